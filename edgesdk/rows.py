"""Inputs of any number of rows, served by compiled batches of a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Piece:
    """One run: `rows` rows from `start` on, in a compiled batch of `size`, at least as many."""

    start: int
    rows: int
    size: int


def run_in_pieces(
    inputs: Mapping[str, np.ndarray],
    batch_inputs: Sequence[str],
    sizes: Sequence[int],
    run: Callable[[Piece, dict[str, np.ndarray]], Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Returns what `run` gives for all rows of `inputs`, in their order.

    The first axis of the inputs named `batch_inputs` and of all outputs counts rows. A batch that
    is not full repeats its last row, whose results are cut off: real data, so that it takes no time
    of its own kind (denormals, NaN).
    """
    import numpy as np

    rows = inputs[batch_inputs[0]].shape[0]
    found: dict[str, list[np.ndarray]] = {}
    for piece in split_rows(rows, sizes):
        arrays = {
            name: _taken(array, piece) if name in batch_inputs else array
            for name, array in inputs.items()
        }
        for name, array in run(piece, arrays).items():
            found.setdefault(name, []).append(array[: piece.rows])
    return {name: np.concatenate(arrays) for name, arrays in found.items()}


def split_rows(rows: int, sizes: Sequence[int]) -> list[Piece]:
    """Returns the fewest runs that serve `rows` (at least 1) with batches of `sizes`.

    The largest batch as often as it is full, and for what remains the next larger one: padding
    costs less than a second run, which would read all weights again.
    """
    largest = max(sizes)
    full, rest = divmod(rows, largest)
    pieces = [Piece(i * largest, largest, largest) for i in range(full)]
    if rest:
        pieces.append(Piece(full * largest, rest, min(s for s in sizes if s >= rest)))
    return pieces


def _taken(array: np.ndarray, piece: Piece) -> np.ndarray:
    import numpy as np

    taken = array[piece.start : piece.start + piece.rows]
    if piece.size == piece.rows:
        return taken
    return np.concatenate([taken, np.repeat(taken[-1:], piece.size - piece.rows, axis=0)])
