"""TFLite's operators that move elements, or tell where they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgesdk.frontend.graph import element_type
from edgesdk.frontend.tflite.operators import (
    activated,
    as_int64,
    axis_in_nchw,
    converts,
    positive_axis,
)
from edgesdk.frontend.tflite.writer import TO_NCHW, Operator, RefusedOperatorError

# An end beyond every axis.
_LAST = np.iinfo(np.int64).max


@converts("RESHAPE")
def _reshape(op: Operator) -> None:
    w = op.w
    if op.get(1) is not None:
        shape = as_int64(op, 1)
    else:
        shape = w.integers([int(d) for d in op.options.newShape])
    w.put(op.out, w.node("Reshape", w.real(op[0]), shape))


@converts("SQUEEZE")
def _squeeze(op: Operator) -> None:
    dims = op.options.squeezeDims if op.options is not None else None
    axes = [] if dims is None else [positive_axis(int(d), op[0].rank) for d in dims]
    axes = axes or [i for i, d in enumerate(op[0].shape) if d == 1]
    op.w.put(op.out, op.w.node("Squeeze", op.w.real(op[0]), op.w.integers(axes)))


@converts("EXPAND_DIMS")
def _expand_dims(op: Operator) -> None:
    axis = op.w.integers([positive_axis(op.ints(1, "axis")[0], op[0].rank + 1)])
    op.w.put(op.out, op.w.node("Unsqueeze", op.w.real(op[0]), axis))


@converts("TRANSPOSE")
def _transpose(op: Operator) -> None:
    w, x = op.w, op[0]
    perm = op.ints(1, "permutation")
    nchw = w.nchw(x)
    if nchw:
        perm = [axis_in_nchw(p) for p in perm]
    value = w.real(x, nchw=nchw)
    if perm != list(range(len(perm))):
        value = w.node("Transpose", value, perm=perm)
    w.put(op.out, value)


@converts("CONCATENATION")
def _concatenation(op: Operator) -> None:
    w = op.w
    nchw = w.nchw(*op.inputs)
    axis = positive_axis(int(op.options.axis), op.out.rank)
    values = [w.real(t, nchw=nchw) for t in op.inputs if t is not None]
    value = w.node("Concat", *values, axis=axis_in_nchw(axis) if nchw else axis)
    w.put(op.out, activated(op, value), nchw=nchw)


@converts("SPLIT", "SPLIT_V")
def _split(op: Operator) -> None:
    w = op.w
    x, axis_at = (op[1], 0) if op.kind == "SPLIT" else (op[0], 2)
    axis = positive_axis(op.ints(axis_at, "axis")[0], x.rank)
    nchw = w.nchw(x)
    inputs = [w.real(x, nchw=nchw)]
    attrs: dict[str, Any] = {"axis": axis_in_nchw(axis) if nchw else axis}
    if op.kind == "SPLIT_V":
        sizes = op.ints(1, "sizes")
        rest = x.shape[axis] - sum(s for s in sizes if s >= 0)
        inputs.append(w.integers([rest if s < 0 else s for s in sizes]))
    else:
        attrs["num_outputs"] = len(op.outputs)
    for out, value in zip(
        op.outputs, w.many("Split", inputs, len(op.outputs), **attrs), strict=True
    ):
        w.put(out, value, nchw=nchw)


@converts("PACK")
def _pack(op: Operator) -> None:
    w = op.w
    axis = positive_axis(int(op.options.axis), op[0].rank + 1)
    values = [
        w.node("Unsqueeze", w.real(t), w.integers([axis])) for t in op.inputs if t is not None
    ]
    w.put(op.out, w.node("Concat", *values, axis=axis))


@converts("UNPACK")
def _unpack(op: Operator) -> None:
    w, count = op.w, len(op.outputs)
    axis = positive_axis(int(op.options.axis), op[0].rank)
    parts = w.many("Split", [w.real(op[0])], count, axis=axis, num_outputs=count)
    for out, part in zip(op.outputs, parts, strict=True):
        w.put(out, w.node("Squeeze", part, w.integers([axis])))


@converts("SLICE")
def _slice(op: Operator) -> None:
    begin, size = op.ints(1, "begin"), op.ints(2, "size")
    stop = [_LAST if s < 0 else b + s for b, s in zip(begin, size, strict=True)]
    nchw = op.w.nchw(op[0])
    order = TO_NCHW if nchw else range(len(begin))
    bounds = [op.w.integers([items[i] for i in order]) for items in (begin, stop)]
    op.w.put(op.out, op.w.node("Slice", op.w.real(op[0], nchw=nchw), *bounds), nchw=nchw)


@converts("STRIDED_SLICE")
def _strided_slice(op: Operator) -> None:
    """NumPy's slicing: each mask has a bit for each entry of begin, end and strides."""
    w, x, o = op.w, op[0], op.options
    begin, end, strides = (op.ints(i, n) for i, n in ((1, "begin"), (2, "end"), (3, "strides")))
    starts, stops, steps, axes = [], [], [], []
    gone, added = [], []  # axes of the input, and of the result
    axis = place = 0
    for i in range(len(begin)):
        bit = 1 << i
        if o.ellipsisMask & bit:
            entries = len(begin) - i - 1
            entries -= sum(bool(o.newAxisMask & (1 << j)) for j in range(i + 1, len(begin)))
            place += x.rank - entries - axis
            axis = x.rank - entries
            continue
        if o.newAxisMask & bit:
            added.append(place)
            place += 1
            continue
        single = bool(o.shrinkAxisMask & bit)
        forward = strides[i] > 0
        start = begin[i] if not o.beginMask & bit else (0 if forward else _LAST)
        stop = end[i] if not o.endMask & bit else (_LAST if forward else -_LAST)
        if o.offset and not o.endMask & bit:
            stop += begin[i]
        if single:
            start = begin[i]
            stop = start + 1 if start != -1 else _LAST
            gone.append(axis)
        else:
            place += 1
        starts.append(start)
        stops.append(stop)
        steps.append(1 if single else strides[i])
        axes.append(axis)
        axis += 1
    value = w.real(x)
    if axes:
        value = w.node("Slice", value, *map(w.integers, (starts, stops, axes, steps)))
    if gone:
        value = w.node("Squeeze", value, w.integers(gone))
    if added:
        value = w.node("Unsqueeze", value, w.integers(added))
    w.put(op.out, value)


@converts("GATHER")
def _gather(op: Operator) -> None:
    if op.options.batchDims:
        raise RefusedOperatorError("its batch dimensions are not supported")
    axis = positive_axis(int(op.options.axis), op[0].rank)
    op.w.put(op.out, op.w.node("Gather", op.w.real(op[0]), as_int64(op, 1), axis=axis))


@converts("EMBEDDING_LOOKUP")
def _embedding_lookup(op: Operator) -> None:
    op.w.put(op.out, op.w.node("Gather", op.w.real(op[1]), as_int64(op, 0), axis=0))


@converts("GATHER_ND")
def _gather_nd(op: Operator) -> None:
    op.w.put(op.out, op.w.node("GatherND", op.w.real(op[0]), as_int64(op, 1)))


@converts("TILE")
def _tile(op: Operator) -> None:
    op.w.put(op.out, op.w.node("Tile", op.w.real(op[0]), as_int64(op, 1)))


@converts("BROADCAST_TO")
def _broadcast_to(op: Operator) -> None:
    op.w.put(op.out, op.w.node("Expand", op.w.real(op[0]), as_int64(op, 1)))


@converts("FILL")
def _fill(op: Operator) -> None:
    op.w.put(op.out, op.w.node("Expand", op.w.real(op[1]), as_int64(op, 0)))


@converts("SHAPE")
def _shape(op: Operator) -> None:
    value = op.w.node("Shape", op.w.real(op[0]))
    op.w.put(op.out, op.w.node("Cast", value, to=element_type(op.out.dtype)))


@converts("RANGE")
def _range(op: Operator) -> None:
    op.w.put(op.out, op.w.node("Range", *(op.w.real(op[i]) for i in range(3))))


@converts("REVERSE_V2")
def _reverse(op: Operator) -> None:
    w = op.w
    axes = op.ints(1, "axes")
    n = len(axes)
    bounds = [w.integers(items) for items in ([-1] * n, [-_LAST] * n, axes, [-1] * n)]
    w.put(op.out, w.node("Slice", w.real(op[0]), *bounds))


@converts("ONE_HOT")
def _one_hot(op: Operator) -> None:
    w = op.w
    depth = w.integers([op.ints(1, "depth")[0]])
    one = w.integers([1])
    off_on = [w.node("Reshape", w.real(op[i]), one) for i in (3, 2)]
    values = w.node("Concat", *off_on, axis=0)
    value = w.node("OneHot", as_int64(op, 0), depth, values, axis=int(op.options.axis))
    w.put(op.out, value)


@converts("PAD", "PADV2")
def _pad(op: Operator) -> None:
    w, x = op.w, op[0]
    nchw = w.nchw(x)
    pads = _paddings(op, nchw=nchw)
    fill = [w.real(op[2])] if op.kind == "PADV2" else []
    w.put(op.out, w.node("Pad", w.real(x, nchw=nchw), w.integers(pads), *fill), nchw=nchw)


@converts("MIRROR_PAD")
def _mirror_pad(op: Operator) -> None:
    w = op.w
    nchw = w.nchw(op[0])
    pads = _paddings(op, nchw=nchw)
    symmetric = bool(op.options.mode)
    if symmetric and max(pads) > 1:
        raise RefusedOperatorError("symmetric padding by more than one element is not supported")
    mode = "edge" if symmetric else "reflect"  # by one element, the edge is what is mirrored
    value = w.node("Pad", w.real(op[0], nchw=nchw), w.integers(pads), mode=mode)
    w.put(op.out, value, nchw=nchw)


def _paddings(op: Operator, *, nchw: bool) -> list[int]:
    """ONNX's padding: all begins, then all ends."""
    table = op.array(1, "paddings").reshape(-1, 2)
    table = table[list(TO_NCHW)] if nchw else table
    return [int(i) for i in table.T.reshape(-1)]


@converts("SPACE_TO_DEPTH", "DEPTH_TO_SPACE")
def _space_to_depth(op: Operator) -> None:
    kind = "SpaceToDepth" if op.kind == "SPACE_TO_DEPTH" else "DepthToSpace"
    value = op.w.node(kind, op.w.real(op[0], nchw=True), blocksize=int(op.options.blockSize))
    op.w.put(op.out, value, nchw=True)


@converts("SPACE_TO_BATCH_ND")
def _space_to_batch(op: Operator) -> None:
    w, x = op.w, op[0]
    block, pads = op.ints(1, "block sizes"), op.array(2, "paddings").reshape(-1, 2)
    n = len(block)
    rest = x.rank - 1 - n
    begins = [0, *pads[:, 0].tolist(), *[0] * rest]
    ends = [0, *pads[:, 1].tolist(), *[0] * rest]
    value = w.node("Pad", w.real(x), w.integers([*begins, *ends]))
    sizes = [x.shape[1 + i] + int(pads[i].sum()) for i in range(n)]
    split = [v for i in range(n) for v in (sizes[i] // block[i], block[i])]
    value = w.node("Reshape", value, w.integers([x.shape[0], *split, *x.shape[1 + n :]]))
    outer = [2 * i + 2 for i in range(n)]
    inner = [2 * i + 1 for i in range(n)]
    tail = list(range(2 * n + 1, 2 * n + 1 + rest))
    value = w.node("Transpose", value, perm=[*outer, 0, *inner, *tail])
    batch = x.shape[0] * int(np.prod(block))
    shape = [batch, *(sizes[i] // block[i] for i in range(n)), *x.shape[1 + n :]]
    w.put(op.out, w.node("Reshape", value, w.integers(shape)))


@converts("BATCH_TO_SPACE_ND")
def _batch_to_space(op: Operator) -> None:
    w, x = op.w, op[0]
    block, crops = op.ints(1, "block sizes"), op.array(2, "crops").reshape(-1, 2)
    n = len(block)
    rest = x.rank - 1 - n
    batch = x.shape[0] // int(np.prod(block))
    value = w.node("Reshape", w.real(x), w.integers([*block, batch, *x.shape[1:]]))
    mixed = [v for i in range(n) for v in (n + 1 + i, i)]
    tail = list(range(2 * n + 1, 2 * n + 1 + rest))
    value = w.node("Transpose", value, perm=[n, *mixed, *tail])
    sizes = [x.shape[1 + i] * block[i] for i in range(n)]
    value = w.node("Reshape", value, w.integers([batch, *sizes, *x.shape[1 + n :]]))
    starts = crops[:, 0].tolist()
    stops = [sizes[i] - int(crops[i, 1]) for i in range(n)]
    axes = list(range(1, n + 1))
    w.put(op.out, w.node("Slice", value, *map(w.integers, (starts, stops, axes))))
