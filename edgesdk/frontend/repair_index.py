"""Repairs of gathers, scatters, one-hot and the operators whose output shape is data."""

from __future__ import annotations

import math

import numpy as np

from edgesdk.frontend.graph import Value
from edgesdk.frontend.model import ValueHint
from edgesdk.frontend.repair import Op, Repaired, positive_axis, refuse, repairs


def wrapped(op: Op, indices: Value, length: int) -> Value:
    """Counts negative indices from the front; checks constant ones against `length`."""
    b = op.b
    if indices.const is not None:
        array = np.where(indices.const < 0, indices.const + length, indices.const)
        if array.size and (array.min() < 0 or array.max() >= length):
            raise refuse(f"an index lies outside the {length} elements of its axis")
        return b.constant(array.astype(indices.dtype))
    if indices.dtype.kind == "u":
        return indices
    op.hint(indices, ValueHint(0, length - 1))
    zero = b.constant(np.zeros((), indices.dtype))
    size = b.constant(np.asarray(length, indices.dtype))
    return b("Where", b("Less", indices, zero), b("Add", indices, size), indices)


@repairs("Gather")
def _gather(op: Op) -> Repaired:
    b, x = op.b, op[0]
    axis = positive_axis(op.attr("axis", 0), x.rank)
    indices = wrapped(op, op[1], x.shape[axis])
    if indices.const is not None and indices.size == 1:
        at = int(indices.const.reshape(-1)[0])
        row = b.slice(x, axis, at, at + 1)
        return b.reshape(row, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))
    return b("Gather", x, indices, axis=axis)


@repairs("GatherElements")
def _gather_elements(op: Op) -> Repaired:
    axis = positive_axis(op.attr("axis", 0), op[0].rank)
    indices = wrapped(op, op[1], op[0].shape[axis])
    return op.b("GatherElements", op[0], indices, axis=axis)


@repairs("GatherND")
def _gather_nd(op: Op) -> Repaired:
    b, data, indices = op.b, op[0], op[1]
    batch = int(op.attr("batch_dims", 0))
    depth = indices.shape[-1]
    lead, tail = data.shape[batch : batch + depth], data.shape[batch + depth :]
    flat = _flat_index(op, indices, lead)
    rows = math.prod(data.shape[:batch])
    if batch:  # one table of rows: the batches follow one another
        per_batch = math.prod(lead)
        offsets = np.arange(rows, dtype=np.int64) * per_batch
        shape = (*data.shape[:batch], *[1] * (flat.rank - batch))
        flat = b("Add", flat, b.constant(offsets.reshape(shape)))
    table = b.reshape(data, (rows * math.prod(lead), *tail))
    return b("Gather", table, flat, axis=0)


def _flat_index(op: Op, indices: Value, lead: tuple[int, ...]) -> Value:
    """Turns tuples of positions into one position in the flattened leading axes."""
    b = op.b
    total: Value | None = None
    for i, length in enumerate(lead):
        last = indices.rank - 1
        column = b.reshape(b.slice(indices, last, i, i + 1), indices.shape[:-1])
        column = wrapped(op, column, length)
        stride = math.prod(lead[i + 1 :])
        part = b("Mul", column, b.constant(np.asarray(stride, np.int64))) if stride != 1 else column
        total = part if total is None else b("Add", total, part)
    if total is None:
        raise refuse("its indices are empty tuples")
    return total


@repairs("ScatterElements", "Scatter")
def _scatter_elements(op: Op) -> Repaired:
    axis = positive_axis(op.attr("axis", 0), op[0].rank)
    if op[1].size == 0:
        return op[0]
    indices = wrapped(op, op[1], op[0].shape[axis])
    reduction = op.attr("reduction", "none")
    return op.b("ScatterElements", op[0], indices, op[2], axis=axis, reduction=reduction)


@repairs("ScatterND")
def _scatter_nd(op: Op) -> Repaired:
    b, data, indices, updates = op.b, op[0], op[1], op[2]
    if indices.size == 0 or updates.size == 0:
        return data
    depth = indices.shape[-1]
    lead, tail = data.shape[:depth], data.shape[depth:]
    flat = _flat_index(op, indices, lead)
    rows, width = math.prod(lead), math.prod(tail)
    count = math.prod(indices.shape[:-1])
    wide = b.expand(b.reshape(flat, (count, 1)), (count, width))
    result = b(
        "ScatterElements",
        b.reshape(data, (rows, width)),
        wide,
        b.reshape(updates, (count, width)),
        axis=0,
        reduction=op.attr("reduction", "none"),
    )
    return b.reshape(result, data.shape)


@repairs("OneHot")
def _one_hot(op: Op) -> Repaired:
    b, indices = op.b, op[0]
    depth = int(op.array(1, "depth").reshape(-1)[0])
    axis = positive_axis(op.attr("axis", -1), indices.rank + 1)
    op.hint(indices, ValueHint(0, depth - 1))
    whole = b.cast(indices, np.int64)
    zero, size = (b.constant(np.asarray(v, np.int64)) for v in (0, depth))
    whole = b("Where", b("Less", whole, zero), b("Add", whole, size), whole)
    wide = b.reshape(whole, (*indices.shape[:axis], 1, *indices.shape[axis:]))
    positions = np.arange(depth, dtype=np.int64).reshape(-1, *[1] * (indices.rank - axis))
    off = b.reshape(b.slice(op[2], 0, 0, 1), ())
    on = b.reshape(b.slice(op[2], 0, 1, 2), ())
    return b("Where", b("Equal", wide, b.constant(positions)), on, off)


@repairs("Equal")
def _equal(op: Op) -> Repaired:
    for x, y in ((op[0], op[1]), (op[1], op[0])):
        if y.const is not None and y.dtype.kind in "iu" and x.const is None:
            choices = tuple(int(v) for v in np.unique(y.const)[:4096])
            op.hint(x, ValueHint(choices=choices))
    return op.b("Equal", op[0], op[1])


@repairs("Compress")
def _compress(op: Op) -> Repaired:
    b, x = op.b, op[0]
    chosen = np.nonzero(op.array(1, "condition").reshape(-1))[0]
    axis = op.attr("axis")
    if axis is None:
        return b.take(b.reshape(x, (x.size,)), [int(i) for i in chosen], 0)
    return b.take(x, [int(i) for i in chosen], positive_axis(axis, x.rank))


@repairs("NonZero", "Unique", "NonMaxSuppression")
def _data_dependent(op: Op) -> Repaired:
    if all(v is None or v.const is not None for v in op.inputs):
        attrs = dict(op.attrs.items())
        return op.b.many(op.kind, *op.inputs, outputs=len(op.outputs), **attrs)
    raise refuse("the shape of its output depends on values at run time")
