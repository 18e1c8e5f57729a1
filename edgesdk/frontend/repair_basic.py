"""Repairs of elementwise operators, reductions and normalisations."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np

from edgesdk.frontend.graph import Value
from edgesdk.frontend.repair import Op, Repaired, positive_axis, refuse, repairs

# CumProd is a product for each element; longer axes are refused.
CUMPROD_LIMIT = 256


@repairs("Dropout")
def _dropout(op: Op) -> Repaired:
    training = op.get(2)
    if training is not None and (training.const is None or bool(training.const.any())):
        ratio = op.get(1)
        if ratio is None or ratio.const is None or float(ratio.const) != 0.0:
            raise refuse("it drops at random; export the model in inference mode")
    mask_type = np.bool_ if op.opset >= 10 else op[0].dtype
    # Before operator set 12, ONNX Runtime says of an element that stays that it is not masked.
    stays = np.asarray(op.opset >= 12, mask_type)
    mask = op.b.constant(np.broadcast_to(stays, op[0].shape))
    return [op[0], mask] if op.wants(1) else op[0]


@repairs("Constant")
def _constant(op: Op) -> Repaired:
    for key, value in op.attrs.items():
        if key == "value":
            return op.b.constant(value)
        if key in ("value_float", "value_floats"):
            return op.b.constant(np.asarray(value, np.float32))
        if key in ("value_int", "value_ints"):
            return op.b.constant(np.asarray(value, np.int64))
        if key == "sparse_value":
            from edgesdk.frontend.load import dense_array

            return op.b.constant(dense_array(value))
    raise refuse("strings are not supported")


@repairs("Cast")
def _cast(op: Op) -> Repaired:
    from onnx import helper

    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(op.attrs["to"]))
    except KeyError:
        raise refuse(f"its type {op.attrs.get('to')} is unknown") from None
    if dtype.kind in "OUS":
        raise refuse("strings are not supported")
    return op.b.cast(op[0], dtype)


@repairs("CastLike")
def _cast_like(op: Op) -> Repaired:
    return op.b.cast(op[0], op[1].dtype)


@repairs("Max", "Min")
def _extremes(op: Op) -> Repaired:
    return reduce(lambda x, y: op.b(op.kind, x, y), [op[i] for i in range(len(op.inputs))])


@repairs("Sum", "Mean")
def _sum(op: Op) -> Repaired:
    total = reduce(lambda x, y: op.b("Add", x, y), [op[i] for i in range(len(op.inputs))])
    if op.kind == "Sum" or len(op.inputs) == 1:
        return total
    return op.b("Div", total, float(len(op.inputs)))


@repairs("Pow")
def _pow(op: Op) -> Repaired:
    base, exponent = op[0], op[1]
    if exponent.const is not None and exponent.size == 1 and base.const is None:
        value = float(exponent.const.reshape(-1)[0])
        shape = np.broadcast_shapes(base.shape, exponent.shape)
        if value in (1.0, 2.0, 3.0):
            square = base if value == 1.0 else op.b("Mul", base, base)
            result = op.b("Mul", square, base) if value == 3.0 else square
            return op.b.reshape(result, shape)
        if value == 0.5 and base.is_float:
            return op.b.reshape(op.b("Sqrt", base), shape)
    if base.is_float:
        return op.b("Pow", base, op.b.cast(exponent, base.dtype))
    # ONNX Runtime computes integer powers in double precision.
    wide = op.b("Pow", op.b.cast(base, np.float64), op.b.cast(exponent, np.float64))
    return op.b.cast(wide, base.dtype)


@repairs("Mod")
def _mod(op: Op) -> Repaired:
    b, x, y = op.b, op[0], op[1]
    if not x.is_float or op.attr("fmod", 0):
        return b("Mod", x, y, fmod=int(bool(op.attr("fmod", 0))))
    rest = b("Mod", x, y, fmod=1)  # has the sign of x; the result wants that of y
    other = b("Xor", b("Less", rest, 0.0), b("Less", y, 0.0))
    shifted = b("And", other, b("Not", b("Equal", rest, 0.0)))
    return b("Where", shifted, b("Add", rest, y), rest)


@repairs("BitShift")
def _bit_shift(op: Op) -> Repaired:
    if op[0].dtype.kind != "u":
        raise refuse("shifts of signed integers are not supported")
    return op.b("BitShift", op[0], op[1], direction=op.attrs["direction"])


@repairs("IsInf")
def _is_inf(op: Op) -> Repaired:
    positive, negative = op.attr("detect_positive", 1), op.attr("detect_negative", 1)
    x = op[0]
    if positive and negative:
        return op.b("IsInf", x)
    if not positive and not negative:
        return op.b.constant(np.zeros(x.shape, np.bool_))
    limit = math.inf if positive else -math.inf
    return op.b("Equal", x, op.b.constant(np.asarray(limit, x.dtype)))


@repairs("Clip")
def _clip(op: Op) -> Repaired:
    x = op[0]
    if op.opset < 11:
        low, high = op.attr("min"), op.attr("max")
        bounds = [
            op.b.constant(np.asarray(v, x.dtype)) if v is not None else None for v in (low, high)
        ]
    else:
        bounds = [op.get(1), op.get(2)]
    if bounds[0] is None and bounds[1] is None:
        return x
    scalars = [None if v is None else op.b.reshape(v, ()) for v in bounds]
    return op.b("Clip", x, *scalars)


@repairs("HardSigmoid")
def _hard_sigmoid(op: Op) -> Repaired:
    return hard_sigmoid(op, op[0], op.attr("alpha", 0.2), op.attr("beta", 0.5))


def hard_sigmoid(op: Op, x: Value, alpha: float, beta: float) -> Value:
    line = op.b("Add", op.b("Mul", x, float(alpha)), float(beta))
    return _between(op, line, 0.0, 1.0)


def _between(op: Op, x: Value, low: float, high: float) -> Value:
    bounds = [op.b.constant(np.asarray(v, x.dtype)) for v in (low, high)]
    return op.b("Clip", x, *bounds)


@repairs("HardSwish")
def _hard_swish(op: Op) -> Repaired:
    return op.b("Mul", op[0], hard_sigmoid(op, op[0], 1 / 6, 0.5))


@repairs("LeakyRelu")
def _leaky_relu(op: Op) -> Repaired:
    return op.b("LeakyRelu", op[0], alpha=float(op.attr("alpha", 0.01)))


@repairs("PRelu")
def _prelu(op: Op) -> Repaired:
    slope = op[1]
    if slope.rank > op[0].rank:
        slope = op.b.reshape(slope, slope.shape[slope.rank - op[0].rank :])
    return op.b("Where", op.b("Less", op[0], 0.0), op.b("Mul", op[0], slope), op[0])


@repairs("Elu", "Selu", "Celu", "ThresholdedRelu", "Shrink")
def _kinked(op: Op) -> Repaired:
    b, x = op.b, op[0]
    if op.kind == "ThresholdedRelu":
        keep = b("Greater", x, float(op.attr("alpha", 1.0)))
        return b("Where", keep, x, _zero(op, x))
    if op.kind == "Shrink":
        bias, limit = op.attr("bias", 0.0), op.attr("lambd", 0.5)
        low, high = b.constant(np.asarray(-limit, x.dtype)), b.constant(np.asarray(limit, x.dtype))
        inner = b("Where", b("Greater", x, high), b("Sub", x, bias), _zero(op, x))
        return b("Where", b("Less", x, low), b("Add", x, bias), inner)
    alpha = float(op.attr("alpha", 1.67326319217681884765625 if op.kind == "Selu" else 1.0))
    gamma = float(op.attr("gamma", 1.05070102214813232421875)) if op.kind == "Selu" else 1.0
    scaled = b("Div", x, alpha) if op.kind == "Celu" and alpha != 1.0 else x
    curve = b("Mul", b("Sub", b("Exp", scaled), 1.0), alpha * gamma)
    line = b("Mul", x, gamma) if gamma != 1.0 else x
    return b("Where", b("Less", x, 0.0), curve, line)


def _zero(op: Op, like: Value) -> Value:
    return op.b.constant(np.zeros((), like.dtype))


@repairs("Softplus")
def _softplus(op: Op) -> Repaired:
    b, x = op.b, op[0]
    decay = b("Log", b("Add", b("Exp", b("Neg", b("Abs", x))), 1.0))
    return b("Add", b("Relu", x), decay)


@repairs("Softsign")
def _softsign(op: Op) -> Repaired:
    return op.b("Div", op[0], op.b("Add", op.b("Abs", op[0]), 1.0))


@repairs("Mish")
def _mish(op: Op) -> Repaired:
    return op.b("Mul", op[0], op.b("Tanh", _as_value(_softplus(op))))


def _as_value(result: Repaired) -> Value:
    assert isinstance(result, Value)
    return result


@repairs("Swish")
def _swish(op: Op) -> Repaired:
    alpha = float(op.attr("alpha", 1.0))
    scaled = op[0] if alpha == 1.0 else op.b("Mul", op[0], alpha)
    return op.b("Mul", op[0], op.b("Sigmoid", scaled))


@repairs("Gelu")
def _gelu(op: Op) -> Repaired:
    return gelu(op, op[0], op.attr("approximate", "none") == "tanh")


def gelu(op: Op, x: Value, tanh: bool) -> Value:
    """0.5 x (1 + erf(x / sqrt 2)), or its tanh approximation (Hendrycks and Gimpel, 2016)."""
    b = op.b
    if tanh:
        cubic = b("Mul", b("Mul", b("Mul", x, x), x), 0.044715)
        inner = b("Tanh", b("Mul", b("Add", x, cubic), math.sqrt(2 / math.pi)))
    else:
        inner = b("Erf", b("Mul", x, math.sqrt(0.5)))
    return b("Mul", b("Mul", x, 0.5), b("Add", inner, 1.0))


@repairs("Softmax", "LogSoftmax", "Hardmax")
def _softmax(op: Op) -> Repaired:
    b, x = op.b, op[0]
    axis = op.attr("axis", 1 if op.opset < 13 else -1)
    if op.opset < 13:  # the axes from `axis` on are one
        axis = axis + x.rank if axis < 0 else axis
        rows = math.prod(x.shape[:axis])
        flat = b.reshape(x, (rows, math.prod(x.shape[axis:])))
        return b.reshape(_softmax_over(op, flat, 1), x.shape)
    return _softmax_over(op, x, positive_axis(axis, x.rank))


def _softmax_over(op: Op, x: Value, axis: int) -> Value:
    if op.kind != "Hardmax":
        return op.b(op.kind, x, axis=axis)
    best = op.b("ArgMax", x, axis=axis, keepdims=1)
    shape = [1] * x.rank
    shape[axis] = x.shape[axis]
    positions = op.b.constant(np.arange(x.shape[axis], dtype=np.int64).reshape(shape))
    return op.b.cast(op.b("Equal", best, positions), x.dtype)


_REDUCTION_WORDS = (
    "ReduceMax ReduceMin ReduceSum ReduceMean ReduceProd ReduceL1 ReduceL2 ReduceLogSum"
    " ReduceLogSumExp ReduceSumSquare"
)
_REDUCTIONS = _REDUCTION_WORDS.split()


@repairs(*_REDUCTIONS)
def _reduce(op: Op) -> Repaired:
    x = op[0]
    given = op.attr("axes")
    if given is None and op.get(1) is not None:
        given = op.int_list(1, "axes")
    if not given:
        given = [] if op.attr("noop_with_empty_axes", 0) else range(x.rank)
    axes = sorted(positive_axis(int(a), x.rank) for a in given)
    if x.dtype == np.bool_:  # false and true are 0 and 1
        bytes_ = op.b.cast(x, np.uint8)
        return op.b.cast(reduced(op, op.kind, bytes_, axes, bool(op.attr("keepdims", 1))), np.bool_)
    return reduced(op, op.kind, x, axes, bool(op.attr("keepdims", 1)))


def reduced(op: Op, kind: str, x: Value, axes: list[int], keepdims: bool) -> Value:
    """Reduces `x` over `axes` (counted from the front) as ONNX's operator `kind` does."""
    b = op.b
    if kind in ("ReduceL1", "ReduceL2", "ReduceSumSquare"):
        x = b("Abs", x) if kind == "ReduceL1" else b("Mul", x, x)
    if kind == "ReduceLogSumExp" and axes and all(x.shape[a] for a in axes):
        top = _reduce_one(op, "ReduceMax", x, axes, True)
        # An infinite maximum would give inf - inf.
        finite = b("Where", b("IsInf", top), _zero(op, top), top)
        total = _reduce_one(op, "ReduceSum", b("Exp", b("Sub", x, finite)), axes, True)
        result = b("Add", b("Log", total), finite)
        return result if keepdims else b.reshape(result, _without(x.shape, axes))
    if kind == "ReduceLogSumExp":
        x = b("Exp", x)
    core = kind if kind in ("ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd") else "ReduceSum"
    result = _reduce_one(op, core, x, axes, keepdims) if axes else x
    if kind == "ReduceL2":
        return b("Sqrt", result)
    return b("Log", result) if kind in ("ReduceLogSum", "ReduceLogSumExp") else result


def _reduce_one(op: Op, core: str, x: Value, axes: list[int], keepdims: bool) -> Value:
    if all(x.shape[a] == 1 for a in axes):
        return x if keepdims else op.b.reshape(x, _without(x.shape, axes))
    return op.b(core, x, op.b.ints(axes), keepdims=int(keepdims))


def _without(shape: tuple[int, ...], axes: list[int]) -> tuple[int, ...]:
    return tuple(d for i, d in enumerate(shape) if i not in axes)


@repairs("ArgMax", "ArgMin")
def _arg_extreme(op: Op) -> Repaired:
    b, x = op.b, op[0]
    axis = positive_axis(op.attr("axis", 0), x.rank)
    keepdims = op.attr("keepdims", 1)
    if not op.attr("select_last_index", 0):
        return b(op.kind, x, axis=axis, keepdims=keepdims)
    length = x.shape[axis]
    backwards = b.take(x, range(length - 1, -1, -1), axis)
    first = b(op.kind, backwards, axis=axis, keepdims=keepdims)
    return b("Sub", b.constant(np.asarray(length - 1, np.int64)), first)


@repairs("CumSum")
def _cumsum(op: Op) -> Repaired:
    b, x = op.b, op[0]
    axis = positive_axis(op.int_list(1, "axis")[0], x.rank)
    length = x.shape[axis]
    back = range(length - 1, -1, -1)
    if op.attr("reverse", 0):
        x = b.take(x, back, axis)
    result, step = x, 1
    while step < length:  # Hillis and Steele: each round doubles the span that is summed
        early = b.slice(result, axis, 0, step)
        shifted = b.slice(result, axis, 0, length - step)
        summed = b("Add", b.slice(result, axis, step, length), shifted)
        result, step = b.concat([early, summed], axis), 2 * step
    if op.attr("exclusive", 0):
        edge = list(x.shape)
        edge[axis] = 1
        zeros = b.constant(np.zeros(edge, x.dtype))
        result = b.concat([zeros, b.slice(result, axis, 0, length - 1)], axis)
    return b.take(result, back, axis) if op.attr("reverse", 0) else result


@repairs("CumProd")
def _cumprod(op: Op) -> Repaired:
    b, x = op.b, op[0]
    axis = positive_axis(op.int_list(1, "axis")[0], x.rank)
    length = x.shape[axis]
    if length > CUMPROD_LIMIT:
        raise refuse(f"its axis of {length} elements is longer than {CUMPROD_LIMIT}")
    steps = [b.slice(x, axis, i, i + 1) for i in range(length)]
    steps = steps[::-1] if op.attr("reverse", 0) else steps
    products = [b.constant(np.ones(steps[0].shape, x.dtype))]
    for step in steps:
        products.append(b("Mul", products[-1], step))
    kept = products[:-1] if op.attr("exclusive", 0) else products[1:]
    return b.concat(kept[::-1] if op.attr("reverse", 0) else kept, axis)
