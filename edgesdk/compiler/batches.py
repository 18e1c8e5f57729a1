"""Whether a model treats the rows of a batch apart, so that batches may be filled and cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgesdk.errors import UnsupportedModelError
from edgesdk.frontend import ImportedModel, Reference, draw_inputs
from edgesdk.numerics import compare
from edgesdk.rows import Piece, run_in_pieces


def check_rows(models: Sequence[ImportedModel], batch_inputs: Sequence[str], tol: float) -> None:
    """Has the reference compute an odd number of rows at once, and in the pieces of `split_rows`.

    `models` are the imports for each batch, ascending. Raises UnsupportedModelError if the results
    differ by more than `tol` relative to an output's largest magnitude.
    """
    largest = models[-1]
    sizes = [_batch(model, batch_inputs) for model in models]
    first, second = (draw_inputs(largest.inputs, seed=s, hints=largest.hints) for s in (0, 1))
    rows = sizes[-1] + 1
    inputs = {
        name: np.concatenate([array, second[name]])[:rows] if name in batch_inputs else array
        for name, array in first.items()
    }
    whole = Reference(largest.source, {n: a.shape for n, a in inputs.items()}).run(inputs)
    references = {
        size: Reference(model.source, model.shapes)
        for size, model in zip(sizes, models, strict=True)
    }

    def run(piece: Piece, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return references[piece.size].run(arrays)

    pieces = run_in_pieces(inputs, batch_inputs, sizes, run)
    for output in largest.outputs:
        difference = compare(output.name, pieces[output.name], whole[output.name])
        if not difference.within(tol):
            raise UnsupportedModelError(
                f"the rows of a batch depend on each other: the output {output.name!r} of {rows}"
                f" rows {difference.describe(tol)} when they are computed in smaller batches",
                hint="compile fixed shapes instead, with several --shape",
            )


def _batch(model: ImportedModel, batch_inputs: Sequence[str]) -> int:
    return model.shapes[batch_inputs[0]][0]
