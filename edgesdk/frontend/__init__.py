"""The front end: a model file becomes a static Relax module, and a reference to compare with.

Nothing heavy is imported before one of the functions is called.
"""

from edgesdk.frontend.importer import import_model
from edgesdk.frontend.model import ImportedModel, TensorSpec, ValueHint
from edgesdk.frontend.reference import Reference, draw_inputs

__all__ = [
    "ImportedModel",
    "Reference",
    "TensorSpec",
    "ValueHint",
    "draw_inputs",
    "import_model",
]
