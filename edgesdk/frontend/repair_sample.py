"""Sampling at positions computed at run time: GridSample, RoiAlign, AffineGrid, as gathers."""

from __future__ import annotations

import itertools
import math
from functools import reduce

import numpy as np

from edgesdk.frontend.graph import Value
from edgesdk.frontend.repair import Op, Repaired, refuse, repairs


def _sum(op: Op, terms: list[Value]) -> Value:
    return reduce(lambda p, q: op.b("Add", p, q), terms)


@repairs("GridSample")
def _grid_sample(op: Op) -> Repaired:
    b, x, grid = op.b, op[0], op[1]
    n = x.rank - 2
    mode = op.attr("mode", "linear")
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    padding = op.attr("padding_mode", "zeros")
    aligned = bool(op.attr("align_corners", 0))
    if mode == "cubic" and n != 2:
        raise refuse("cubic sampling is supported in two dimensions only")
    spatial, points = x.shape[2:], math.prod(grid.shape[1:-1])
    flat = b.reshape(grid, (x.shape[0], points, n))
    positions = []
    for axis in range(n):  # the grid's last axis counts from the innermost dimension
        part = b.slice(flat, 2, n - 1 - axis, n - axis)
        part = b.reshape(part, (x.shape[0], 1, points))
        size = spatial[axis]
        if aligned:
            positions.append(b("Mul", b("Add", part, 1.0), (size - 1) / 2))
        else:
            line = b("Mul", b("Add", part, 1.0), float(size))
            positions.append(b("Mul", b("Sub", line, 1.0), 0.5))
    if mode != "cubic" and padding != "zeros":
        positions = [
            _bounded(op, p, s, padding, aligned) for p, s in zip(positions, spatial, strict=True)
        ]
    table = b.reshape(x, (*x.shape[:2], math.prod(spatial)))
    if mode == "nearest":
        result = _lookup(op, table, spatial, [b("Round", p) for p in positions], padding, aligned)
    else:
        result = _blended(op, table, spatial, positions, mode, padding, aligned)
    return b.reshape(result, (*x.shape[:2], *grid.shape[1:-1]))


def _bounded(op: Op, position: Value, size: int, padding: str, aligned: bool) -> Value:
    """Clamps or reflects positions into the image."""
    b = op.b
    if padding == "reflection":
        low, high = (0.0, size - 1.0) if aligned else (-0.5, size - 0.5)
        span = high - low
        if span == 0:
            return b("Mul", position, 0.0)
        away = b("Abs", b("Sub", position, low))
        turns = b("Floor", b("Div", away, span))
        extra = b("Sub", away, b("Mul", turns, span))
        half = b("Mul", turns, 0.5)
        odd = b("Greater", b("Sub", half, b("Floor", half)), 0.25)
        mirrored = b("Sub", b.constant(np.asarray(span, position.dtype)), extra)
        position = b("Add", b("Where", odd, mirrored, extra), low)
    bounds = [b.constant(np.asarray(v, position.dtype)) for v in (0.0, size - 1.0)]
    return b("Clip", position, *bounds)


def _lookup(
    op: Op,
    table: Value,
    spatial: tuple[int, ...],
    whole: list[Value],
    padding: str,
    aligned: bool,
) -> Value:
    """Elements at whole positions [batch, 1, points]; outside: zero, the border or a reflection."""
    b = op.b
    inside: Value | None = None
    index: Value | None = None
    for axis, (at, size) in enumerate(zip(whole, spatial, strict=True)):
        if padding == "zeros":
            limit = b.constant(np.asarray(size - 0.5, at.dtype))
            low = b.constant(np.asarray(-0.5, at.dtype))
            here = b("And", b("Greater", at, low), b("Less", at, limit))
            inside = here if inside is None else b("And", inside, here)
            bounds = [b.constant(np.asarray(v, at.dtype)) for v in (0.0, size - 1.0)]
            at = b("Clip", at, *bounds)
        else:
            at = _bounded(op, at, size, padding, aligned)
            at = b("Round", at)
        number = b.cast(at, np.int64)
        stride = math.prod(spatial[axis + 1 :])
        if stride != 1:
            number = b("Mul", number, b.constant(np.asarray(stride, np.int64)))
        index = number if index is None else b("Add", index, number)
    assert index is not None
    wide = b.expand(index, (*table.shape[:2], index.shape[-1]))
    picked = b("GatherElements", table, wide, axis=2)
    if inside is None:
        return picked
    return b("Where", inside, picked, b.constant(np.zeros((), table.dtype)))


def _blended(
    op: Op,
    table: Value,
    spatial: tuple[int, ...],
    positions: list[Value],
    mode: str,
    padding: str,
    aligned: bool,
) -> Value:
    b = op.b
    floors = [b("Floor", p) for p in positions]
    parts = [b("Sub", p, f) for p, f in zip(positions, floors, strict=True)]
    one = b.constant(np.ones((), table.dtype))
    if mode == "linear":
        factors = [[b("Sub", one, t), t] for t in parts]
        offsets = [0, 1]
    else:
        factors = [_cubic(op, t) for t in parts]
        offsets = [-1, 0, 1, 2]
    terms = []
    for corner in itertools.product(range(len(offsets)), repeat=len(spatial)):
        whole = [b("Add", f, float(offsets[c])) for f, c in zip(floors, corner, strict=True)]
        # Linear positions are inside already; what lies past the border has the weight zero.
        edge = padding if mode == "cubic" or padding == "zeros" else "border"
        value = _lookup(op, table, spatial, whole, edge, aligned)
        weight = reduce(
            lambda p, q: b("Mul", p, q), [f[c] for f, c in zip(factors, corner, strict=True)]
        )
        terms.append(b("Mul", value, weight))
    return _sum(op, terms)


def _cubic(op: Op, t: Value) -> list[Value]:
    """Keys' weights with a = -0.75 for the elements at -1, 0, 1, 2 from the floor."""
    b, a = op.b, -0.75
    one = b.constant(np.ones((), t.dtype))
    two = b.constant(np.asarray(2.0, t.dtype))

    def near(d: Value) -> Value:
        inner = b("Mul", b("Sub", b("Mul", d, a + 2), a + 3), b("Mul", d, d))
        return b("Add", inner, 1.0)

    def far(d: Value) -> Value:
        inner = b("Add", b("Mul", b("Sub", b("Mul", d, a), 5 * a), d), 8 * a)
        return b("Sub", b("Mul", inner, d), 4 * a)

    return [far(b("Add", t, 1.0)), near(t), near(b("Sub", one, t)), far(b("Sub", two, t))]


@repairs("AffineGrid")
def _affine_grid(op: Op) -> Repaired:
    b, theta = op.b, op[0]
    size = op.int_list(1, "size")
    spatial = size[2:]
    aligned = bool(op.attr("align_corners", 0))
    lines = []
    for length in spatial:
        if aligned:
            lines.append(np.linspace(-1, 1, length) if length > 1 else np.zeros(1))
        else:
            lines.append((np.arange(length) * 2 + 1) / length - 1)
    mesh = np.meshgrid(*lines, indexing="ij")
    points = np.stack([m.reshape(-1) for m in mesh[::-1]] + [np.ones(math.prod(spatial))], -1)
    turned = b.transpose(theta, (0, 2, 1))
    moved = b("MatMul", b.constant(points.astype(theta.dtype)), turned)
    return b.reshape(moved, (size[0], *spatial, len(spatial)))


@repairs("RoiAlign")
def _roi_align(op: Op) -> Repaired:
    """Samples a fixed grid in each region; the number of samples must not depend on the data."""
    b, x, rois = op.b, op[0], op[1]
    high, wide = int(op.attr("output_height", 1)), int(op.attr("output_width", 1))
    samples, scale = int(op.attr("sampling_ratio", 0)), float(op.attr("spatial_scale", 1.0))
    default = "half_pixel" if op.opset >= 16 else "output_half_pixel"
    half = op.attr("coordinate_transformation_mode", default) == "half_pixel"
    if samples <= 0:
        raise refuse("sampling_ratio 0 takes a number of samples that depends on the regions")
    count = rois.shape[0]
    corners = b("Mul", rois, scale)
    if half:
        corners = b("Sub", corners, 0.5)
    left, top, right, bottom = (b.slice(corners, 1, i, i + 1) for i in range(4))
    axes = []
    for low, end, bins, size in ((top, bottom, high, x.shape[2]), (left, right, wide, x.shape[3])):
        length = b("Sub", end, low)
        if not half:
            length = b("Max", length, 1.0)
        steps = (np.arange(bins * samples) + 0.5) / (bins * samples)
        line = b.constant(steps.astype(x.dtype).reshape(1, -1))
        axes.append(_line(op, b("Add", low, b("Mul", length, line)), size))
    batch = b.reshape(b.cast(op[2], np.int64), (count, 1, 1))
    plane = x.shape[2] * x.shape[3]
    table = b.reshape(b.transpose(x, (0, 2, 3, 1)), (x.shape[0] * plane, x.shape[1]))
    base = b("Mul", batch, b.constant(np.asarray(plane, np.int64)))
    width = b.constant(np.asarray(x.shape[3], np.int64))
    rows, columns = high * samples, wide * samples
    terms = []
    for (y, y_weight), (z, z_weight) in itertools.product(axes[0], axes[1]):
        down = b("Mul", b.reshape(y, (count, rows, 1)), width)
        index = b("Add", b("Add", base, down), b.reshape(z, (count, 1, columns)))
        weight = b("Mul", b.reshape(y_weight, (count, rows, 1, 1)),
                   b.reshape(z_weight, (count, 1, columns, 1)))  # fmt: skip
        terms.append(b("Mul", b("Gather", table, index, axis=0), weight))
    maximum = op.attr("mode", "avg") == "max"
    # ONNX Runtime takes the largest weighted corner, not the largest interpolated sample.
    joined = reduce(lambda p, q: b("Max", p, q), terms) if maximum else _sum(op, terms)
    grouped = b.reshape(joined, (count, high, samples, wide, samples, x.shape[1]))
    kind = "ReduceMax" if maximum else "ReduceMean"
    pooled = b(kind, grouped, b.ints([2, 4]), keepdims=0)
    return b.transpose(pooled, (0, 3, 1, 2))


def _line(op: Op, at: Value, size: int) -> list[tuple[Value, Value]]:
    """The two elements around each position and their weights; none outside the image."""
    b = op.b
    limits = [b.constant(np.asarray(v, at.dtype)) for v in (-1.0, float(size))]
    inside = b("Not", b("Or", b("Less", at, limits[0]), b("Greater", at, limits[1])))
    bounds = [b.constant(np.asarray(v, at.dtype)) for v in (0.0, size - 1.0)]
    at = b("Clip", at, *bounds)
    low = b("Floor", at)
    part = b("Sub", at, low)
    number = b.cast(low, np.int64)
    top = b.constant(np.asarray(size - 1, np.int64))
    following = b("Min", b("Add", number, b.constant(np.asarray(1, np.int64))), top)
    one, zero = (b.constant(np.asarray(v, at.dtype)) for v in (1.0, 0.0))
    return [
        (number, b("Where", inside, b("Sub", one, part), zero)),
        (following, b("Where", inside, part, zero)),
    ]
