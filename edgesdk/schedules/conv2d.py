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
    """A convolution. Shapes are [N, C, H, W]; `padding` is top, left, bottom, right; `block` counts
    the channels of a block."""

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    block: int

    @property
    def kind(self) -> str:
        """"direct", "grouped" (whole blocks in each group), "depthwise", or "split groups"."""
        channels, out_channels = self.in_shape[1], self.out_shape[1]
        if self.groups == 1:
            return "direct"
        if self.groups == channels == out_channels:
            return "depthwise"
        per_group = (channels // self.groups, out_channels // self.groups)
        return "grouped" if all(c % self.block == 0 for c in per_group) else "split groups"

    @property
    def pointwise(self) -> bool:
        """Touches each pixel once, so all rows can be treated as one long row."""
        return self.window == (1, 1) and self.stride == (1, 1) and not any(self.padding)


    def as_row(self, weight: np.ndarray) -> tuple[Conv2d, np.ndarray]:
        """A convolution over a picture of width 1 as one over a picture of height 1.

        The bytes of all tensors are the same; the register tile runs along rows.
        """
        import dataclasses

        top, left, bottom, right = self.padding
        if self.in_shape[3] != 1 or self.out_shape[3] != 1 or left or right:
            return self, weight

        def turned(pair: tuple[int, ...]) -> tuple[int, ...]:
            return (pair[1], pair[0])

        config = dataclasses.replace(
            self,
            in_shape=(*self.in_shape[:2], *turned(self.in_shape[2:])),
            out_shape=(*self.out_shape[:2], *turned(self.out_shape[2:])),
            window=turned(self.window),
            stride=turned(self.stride),
            padding=(0, top, 0, bottom),
            dilation=turned(self.dilation),
        )
        return config, weight.transpose(0, 1, 3, 2)


def round_groups(weight: np.ndarray, config: Conv2d) -> tuple[Conv2d, np.ndarray]:
    """Widens each group with zeros to whole blocks; returns the wider convolution and weights."""
    import dataclasses

    import numpy as np

    block, groups = config.block, config.groups
    outs, ins = weight.shape[0] // groups, weight.shape[1]
    wide_outs, wide_ins = (-(-c // block) * block for c in (outs, ins))
    wider = np.zeros((groups, wide_outs, wide_ins, *weight.shape[2:]), weight.dtype)
    wider[:, :outs, :ins] = weight.reshape(groups, outs, *weight.shape[1:])
    rounded = dataclasses.replace(
        config,
        in_shape=(config.in_shape[0], groups * wide_ins, *config.in_shape[2:]),
        out_shape=(config.out_shape[0], groups * wide_outs, *config.out_shape[2:]),
    )
    return rounded, wider.reshape(groups * wide_outs, wide_ins, *weight.shape[2:])


def pack_weight(weight: np.ndarray, config: Conv2d, *, plain_input: bool) -> np.ndarray:
    """[O, I/groups, KH, KW] in the order in which the kernel reads it, zeros beyond O.

    plain input:    [O/b, I, KH, KW, b]
    blocked input:  [O/b, I/b, KH, KW, b, b], or [O/b, KH, KW, I, b] if b does not divide I
    depthwise:      [O/b, KH, KW, b]
    """
    import numpy as np

    block = config.block
    out_channels, in_channels, kh, kw = weight.shape
    padded = np.zeros((-(-out_channels // block) * block, in_channels, kh, kw), weight.dtype)
    padded[:out_channels] = weight
    blocks = padded.reshape(-1, block, in_channels, kh, kw)
    if config.kind == "depthwise":
        packed = blocks[:, :, 0].transpose(0, 2, 3, 1)
    elif plain_input:
        packed = blocks.transpose(0, 2, 3, 4, 1)
    elif in_channels % block:
        packed = blocks.transpose(0, 3, 4, 2, 1)
    else:
        split = blocks.reshape(-1, block, in_channels // block, block, kh, kw)
        packed = split.transpose(0, 2, 4, 5, 3, 1)
    return np.ascontiguousarray(packed)


def pad_spatial(x: Any, config: Conv2d, *, plain_input: bool) -> Any:
    """Zeros around the picture: [N, C, H, W] stays plain, [N, C/b, H*W, b] becomes
    [N, C/b, H', W', b]."""
    from tvm import te, tirx

    top, left, bottom, right = config.padding
    h, w = config.in_shape[2:]
    n, c = int(x.shape[0]), int(x.shape[1])

    def element(i: Any, k: Any, y: Any, z: Any, *lane: Any) -> Any:
        inside = tirx.all(y >= top, y < h + top, z >= left, z < w + left)
        pixel = ((y - top) * w + z - left,) if lane else (y - top, z - left)
        return tirx.if_then_else(inside, x(i, k, *pixel, *lane), tirx.const(0, x.dtype))

    shape = (n, c, h + top + bottom, w + left + right, *(() if plain_input else (config.block,)))
    return te.compute(shape, element, name="pad", tag="injective,pad")


def conv2d_nchwc(data: Any, weight: Any, config: Conv2d, *, plain_input: bool) -> Any:
    """The convolution of a tensor that is padded already; returns [N, O/b, OH*OW, b].

    `data` is [N, I/b, H*W, b], or [N, I/b, H, W, b] from `pad_spatial`, or with `plain_input`
    [N, I, H, W] and weights of `pack_weight(plain_input=True)`.
    """
    from tvm import te

    block = config.block
    (sy, sx), (dy, dx) = config.stride, config.dilation
    in_w = config.in_shape[3]
    n = config.in_shape[0]
    _, _, out_h, out_w = config.out_shape
    blocks = int(weight.shape[0])
    per_group = config.in_shape[1] // config.groups
    ry = te.reduce_axis((0, config.window[0]), "ky")
    rx = te.reduce_axis((0, config.window[1]), "kx")

    def pixel(i: Any, channel_block: Any, y: Any, x: Any, lane: Any) -> Any:
        row, column = y * sy + ry * dy, x * sx + rx * dx
        if len(data.shape) == 5:
            return data[i, channel_block, row, column, lane]
        return data[i, channel_block, row * in_w + column, lane]

    if config.kind == "depthwise":

        def element(i: Any, o: Any, y: Any, x: Any, b: Any) -> Any:
            return te.sum(pixel(i, o, y, x, b) * weight[o, ry, rx, b], axis=[ry, rx])

    elif plain_input:
        rc = te.reduce_axis((0, per_group), "ci")

        def element(i: Any, o: Any, y: Any, x: Any, b: Any) -> Any:
            scalar = data[i, rc, y * sy + ry * dy, x * sx + rx * dx]
            return te.sum(scalar * weight[o, rc, ry, rx, b], axis=[rc, ry, rx])

    elif len(weight.shape) == 5:
        rk = te.reduce_axis((0, per_group), "ci")

        def element(i: Any, o: Any, y: Any, x: Any, b: Any) -> Any:
            scalar = pixel(i, rk // block, y, x, rk % block)
            return te.sum(scalar * weight[o, ry, rx, rk, b], axis=[ry, rx, rk])

    else:
        out_blocks, in_blocks = blocks // config.groups, per_group // block
        rc = te.reduce_axis((0, in_blocks), "co")
        ri = te.reduce_axis((0, block), "ci")

        def element(i: Any, o: Any, y: Any, x: Any, b: Any) -> Any:
            first = 0 if config.groups == 1 else o // out_blocks * in_blocks
            scalar = pixel(i, first + rc, y, x, ri)
            return te.sum(scalar * weight[o, rc, ry, rx, ri, b], axis=[rc, ry, rx, ri])

    # The template splits the long row at `row`, so that p // out_w and p % out_w become loops.
    long_row = config.pointwise and config.kind != "depthwise" and not plain_input
    attrs = {
        "edgesdk.template": DEPTHWISE if config.kind == "depthwise" else DIRECT,
        "edgesdk.row": 0 if long_row else out_w,
    }

    def from_row(i: Any, o: Any, p: Any, b: Any) -> Any:
        return element(i, o, 0, p, b) if long_row else element(i, o, p // out_w, p % out_w, b)

    shape = (n, blocks, out_h * out_w, block)
    return te.compute(shape, from_row, name="conv2d", attrs=attrs)


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
    row = int(sch.get(conv).annotations["edgesdk.row"])
    out = tiles.gather_epilogue(sch, conv)
    n, o, p, b = sch.get_loops(out)
    blocks, pixels = tiles.extent(sch, o), tiles.extent(sch, p)
    columns = row or pixels
    decision = default_decision(
        columns,
        blocks,
        pixels // columns,
        profile,
        weight_bytes=tiles.reduction_size(sch, conv) * lanes(profile) * 4,
    )
    oo, oi = sch.split(o, [None, decision.blocks])
    y, xo, xi = sch.split(p, [None, columns // decision.columns, decision.columns])
    sch.reorder(n, oo, y, xo, xi, oi, b)
    task = sch.fuse(n, oo, y, xo)
    sch.set_scope(conv, 0, "local")
    sch.compute_at(conv, task, preserve_unit_loops=True)
    inner = sch.get_loops(conv)[1:]
    spatial = len(inner) - tiles.reduction_rank(sch, conv)
    tile, reduction = inner[:spatial], inner[spatial:]
    channel, lane = tile[1], tile[-1]
    pixel_loops = [tile[0], *tile[2:-1]]
    sch.reorder(*reduction, *pixel_loops, channel, lane)
    for loop in (*pixel_loops, channel):
        sch.unroll(loop)
    sch.vectorize(lane)
    if tiles.work(sch, conv) >= tiles.PARALLEL_WORK:
        sch.parallel(task)
    init = sch.decompose_reduction(conv, reduction[0])
    tiles.unroll_and_vectorize(sch, init, after=1)
    for loop in (xi, oi):
        sch.unroll(loop)
    sch.vectorize(b)


def schedule_depthwise(sch: Any, conv: Any, profile: TargetProfile) -> None:
    """Applies the depthwise template: a row of sums in registers, the window unrolled."""
    columns = int(sch.get(conv).annotations["edgesdk.row"])
    out = tiles.gather_epilogue(sch, conv)
    n, c, p, b = sch.get_loops(out)
    window = tiles.reduction_size(sch, conv)
    tile_columns = max(divisors(columns, max(4, accumulators(profile) // 2)))
    y, xo, xi = sch.split(p, [None, columns // tile_columns, tile_columns])
    task = sch.fuse(n, c, y)
    sch.set_scope(conv, 0, "local")
    sch.compute_at(conv, xo, preserve_unit_loops=True)
    inner = sch.get_loops(conv)[2:]
    spatial = len(inner) - tiles.reduction_rank(sch, conv)
    tile, reduction = inner[:spatial], inner[spatial:]
    sch.reorder(*reduction, *tile)
    for loop in tile[:-1]:
        sch.unroll(loop)
    sch.vectorize(tile[-1])
    if tiles.work(sch, conv) >= tiles.PARALLEL_WORK:
        sch.parallel(task)
    init = sch.decompose_reduction(conv, reduction[0])
    tiles.unroll_and_vectorize(sch, init, after=2)
    if window <= 25:
        for loop in reduction:
            sch.unroll(loop)
    sch.unroll(xi)
    sch.vectorize(b)
