"""Pooling on channel blocks."""

from __future__ import annotations

from typing import Any

from edgesdk.frontend.kernels import extreme, lowest
from edgesdk.profiles import TargetProfile
from edgesdk.schedules import tiles
from edgesdk.schedules.hardware import lanes
from edgesdk.schedules.template import Knobs, Template

POOL = "pool2d"
GLOBAL_MEAN = "global_mean"


def pool2d_nchwc(
    data: Any,
    *,
    in_hw: tuple[int, ...],
    kind: str,
    window: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    out_hw: tuple[int, ...],
    count_include_pad: bool,
) -> Any:
    """Maximum ("max") or mean ("avg") over windows of [N, C/b, H*W, b].

    `padding` is top, left, bottom, right. Positions outside the picture count as minus infinity for
    the maximum; the mean leaves them out, or counts those of the padding as zeros. Windows may
    reach beyond the padding (ONNX's ceil_mode): that part never counts.
    """
    from tvm import te, tirx

    n, c, _, block = (int(d) for d in data.shape)
    h, w = in_hw
    (kh, kw), (sy, sx), (dy, dx) = window, stride, dilation
    top, left, bottom, right = padding
    out_h, out_w = (int(d) for d in out_hw)
    ry = te.reduce_axis((0, kh), "ky")
    rx = te.reduce_axis((0, kw), "kx")
    inside_always = (
        top == left == 0
        and (out_h - 1) * sy + (kh - 1) * dy < h
        and (out_w - 1) * sx + (kw - 1) * dx < w
    )
    outside = lowest(data.dtype) if kind == "max" else tirx.const(0, data.dtype)

    def pixel(i: Any, o: Any, y: Any, x: Any, b: Any) -> Any:
        iy, ix = y * sy + ry * dy - top, x * sx + rx * dx - left
        if inside_always:
            return data[i, o, iy * w + ix, b]
        inside = tirx.all(iy >= 0, iy < h, ix >= 0, ix < w)
        return tirx.if_then_else(inside, data[i, o, iy * w + ix, b], outside)

    combine = extreme(False) if kind == "max" else te.sum
    shape = (n, c, out_h * out_w, block)
    total = te.compute(
        shape,
        lambda i, o, p, b: combine(pixel(i, o, p // out_w, p % out_w, b), axis=[ry, rx]),
        name="pool2d",
        attrs={"edgesdk.template": POOL, "edgesdk.row": out_w},
    )
    if kind == "max":
        return total

    def counted(index: Any, step: int, start: int, size: int, end: int, taps: int, gap: int) -> Any:
        """Window positions along one axis that count."""
        low, high = (-start, size + end) if count_include_pad else (0, size)
        first = index * step - start
        below = tirx.max(0, (low - first + gap - 1) // gap)
        upto = tirx.min(taps, (high - first + gap - 1) // gap)
        return tirx.max(upto - below, 0)

    def mean(i: Any, o: Any, p: Any, b: Any) -> Any:
        y, x = p // out_w, p % out_w
        rows = counted(y, sy, top, h, bottom, kh, dy)
        columns = counted(x, sx, left, w, right, kw, dx)
        count = tirx.max(rows * columns, 1)
        if inside_always:
            count = kh * kw
        return total[i, o, p, b] / tirx.Cast(data.dtype, count)

    return te.compute(shape, mean, name="pool2d_mean")


def global_mean_nchwc(data: Any) -> Any:
    """The mean over all pixels: [N, C/b, P, b] -> [N, C/b, 1, b]; of 8-bit integers as float32."""
    from tvm import te, tirx

    n, c, pixels, block = (int(d) for d in data.shape)
    integers = data.dtype in ("int8", "uint8")
    rp = te.reduce_axis((0, pixels), "p")

    def term(*index: Any) -> Any:
        return data[index].astype("int32") if integers else data[index]

    total = te.compute(
        (n, c, 1, block),
        lambda i, o, p, b: te.sum(term(i, o, rp, b), axis=rp),
        name="global_sum",
        attrs={"edgesdk.template": GLOBAL_MEAN, "edgesdk.row": 1},
    )

    def mean(*index: Any) -> Any:
        value = total[index].astype("float32") if integers else total[index]
        return value / tirx.const(pixels, "float32" if integers else data.dtype)

    return te.compute((n, c, 1, block), mean, name="global_mean")


def _schedule(sch: Any, block: Any, profile: TargetProfile, knobs: Knobs) -> None:
    """One vector of sums per output pixel, the window inside."""
    row = int(sch.get(block).annotations["edgesdk.row"])
    out = tiles.gather_epilogue(sch, block, lanes(profile))
    n, c, p, lane = sch.get_loops(out)
    y, x = sch.split(p, [None, row])
    task = sch.fuse(n, c, y)
    sch.set_scope(block, 0, "local")
    sch.compute_at(block, x, preserve_unit_loops=True)
    inner = sch.get_loops(block)[2:]
    spatial = len(inner) - tiles.reduction_rank(sch, block)
    tile, reduction = inner[:spatial], inner[spatial:]
    sch.reorder(*reduction, *tile)
    sch.vectorize(tile[-1])
    if tiles.work(sch, block) >= tiles.PARALLEL_WORK:
        sch.parallel(task)
    init = sch.decompose_reduction(block, reduction[0])
    sch.vectorize(sch.get_loops(init)[-1])
    sch.vectorize(lane)


def _nothing(sch: Any, block: Any, profile: TargetProfile) -> dict[str, Any]:
    """Pooling is bound by memory: there is nothing to choose."""
    return {}


TEMPLATES = tuple(Template(name, _nothing, _nothing, _schedule) for name in (POOL, GLOBAL_MEAN))
