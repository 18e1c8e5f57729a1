"""TFLite's convolutions, pools, matrix products and resizing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgesdk.frontend.tflite.operators import activated, as_int64, converts
from edgesdk.frontend.tflite.writer import (
    TO_NCHW,
    Operator,
    RefusedOperatorError,
    Tensor,
    real_array,
)


def _auto_pad(op: Operator) -> str:
    return "VALID" if int(op.options.padding) else "SAME_UPPER"


def _bias(op: Operator, index: int) -> list[str]:
    bias = op.get(index)
    if bias is None:
        return []
    return [op.w.weight(bias, (0,)) if bias.rank == 1 else op.w.real(bias)]


def _window(op: Operator, kernel: Sequence[int]) -> dict[str, Any]:
    """The attributes of a convolution over `kernel`.

    ONNX Runtime has no automatic padding together with dilation, so that is written out.
    """
    o = op.options
    strides, dilations = [o.strideH, o.strideW], [o.dilationHFactor, o.dilationWFactor]
    attrs: dict[str, Any] = {"strides": strides, "dilations": dilations, "kernel_shape": kernel}
    if int(o.padding) or dilations == [1, 1] or op[0].open:
        return {**attrs, "auto_pad": _auto_pad(op)}
    before, after = [], []
    for size, k, s, d in zip(op[0].shape[1:3], kernel, strides, dilations, strict=True):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        before.append(total // 2)
        after.append(total - total // 2)
    return {**attrs, "pads": [*before, *after]}


@converts("CONV_2D")
def _conv(op: Operator) -> None:
    x, weight = op[0], op[1]
    _expect_rank(x, 4)
    channels, per_group = x.shape[3], weight.shape[3]
    value = op.w.node(
        "Conv",
        op.w.real(x, nchw=True),
        op.w.weight(weight, TO_NCHW),
        *_bias(op, 2),
        group=channels // per_group,
        **_window(op, weight.shape[1:3]),
    )
    op.w.put(op.out, activated(op, value), nchw=True)


@converts("DEPTHWISE_CONV_2D")
def _depthwise(op: Operator) -> None:
    x, weight = op[0], op[1]  # [1, H, W, outputs], those of one input side by side
    _expect_rank(x, 4)
    value = op.w.node(
        "Conv",
        op.w.real(x, nchw=True),
        op.w.weight(weight, (3, 0, 1, 2)),
        *_bias(op, 2),
        group=x.shape[3],
        **_window(op, weight.shape[1:3]),
    )
    op.w.put(op.out, activated(op, value), nchw=True)


@converts("TRANSPOSE_CONV")
def _transpose_conv(op: Operator) -> None:
    _, height, width, _ = op.ints(0, "output sizes")
    o = op.options
    value = _upward(op, op[2], op[1], _bias(op, 3), (height, width), bool(o.padding), o)
    op.w.put(op.out, activated(op, value), nchw=True)


class _Strides:
    """The options of MediaPipe's custom operator: three C integers, padding and strides."""

    def __init__(self, custom: bytes) -> None:
        if len(custom) < 12:
            raise RefusedOperatorError("its options are not those that MediaPipe writes")
        # TfLiteTransposeConvParams: kTfLitePaddingSame is 1, kTfLitePaddingValid 2.
        padding, self.strideW, self.strideH = np.frombuffer(custom[:12], "<i4").tolist()
        self.valid = padding == 2


@converts("Convolution2DTransposeBias")
def _mediapipe_transpose_conv(op: Operator) -> None:
    options = _Strides(op.custom)
    height, width = op.out.shape[1:3]
    value = _upward(op, op[0], op[1], _bias(op, 2), (height, width), options.valid, options)
    op.w.put(op.out, value, nchw=True)


def _upward(
    op: Operator,
    x: Tensor,
    weight: Tensor,
    bias: list[str],
    size: tuple[int, int],
    valid: bool,
    options: Any,
) -> str:
    """A transposed convolution to `size`; weights are [outputs, H, W, inputs].

    What SAME cuts off is what a convolution from `size` to the size of `x` would have added.
    """
    before, after, extra = [], [], []
    strides = [int(options.strideH), int(options.strideW)]
    for i in range(2):
        kernel, stride = weight.shape[1 + i], strides[i]
        full = (x.shape[1 + i] - 1) * stride + kernel
        cut = 0 if valid else max(full - size[i], 0)
        before.append(cut // 2)
        after.append(cut - cut // 2)
        extra.append(size[i] - full + cut)
    if any(not 0 <= e < s for e, s in zip(extra, strides, strict=True)):
        raise RefusedOperatorError(f"its output size {list(size)} does not follow from its input")
    return op.w.node(
        "ConvTranspose",
        op.w.real(x, nchw=True),
        op.w.weight(weight, (3, 0, 1, 2)),
        *bias,
        strides=strides,
        kernel_shape=list(weight.shape[1:3]),
        pads=[*before, *after],
        output_padding=extra,
    )


@converts("AVERAGE_POOL_2D", "MAX_POOL_2D")
def _pool(op: Operator) -> None:
    o = op.options
    _expect_rank(op[0], 4)
    value = op.w.node(
        "AveragePool" if op.kind == "AVERAGE_POOL_2D" else "MaxPool",
        op.w.real(op[0], nchw=True),
        kernel_shape=[o.filterHeight, o.filterWidth],
        strides=[o.strideH, o.strideW],
        auto_pad=_auto_pad(op),
    )
    op.w.put(op.out, activated(op, value), nchw=True)


def _expect_rank(tensor: Tensor, rank: int) -> None:
    if tensor.rank != rank:
        raise RefusedOperatorError(f"its input has {tensor.rank} dimensions, not {rank}")


@converts("FULLY_CONNECTED")
def _fully_connected(op: Operator) -> None:
    w, x, weight, o = op.w, op[0], op[1], op.options
    if o.weightsFormat:
        raise RefusedOperatorError("its weights are shuffled for one kind of CPU")
    depth = weight.shape[1]
    value = w.real(x)
    if not o.keepNumDims and x.rank != 2:
        value = w.node("Reshape", value, w.integers([-1, depth]))
    if x.rank == 2 or not o.keepNumDims:
        value = w.node("Gemm", value, w.weight(weight, (0, 1)), *_bias(op, 2), transB=1)
    else:
        value = w.node("MatMul", value, w.weight(weight, (1, 0)))
        for bias in _bias(op, 2):
            value = w.node("Add", value, bias)
    w.put(op.out, activated(op, value))


@converts("BATCH_MATMUL")
def _batch_matmul(op: Operator) -> None:
    sides = []
    for tensor, turned in ((op[0], op.options.adjX), (op[1], op.options.adjY)):
        value = op.w.real(tensor)
        if turned:
            axes = list(range(tensor.rank))
            value = op.w.node("Transpose", value, perm=[*axes[:-2], axes[-1], axes[-2]])
        sides.append(value)
    op.w.put(op.out, op.w.node("MatMul", *sides))


@converts("UNIDIRECTIONAL_SEQUENCE_LSTM")
def _lstm(op: Operator) -> None:
    """Gates come in the order i, f, c, o here, and i, o, f, c in ONNX; states begin at zero."""
    w, o = op.w, op.options
    given = [index for index in (9, 10, 11, 16, 17, 20, 21, 22, 23) if op.get(index) is not None]
    if given or op.get(1) is None:
        raise RefusedOperatorError("only the plain cell is supported: no peepholes or projection")
    if o.fusedActivationFunction != 4 or o.cellClip > 0 or op[0].scale is not None:
        raise RefusedOperatorError("only tanh without clipping, in float, is supported")
    parts = [
        np.concatenate([real_array(_constant(op, first + i)) for i in (0, 3, 1, 2)])[None]
        for first in (1, 5, 12)
    ]
    hidden = parts[1].shape[2]
    bias = np.concatenate([parts[2], np.zeros_like(parts[2])], axis=1)
    x = w.real(op[0])
    x = x if o.timeMajor else w.node("Transpose", x, perm=[1, 0, 2])
    weights = [w.constant(part) for part in (parts[0], parts[1], bias)]
    y = w.node("Squeeze", w.node("LSTM", x, *weights, hidden_size=hidden), w.integers([1]))
    w.put(op.out, y if o.timeMajor else w.node("Transpose", y, perm=[1, 0, 2]))


def _constant(op: Operator, index: int) -> Tensor:
    op.array(index, "weights")
    return op[index]


@converts("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR")
def _resize(op: Operator) -> None:
    w, o = op.w, op.options
    attrs = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if o.halfPixelCenters:  # nearest takes floor((i + 0.5) * scale), a half up
        attrs = {
            "coordinate_transformation_mode": "half_pixel",
            "nearest_mode": "round_prefer_ceil",
        }
    if o.alignCorners:
        attrs = {
            "coordinate_transformation_mode": "align_corners",
            "nearest_mode": "round_prefer_ceil",
        }
    x = w.real(op[0], nchw=True)
    # All four sizes: ONNX Runtime 1.32 loses those of two axes beside a Transpose.
    sizes = w.node("Concat", w.node("Shape", x, start=0, end=2), as_int64(op, 1), axis=0)
    mode = "linear" if op.kind == "RESIZE_BILINEAR" else "nearest"
    value = w.node("Resize", x, "", "", sizes, mode=mode, **attrs)
    w.put(op.out, value, nchw=True)
