"""Resize and Upsample, exactly to the specification: weights are computed while compiling.

Every axis is resized on its own. An output element is a weighted sum of a few input elements whose
positions and weights are known, so nearest is one gather, and linear, cubic and antialiased
filters are gathers and a sum, or a product with a small matrix. Specification: ONNX "Resize"
version 19; its filters follow Keys (1981) and, for antialiasing, Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce

import numpy as np

from edgesdk.frontend.graph import Value
from edgesdk.frontend.repair import Op, Repaired, positive_axis, refuse, repairs

# Up to this many input elements per output element are gathered; more become a matrix product.
GATHER_TAPS = 4
# The attributes that say how positions and weights are found.
Rule = Mapping[str, str | int | float]
# What Upsample, and Resize before operator set 11, always do.
_OLD: Rule = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


@repairs("Upsample")
def _upsample(op: Op) -> Repaired:
    scales = op.attr("scales")
    if scales is None:
        scales = [float(s) for s in op.array(1, "scales")]
    sizes = [_scaled(d, s) for d, s in zip(op[0].shape, scales, strict=True)]
    mode = "linear" if op.attr("mode", "nearest") in ("linear", "bilinear") else "nearest"
    return _resized(op, list(range(op[0].rank)), sizes, list(scales), mode, _OLD, None)


@repairs("Resize")
def _resize(op: Op) -> Repaired:
    x = op[0]
    if op.opset < 11:
        scales = [float(s) for s in op.array(1, "scales")]
        sizes = [_scaled(d, s) for d, s in zip(x.shape, scales, strict=True)]
        every = list(range(x.rank))
        return _resized(op, every, sizes, scales, op.attr("mode", "nearest"), _OLD, None)
    axes = [positive_axis(a, x.rank) for a in op.attr("axes") or range(x.rank)]
    lengths = [x.shape[a] for a in axes]
    given_sizes = op.get(3)
    if given_sizes is not None and given_sizes.size:
        sizes, scales = _from_sizes(op, lengths, op.int_list(3, "sizes"))
    else:
        scales = [float(s) for s in op.array(2, "scales").reshape(-1)]
        sizes = [_scaled(d, s) for d, s in zip(lengths, scales, strict=True)]
    rule: Rule = {k: v for k, v in op.attrs.items() if isinstance(v, str | int | float)}
    roi = None
    if op.attr("coordinate_transformation_mode") == "tf_crop_and_resize":
        roi = [float(r) for r in op.array(1, "regions of interest")]
    return _resized(op, axes, sizes, scales, op.attr("mode", "nearest"), rule, roi)


def _from_sizes(op: Op, lengths: list[int], sizes: list[int]) -> tuple[list[int], list[float]]:
    policy = op.attr("keep_aspect_ratio_policy", "stretch")
    scales = [s / d for s, d in zip(sizes, lengths, strict=True)]
    if policy == "stretch":
        return sizes, scales
    scale = min(scales) if policy == "not_larger" else max(scales)
    # Halves are rounded up.
    return [math.floor(d * scale + 0.5) for d in lengths], [scale] * len(lengths)


def _resized(
    op: Op,
    axes: list[int],
    sizes: list[int],
    scales: list[float],
    mode: str,
    rule: Rule,
    roi: list[float] | None,
) -> Value:
    x = op[0]
    if x.is_float is False and mode != "nearest":
        raise refuse(f"{mode} interpolation of {x.dtype.name} is not supported")
    if any(size < 0 for size in sizes):
        raise refuse(f"its sizes {sizes} are negative")
    outside: list[tuple[int, np.ndarray]] = []
    for i, (axis, size, scale) in enumerate(zip(axes, sizes, scales, strict=True)):
        length = x.shape[axis]
        if size == length and scale == 1.0 and roi is None:
            continue
        if size == 0 or length == 0:
            shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
            return op.b.constant(np.zeros(shape, x.dtype))
        ends = (roi[i], roi[i + len(axes)]) if roi is not None else None
        at = source_positions(length, size, scale, str(rule.get(_MODE, "half_pixel")), ends)
        beyond = (at < 0) | (at > length - 1)
        if mode == "nearest":
            if rule.get(_MODE) == "tf_half_pixel_for_nn":  # ONNX Runtime has it no more
                picked = _rounded(at, str(rule.get("nearest_mode", "round_prefer_floor")))
            else:
                picked = _as_onnxruntime(op, length, size, scale, rule, ends)
                beyond = picked < 0
            x = _nearest(op, x, axis, np.clip(picked, 0, length - 1).astype(np.int64))
        else:
            x = _weighted(op, x, axis, weights(length, at, scale, mode, rule))
        if roi is not None:
            outside.append((axis, beyond))
    return _extrapolated(op, x, outside, float(rule.get("extrapolation_value", 0.0)))


_MODE = "coordinate_transformation_mode"


def source_positions(
    length: int, size: int, scale: float, mode: str, roi: tuple[float, float] | None
) -> np.ndarray:
    """Returns where each of `size` output elements lies among `length` input elements.

    Single precision, as ONNX Runtime computes: positions halfway between two elements would
    otherwise round to the other side.
    """
    i = np.arange(size, dtype=np.float32)
    s = np.float32(scale)
    one, half = np.float32(1), np.float32(0.5)
    if mode == "half_pixel":
        return (i + half) / s - half
    if mode == "half_pixel_symmetric":
        adjustment = np.float32(size) / (s * np.float32(length))
        center = np.float32(length) / 2
        return center * (one - adjustment) + (i + half) / s - half
    if mode == "pytorch_half_pixel":
        return (i + half) / s - half if size > 1 else np.zeros(1, np.float32)
    if mode == "align_corners":
        if size == 1:
            return np.zeros(1, np.float32)
        return i * np.float32(length - 1) / np.float32(size - 1)
    if mode == "asymmetric":
        return i / s
    if mode == "tf_half_pixel_for_nn":
        return (i + half) / s
    if mode == "tf_crop_and_resize" and roi is not None:
        start, end = np.float32(roi[0]), np.float32(roi[1])
        span = np.float32(length - 1)
        if size == 1:
            return np.asarray([0.5 * np.float64(start + end) * span], np.float32)
        return start * span + i * (end - start) * span / np.float32(size - 1)
    raise refuse(f"the coordinate transformation {mode!r} is not supported")


def _nearest(op: Op, x: Value, axis: int, picked: np.ndarray) -> Value:
    length, size = x.shape[axis], len(picked)
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    times = size // length
    if np.array_equal(picked, np.repeat(np.arange(length), times)):
        wide = op.b.reshape(x, (*before, length, 1, *after))
        wide = op.b.expand(wide, (*before, length, times, *after))
        return op.b.reshape(wide, (*before, size, *after))
    return op.b.take(x, [int(p) for p in picked], axis)


def _as_onnxruntime(
    op: Op,
    length: int,
    size: int,
    scale: float,
    rule: Rule,
    ends: tuple[float, float] | None,
) -> np.ndarray:
    """The element that ONNX Runtime picks for each output: at ties, its rounding decides.

    -1 where the output lies outside the region of interest `ends`.
    """
    b = op.b
    ramp = b.constant(np.arange(length, dtype=np.float32).reshape(1, 1, 1, length))
    attrs = {k: v for k, v in rule.items() if k in (_MODE, "nearest_mode")}
    by_scale = _scaled(length, scale) == size
    scales = b.constant(np.asarray([1, 1, 1, scale], np.float32)) if by_scale else None
    sizes = None if by_scale else b.ints([1, 1, 1, size])
    roi = None
    if ends is not None:
        roi = b.constant(np.asarray([0, 0, 0, ends[0], 1, 1, 1, ends[1]], np.float32))
        attrs["extrapolation_value"] = -1.0
    picked = b("Resize", ramp, roi, scales, sizes, mode="nearest", **attrs)
    assert picked.const is not None
    return picked.const.reshape(-1)


def _rounded(at: np.ndarray, mode: str) -> np.ndarray:
    if mode == "round_prefer_floor":
        return np.ceil(at - np.float32(0.5))
    if mode == "round_prefer_ceil":
        return np.floor(at + np.float32(0.5))
    if mode in ("floor", "ceil"):
        return np.floor(at) if mode == "floor" else np.ceil(at)
    raise refuse(f"the rounding {mode!r} is not supported")


def _scaled(length: int, scale: float) -> int:
    """The resized length, rounded down in single precision as ONNX says."""
    return int(np.floor(np.float32(length) * np.float32(scale)))


def weights(length: int, at: np.ndarray, scale: float, mode: str, rule: Rule) -> np.ndarray:
    """Returns the matrix [output, input] of one axis for linear or cubic interpolation."""
    antialias = bool(rule.get("antialias", 0)) and scale < 1.0
    stretch = scale if antialias else 1.0
    cubic = mode == "cubic"
    if mode not in ("linear", "cubic"):
        raise refuse(f"the mode {mode!r} is not supported")
    a = float(rule.get("cubic_coeff_a", -0.75))
    support = (2.0 if cubic else 1.0) / stretch
    exclude = bool(rule.get("exclude_outside", 0))
    matrix = np.zeros((len(at), length))
    for row, position in enumerate(np.asarray(at, np.float64)):
        first, last = math.floor(position - support) + 1, math.ceil(position + support) - 1
        taps = np.arange(first, max(last, first) + 1)
        distance = np.abs(taps - position) * stretch
        values = _keys(distance, a) if cubic else np.maximum(0.0, 1.0 - distance)
        if exclude:
            values = np.where((taps < 0) | (taps >= length), 0.0, values)
        if exclude or antialias:
            values = values / (values.sum() or 1.0)
        np.add.at(matrix[row], np.clip(taps, 0, length - 1), values)
    return matrix


def _keys(distance: np.ndarray, a: float) -> np.ndarray:
    """Keys' cubic convolution kernel."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


def _weighted(op: Op, x: Value, axis: int, matrix: np.ndarray) -> Value:
    """Applies a matrix [output, input] along `axis`."""
    b = op.b
    taps = int(np.count_nonzero(matrix, axis=1).max())
    if taps <= GATHER_TAPS:
        order = np.argsort(matrix == 0, axis=1, kind="stable")[:, :taps]
        factors = np.take_along_axis(matrix, order, axis=1)
        shape = (-1, *[1] * (x.rank - 1 - axis))
        terms = [
            b(
                "Mul",
                b.take(x, [int(p) for p in order[:, t]], axis),
                b.constant(factors[:, t].astype(x.dtype).reshape(shape)),
            )
            for t in range(taps)
        ]
        return reduce(lambda p, q: b("Add", p, q), terms)
    last = list(range(x.rank))
    last[axis], last[-1] = last[-1], last[axis]
    table = b.constant(np.ascontiguousarray(matrix.T.astype(x.dtype)))
    return b.transpose(b("MatMul", b.transpose(x, last), table), last)


def _extrapolated(op: Op, x: Value, outside: list[tuple[int, np.ndarray]], value: float) -> Value:
    for axis, mask in outside:
        if mask.any():
            shape = (-1, *[1] * (x.rank - 1 - axis))
            fill = op.b.constant(np.asarray(value, x.dtype))
            x = op.b("Where", op.b.constant(mask.reshape(shape)), fill, x)
    return x
