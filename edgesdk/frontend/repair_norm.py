"""Repairs of normalisations: each written out as means, products and quotients."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np

from edgesdk.frontend.graph import Value
from edgesdk.frontend.repair import Op, Repaired, positive_axis, refuse, repairs
from edgesdk.frontend.repair_basic import reduced


@repairs("BatchNormalization")
def _batch_norm(op: Op) -> Repaired:
    b, x = op.b, op[0]
    if op.attr("training_mode", 0):
        raise refuse("it is in training mode; export the model in inference mode")
    if op.opset < 9 and op.attr("spatial", 1) == 0:
        raise refuse("spatial=0 is not supported")
    wide = np.dtype(np.float32) if x.dtype == np.float16 else x.dtype
    scale, bias, mean, var = (b.cast(op[i], wide) for i in range(1, 5))
    epsilon = float(op.attr("epsilon", 1e-5))
    factor = b("Div", scale, b("Sqrt", b("Add", var, epsilon)))
    shift = b("Sub", bias, b("Mul", mean, factor))
    shape = (1, -1, *[1] * (x.rank - 2)) if x.rank > 1 else (-1,)
    channels = [s if s > 0 else factor.size for s in shape]
    line = b("Mul", b.cast(x, wide), b.reshape(factor, channels))
    return b.cast(b("Add", line, b.reshape(shift, channels)), x.dtype)


@repairs("InstanceNormalization")
def _instance_norm(op: Op) -> Repaired:
    b, x = op.b, op[0]
    normal = standardised(op, x, list(range(2, x.rank)), float(op.attr("epsilon", 1e-5)))
    shape = (x.shape[1], *[1] * (x.rank - 2))
    return b("Add", b("Mul", normal, b.reshape(op[1], shape)), b.reshape(op[2], shape))


def standardised(op: Op, x: Value, axes: list[int], epsilon: float) -> Value:
    """(x - mean) / sqrt(variance + epsilon) over `axes`."""
    b = op.b
    mean = reduced(op, "ReduceMean", x, axes, True)
    centred = b("Sub", x, mean)
    variance = reduced(op, "ReduceMean", b("Mul", centred, centred), axes, True)
    return b("Div", centred, b("Sqrt", b("Add", variance, epsilon)))


@repairs("MeanVarianceNormalization")
def _mvn(op: Op) -> Repaired:
    b, x = op.b, op[0]
    axes = [positive_axis(a, x.rank) for a in op.attr("axes", [0, 2, 3])]
    centred = b("Sub", x, reduced(op, "ReduceMean", x, axes, True))
    variance = reduced(op, "ReduceMean", b("Mul", centred, centred), axes, True)
    return b("Div", centred, b("Add", b("Sqrt", variance), 1e-9))


@repairs("LayerNormalization")
def _layer_norm(op: Op) -> Repaired:
    b, x = op.b, op[0]
    axis = positive_axis(op.attr("axis", -1), x.rank)
    axes = list(range(axis, x.rank))
    epsilon = float(op.attr("epsilon", 1e-5))
    wide = b.cast(x, np.float32) if x.dtype == np.float16 else x
    mean = reduced(op, "ReduceMean", wide, axes, True)
    centred = b("Sub", wide, mean)
    variance = reduced(op, "ReduceMean", b("Mul", centred, centred), axes, True)
    deviation = b("Sqrt", b("Add", variance, epsilon))
    normal = b.cast(b("Div", centred, deviation), x.dtype)
    scaled = b("Mul", normal, op[1])
    bias = op.get(2)
    result = b("Add", scaled, bias) if bias is not None else scaled
    if len(op.outputs) == 1:
        return result
    return [result, mean, b("Reciprocal", deviation)][: len(op.outputs)]


@repairs("RMSNormalization")
def _rms_norm(op: Op) -> Repaired:
    b, x = op.b, op[0]
    axes = list(range(positive_axis(op.attr("axis", -1), x.rank), x.rank))
    wide = b.cast(x, np.float32) if x.dtype == np.float16 else x
    square = reduced(op, "ReduceMean", b("Mul", wide, wide), axes, True)
    root = b("Sqrt", b("Add", square, float(op.attr("epsilon", 1e-5))))
    return b("Mul", b.cast(b("Div", wide, root), x.dtype), op[1])


@repairs("GroupNormalization")
def _group_norm(op: Op) -> Repaired:
    b, x = op.b, op[0]
    groups = int(op.attrs["num_groups"])
    channels = x.shape[1]
    grouped = b.reshape(x, (x.shape[0], groups, math.prod(x.shape[1:]) // groups))
    wide = b.cast(grouped, np.float32) if x.dtype == np.float16 else grouped
    normal = b.cast(standardised(op, wide, [2], float(op.attr("epsilon", 1e-5))), x.dtype)
    scale, bias = op[1], op[2]
    if op.opset < 21:  # one scale and bias for each group, not for each channel
        back = b.reshape(normal, (x.shape[0], groups, channels // groups, *x.shape[2:]))
        shape = (groups, *[1] * (x.rank - 1))
        line = b("Add", b("Mul", back, b.reshape(scale, shape)), b.reshape(bias, shape))
        return b.reshape(line, x.shape)
    shape = (channels, *[1] * (x.rank - 2))
    line = b("Mul", b.reshape(normal, x.shape), b.reshape(scale, shape))
    return b("Add", line, b.reshape(bias, shape))


@repairs("LpNormalization")
def _lp_norm(op: Op) -> Repaired:
    b, x = op.b, op[0]
    axis = positive_axis(op.attr("axis", -1), x.rank)
    kind = "ReduceL1" if op.attr("p", 2) == 1 else "ReduceL2"
    norm = reduced(op, kind, x, [axis], True)
    # ONNX Runtime leaves a vector of zeros as it is.
    safe = b("Where", b("Equal", norm, 0.0), b.constant(np.ones((), x.dtype)), norm)
    return b("Div", x, safe)


@repairs("LRN")
def _lrn(op: Op) -> Repaired:
    b, x = op.b, op[0]
    size, alpha = int(op.attrs["size"]), float(op.attr("alpha", 1e-4))
    before, channels = (size - 1) // 2, x.shape[1]
    pads = [0] * (2 * x.rank)
    pads[1], pads[x.rank + 1] = before, size - 1 - before
    padded = b("Pad", b("Mul", x, x), b.ints(pads), b.constant(np.zeros((), x.dtype)))
    windows = [b.slice(padded, 1, i, i + channels) for i in range(size)]
    total = reduce(lambda p, q: b("Add", p, q), windows)
    base = b("Add", b("Mul", total, alpha / size), float(op.attr("bias", 1.0)))
    beta = b.constant(np.asarray(op.attr("beta", 0.75), x.dtype))
    return b("Div", x, b("Pow", base, beta))
