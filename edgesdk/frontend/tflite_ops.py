"""TFLite's operators in ONNX's words: one small function for each kind.

The meaning of each is that of TFLite's own kernels (tensorflow/lite/kernels in its sources).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgesdk.frontend.graph import element_type
from edgesdk.frontend.tflite import (
    TO_NCHW,
    TO_NHWC,
    Operator,
    RefusedOperatorError,
    Tensor,
    real_array,
)

Conversion = Callable[[Operator], None]
CONVERSIONS: dict[str, Conversion] = {}
# An end beyond every axis.
_LAST = np.iinfo(np.int64).max


def convert_operator(op: Operator) -> None:
    """Writes ONNX nodes for `op`, or one that stands for its refusal."""
    conversion = CONVERSIONS.get(op.kind)
    try:
        if conversion is None:
            raise RefusedOperatorError(_why_unknown(op))
        conversion(op)
    except RefusedOperatorError as error:
        op.w.refuse(op, str(error))


def _why_unknown(op: Operator) -> str:
    if op.kind.startswith("Flex"):
        return "an operator of TensorFlow itself; convert the model without SELECT_TF_OPS"
    if op.custom or not op.kind.isupper():
        return f"the custom operator {op.kind} is not known"
    return f"operator {op.kind} is not supported"


def converts(*kinds: str) -> Callable[[Conversion], Conversion]:
    """Registers a conversion for TFLite's operators `kinds`."""

    def register(function: Conversion) -> Conversion:
        for kind in kinds:
            CONVERSIONS[kind] = function
        return function

    return register


# Convolutions and pools.

_ACTIVATIONS: dict[int, tuple[str, tuple[float, ...]]] = {
    1: ("Relu", ()),
    2: ("Clip", (-1.0, 1.0)),
    3: ("Clip", (0.0, 6.0)),
    4: ("Tanh", ()),
}


def _activated(op: Operator, value: str) -> str:
    """`value` after the activation that is fused into `op`."""
    number = int(op.options.fusedActivationFunction) if op.options is not None else 0
    if not number:
        return value
    if number not in _ACTIVATIONS:
        raise RefusedOperatorError(f"its fused activation {number} is not supported")
    kind, bounds = _ACTIVATIONS[number]
    return op.w.node(kind, value, *(op.w.constant(np.float32(b)) for b in bounds))


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
    op.w.put(op.out, _activated(op, value), nchw=True)


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
    op.w.put(op.out, _activated(op, value), nchw=True)


@converts("TRANSPOSE_CONV")
def _transpose_conv(op: Operator) -> None:
    _, height, width, _ = op.ints(0, "output sizes")
    o = op.options
    value = _upward(op, op[2], op[1], _bias(op, 3), (height, width), bool(o.padding), o)
    op.w.put(op.out, _activated(op, value), nchw=True)


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
    op.w.put(op.out, _activated(op, value), nchw=True)


def _expect_rank(tensor: Tensor, rank: int) -> None:
    if tensor.rank != rank:
        raise RefusedOperatorError(f"its input has {tensor.rank} dimensions, not {rank}")


# Matrix products.


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
    w.put(op.out, _activated(op, value))


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


# Element by element.


def _elementwise(kind: str, **attrs: Any) -> Conversion:
    """Operator `kind` of ONNX on all inputs, in whichever order they are."""

    def convert(op: Operator) -> None:
        nchw = op.w.nchw(*op.inputs)
        values = [op.w.real(t, nchw=nchw) for t in op.inputs if t is not None]
        value = op.w.node(kind, *values, **attrs)
        fused = getattr(op.options, "fusedActivationFunction", 0)
        op.w.put(op.out, _activated(op, value) if fused else value, nchw=nchw)

    return convert


for _kind, _name in (
    ("ADD", "Add"), ("ADD_N", "Sum"), ("SUB", "Sub"), ("MUL", "Mul"), ("DIV", "Div"),
    ("MAXIMUM", "Max"), ("MINIMUM", "Min"), ("POW", "Pow"), ("PRELU", "PRelu"), ("EQUAL", "Equal"),
    ("LESS", "Less"), ("LESS_EQUAL", "LessOrEqual"), ("GREATER", "Greater"),
    ("GREATER_EQUAL", "GreaterOrEqual"), ("LOGICAL_AND", "And"), ("LOGICAL_OR", "Or"),
    ("LOGICAL_NOT", "Not"), ("ABS", "Abs"), ("NEG", "Neg"), ("SQRT", "Sqrt"), ("EXP", "Exp"),
    ("LOG", "Log"), ("SIN", "Sin"), ("COS", "Cos"), ("FLOOR", "Floor"), ("CEIL", "Ceil"),
    ("ROUND", "Round"), ("SIGN", "Sign"), ("RELU", "Relu"), ("ELU", "Elu"), ("TANH", "Tanh"),
    ("LOGISTIC", "Sigmoid"), ("HARD_SWISH", "HardSwish"), ("QUANTIZE", "Identity"),
):  # fmt: skip
    CONVERSIONS[_kind] = _elementwise(_name)


@converts("LEAKY_RELU")
def _leaky_relu(op: Operator) -> None:
    _elementwise("LeakyRelu", alpha=float(op.options.alpha))(op)


@converts("GELU")
def _gelu(op: Operator) -> None:
    _elementwise("Gelu", approximate="tanh" if op.options.approximate else "none")(op)


def _expression(write: Callable[..., str]) -> Conversion:
    """`write(op, *values)` on all inputs, in whichever order they are."""

    def convert(op: Operator) -> None:
        nchw = op.w.nchw(*op.inputs)
        values = [op.w.real(t, nchw=nchw) for t in op.inputs if t is not None]
        op.w.put(op.out, write(op, *values), nchw=nchw)

    return convert


def _clip(low: float, high: float) -> Conversion:
    def write(op: Operator, x: str) -> str:
        return op.w.node("Clip", x, *(op.w.constant(np.float32(b)) for b in (low, high)))

    return _expression(write)


CONVERSIONS["RELU6"] = _clip(0.0, 6.0)
CONVERSIONS["RELU_N1_TO_1"] = _clip(-1.0, 1.0)
CONVERSIONS["RELU_0_TO_1"] = _clip(0.0, 1.0)


@converts("RSQRT")
@_expression
def _rsqrt(op: Operator, x: str) -> str:
    return op.w.node("Reciprocal", op.w.node("Sqrt", x))


@converts("SQUARE")
@_expression
def _square(op: Operator, x: str) -> str:
    return op.w.node("Mul", x, x)


@converts("SQUARED_DIFFERENCE")
@_expression
def _squared_difference(op: Operator, a: str, b: str) -> str:
    difference = op.w.node("Sub", a, b)
    return op.w.node("Mul", difference, difference)


@converts("NOT_EQUAL")
@_expression
def _not_equal(op: Operator, a: str, b: str) -> str:
    return op.w.node("Not", op.w.node("Equal", a, b))


@converts("FLOOR_DIV")
@_expression
def _floor_div(op: Operator, a: str, b: str) -> str:
    if op.out.dtype.kind == "f":
        return op.w.node("Floor", op.w.node("Div", a, b))
    return op.w.node("Div", op.w.node("Sub", a, op.w.node("Mod", a, b)), b)


@converts("FLOOR_MOD")
@_expression
def _floor_mod(op: Operator, a: str, b: str) -> str:
    if op.out.dtype.kind != "f":
        return op.w.node("Mod", a, b)
    whole = op.w.node("Floor", op.w.node("Div", a, b))
    return op.w.node("Sub", a, op.w.node("Mul", whole, b))


@converts("CAST")
@_expression
def _cast(op: Operator, x: str) -> str:
    if op.out.dtype.kind == "O":
        raise RefusedOperatorError("its result has a type that is not supported")
    return op.w.node("Cast", x, to=element_type(op.out.dtype))


@converts("SELECT", "SELECT_V2")
def _select(op: Operator) -> None:
    w, condition = op.w, op[0]
    nchw = w.nchw(*op.inputs)
    values = [w.real(t, nchw=nchw) for t in (condition, op[1], op[2])]
    if op.kind == "SELECT" and condition.rank == 1 and op[1].rank > 1:  # one for each row
        values[0] = w.real(condition)
        values[0] = w.node("Reshape", values[0], w.integers([-1, *[1] * (op[1].rank - 1)]))
    w.put(op.out, w.node("Where", *values), nchw=nchw)


@converts("DENSIFY")
def _densify(op: Operator) -> None:
    op.array(0, "sparse weights")
    op.out.const = op[0].const  # written out when it was read
    op.out.scale, op.out.zero, op.out.axis = op[0].scale, op[0].zero, op[0].axis


@converts("DEQUANTIZE")
def _dequantize(op: Operator) -> None:
    """Weights stored as float16, or as integers that nothing else reads."""
    if op[0].const is None:
        _elementwise("Identity")(op)
        return
    op.out.const = real_array(op[0]).astype(np.float32)


@converts("FAKE_QUANT")
def _fake_quant(op: Operator) -> None:
    raise RefusedOperatorError("it is for training; convert the model for inference")


# Along axes.


def _axis_in_nchw(axis: int) -> int:
    return TO_NCHW.index(axis)


def _positive(axis: int, rank: int) -> int:
    if not -rank <= axis < max(rank, 1):
        raise RefusedOperatorError(f"its axis {axis} is outside {rank} dimensions")
    return axis + rank if axis < 0 else axis


@converts("SOFTMAX", "LOG_SOFTMAX")
def _softmax(op: Operator) -> None:
    w, x = op.w, op[0]
    nchw = w.nchw(x)
    value = w.real(x, nchw=nchw)
    beta = float(op.options.beta) if op.kind == "SOFTMAX" else 1.0
    if beta != 1.0:
        value = w.node("Mul", value, w.constant(np.float32(beta)))
    kind = "Softmax" if op.kind == "SOFTMAX" else "LogSoftmax"
    w.put(op.out, w.node(kind, value, axis=1 if nchw else -1), nchw=nchw)


@converts("L2_NORMALIZATION")
def _l2_normalization(op: Operator) -> None:
    w, x = op.w, op[0]
    nchw = w.nchw(x)
    value = w.real(x, nchw=nchw)
    norm = w.node("ReduceL2", value, w.integers([1 if nchw else -1]), keepdims=1)
    norm = w.node("Max", norm, w.constant(np.float32(1e-6)))
    w.put(op.out, _activated(op, w.node("Div", value, norm)), nchw=nchw)


@converts("LOCAL_RESPONSE_NORMALIZATION")
def _local_response(op: Operator) -> None:
    o = op.options
    size = 2 * int(o.radius) + 1
    value = op.w.node(
        "LRN",
        op.w.real(op[0], nchw=True),
        size=size,
        alpha=float(o.alpha) * size,
        beta=float(o.beta),
        bias=float(o.bias),
    )
    op.w.put(op.out, value, nchw=True)


_REDUCTIONS = {
    "MEAN": "ReduceMean", "SUM": "ReduceSum", "REDUCE_MAX": "ReduceMax",
    "REDUCE_MIN": "ReduceMin", "REDUCE_PROD": "ReduceProd", "REDUCE_ANY": "ReduceMax",
    "REDUCE_ALL": "ReduceMin",
}  # fmt: skip


@converts(*_REDUCTIONS)
def _reduce(op: Operator) -> None:
    w, x = op.w, op[0]
    axes = sorted({_positive(a, x.rank) for a in op.ints(1, "axes")})
    keep = bool(op.options.keepDims)
    nchw = w.nchw(x) and (keep or _same_order_without(axes))
    value = w.real(x, nchw=nchw)
    moved = [_axis_in_nchw(a) for a in axes] if nchw else axes
    logical = op.kind in ("REDUCE_ANY", "REDUCE_ALL")
    if logical:
        value = w.node("Cast", value, to=element_type(np.dtype(np.uint8)))
    if axes:
        value = w.node(_REDUCTIONS[op.kind], value, w.integers(moved), keepdims=int(keep))
    if logical:
        value = w.node("Cast", value, to=element_type(np.dtype(bool)))
    w.put(op.out, value, nchw=nchw and keep)


def _same_order_without(axes: list[int]) -> bool:
    """Whether both orders are the same once `axes` (of the file) are gone."""
    return [a for a in TO_NCHW if a not in axes] == [a for a in range(4) if a not in axes]


@converts("ARG_MAX", "ARG_MIN")
def _arg(op: Operator) -> None:
    w, x = op.w, op[0]
    axis = _positive(op.ints(1, "axis")[0], x.rank)
    nchw = w.nchw(x) and _same_order_without([axis])
    kind = "ArgMax" if op.kind == "ARG_MAX" else "ArgMin"
    moved = _axis_in_nchw(axis) if nchw else axis
    value = w.node(kind, w.real(x, nchw=nchw), axis=moved, keepdims=0)
    w.put(op.out, w.node("Cast", value, to=element_type(op.out.dtype)))


@converts("CUMSUM")
def _cumsum(op: Operator) -> None:
    axis = op.w.constant(np.int64(op.ints(1, "axis")[0]))
    o = op.options
    value = op.w.node(
        "CumSum", op.w.real(op[0]), axis, exclusive=int(o.exclusive), reverse=int(o.reverse)
    )
    op.w.put(op.out, value)


@converts("TOPK_V2")
def _topk(op: Operator) -> None:
    w = op.w
    k = w.integers([op.ints(1, "k")[0]])
    values, indices = w.many("TopK", [w.real(op[0]), k], 2)
    w.put(op.out, values)
    w.put(op.outputs[1], w.node("Cast", indices, to=element_type(op.outputs[1].dtype)))


# Shapes.


def _wide(op: Operator, index: int) -> str:
    """Input `index`, integers, as int64."""
    tensor = op[index]
    if tensor.const is not None:
        return op.w.constant(tensor.const.astype(np.int64))
    return op.w.node("Cast", op.w.real(tensor), to=element_type(np.dtype(np.int64)))


@converts("RESHAPE")
def _reshape(op: Operator) -> None:
    w = op.w
    if op.get(1) is not None:
        shape = _wide(op, 1)
    else:
        shape = w.integers([int(d) for d in op.options.newShape])
    w.put(op.out, w.node("Reshape", w.real(op[0]), shape))


@converts("SQUEEZE")
def _squeeze(op: Operator) -> None:
    dims = op.options.squeezeDims if op.options is not None else None
    axes = [] if dims is None else [_positive(int(d), op[0].rank) for d in dims]
    axes = axes or [i for i, d in enumerate(op[0].shape) if d == 1]
    op.w.put(op.out, op.w.node("Squeeze", op.w.real(op[0]), op.w.integers(axes)))


@converts("EXPAND_DIMS")
def _expand_dims(op: Operator) -> None:
    axis = op.w.integers([_positive(op.ints(1, "axis")[0], op[0].rank + 1)])
    op.w.put(op.out, op.w.node("Unsqueeze", op.w.real(op[0]), axis))


@converts("TRANSPOSE")
def _transpose(op: Operator) -> None:
    w, x = op.w, op[0]
    perm = op.ints(1, "permutation")
    nchw = w.nchw(x)
    if nchw:
        perm = [_axis_in_nchw(p) for p in perm]
    value = w.real(x, nchw=nchw)
    if perm != list(range(len(perm))):
        value = w.node("Transpose", value, perm=perm)
    w.put(op.out, value)


@converts("CONCATENATION")
def _concatenation(op: Operator) -> None:
    w = op.w
    nchw = w.nchw(*op.inputs)
    axis = _positive(int(op.options.axis), op.out.rank)
    values = [w.real(t, nchw=nchw) for t in op.inputs if t is not None]
    value = w.node("Concat", *values, axis=_axis_in_nchw(axis) if nchw else axis)
    w.put(op.out, _activated(op, value), nchw=nchw)


@converts("SPLIT", "SPLIT_V")
def _split(op: Operator) -> None:
    w = op.w
    x, axis_at = (op[1], 0) if op.kind == "SPLIT" else (op[0], 2)
    axis = _positive(op.ints(axis_at, "axis")[0], x.rank)
    nchw = w.nchw(x)
    inputs = [w.real(x, nchw=nchw)]
    attrs: dict[str, Any] = {"axis": _axis_in_nchw(axis) if nchw else axis}
    if op.kind == "SPLIT_V":
        sizes = op.ints(1, "sizes")
        rest = x.shape[axis] - sum(s for s in sizes if s >= 0)
        inputs.append(w.integers([rest if s < 0 else s for s in sizes]))
    else:
        attrs["num_outputs"] = len(op.outputs)
    for out, value in zip(
        op.outputs, w.many("Split", inputs, len(op.outputs), **attrs), strict=True
    ):
        w.put(out, value, nchw=nchw)


@converts("PACK")
def _pack(op: Operator) -> None:
    w = op.w
    axis = _positive(int(op.options.axis), op[0].rank + 1)
    values = [
        w.node("Unsqueeze", w.real(t), w.integers([axis])) for t in op.inputs if t is not None
    ]
    w.put(op.out, w.node("Concat", *values, axis=axis))


@converts("UNPACK")
def _unpack(op: Operator) -> None:
    w, count = op.w, len(op.outputs)
    axis = _positive(int(op.options.axis), op[0].rank)
    parts = w.many("Split", [w.real(op[0])], count, axis=axis, num_outputs=count)
    for out, part in zip(op.outputs, parts, strict=True):
        w.put(out, w.node("Squeeze", part, w.integers([axis])))


@converts("SLICE")
def _slice(op: Operator) -> None:
    begin, size = op.ints(1, "begin"), op.ints(2, "size")
    stop = [_LAST if s < 0 else b + s for b, s in zip(begin, size, strict=True)]
    nchw = op.w.nchw(op[0])
    order = TO_NCHW if nchw else range(len(begin))
    bounds = [op.w.integers([items[i] for i in order]) for items in (begin, stop)]
    op.w.put(op.out, op.w.node("Slice", op.w.real(op[0], nchw=nchw), *bounds), nchw=nchw)


@converts("STRIDED_SLICE")
def _strided_slice(op: Operator) -> None:
    """NumPy's slicing: each mask has a bit for each entry of begin, end and strides."""
    w, x, o = op.w, op[0], op.options
    begin, end, strides = (op.ints(i, n) for i, n in ((1, "begin"), (2, "end"), (3, "strides")))
    starts, stops, steps, axes = [], [], [], []
    gone, added = [], []  # axes of the input, and of the result
    axis = place = 0
    for i in range(len(begin)):
        bit = 1 << i
        if o.ellipsisMask & bit:
            entries = len(begin) - i - 1
            entries -= sum(bool(o.newAxisMask & (1 << j)) for j in range(i + 1, len(begin)))
            place += x.rank - entries - axis
            axis = x.rank - entries
            continue
        if o.newAxisMask & bit:
            added.append(place)
            place += 1
            continue
        single = bool(o.shrinkAxisMask & bit)
        forward = strides[i] > 0
        start = begin[i] if not o.beginMask & bit else (0 if forward else _LAST)
        stop = end[i] if not o.endMask & bit else (_LAST if forward else -_LAST)
        if o.offset and not o.endMask & bit:
            stop += begin[i]
        if single:
            start = begin[i]
            stop = start + 1 if start != -1 else _LAST
            gone.append(axis)
        else:
            place += 1
        starts.append(start)
        stops.append(stop)
        steps.append(1 if single else strides[i])
        axes.append(axis)
        axis += 1
    value = w.real(x)
    if axes:
        value = w.node("Slice", value, *map(w.integers, (starts, stops, axes, steps)))
    if gone:
        value = w.node("Squeeze", value, w.integers(gone))
    if added:
        value = w.node("Unsqueeze", value, w.integers(added))
    w.put(op.out, value)


@converts("GATHER")
def _gather(op: Operator) -> None:
    if op.options.batchDims:
        raise RefusedOperatorError("its batch dimensions are not supported")
    axis = _positive(int(op.options.axis), op[0].rank)
    op.w.put(op.out, op.w.node("Gather", op.w.real(op[0]), _wide(op, 1), axis=axis))


@converts("EMBEDDING_LOOKUP")
def _embedding_lookup(op: Operator) -> None:
    op.w.put(op.out, op.w.node("Gather", op.w.real(op[1]), _wide(op, 0), axis=0))


@converts("GATHER_ND")
def _gather_nd(op: Operator) -> None:
    op.w.put(op.out, op.w.node("GatherND", op.w.real(op[0]), _wide(op, 1)))


@converts("TILE")
def _tile(op: Operator) -> None:
    op.w.put(op.out, op.w.node("Tile", op.w.real(op[0]), _wide(op, 1)))


@converts("BROADCAST_TO")
def _broadcast_to(op: Operator) -> None:
    op.w.put(op.out, op.w.node("Expand", op.w.real(op[0]), _wide(op, 1)))


@converts("FILL")
def _fill(op: Operator) -> None:
    op.w.put(op.out, op.w.node("Expand", op.w.real(op[1]), _wide(op, 0)))


@converts("SHAPE")
def _shape(op: Operator) -> None:
    value = op.w.node("Shape", op.w.real(op[0]))
    op.w.put(op.out, op.w.node("Cast", value, to=element_type(op.out.dtype)))


@converts("RANGE")
def _range(op: Operator) -> None:
    op.w.put(op.out, op.w.node("Range", *(op.w.real(op[i]) for i in range(3))))


@converts("REVERSE_V2")
def _reverse(op: Operator) -> None:
    w = op.w
    axes = op.ints(1, "axes")
    n = len(axes)
    bounds = [w.integers(items) for items in ([-1] * n, [-_LAST] * n, axes, [-1] * n)]
    w.put(op.out, w.node("Slice", w.real(op[0]), *bounds))


@converts("ONE_HOT")
def _one_hot(op: Operator) -> None:
    w = op.w
    depth = w.integers([op.ints(1, "depth")[0]])
    one = w.integers([1])
    off_on = [w.node("Reshape", w.real(op[i]), one) for i in (3, 2)]
    values = w.node("Concat", *off_on, axis=0)
    value = w.node("OneHot", _wide(op, 0), depth, values, axis=int(op.options.axis))
    w.put(op.out, value)


@converts("PAD", "PADV2")
def _pad(op: Operator) -> None:
    w, x = op.w, op[0]
    nchw = w.nchw(x)
    pads = _paddings(op, nchw=nchw)
    fill = [w.real(op[2])] if op.kind == "PADV2" else []
    w.put(op.out, w.node("Pad", w.real(x, nchw=nchw), w.integers(pads), *fill), nchw=nchw)


@converts("MIRROR_PAD")
def _mirror_pad(op: Operator) -> None:
    w = op.w
    nchw = w.nchw(op[0])
    pads = _paddings(op, nchw=nchw)
    symmetric = bool(op.options.mode)
    if symmetric and max(pads) > 1:
        raise RefusedOperatorError("symmetric padding by more than one element is not supported")
    mode = "edge" if symmetric else "reflect"  # by one element, the edge is what is mirrored
    value = w.node("Pad", w.real(op[0], nchw=nchw), w.integers(pads), mode=mode)
    w.put(op.out, value, nchw=nchw)


def _paddings(op: Operator, *, nchw: bool) -> list[int]:
    """ONNX's padding: all begins, then all ends."""
    table = op.array(1, "paddings").reshape(-1, 2)
    table = table[list(TO_NCHW)] if nchw else table
    return [int(i) for i in table.T.reshape(-1)]


@converts("SPACE_TO_DEPTH", "DEPTH_TO_SPACE")
def _space_to_depth(op: Operator) -> None:
    kind = "SpaceToDepth" if op.kind == "SPACE_TO_DEPTH" else "DepthToSpace"
    value = op.w.node(kind, op.w.real(op[0], nchw=True), blocksize=int(op.options.blockSize))
    op.w.put(op.out, value, nchw=True)


@converts("SPACE_TO_BATCH_ND")
def _space_to_batch(op: Operator) -> None:
    w, x = op.w, op[0]
    block, pads = op.ints(1, "block sizes"), op.array(2, "paddings").reshape(-1, 2)
    n = len(block)
    rest = x.rank - 1 - n
    begins = [0, *pads[:, 0].tolist(), *[0] * rest]
    ends = [0, *pads[:, 1].tolist(), *[0] * rest]
    value = w.node("Pad", w.real(x), w.integers([*begins, *ends]))
    sizes = [x.shape[1 + i] + int(pads[i].sum()) for i in range(n)]
    split = [v for i in range(n) for v in (sizes[i] // block[i], block[i])]
    value = w.node("Reshape", value, w.integers([x.shape[0], *split, *x.shape[1 + n :]]))
    outer = [2 * i + 2 for i in range(n)]
    inner = [2 * i + 1 for i in range(n)]
    tail = list(range(2 * n + 1, 2 * n + 1 + rest))
    value = w.node("Transpose", value, perm=[*outer, 0, *inner, *tail])
    batch = x.shape[0] * int(np.prod(block))
    shape = [batch, *(sizes[i] // block[i] for i in range(n)), *x.shape[1 + n :]]
    w.put(op.out, w.node("Reshape", value, w.integers(shape)))


@converts("BATCH_TO_SPACE_ND")
def _batch_to_space(op: Operator) -> None:
    w, x = op.w, op[0]
    block, crops = op.ints(1, "block sizes"), op.array(2, "crops").reshape(-1, 2)
    n = len(block)
    rest = x.rank - 1 - n
    batch = x.shape[0] // int(np.prod(block))
    value = w.node("Reshape", w.real(x), w.integers([*block, batch, *x.shape[1:]]))
    mixed = [v for i in range(n) for v in (n + 1 + i, i)]
    tail = list(range(2 * n + 1, 2 * n + 1 + rest))
    value = w.node("Transpose", value, perm=[n, *mixed, *tail])
    sizes = [x.shape[1 + i] * block[i] for i in range(n)]
    value = w.node("Reshape", value, w.integers([batch, *sizes, *x.shape[1 + n :]]))
    starts = crops[:, 0].tolist()
    stops = [sizes[i] - int(crops[i, 1]) for i in range(n)]
    axes = list(range(1, n + 1))
    w.put(op.out, w.node("Slice", value, *map(w.integers, (starts, stops, axes))))


# Resizing.


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
    sizes = w.node("Concat", w.node("Shape", x, start=0, end=2), _wide(op, 1), axis=0)
    mode = "linear" if op.kind == "RESIZE_BILINEAR" else "nearest"
    value = w.node("Resize", x, "", "", sizes, mode=mode, **attrs)
    w.put(op.out, value, nchw=True)


__all__ = ["CONVERSIONS", "TO_NHWC", "convert_operator"]
