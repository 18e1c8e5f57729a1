"""exp, sigmoid, tanh and erf against double precision."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from edgesdk.schedules import vector_math

tvm = pytest.importorskip("tvm", reason="TVM is a dependency of edgesdk; install it")

_SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 88.72, 89.0, -87.3, -104.0]


def _inputs(count: int) -> np.ndarray:
    draw = np.random.default_rng(0)
    wide = np.linspace(-100, 100, count // 2)
    near = draw.standard_normal(count // 2) * np.exp(draw.uniform(-20, 1, count // 2))
    x = np.concatenate([wide, near]).astype(np.float32)
    x[: len(_SPECIAL)] = _SPECIAL
    return x


def _run(function: Callable, x: np.ndarray, lanes: int) -> np.ndarray:
    from tvm import te
    from tvm.s_tir import Schedule

    source = te.placeholder(x.shape, name="x")
    result = te.compute(x.shape, lambda i: function(source[i]), name="y")
    sch = Schedule(tvm.IRModule({"main": te.create_prim_func([source, result])}))
    _, lane = sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, lanes])
    sch.vectorize(lane)
    built = tvm.compile(sch.mod, target=tvm.target.Target("llvm"))
    out = tvm.runtime.tensor(np.zeros_like(x))
    built["main"](tvm.runtime.tensor(x), out)
    return out.numpy()


# Units in the last place, and the absolute error near zero for those that approximate absolutely.
@pytest.mark.parametrize("lanes", [4, 16])
@pytest.mark.parametrize(
    ("function", "reference", "limit_ulp"),
    [
        (vector_math.exp, math.exp, 1.5),
        (vector_math.sigmoid, lambda v: 0.0 if v < -700 else 1 / (1 + math.exp(-v)), 3.0),
        (vector_math.tanh, math.tanh, 3.0),
        (vector_math.erf, math.erf, 3.0),
    ],
    ids=["exp", "sigmoid", "tanh", "erf"],
)
def test_error_in_units_of_the_last_place(
    function: Callable, reference: Callable, limit_ulp: float, lanes: int
) -> None:
    x = _inputs(1 << 14)
    actual = _run(function, x, lanes)

    def exact(v: float) -> float:
        try:
            return reference(v)
        except OverflowError:
            return math.inf

    expected = np.array([exact(float(v)) for v in x])
    rounded = expected.astype(np.float32)
    normal = np.isfinite(rounded) & (np.abs(expected) > np.finfo(np.float32).tiny)
    ulp = np.abs(actual[normal] - expected[normal]) / np.spacing(np.abs(rounded[normal]))
    assert ulp.max() <= limit_ulp
    assert np.isnan(actual[0])
    assert np.array_equal(np.isinf(actual), np.isinf(rounded))
    tiny = ~normal & np.isfinite(rounded)
    assert np.abs(actual[tiny] - expected[tiny]).max() <= np.finfo(np.float32).tiny
