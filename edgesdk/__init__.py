"""edgesdk compiles, tunes and deploys trained networks for the board on the desk.

    bundle = edgesdk.compile("model.onnx", target="rpi4", shapes={"x": (1, 3, 224, 224)})

Everything heavy is imported when a function is called, never by `import edgesdk`.
"""

from __future__ import annotations

from edgesdk import errors
from edgesdk.api import bench, compile, push, run, verify
from edgesdk.bundle import Bundle, open_bundle

__version__ = "0.1.0"
__all__ = [
    "Bundle",
    "__version__",
    "bench",
    "compile",
    "errors",
    "open_bundle",
    "push",
    "run",
    "verify",
]
