"""The measure of distance to the reference."""

from __future__ import annotations

import numpy as np
import pytest

from edgesdk.numerics import compare


def test_equal_arrays_are_exact() -> None:
    a = np.array([1.0, np.nan, np.inf], np.float32)
    difference = compare("y", a, a.copy())
    assert difference.exact
    assert difference.within(0.0)


def test_the_error_is_relative_to_the_largest_reference_value() -> None:
    expected = np.array([0.0, -8.0, 4.0], np.float32)
    difference = compare("y", expected + np.float32(0.004), expected)
    assert difference.max_abs_error == pytest.approx(0.004, rel=1e-3)
    assert difference.max_relative_error == pytest.approx(0.0005, rel=1e-3)
    assert difference.within(6e-4)
    assert not difference.within(4e-4)


def test_a_zero_reference_counts_absolutely() -> None:
    difference = compare("y", np.full(3, 0.5, np.float32), np.zeros(3, np.float32))
    assert difference.max_relative_error == 0.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_or_infinity_where_the_reference_has_none_never_passes(value: float) -> None:
    expected = np.ones(4, np.float32)
    actual = expected.copy()
    actual[2] = value
    assert not compare("y", actual, expected).within(1e9)
    assert not compare("y", expected, actual).within(1e9)


def test_infinities_of_unlike_sign_differ() -> None:
    plus, minus = np.array([np.inf, 1], np.float32), np.array([-np.inf, 1], np.float32)
    assert not compare("y", plus, minus).within(1e9)


def test_integers_must_be_equal() -> None:
    expected = np.arange(1000, dtype=np.int64)
    actual = expected.copy()
    actual[7] += 1
    difference = compare("y", actual, expected)
    assert not difference.within(1.0)
    assert difference.mismatch == "differs in 1 of 1000 integers"


def test_shape_and_dtype_must_match() -> None:
    expected = np.zeros((2, 3), np.float32)
    assert "float64" in compare("y", expected.astype(np.float64), expected).mismatch
    assert "[3, 2]" in compare("y", expected.T.copy(), expected).mismatch


def test_the_cosine_tells_direction() -> None:
    e = np.array([1.0, 0.0], np.float32)
    assert compare("y", np.array([0.0, 1.0], np.float32), e).cosine == 0.0
    assert compare("y", 2 * e, e).cosine == pytest.approx(1.0)
