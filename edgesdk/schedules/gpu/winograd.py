"""3x3 convolutions on a GPU by Winograd's minimal filtering, where that is fewer cycles.

The method and its definitions are those of `schedules/winograd.py`, the products those of
`gemm.py`: 16 of them side by side, so that even a small picture keeps the GPU busy. Three launches
instead of one; whether they pay is estimated with the products' own formula.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgesdk.profiles import GpuInfo, TargetProfile
from edgesdk.schedules import conv2d, winograd
from edgesdk.schedules.conv2d import Conv2d
from edgesdk.schedules.gpu import gemm
from edgesdk.schedules.gpu.binding import VECTOR, bind_threads, inline_maps
from edgesdk.schedules.template import Knobs, Template

if TYPE_CHECKING:
    import numpy as np

_TILES = 16  # products of a tile
# What the transforms take: cycles, and the bytes that a multiprocessor moves in one.
_LAUNCHES = 2 * gemm.FITTED.launch
_BYTES = gemm.FITTED.split_bytes


def even(config: Conv2d) -> Conv2d:
    """`config` with as many more rows and columns of results as whole tiles want."""
    n, channels, height, width = config.out_shape
    top, left, bottom, right = config.padding
    return replace(
        config,
        out_shape=(n, channels, height + height % 2, width + width % 2),
        padding=(top, left, bottom + height % 2, right + width % 2),
    )


def pays(config: Conv2d, gpu: GpuInfo) -> bool:
    """Whether the method serves `config` and is estimated to be faster than the product."""
    if (
        config.kind != "direct"
        or (config.window, config.stride, config.dilation) != ((3, 3), (1, 1), (1, 1))
        or config.in_shape[1] % VECTOR
    ):
        return False
    n, channels, height, width = config.out_shape
    inputs, blocks = config.in_shape[1], -(-channels // VECTOR)
    pixels = gemm.rounded_pixels(height * width)
    tiles = n * -(-height // 2) * -(-width // 2)
    if tiles < gemm.MIN_PIXELS or gpu.shared_kib == 0:
        return False
    direct = gemm.Problem(n, blocks, pixels, inputs // VECTOR * 9)
    products = gemm.Problem(_TILES, blocks, gemm.rounded_pixels(tiles), inputs // VECTOR)
    moved = 4 * _TILES * tiles * (inputs + channels)
    transforms = _LAUNCHES + 2 * moved / (_BYTES * gpu.multiprocessors)
    return _cycles(products, gpu) + transforms < _cycles(direct, gpu)


def _cycles(problem: gemm.Problem, gpu: GpuInfo) -> float:
    return gemm.cost_of(gemm.default_of(problem, gpu), problem, gpu)


def transform_input(data: Any, config: Conv2d) -> Any:
    """[N, C/4, H*W, 4] -> [16, C/4, T, 4]: see `schedules.winograd`. T, the number of tiles, is
    rounded up for the product."""
    from tvm import te, tirx

    padded = conv2d.pad_spatial(data, config, plain_input=False)
    tiles = winograd.transform_input(padded, config)
    elements, blocks, count, lanes = (int(d) for d in tiles.shape)
    rounded = gemm.rounded_pixels(count)
    if rounded == count:
        return tiles
    zero = tirx.const(0, data.dtype)
    return te.compute(
        (elements, blocks, rounded, lanes),
        lambda e, c, t, b: tirx.if_then_else(t < count, tiles[e, c, t, b], zero),
        name="rounded",
    )


def pack_weight(weight: np.ndarray) -> np.ndarray:
    """[O, I, 3, 3] -> G w G^T as [16, I/4, 4, O], O rounded up to 4."""
    import numpy as np

    # [16, O/4, I/4, 4 of I, 4 of O]
    blocks = winograd.pack_weight(weight, VECTOR)
    elements, outs, ins = blocks.shape[:3]
    packed = blocks.transpose(0, 2, 3, 1, 4).reshape(elements, ins, VECTOR, outs * VECTOR)
    return np.ascontiguousarray(packed)


def multiply(tiles: Any, weight: Any) -> Any:
    """[16, I/4, T, 4] times [16, I/4, 4, O] -> [16, O/4, T, 4]."""
    return gemm.product(tiles, weight, batched=True)


def transform_output(products: Any, config: Conv2d, height: int, width: int) -> Any:
    """[16, O/4, T, 4] -> [N, O/4, height * width, 4]; `config` may have one row and one column
    more (`even`)."""
    from tvm import te

    result = winograd.transform_output(products, config)
    n, blocks, _, lanes = (int(d) for d in result.shape)
    wide = config.out_shape[3]
    if (height, width) == config.out_shape[2:]:
        return result
    return te.compute(
        (n, blocks, height * width, lanes),
        lambda i, o, p, b: result[i, o, p // width * wide + p % width, b],
        name="cut",
    )


def _nothing(sch: Any, block: Any, profile: TargetProfile) -> dict[str, Any]:
    """The transforms are bound by memory: there is nothing to choose."""
    return {}


def _schedule_input(sch: Any, block: Any, profile: TargetProfile, knobs: Knobs) -> None:
    """A thread transforms a tile of 4 channels: its 16 results share 16 inputs."""
    inline_maps(sch)
    out = sch.get_child_blocks(sch.get_sblock("root"))[-1]
    e, c, t, b = sch.get_loops(out)
    sch.reorder(c, t, e, b)
    bind_threads(sch, [c, t], threads=64)
    sch.unroll(e)
    sch.vectorize(b)


INPUT = Template(winograd.INPUT, _nothing, _nothing, _schedule_input)
