"""Depthwise convolutions on a GPU: a thread computes 4 channels of a pixel."""

from __future__ import annotations

from typing import Any

from edgesdk.schedules.conv2d import Conv2d


def conv2d(data: Any, weight: Any, config: Conv2d) -> Any:
    """[N, C/4, H*W, 4] with weights [C/4, KH, KW, 4] -> [N, C/4, OH*OW, 4]."""
    from tvm import te, tirx

    (sy, sx), (dy, dx) = config.stride, config.dilation
    top, left, bottom, right = config.padding
    n, _, h, w = config.in_shape
    _, _, out_h, out_w = config.out_shape
    blocks, block = int(data.shape[1]), int(data.shape[3])
    ry = te.reduce_axis((0, config.window[0]), "ky")
    rx = te.reduce_axis((0, config.window[1]), "kx")

    def element(i: Any, o: Any, p: Any, b: Any) -> Any:
        y, x = p // out_w * sy + ry * dy - top, p % out_w * sx + rx * dx - left
        conditions = []
        if top or bottom:
            conditions += [y >= 0, y < h]
        if left or right:
            conditions += [x >= 0, x < w]
        value = data[i, o, y * w + x, b]
        if conditions:
            value = tirx.if_then_else(tirx.all(*conditions), value, tirx.const(0, data.dtype))
        return te.sum(value * weight[o, ry, rx, b], axis=[ry, rx])

    return te.compute((n, blocks, out_h * out_w, block), element, name="depthwise")
