"""Several fixed shapes of one model: each is an import of its own, a variant of the library.

A dynamic batch is the same thing: some fixed batches, of which runs take what fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgesdk.errors import UnsupportedModelError, UsageError
from edgesdk.frontend.importer import identifier, import_model
from edgesdk.frontend.model import ImportedModel
from edgesdk.frontend.shapes import open_batches

if TYPE_CHECKING:
    import numpy as np

Shapes = Mapping[str, Sequence[int]]

# Each has kernels and a plan of its own: a dozen is plenty, a hundred a misunderstanding.
MAX_VARIANTS = 16


@dataclass(frozen=True)
class Variants:
    """The imports of one model, and the names of the inputs whose first axis is a batch, if it was
    asked for any number of rows."""

    models: tuple[ImportedModel, ...]
    batch_inputs: tuple[str, ...] = ()


def import_variants(path: Path, shapes: Sequence[Shapes], batches: Sequence[int] = ()) -> Variants:
    """Imports the model for each of `shapes`, or for each of the `batches`.

    With `batches` the first axis of every input that leaves it open is each of them in turn, other
    axes are those of the model or of the one entry of `shapes`.

    Raises UsageError for shapes and batches that contradict each other or are too many,
    UnsupportedModelError when an output has no axis of the batch, and what `import_model` raises.
    """
    if batches:
        return _import_batches(path, shapes, batches)
    if len(shapes) > MAX_VARIANTS:
        raise _too_many(len(shapes), "shapes")
    models: list[ImportedModel] = []
    for each in shapes:
        model = import_model(path, shapes=each)
        if any(model.shapes == other.shapes for other in models):
            text = ", ".join(f"{n}={'x'.join(map(str, s))}" for n, s in model.shapes.items())
            raise UsageError(f"the shapes {text} are given twice", hint="leave one of them out")
        models.append(model)
    return Variants(tuple(models))


def shape_of(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    """The shapes of `arrays`, by name: one of the variants', or none's."""
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _import_batches(path: Path, shapes: Sequence[Shapes], batches: Sequence[int]) -> Variants:
    from edgesdk.frontend.load import load_model

    if len(shapes) > 1:
        raise UsageError(
            "several shapes and a batch exclude each other",
            hint="give one --shape for each input, and all batches with --batch",
        )
    sizes = sorted(batches)
    if sizes[0] < 1 or len(set(sizes)) < len(sizes):
        raise UsageError(
            f"the batches are {', '.join(map(str, batches))}",
            hint="give each once, and at least 1: --batch 1,4,8",
        )
    if len(sizes) > MAX_VARIANTS:
        raise _too_many(len(sizes), "batches")
    loaded = load_model(path)
    opened = open_batches(loaded.proto, set(loaded.weights))
    del loaded
    if not opened:
        raise UsageError(
            f"no input of {path.name} leaves its first dimension open, so its batch is fixed",
            hint="leave --batch out, or export the model with a dynamic batch",
        )
    given = {
        identifier(name): tuple(shape) for name, shape in (shapes[0] if shapes else {}).items()
    }
    models = []
    for size in sizes:
        wanted = dict(shapes[0]) if shapes else {}
        for name, rest in opened.items():
            known = given.get(identifier(name), (0, *rest) if rest is not None else None)
            if known is None:
                raise UsageError(
                    f"the input {name!r} leaves more open than its batch",
                    hint=f"add --shape {name}=... with any number for the batch",
                )
            wanted = {n: s for n, s in wanted.items() if identifier(n) != identifier(name)}
            wanted[name] = (size, *known[1:])
        models.append(import_model(path, shapes=wanted))
    for size, model in zip(sizes, models, strict=True):
        for output in model.outputs:
            if output.shape[:1] != (size,):
                text = "x".join(map(str, output.shape)) or "scalar"
                raise UnsupportedModelError(
                    f"the output {output.name!r} is {text} for a batch of {size}: its first axis"
                    " is no batch, so results of other batches cannot be cut from it",
                    hint="compile fixed shapes instead, with several --shape",
                )
    return Variants(tuple(models), tuple(opened))


def _too_many(count: int, what: str) -> UsageError:
    return UsageError(
        f"{count} {what} are given, a bundle has at most {MAX_VARIANTS}",
        hint="leave some out, or make several bundles with -o",
    )
