"""Convolutions of 8-bit integers on channel blocks, with 32-bit sums: exact on every CPU.

The data stay in the blocks of the other templates, [N, C/b, H*W, b], so nothing is moved between a
convolution of integers and its neighbours. What is summed are the numbers as they are stored; the
zero point of the data is taken off afterwards, as one number for each output channel, and padding
is filled with the zero point. Rescaling, rounding and saturation follow as element-wise operators,
which are applied when a tile is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import conv2d, dot
from edgesdk.schedules.blocks import block_array
from edgesdk.schedules.conv2d import Conv2d
from edgesdk.schedules.dot import DotProduct
from edgesdk.schedules.template import Knobs, Space, Template

if TYPE_CHECKING:
    import numpy as np

DIRECT_INT8 = "conv2d_direct_int8"
DEPTHWISE_SHIFT = 128


def pack_weight(weight: np.ndarray, config: Conv2d, depth: int, in_block: int) -> np.ndarray:
    """[O, I/groups, KH, KW] -> [O/b, I/d, KH, KW, d/depth, b, depth] for data in blocks of d =
    `in_block` channels; zeros beyond O and I."""
    import numpy as np

    block = config.block
    out_channels, in_channels, kh, kw = weight.shape
    wide = (-(-out_channels // block) * block, -(-in_channels // in_block) * in_block)
    padded = np.zeros((*wide, kh, kw), weight.dtype)
    padded[:out_channels, :in_channels] = weight
    split = padded.reshape(-1, block, wide[1] // in_block, in_block // depth, depth, kh, kw)
    return np.ascontiguousarray(split.transpose(0, 2, 5, 6, 3, 1, 4))


def corrections(weight: np.ndarray, zero: int, shift: int, block: int) -> np.ndarray:
    """[O, ...] -> [1, O/b, 1, b]: what makes sums of (x + shift) * w those of (x - zero) * w."""
    import numpy as np

    total = weight.reshape(weight.shape[0], -1).sum(1, dtype=np.int64) * -(zero + shift)
    return block_array(total.astype(np.int32).reshape(1, -1, 1, 1), block)


def conv2d_int8(data: Any, weight: Any, config: Conv2d, instruction: DotProduct) -> Any:
    """Sums over data that are padded already; int32, [N, O/b, OH*OW, b].

    `data` is [N, I/d, H*W, d], or [N, I/d, H, W, d] from `conv2d.pad_spatial`.
    """
    from tvm import te

    depth = instruction.depth
    block, in_block = config.block, int(data.shape[-1])
    out_blocks = int(weight.shape[0]) // config.groups
    in_blocks = int(weight.shape[1])
    (sy, sx), (dy, dx) = config.stride, config.dilation
    in_w, (out_h, out_w) = config.in_shape[3], config.out_shape[2:]
    ro = te.reduce_axis((0, in_blocks), "co")
    ry = te.reduce_axis((0, config.window[0]), "ky")
    rx = te.reduce_axis((0, config.window[1]), "kx")
    rq = te.reduce_axis((0, in_block // depth), "cq")
    rk = te.reduce_axis((0, depth), "ck")

    def element(i: Any, o: Any, y: Any, x: Any, b: Any) -> Any:
        first = 0 if config.groups == 1 else o // out_blocks * in_blocks
        row, column, lane = y * sy + ry * dy, x * sx + rx * dx, rq * depth + rk
        if len(data.shape) == 5:
            value = data[i, first + ro, row, column, lane]
        else:
            value = data[i, first + ro, row * in_w + column, lane]
        product = dot.widened(value, instruction) * weight[o, ro, ry, rx, rq, b, rk].astype("int32")
        return te.sum(product, axis=[ro, ry, rx, rq, rk])

    long_row = config.pointwise
    attrs = {
        "edgesdk.template": DIRECT_INT8,
        "edgesdk.row": 0 if long_row else out_w,
        "edgesdk.dot": instruction.name,
    }

    def from_row(i: Any, o: Any, p: Any, b: Any) -> Any:
        return element(i, o, 0, p, b) if long_row else element(i, o, p // out_w, p % out_w, b)

    shape = (config.in_shape[0], int(weight.shape[0]), out_h * out_w, block)
    return te.compute(shape, from_row, name="conv2d_int8", attrs=attrs)


def depthwise_int8(data: Any, weight: Any, config: Conv2d, zero: int) -> Any:
    """The same for one filter per channel: no channels to sum, so lanes are multiplied as they are.

    `data` is [N, C/b, H*W, b] and is padded with `zero` inside of the kernel; `weight` is that of
    `conv2d.pack_weight`. Signed numbers are
    moved up by `DEPTHWISE_SHIFT`: LLVM multiplies 8-bit numbers without a sign in fewer steps.
    """
    from tvm import te, tirx

    (sy, sx), (dy, dx) = config.stride, config.dilation
    in_w, (out_h, out_w) = config.in_shape[3], config.out_shape[2:]
    ry = te.reduce_axis((0, config.window[0]), "ky")
    rx = te.reduce_axis((0, config.window[1]), "kx")
    padded = any(config.padding)
    if padded:
        data = conv2d.pad_spatial(data, config, plain_input=False, value=zero)

    def element(i: Any, o: Any, p: Any, b: Any) -> Any:
        row, column = p // out_w * sy + ry * dy, p % out_w * sx + rx * dx
        pixel = (row, column) if padded else (row * in_w + column,)
        value = data[(i, o, *pixel, b)]
        if data.dtype == "int8":
            value = value.astype("uint8") ^ tirx.const(DEPTHWISE_SHIFT, "uint8")
        value = value.astype("int32")
        return te.sum(value * weight[o, ry, rx, b].astype("int32"), axis=[ry, rx])

    shape = (config.in_shape[0], int(weight.shape[0]), out_h * out_w, config.block)
    attrs = {"edgesdk.template": conv2d.DEPTHWISE, "edgesdk.row": out_w}
    return te.compute(shape, element, name="conv2d_int8", attrs=attrs)


def _space(sch: Any, conv: Any, profile: TargetProfile) -> Space:
    return conv2d.direct_space(sch, conv, profile, steps=_steps(sch, conv))


def _default(sch: Any, conv: Any, profile: TargetProfile) -> Knobs:
    # Unlike a float's, a broadcast number needs a register of its own here.
    return conv2d.direct_default(sch, conv, profile, scratch=2)


def _schedule(sch: Any, conv: Any, profile: TargetProfile, knobs: Knobs) -> None:
    name = str(sch.get(conv).annotations["edgesdk.dot"])
    dot.register(name)
    conv2d.schedule_direct(sch, conv, profile, knobs, intrinsic=name)


def _steps(sch: Any, conv: Any) -> int:
    """The number of dot products along one block of input channels."""
    return int(sch.get(conv).iter_vars[-2].dom.extent)


TEMPLATES = (Template(DIRECT_INT8, _space, _default, _schedule),)
