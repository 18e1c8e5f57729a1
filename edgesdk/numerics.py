"""How far results are from the reference: one measure for compile, verify and the launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

# fp32: the largest difference allowed, relative to the largest magnitude of the reference output.
FP32_TOLERANCE = 1e-4
# Half precision: two units in the last place of that magnitude.
FP16_TOLERANCE = 2e-3
# Or this many times what the reference differs from itself when it computes in another order.
SPREAD_FACTOR = 4.0
# But never more than this.
LOOSEST_TOLERANCE = 1e-2
# Of a quantised model: numbers that lie halfway between two steps may be rounded to either, and the
# layers after it pass that on. A step is 1/255 of an output that fills 8 bits, and more of others.
QUANTISED_TOLERANCE = 5e-2


_NONFINITE = "has NaN or infinity where the reference has not"


@dataclass(frozen=True)
class Difference:
    """The distance of one output from its reference.

    `max_relative_error` is `max_abs_error` divided by the reference's largest finite magnitude.
    `cosine` is the cosine between both as vectors, in double precision, over the elements that are
    finite in both (1.0 if there is none, or if both are zero). `mismatch` says what cannot be
    measured: another dtype or shape, NaN or infinity in different places, integers that differ.
    `steps` says that these are of 8 bits, so that they may be steps of a quantised model.
    """

    name: str
    max_abs_error: float
    max_relative_error: float
    cosine: float
    exact: bool
    mismatch: str = ""
    steps: bool = False

    @property
    def nonfinite(self) -> bool:
        """Whether NaN or infinity are not where the reference has them."""
        return self.mismatch == _NONFINITE

    def within(self, tolerance: float) -> bool:
        """Whether the result counts as equal: exact for integers, within `tolerance` for floats,
        and for the 8-bit integers of quantised models, whose tolerance is QUANTISED_TOLERANCE."""
        measured = not self.mismatch or (self.steps and tolerance >= QUANTISED_TOLERANCE)
        return self.exact or (measured and self.max_relative_error <= tolerance)

    def describe(self, tolerance: float) -> str:
        """Says what is wrong, e.g. "differs by 0.1 of its largest value (allowed 0.0001)"."""
        return self.mismatch or (
            f"differs by {self.max_relative_error:.2g} of its largest value (allowed {tolerance:g})"
        )


def compare(name: str, actual: np.ndarray, expected: np.ndarray) -> Difference:
    """Compares `actual` with the reference `expected`, of any equal shape and dtype."""
    import numpy as np

    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        found = f"{actual.dtype} {list(actual.shape)}"
        wanted = f"{expected.dtype} {list(expected.shape)}"
        infinite = float("inf")
        return Difference(name, infinite, infinite, 0.0, False, f"is {found}, should be {wanted}")
    if np.array_equal(actual, expected, equal_nan=np.issubdtype(expected.dtype, np.inexact)):
        return Difference(name, 0.0, 0.0, 1.0, True)
    a, e = actual.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    finite = np.isfinite(a) & np.isfinite(e)
    # Infinities count as equal where they agree in sign, NaN where both have it.
    special_equal = np.array_equal(a[~finite], e[~finite], equal_nan=True)
    difference = float(np.max(np.abs(a[finite] - e[finite]), initial=0.0))
    scale = float(np.max(np.abs(e), where=np.isfinite(e), initial=0.0))
    relative = difference / scale if scale > 0 else difference
    mismatch = "" if special_equal else _NONFINITE
    if not np.issubdtype(expected.dtype, np.inexact):
        count = int(np.count_nonzero(actual != expected))
        mismatch = f"differs in {count} of {actual.size} integers"
    norms = float(np.linalg.norm(a[finite]) * np.linalg.norm(e[finite]))
    cosine = float(a[finite] @ e[finite]) / norms if norms > 0 else float(difference == 0)
    steps = expected.dtype.name in ("int8", "uint8")
    return Difference(name, difference, relative, cosine, False, mismatch, steps)


def tolerance_of(
    expected: Mapping[str, np.ndarray], in_another_order: Mapping[str, np.ndarray]
) -> float:
    """The difference allowed to `expected`, relative to the largest magnitude of an array.

    Where the reference itself moves by more when it computes in another order (tiny probabilities
    after a deep network, say), its own spread is the measure, up to LOOSEST_TOLERANCE: results
    that are rounding for the most part cannot be told from wrong ones, and do not pass.
    """
    # Integers must be equal whatever floats do: an index that flips widens nothing.
    spread = max(
        (
            compare(name, in_another_order[name], array).max_relative_error
            for name, array in expected.items()
            if array.dtype.kind == "f"
        ),
        default=0.0,
    )
    half = any(array.dtype.name == "float16" for array in expected.values())
    usual = FP16_TOLERANCE if half else FP32_TOLERANCE
    return min(LOOSEST_TOLERANCE, max(usual, SPREAD_FACTOR * spread))
