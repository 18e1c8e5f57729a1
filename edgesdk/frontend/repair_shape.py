"""Repairs of operators that only move elements: shapes, slices, padding, joining, splitting."""

from __future__ import annotations

import math

import numpy as np

from edgesdk.frontend.graph import Value
from edgesdk.frontend.repair import Op, Repaired, positive_axis, refuse, repairs


@repairs("Shape")
def _shape(op: Op) -> Repaired:
    start, end = op.attr("start", 0), op.attr("end")
    return op.b.ints(op[0].shape[start:end])


@repairs("Size")
def _size(op: Op) -> Repaired:
    return op.b.constant(np.asarray(op[0].size, np.int64))


@repairs("Reshape")
def _reshape(op: Op) -> Repaired:
    x, dims = op[0], op.int_list(1, "dimensions")
    if not op.attr("allowzero", 0):
        dims = [x.shape[i] if d == 0 and i < x.rank else d for i, d in enumerate(dims)]
    if dims.count(-1) == 1:
        rest = math.prod(d for d in dims if d != -1)
        if rest == 0 or x.size % rest:
            raise refuse(f"{x.size} elements do not fill {dims}")
        dims = [x.size // rest if d == -1 else d for d in dims]
    if any(d < 0 for d in dims) or math.prod(dims) != x.size:
        raise refuse(f"its input has the shape {list(x.shape)}, which does not fill {dims}")
    if x.size == 0:
        return op.b.constant(np.empty(dims, x.dtype))
    return op.b.reshape(x, dims)


@repairs("Flatten")
def _flatten(op: Op) -> Repaired:
    x, axis = op[0], op.attr("axis", 1)
    axis = axis + x.rank if axis < 0 else axis
    return op.b.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@repairs("Squeeze")
def _squeeze(op: Op) -> Repaired:
    x = op[0]
    axes = op.attr("axes")
    if axes is None and op.get(1) is not None:
        axes = op.int_list(1, "axes")
    drop = (
        {i for i, d in enumerate(x.shape) if d == 1}
        if axes is None
        else {positive_axis(a, x.rank) for a in axes}
    )
    if any(x.shape[a] != 1 for a in drop):
        raise refuse(f"it removes an axis of {list(x.shape)} that is not 1")
    return op.b.reshape(x, [d for i, d in enumerate(x.shape) if i not in drop])


@repairs("Unsqueeze")
def _unsqueeze(op: Op) -> Repaired:
    x = op[0]
    axes = op.attr("axes")
    axes = op.int_list(1, "axes") if axes is None else axes
    rank = x.rank + len(axes)
    new = {positive_axis(a, rank) for a in axes}
    rest = iter(x.shape)
    return op.b.reshape(x, [1 if i in new else next(rest) for i in range(rank)])


@repairs("Transpose")
def _transpose(op: Op) -> Repaired:
    perm = op.attr("perm") or list(range(op[0].rank))[::-1]
    if sorted(perm) != list(range(op[0].rank)):
        raise refuse(f"its permutation {perm} does not fit a tensor of {op[0].rank} dimensions")
    return op.b.transpose(op[0], perm)


@repairs("Expand")
def _expand(op: Op) -> Repaired:
    dims = op.int_list(1, "dimensions")
    return op.b.expand(op[0], np.broadcast_shapes(op[0].shape, tuple(dims)))


@repairs("Tile")
def _tile(op: Op) -> Repaired:
    counts = op.int_list(1, "repeats")
    for axis, count in enumerate(counts):
        if op[0].shape[axis] == 1:
            continue
        if count != 1:
            return op.b("Tile", op[0], op.b.ints(counts))
    return op.b.expand(op[0], [d * c for d, c in zip(op[0].shape, counts, strict=True)])


@repairs("Concat")
def _concat(op: Op) -> Repaired:
    values = [op[i] for i in range(len(op.inputs))]
    return op.b.concat(values, positive_axis(op.attrs["axis"], values[0].rank))


@repairs("Split")
def _split(op: Op) -> Repaired:
    x = op[0]
    axis = positive_axis(op.attr("axis", 0), x.rank)
    sizes = op.attr("split")
    if sizes is None and op.get(1) is not None:
        sizes = op.int_list(1, "split sizes")
    if sizes is None:
        parts = int(op.attr("num_outputs", len(op.outputs)))
        step = -(-x.shape[axis] // parts)
        sizes = [step] * (parts - 1) + [x.shape[axis] - step * (parts - 1)]
    if sum(sizes) != x.shape[axis] or min(sizes) < 0:
        raise refuse(f"its parts {sizes} do not add up to {x.shape[axis]}")
    if len(sizes) == 1:
        return x
    starts = np.cumsum([0, *sizes])
    return [op.b.slice(x, axis, int(s), int(s) + n) for s, n in zip(starts, sizes, strict=False)]


@repairs("Slice")
def _slice(op: Op) -> Repaired:
    x = op[0]
    if op.opset < 10:
        starts, ends = op.attrs["starts"], op.attrs["ends"]
        axes, steps = op.attr("axes"), None
    else:
        starts, ends = op.int_list(1, "starts"), op.int_list(2, "ends")
        axes = op.int_list(3, "axes") if op.get(3) is not None else None
        steps = op.int_list(4, "steps") if op.get(4) is not None else None
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = positive_axis(axis, x.rank)
        if step == 0:
            raise refuse("its step is 0")
        picked = range(*slice(start, _end(end, x.shape[axis], step), step).indices(x.shape[axis]))
        x = _picked(op, x, axis, picked)
    return x


def _end(end: int, length: int, step: int) -> int | None:
    """Python's end of a slice: ONNX counts from the back only down to -length."""
    return None if step < 0 and end < -length else end


def _picked(op: Op, x: Value, axis: int, picked: range) -> Value:
    if len(picked) == 0:
        shape = list(x.shape)
        shape[axis] = 0
        return op.b.constant(np.empty(shape, x.dtype))
    if picked.step < 0 and len(picked) > 1:
        return op.b.take(x, picked, axis)
    step = abs(picked.step) if len(picked) > 1 else 1
    return op.b.slice(x, axis, picked[0], picked[-1] + 1, step)


@repairs("Pad")
def _pad(op: Op) -> Repaired:
    b, x = op.b, op[0]
    mode = op.attr("mode", "constant")
    if op.opset < 11:
        amounts = list(op.attrs["pads"])
        fill = b.constant(np.asarray(op.attr("value", 0.0), x.dtype))
    else:
        amounts = op.int_list(1, "amounts")
        fill = op.get(2) or b.constant(np.zeros((), x.dtype))
    axes = op.int_list(3, "axes") if op.get(3) is not None else list(range(x.rank))
    count = len(axes)
    before, after = [0] * x.rank, [0] * x.rank
    for i, axis in enumerate(axes):
        axis = positive_axis(axis, x.rank)
        before[axis], after[axis] = amounts[i], amounts[i + count]
    return padded(op, x, before, after, mode, fill)


def padded(op: Op, x: Value, before: list[int], after: list[int], mode: str, fill: Value) -> Value:
    """Pads or, where an amount is negative, crops."""
    b = op.b
    for axis, (low, high) in enumerate(zip(before, after, strict=True)):
        if mode != "constant":
            x = _mirrored(op, x, axis, low, high, mode)
        elif low < 0 or high < 0:
            x = b.slice(x, axis, max(-low, 0), x.shape[axis] - max(-high, 0))
    amounts = [max(p, 0) for p in (*before, *after)]
    if mode != "constant" or not any(amounts):
        return x
    if fill.const is None:
        raise refuse("its fill value is computed at run time")
    if x.size == 0:
        shape = [d + p + q for d, p, q in zip(x.shape, before, after, strict=True)]
        return b.constant(np.broadcast_to(fill.const.reshape(()), shape))
    return b("Pad", x, b.ints(amounts), b.reshape(fill, ()))


def _mirrored(op: Op, x: Value, axis: int, low: int, high: int, mode: str) -> Value:
    if low == 0 and high == 0:
        return x
    length = x.shape[axis]
    positions = np.arange(-low, length + high)
    if mode == "edge":
        positions = np.clip(positions, 0, length - 1)
    elif mode == "reflect":
        period = max(2 * (length - 1), 1)
        positions = np.abs((positions + length - 1) % period - (length - 1))
    elif mode == "wrap":
        positions = positions % length
    else:
        raise refuse(f"padding mode {mode!r} is not supported")
    return op.b.take(x, [int(p) for p in positions], axis)


@repairs("ConstantOfShape")
def _constant_of_shape(op: Op) -> Repaired:
    value = op.attr("value")
    fill = np.zeros((), np.float32) if value is None else np.asarray(value).reshape(())
    return op.b.constant(np.broadcast_to(fill, op.int_list(0, "dimensions")))


@repairs("Range")
def _range(op: Op) -> Repaired:
    start, limit, step = (op.array(i, "bounds").reshape(()) for i in range(3))
    count = max(0, math.ceil((limit.astype(np.float64) - start) / step.astype(np.float64)))
    steps = np.arange(count).astype(start.dtype)
    return op.b.constant((start + steps * step).astype(start.dtype))


@repairs("EyeLike")
def _eye_like(op: Op) -> Repaired:
    from onnx import helper

    to = op.attr("dtype")
    dtype = op[0].dtype if to is None else np.dtype(helper.tensor_dtype_to_np_dtype(to))
    rows, columns = op[0].shape
    return op.b.constant(np.eye(rows, columns, op.attr("k", 0), dtype))


@repairs("Trilu")
def _trilu(op: Op) -> Repaired:
    b, x = op.b, op[0]
    k = op.int_list(1, "diagonal")[0] if op.get(1) is not None else 0
    rows, columns = x.shape[-2:]
    ones = np.ones((rows, columns), np.bool_)
    mask = np.triu(ones, k) if op.attr("upper", 1) else np.tril(ones, k)
    return b("Where", b.constant(mask), x, b.constant(np.zeros((), x.dtype)))


@repairs("DepthToSpace")
def _depth_to_space(op: Op) -> Repaired:
    b, x = op.b, op[0]
    size = int(op.attrs["blocksize"])
    n, c, h, w = x.shape
    deep = c // (size * size)
    if op.attr("mode", "DCR") == "DCR":
        split, perm = (n, size, size, deep, h, w), (0, 3, 4, 1, 5, 2)
    else:
        split, perm = (n, deep, size, size, h, w), (0, 1, 4, 2, 5, 3)
    return b.reshape(b.transpose(b.reshape(x, split), perm), (n, deep, h * size, w * size))


@repairs("SpaceToDepth")
def _space_to_depth(op: Op) -> Repaired:
    b, x = op.b, op[0]
    size = int(op.attrs["blocksize"])
    n, c, h, w = x.shape
    split = b.reshape(x, (n, c, h // size, size, w // size, size))
    perm = (0, 3, 5, 1, 2, 4) if op.attr("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return b.reshape(b.transpose(split, perm), (n, c * size * size, h // size, w // size))


@repairs("CenterCropPad")
def _center_crop_pad(op: Op) -> Repaired:
    x = op[0]
    target = op.int_list(1, "dimensions")
    axes = op.attr("axes") or list(range(x.rank))
    before, after = [0] * x.rank, [0] * x.rank
    for axis, size in zip(axes, target, strict=True):
        axis = positive_axis(axis, x.rank)
        extra = size - x.shape[axis]
        # The odd element is cropped at the front's far side, and padded at the end.
        before[axis] = extra // 2 if extra >= 0 else -(-extra // 2)
        after[axis] = extra - before[axis]
    return padded(op, x, before, after, "constant", op.b.constant(np.zeros((), x.dtype)))
