"""Tensor expressions of the few operators where TVM's own are unsafe or miss a type."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx


def pad(x: te.Tensor, before: list[int], after: list[int], value: float) -> te.Tensor:
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
        fill = tirx.const(value, x.dtype)
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
