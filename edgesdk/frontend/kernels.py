"""Tensor expressions of the few operators where TVM's own are unsafe or miss a type."""

from __future__ import annotations

import math
from typing import Any

from tvm import te, tirx


def pad(x: te.Tensor, before: list[int], after: list[int], value: Any) -> te.Tensor:
    """Pads with a constant of the tensor's own type, minus infinity and integers included."""
    shape = [d + p + q for d, p, q in zip(x.shape, before, after, strict=True)]

    def element(*index: Any) -> Any:
        inner = [i - p for i, p in zip(index, before, strict=True)]
        tests = []
        for axis, (low, high) in enumerate(zip(before, after, strict=True)):
            if low:
                tests.append(index[axis] >= low)
            if high:
                tests.append(inner[axis] < x.shape[axis])
        fill = tirx.const(value, x.dtype) if isinstance(value, int | float) else value
        return tirx.if_then_else(tirx.all(*tests), x(*inner), fill) if tests else x(*inner)

    return te.compute(shape, element, name="pad", tag="injective,pad")


def take(x: te.Tensor, indices: te.Tensor, axis: int, checked: bool) -> te.Tensor:
    """The slices of `x` at `indices` along `axis`, which are not negative.

    Unless they were `checked` while compiling, an index past the end reads the last slice: never
    foreign memory.
    """
    shape = [*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]]
    last = axis + len(indices.shape)

    def element(*index: Any) -> Any:
        at = indices(*index[axis:last])
        return x(*index[:axis], at if checked else _within(at, x.shape[axis]), *index[last:])

    return te.compute(shape, element, name="take", tag="injective")


def _within(at: Any, length: Any) -> Any:
    at = at.astype("int64")
    return tirx.max(tirx.min(at, length - 1), tirx.const(0, "int64"))


def gather_elements(x: te.Tensor, indices: te.Tensor, axis: int) -> te.Tensor:
    """out[i][j] = x[indices[i][j]][j] for axis 0; an index outside reads the nearest element."""

    def element(*index: Any) -> Any:
        at = _within(indices(*index), x.shape[axis])
        return x(*index[:axis], at, *index[axis + 1 :])

    return te.compute(indices.shape, element, name="gather_elements", tag="injective")


def lowest(dtype: str, highest: bool = False) -> Any:
    """The identity of max, or of min (`highest`): infinite for floats.

    TVM's own reductions start from the largest finite number, and so lose an infinity.
    """
    if str(dtype).startswith(("float", "bfloat")):
        return tirx.const(math.inf if highest else -math.inf, dtype)
    return tirx.max_value(dtype) if highest else tirx.min_value(dtype)


def extreme(smallest: bool) -> Any:
    """The reduction to the largest (or smallest) element; that of nothing is infinite."""
    return te.comm_reducer(
        (lambda x, y: tirx.min(x, y)) if smallest else (lambda x, y: tirx.max(x, y)),
        lambda dtype: lowest(dtype, smallest),
        name="min" if smallest else "max",
    )


def reduce_extreme(x: te.Tensor, axes: list[int], keepdims: bool, smallest: bool) -> te.Tensor:
    """The largest (or smallest) element over `axes`."""
    reduced = {a: te.reduce_axis((0, x.shape[a]), name=f"k{a}") for a in axes}
    kept = [i for i in range(len(x.shape)) if i not in reduced]
    shape = [1 if i in reduced else d for i, d in enumerate(x.shape)]
    if not keepdims:
        shape = [x.shape[i] for i in kept]
    function = extreme(smallest)

    def element(*index: Any) -> Any:
        places = iter(index)
        at: list[Any] = []
        for i in range(len(x.shape)):
            if i in reduced:
                at.append(reduced[i])
                if keepdims:
                    next(places)
            else:
                at.append(next(places))
        return function(x(*at), axis=[reduced[a] for a in axes])

    return te.compute(shape, element, name="reduce_min" if smallest else "reduce_max")


def arg_extreme(x: te.Tensor, axis: int, keepdims: bool, smallest: bool) -> te.Tensor:
    """The first position of the largest (or smallest) element along `axis`, as int64."""

    def combine(left: Any, right: Any) -> Any:
        ahead = left[1] < right[1] if smallest else left[1] > right[1]
        keep = tirx.any(ahead, tirx.all(left[1] == right[1], left[0] < right[0]))
        return tirx.Select(keep, left[0], right[0]), tirx.Select(keep, left[1], right[1])

    def identity(index_type: str, dtype: str) -> Any:
        return tirx.max_value(index_type), lowest(dtype, smallest)

    function = te.comm_reducer(combine, identity, name="argmin" if smallest else "argmax")
    k = te.reduce_axis((0, x.shape[axis]), name="k")
    shape = [d for i, d in enumerate(x.shape) if i != axis]
    if keepdims:
        shape.insert(axis, 1)

    def element(*index: Any) -> Any:
        rest = index[:axis], index[axis + keepdims :]
        number = k.var.astype("int64")
        return function((number, x(*rest[0], k, *rest[1])), axis=k)

    return te.compute(shape, element, name="arg_extreme")[0]


def max_pool(
    x: te.Tensor,
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    before: list[int],
    after: list[int],
) -> te.Tensor:
    """[N, C, ...] to the largest element of each window; padding is below everything."""
    n = len(kernel)
    if any(before) or any(after):
        x = pad(x, [0, 0, *before], [0, 0, *after], lowest(x.dtype))
    sizes = [
        (x.shape[i + 2] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(n)
    ]
    reduced = [te.reduce_axis((0, kernel[i]), name=f"k{i}") for i in range(n)]
    function = extreme(False)

    def element(*index: Any) -> Any:
        at = [index[i + 2] * strides[i] + reduced[i] * dilations[i] for i in range(n)]
        return function(x(index[0], index[1], *at), axis=reduced)

    return te.compute([*x.shape[:2], *sizes], element, name="max_pool")
