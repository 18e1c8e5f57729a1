"""Convolutions on channel blocks: tensor expressions, packed weights, and their schedules.

The direct method (Georganas et al., "Anatomy of High-Performance Deep Learning Convolutions on SIMD
Architectures", 2018): a register tile of some output columns times some blocks of output channels
is kept while the sum runs over input channels and the window; each weight vector that is loaded
serves all columns, each broadcast input all blocks. Bias, activation and residual are applied when
the tile is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import tiles
from edgesdk.schedules.hardware import accumulators, divisors, lanes

if TYPE_CHECKING:
    import numpy as np

DIRECT = "conv2d_direct"
DEPTHWISE = "conv2d_depthwise"


@dataclass(frozen=True)
class Conv2d:
    """`padding` is top, left, bottom, right; `block` the channels of a block."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    block: int


def kind_of(config: Conv2d, channels: int, out_channels: int) -> str | None:
    """Which expression computes it: "direct", "grouped", "depthwise", or None."""
    if config.groups == 1:
        return "direct"
    if config.groups == channels == out_channels:
        return "depthwise"
    per_group = (channels // config.groups, out_channels // config.groups)
    return "grouped" if all(c % config.block == 0 for c in per_group) else None


def is_pointwise(config: Conv2d, weight_shape: tuple[int, ...]) -> bool:
    """A 1x1 convolution that touches each pixel once: rows can be treated as one long row."""
    return (
        weight_shape[2:] == (1, 1) and config.stride == (1, 1) and not any(config.padding)
    )


def pack_weight(
    weight: np.ndarray, config: Conv2d, kind: str, *, plain_input: bool
) -> np.ndarray:
    """[O, I/groups, KH, KW] in the order in which the kernel reads it, zeros beyond O.

    direct, plain input:       [O/b, I, KH, KW, b]
    direct or grouped, blocked: [O/b, I/b, KH, KW, b, b], or [O/b, KH, KW, I, b] if b does not
                                divide I
    depthwise:                 [O/b, KH, KW, b]
    """
    import numpy as np

    block = config.block
    out_channels, in_channels, kh, kw = weight.shape
    padded = np.zeros((-(-out_channels // block) * block, in_channels, kh, kw), weight.dtype)
    padded[:out_channels] = weight
    blocks = padded.reshape(-1, block, in_channels, kh, kw)
    if kind == "depthwise":
        packed = blocks[:, :, 0].transpose(0, 2, 3, 1)
    elif plain_input:
        packed = blocks.transpose(0, 2, 3, 4, 1)
    elif in_channels % block:
        packed = blocks.transpose(0, 3, 4, 2, 1)
    else:
        split = blocks.reshape(-1, block, in_channels // block, block, kh, kw)
        packed = split.transpose(0, 2, 4, 5, 3, 1)
    return np.ascontiguousarray(packed)


def pad_spatial(x: Any, padding: tuple[int, ...]) -> Any:
    """Zeros around the spatial axes 2 and 3 of a plain or blocked tensor."""
    from tvm import te, tirx

    top, left, bottom, right = padding
    n, c, h, w, *rest = (int(d) for d in x.shape)

    def element(i: Any, k: Any, y: Any, z: Any, *lane: Any) -> Any:
        inside = tirx.all(y >= top, y < h + top, z >= left, z < w + left)
        return tirx.if_then_else(
            inside, x(i, k, y - top, z - left, *lane), tirx.const(0, x.dtype)
        )

    shape = (n, c, h + top + bottom, w + left + right, *rest)
    return te.compute(shape, element, name="pad", tag="injective,pad")


def conv2d_nchwc(
    data: Any, weight: Any, config: Conv2d, kind: str, channels: int, flat: bool
) -> Any:
    """The convolution of a tensor that is padded already; returns [N, O/b, OH, OW, b].

    `data` is [N, I/b, H, W, b], or [N, I, H, W] with `weight` of pack_weight(plain_input=True).
    `channels` counts the input channels with meaning. `flat`: rows are treated as one long row.
    """
    from tvm import te

    block = config.block
    (sy, sx), (dy, dx) = config.stride, config.dilation
    n, _, h, w = (int(d) for d in data.shape[:4])
    if kind == "depthwise":
        blocks, kh, kw, _ = (int(d) for d in weight.shape)
    elif len(data.shape) == 4:
        blocks, _, kh, kw, _ = (int(d) for d in weight.shape)
    elif len(weight.shape) == 6:
        blocks, _, kh, kw, _, _ = (int(d) for d in weight.shape)
    else:
        blocks, kh, kw, _, _ = (int(d) for d in weight.shape)
    out_h = (h - (kh - 1) * dy - 1) // sy + 1
    out_w = (w - (kw - 1) * dx - 1) // sx + 1
    shape = (n, blocks, out_h, out_w, block)
    ry = te.reduce_axis((0, kh), "ky")
    rx = te.reduce_axis((0, kw), "kx")

    if kind == "depthwise":
        return te.compute(
            shape,
            lambda i, o, y, x, b: te.sum(
                data[i, o, y * sy + ry * dy, x * sx + rx * dx, b] * weight[o, ry, rx, b],
                axis=[ry, rx],
            ),
            name="conv2d",
            attrs={"edgesdk.template": DEPTHWISE},
        )
    if len(data.shape) == 4:
        rc = te.reduce_axis((0, channels), "ci")
        return te.compute(
            shape,
            lambda i, o, y, x, b: te.sum(
                data[i, rc, y * sy + ry * dy, x * sx + rx * dx] * weight[o, rc, ry, rx, b],
                axis=[rc, ry, rx],
            ),
            name="conv2d",
            attrs={"edgesdk.template": DIRECT},
        )
    per_group = channels // config.groups
    group_blocks = blocks // config.groups

    def first_block(o: Any) -> Any:
        return 0 if config.groups == 1 else o // group_blocks * (per_group // block)

    if len(weight.shape) == 5:
        rk = te.reduce_axis((0, per_group), "ci")

        def tail(i: Any, o: Any, y: Any, x: Any, b: Any) -> Any:
            pixel = data[i, rk // block, y * sy + ry * dy, x * sx + rx * dx, rk % block]
            return te.sum(pixel * weight[o, ry, rx, rk, b], axis=[ry, rx, rk])

        element = tail
    else:
        rc = te.reduce_axis((0, per_group // block), "co")
        ri = te.reduce_axis((0, block), "ci")

        def whole(i: Any, o: Any, y: Any, x: Any, b: Any) -> Any:
            pixel = data[i, first_block(o) + rc, y * sy + ry * dy, x * sx + rx * dx, ri]
            return te.sum(pixel * weight[o, rc, ry, rx, ri, b], axis=[rc, ry, rx, ri])

        element = whole
    if not flat:
        return te.compute(
            shape, element, name="conv2d", attrs={"edgesdk.template": DIRECT}
        )
    long_row = te.compute(
        (n, blocks, out_h * out_w, block),
        lambda i, o, p, b: element(i, o, p // out_w, p % out_w, b),
        name="conv2d",
        attrs={"edgesdk.template": DIRECT},
    )
    return te.compute(
        shape, lambda i, o, y, x, b: long_row[i, o, y * out_w + x, b], name="conv2d_rows"
    )


@dataclass(frozen=True)
class Decision:
    """The knobs: columns and channel blocks of the register tile."""

    columns: int
    blocks: int


def default_decision(
    columns: int, blocks: int, rows: int, profile: TargetProfile, *, weight_bytes: int
) -> Decision:
    """The register tile for an output of `rows` x `columns` and `blocks` channel blocks.

    Among the tiles that divide the output evenly and fit the registers, the one with the most
    multiply-adds per load that still leaves every core some tiles. `weight_bytes`, of one channel
    block, tells whether the weights stay in the L1 cache from one tile to the next.
    """
    limit = accumulators(profile)
    best, best_score = Decision(1, 1), -1.0
    for block_tile in divisors(blocks, 8):
        in_l1 = weight_bytes * block_tile <= profile.cpu.l1d_kib * 512
        for column_tile in divisors(columns, limit):
            # A single block can be multiplied straight from memory (x86) or by lane (ARM).
            used = column_tile * block_tile + (block_tile if block_tile > 1 else 0)
            if used > limit + 2:
                continue
            sums = column_tile * block_tile
            # Two multiply-adds per cycle of some 4 cycles each: fewer sums wait for one another.
            filled = min(1.0, sums / 12)
            loads = column_tile + block_tile * (1.0 if in_l1 else 2.0)
            tasks = rows * (columns // column_tile) * (blocks // block_tile)
            balance = min(1.0, tasks / (4.0 * profile.cpu.cores))
            score = filled * balance * sums / (sums + loads)
            if score > best_score:
                best, best_score = Decision(column_tile, block_tile), score
    return best


def schedule_direct(sch: Any, conv: Any, profile: TargetProfile) -> None:
    """Applies the direct template to the kernel that holds the block `conv`."""
    out = tiles.gather_epilogue(sch, conv)
    loops = sch.get_loops(out)
    n, o, y, x, b = loops[:5]
    shape = [tiles.extent(sch, loop) for loop in loops]
    flat = len(sch.get(conv).iter_vars) - tiles.reduction_rank(sch, conv) == 4
    if flat:
        x = sch.fuse(y, x)
        rows, columns = 1, shape[2] * shape[3]
    else:
        rows, columns = shape[2], shape[3]
    reads = tiles.reduction_size(sch, conv) * lanes(profile) * 4
    decision = default_decision(columns, shape[1], rows, profile, weight_bytes=reads)
    oo, oi = sch.split(o, [None, decision.blocks])
    xo, xi = sch.split(x, [None, decision.columns])
    outer = [n, oo, xo] if flat else [n, oo, y, xo]
    sch.reorder(*outer, xi, oi, b)
    task = sch.fuse(*outer)
    sch.set_scope(conv, 0, "local")
    sch.compute_at(conv, task, preserve_unit_loops=True)
    inner = sch.get_loops(conv)[1:]
    spatial = len(inner) - tiles.reduction_rank(sch, conv)
    tile, reduction = inner[:spatial], inner[spatial:]
    channel, column, lane = tile[1], tile[-2], tile[-1]
    rest = [loop for loop in tile if loop not in (channel, column, lane)]
    sch.reorder(*reduction, *rest, column, channel, lane)
    for loop in (*rest, column, channel):
        sch.unroll(loop)
    sch.vectorize(lane)
    if tiles.work(sch, conv, outer=task) >= tiles.PARALLEL_WORK:
        sch.parallel(task)
    init = sch.decompose_reduction(conv, reduction[0])
    tiles.unroll_and_vectorize(sch, init, after=1)
    for loop in (xi, oi):
        sch.unroll(loop)
    sch.vectorize(b)


def schedule_depthwise(sch: Any, conv: Any, profile: TargetProfile) -> None:
    """Applies the depthwise template: a row of sums in registers, the window unrolled."""
    out = tiles.gather_epilogue(sch, conv)
    n, c, y, x, b = sch.get_loops(out)
    columns = tiles.extent(sch, x)
    window = tiles.reduction_size(sch, conv)
    limit = accumulators(profile) // 2
    xo, xi = sch.split(x, [None, max(divisors(columns, max(4, limit)))])
    sch.reorder(n, c, y, xo, xi, b)
    task = sch.fuse(n, c, y)
    sch.set_scope(conv, 0, "local")
    sch.compute_at(conv, xo, preserve_unit_loops=True)
    inner = sch.get_loops(conv)[2:]
    tile, reduction = inner[:5], inner[5:]
    sch.reorder(*reduction, *tile)
    for loop in tile[:-1]:
        sch.unroll(loop)
    sch.vectorize(tile[-1])
    if tiles.work(sch, conv, outer=task) >= tiles.PARALLEL_WORK:
        sch.parallel(task)
    init = sch.decompose_reduction(conv, reduction[0])
    tiles.unroll_and_vectorize(sch, init, after=2)
    if window <= 25:
        for loop in reduction:
            sch.unroll(loop)
    sch.unroll(xi)
    sch.vectorize(b)
