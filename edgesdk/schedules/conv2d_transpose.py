"""Transposed convolutions as plain ones, with a channel for each place between two pixels.

With strides SY x SX each pixel lies under SY x SX results. A plain convolution computes these, for
all pixels, as that many channels (`phase_weights`, `plain_convolution`); then they are spread out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgesdk.schedules.conv2d import Conv2d

if TYPE_CHECKING:
    import numpy as np


def phase_weights(weight: np.ndarray, strides: tuple[int, ...], block: int | None) -> np.ndarray:
    """[I, O, KH, KW] of a transposed convolution as the weights of a plain one that computes, for
    each pixel, the SY x SX results that lie over it: [SY*SX*O', I, ceil(KH/SY), ceil(KW/SX)].

    O' is O rounded up to whole blocks; without a `block` the places of a channel lie side by side,
    [O*SY*SX, ...].
    """
    import numpy as np

    channels, out_channels, kh, kw = weight.shape
    sy, sx = strides
    taps_y, taps_x = -(-kh // sy), -(-kw // sx)
    rounded = out_channels if block is None else -(-out_channels // block) * block
    wide = np.zeros((channels, rounded, taps_y * sy, taps_x * sx), weight.dtype)
    wide[:, :out_channels, :kh, :kw] = weight
    # What a pixel adds to the result j strides on is result minus j for the pixel: backwards.
    phases = wide.reshape(channels, rounded, taps_y, sy, taps_x, sx)[:, :, ::-1, :, ::-1]
    order = (1, 3, 5, 0, 2, 4) if block is None else (3, 5, 1, 0, 2, 4)
    return np.ascontiguousarray(phases.transpose(order).reshape(-1, channels, taps_y, taps_x))


def plain_convolution(
    places: np.ndarray,
    in_shape: tuple[int, ...],
    shape: tuple[int, ...],
    *,
    strides: tuple[int, ...],
    start: tuple[int, ...],
    block: int,
) -> Conv2d:
    """The convolution with the weights `places` (`phase_weights`) of a tensor of `in_shape`, for
    results of `shape` (N, O, OH, OW), which begin `start` rows and columns after the first."""
    window = places.shape[2:]
    # Rows and columns of pixels that have results in the output.
    out_hw = tuple(
        max(size, (out - 1 + first) // step + 1)
        for size, out, first, step in zip(in_shape[2:], shape[2:], start, strides, strict=True)
    )
    before = tuple(taps - 1 for taps in window)
    after = tuple(o - i for o, i in zip(out_hw, in_shape[2:], strict=True))
    return Conv2d(
        in_shape=in_shape,
        out_shape=(in_shape[0], places.shape[0], *out_hw),
        window=window,
        stride=(1, 1),
        padding=(*before, *after),
        dilation=(1, 1),
        groups=1,
        block=block,
    )


def spread_blocks(
    x: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    start: tuple[int, ...],
    in_width: int,
) -> Any:
    """[N, SY*SX*O/b, H*in_width, b] of `phase_weights` -> [N, O/b, OH*OW, b] for `shape`
    (N, O, OH, OW), which begins `start` rows and columns after the first results."""
    from tvm import te

    n, _, height, width = shape
    (sy, sx), (top, left), block = strides, start, int(x.shape[-1])
    blocks = int(x.shape[1]) // (sy * sx)

    def element(i: Any, o: Any, p: Any, b: Any) -> Any:
        y, z = p // width + top, p % width + left
        place = y % sy * sx + z % sx
        return x[i, place * blocks + o, y // sy * in_width + z // sx, b]

    return te.compute((n, blocks, height * width, block), element, name="spread", tag="injective")


def spread_lanes(
    x: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    start: tuple[int, ...],
    in_width: int,
) -> Any:
    """[N, O*SY*SX/b, H*in_width, b] -> `shape` (N, O, OH, OW); else like `spread_blocks`."""
    from tvm import te

    (sy, sx), (top, left), block = strides, start, int(x.shape[-1])

    def element(i: Any, o: Any, y: Any, z: Any) -> Any:
        y, z = y + top, z + left
        channel = (o * sy + y % sy) * sx + z % sx
        return x[i, channel // block, y // sy * in_width + z // sx, channel % block]

    return te.compute(shape, element, name="spread", tag="injective")
