"""exp, tanh, sigmoid and erf as arithmetic for vectors, instead of one libm call a lane.

TVM lowers these functions to calls of the C library, element by element. The expressions here are
plain additions and multiplications on float32; their error is measured in
tests/compile/test_vector_math.py and stays within a few units in the last place. NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln(2) / 2. ln 2 in two parts so that
# n * _LN2_HIGH is exact (Cody and Waite, "Software Manual for the Elementary Functions", 1980).
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440054690583e-4
# Beyond these the result is infinity, or zero (denormal results are rounded to zero).
_EXP_MAX = 88.72283935546875
_EXP_MIN = -87.33654022216796875


def exp(x: Any) -> Any:
    """e to the x, for a float32 expression."""
    from tvm import tirx

    if not _is_f32(x):
        return tirx.exp(x)
    c = _clamp(x, _EXP_MIN - 1.0, _EXP_MAX)
    half_away = tirx.Select(c < _f32(0.0), _f32(-0.5), _f32(0.5))
    power = (c * _f32(1.0 / math.log(2.0)) + half_away).astype("int32")
    n = power.astype("float32")
    r = c - n * _f32(_LN2_HIGH) - n * _f32(_LN2_LOW)
    # Taylor's series to degree 7: the next term is below 2^-26 for |r| <= ln(2) / 2.
    series = _horner(r, [1.0 / math.factorial(k) for k in range(7, -1, -1)])
    # 2^n in two factors, so that n = 128 does not overflow before the multiplication.
    half = power >> 1
    value = series * _power_of_two(half) * _power_of_two(power - half)
    above = tirx.Select(x > _f32(_EXP_MAX), _f32(math.inf), value)
    return tirx.Select(x < _f32(_EXP_MIN), _f32(0.0), above)


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    from tvm import tirx

    if not _is_f32(x):
        return tirx.sigmoid(x)
    return _f32(1.0) / (_f32(1.0) + exp(_f32(0.0) - x))


def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    from tvm import tirx

    if not _is_f32(x):
        return tirx.tanh(x)
    magnitude = tirx.abs(x)
    square = x * x
    # Near zero: the continued fraction x / (1 + x^2 / (3 + x^2 / (5 + ...))), as one quotient of
    # polynomials so that there is one division only.
    above, below = _tanh_fraction()
    near = x * _horner(square, above) / _horner(square, below)
    # Elsewhere: 1 - 2 / (e^2|x| + 1), which loses nothing once tanh is above 1/2.
    far = _f32(1.0) - _f32(2.0) / (exp(_f32(2.0) * magnitude) + _f32(1.0))
    return tirx.Select(magnitude < _f32(0.625), near, far * _sign(x))


def _tanh_fraction() -> tuple[list[float], list[float]]:
    """Numerator and denominator in x^2, highest power first, of four levels of the fraction
    tanh(x) / x = 1 / (1 + s / (3 + s / (5 + s / (7 + s / 9)))), s = x^2."""
    above, below = [9.0], [1.0]  # the innermost level as a quotient; lowest power first
    for odd in (7.0, 5.0, 3.0, 1.0):
        # odd + s / (above / below) = (odd * above + s * below) / above
        shifted = [0.0, *below]
        size = max(len(above), len(shifted))
        sums = [
            odd * (above[i] if i < len(above) else 0.0) + (shifted[i] if i < len(shifted) else 0.0)
            for i in range(size)
        ]
        above, below = sums, above
    return below[::-1], above[::-1]


def erf(x: Any) -> Any:
    """The error function."""
    from tvm import tirx

    if not _is_f32(x):
        return tirx.erf(x)
    magnitude = tirx.abs(x)
    square = x * x
    # Maclaurin's series below 1 (Abramowitz and Stegun 7.1.5).
    terms = [
        2.0 / math.sqrt(math.pi) * (-1.0) ** k / (math.factorial(k) * (2 * k + 1))
        for k in range(10, -1, -1)
    ]
    near = x * _horner(square, terms)
    # 1 - t * polynomial(t) * e^-x^2 (Abramowitz and Stegun 7.1.26), absolute error below 1.5e-7.
    t = _f32(1.0) / (_f32(1.0) + _f32(0.3275911) * magnitude)
    rational = [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592]
    far = _f32(1.0) - t * _horner(t, rational) * exp(_f32(0.0) - square)
    return tirx.Select(magnitude < _f32(1.0), near, far * _sign(x))


def _sign(x: Any) -> Any:
    from tvm import tirx

    return tirx.Select(x < _f32(0.0), _f32(-1.0), _f32(1.0))


def _is_f32(x: Any) -> bool:
    # Slices of tensors carry their type themselves, other expressions in `ty`.
    return str(getattr(x, "dtype", None) or x.ty.dtype) == "float32"


def _f32(value: float) -> Any:
    from tvm import tirx

    return tirx.const(value, "float32")


def _horner(x: Any, coefficients: Sequence[float]) -> Any:
    """The polynomial with `coefficients`, highest power first."""
    result = _f32(coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + _f32(coefficient)
    return result


def _clamp(x: Any, low: float, high: float) -> Any:
    from tvm import tirx

    # The constant first: generated code compares and selects, and so hands NaN on.
    return tirx.min(_f32(high), tirx.max(_f32(low), x))


def _power_of_two(exponent: Any) -> Any:
    """2 to an int32 expression between -126 and 127, by building the float's bits."""
    from tvm import tirx

    return tirx.reinterpret("float32", (exponent + tirx.const(127, "int32")) << 23)
