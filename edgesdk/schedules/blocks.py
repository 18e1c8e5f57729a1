"""Tensors in channel blocks: to [N, C/b, H*W, b] and back, as arrays and as tensor expressions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def block_array(array: np.ndarray, block: int) -> np.ndarray:
    """[N, C, H, W] -> [N, ceil(C/block), H*W, block]; zeros in the lanes beyond C."""
    import numpy as np

    n, c, h, w = array.shape
    padded = np.zeros((n, -(-c // block) * block, h * w), array.dtype)
    padded[:, :c] = array.reshape(n, c, h * w)
    return np.ascontiguousarray(padded.reshape(n, -1, block, h * w).transpose(0, 1, 3, 2))


def block_tensor(x: Any, block: int, groups: int = 1) -> Any:
    """The same as a tensor expression; with `groups`, each group begins a new block."""
    from tvm import te, tirx

    n, c, h, w = (int(d) for d in x.shape)
    per_group = c // groups
    blocks = -(-per_group // block)

    def element(i: Any, co: Any, p: Any, ci: Any) -> Any:
        channel = co % blocks * block + ci
        value = x[i, co // blocks * per_group + channel, p // w, p % w]
        if per_group % block == 0:
            return value
        return tirx.if_then_else(channel < per_group, value, tirx.const(0, x.dtype))

    shape = (n, groups * blocks, h * w, block)
    return te.compute(shape, element, name="block", tag="injective")


def unblock_tensor(x: Any, shape: tuple[int, ...], groups: int = 1) -> Any:
    """[N, C/b, H*W, b] -> `shape` (N, C, H, W); the inverse of `block_tensor`."""
    from tvm import te

    block = int(x.shape[-1])
    _, c, _, w = shape
    per_group = c // groups
    blocks = -(-per_group // block)
    return te.compute(
        shape,
        lambda i, c, y, z: x[
            i,
            c // per_group * blocks + c % per_group // block,
            y * w + z,
            c % per_group % block,
        ],
        name="unblock",
        tag="injective",
    )


def repeat_pixels(x: Any, in_width: int, times: tuple[int, int]) -> Any:
    """[N, C/b, H*W, b] -> [N, C/b, sy*H*sx*W, b], each pixel `times` = (sy, sx) times."""
    from tvm import te

    n, c, pixels, block = (int(d) for d in x.shape)
    (sy, sx), width = times, in_width * times[1]

    def element(i: Any, o: Any, p: Any, b: Any) -> Any:
        return x[i, o, p // width // sy * in_width + p % width // sx, b]

    return te.compute((n, c, pixels * sy * sx, block), element, name="repeat", tag="injective")


def crop_columns(x: Any, wide: int, width: int) -> Any:
    """[N, C/b, H*wide, b] -> [N, C/b, H*width, b]: the first `width` columns of each row."""
    from tvm import te

    n, c, pixels, block = (int(d) for d in x.shape)
    return te.compute(
        (n, c, pixels // wide * width, block),
        lambda i, o, p, b: x[i, o, p // width * wide + p % width, b],
        name="crop",
        tag="injective",
    )


def every_pixel(x: Any, in_width: int, stride: tuple[int, ...], out_hw: tuple[int, ...]) -> Any:
    """[N, C/b, H*W, b] -> [N, C/b, OH*OW, b]: each pixel that a 1x1 window meets with `stride`."""
    from tvm import te

    n, c, _, block = (int(d) for d in x.shape)
    (sy, sx), (height, width) = stride, out_hw
    return te.compute(
        (n, c, height * width, block),
        lambda i, o, p, b: x[i, o, p // width * sy * in_width + p % width * sx, b],
        name="every_pixel",
        tag="injective",
    )
