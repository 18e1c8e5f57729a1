"""Operators of domain com.microsoft that exporters and ONNX Runtime's optimiser write.

Definitions: ONNX Runtime, docs/ContribOperators.md. Only what is defined for inference.
"""

from __future__ import annotations

import math

import numpy as np

from edgesdk.frontend.graph import Value
from edgesdk.frontend.repair import Op, Repaired, refuse, repairs
from edgesdk.frontend.repair_basic import gelu, reduced

_MICROSOFT = "com.microsoft"


@repairs("Gelu", "BiasGelu", "FastGelu", "QuickGelu", domain=_MICROSOFT)
def _gelus(op: Op) -> Repaired:
    b, x = op.b, op[0]
    if op.get(1) is not None:
        x = b("Add", x, op[1])
    if op.kind == "QuickGelu":
        return b("Mul", x, b("Sigmoid", b("Mul", x, float(op.attr("alpha", 1.702)))))
    return gelu(op, x, tanh=op.kind == "FastGelu")


@repairs("FusedMatMul", "TransposeMatMul", domain=_MICROSOFT)
def _fused_matmul(op: Op) -> Repaired:
    b = op.b
    if op.attr("transBatchA", 0) or op.attr("transBatchB", 0):
        raise refuse("transBatchA and transBatchB are not supported")
    left, right = op[0], op[1]
    if op.attr("transA", 0) and left.rank > 1:
        left = _turned(op, left)
    if op.attr("transB", 0) and right.rank > 1:
        right = _turned(op, right)
    product = b("MatMul", left, right)
    alpha = float(op.attr("alpha", 1.0))
    return product if alpha == 1.0 else b("Mul", product, alpha)


def _turned(op: Op, x: Value) -> Value:
    order = list(range(x.rank))
    return op.b.transpose(x, [*order[:-2], order[-1], order[-2]])


def _activated(op: Op, x: Value) -> Value:
    """Applies the attribute `activation` of a fused operator."""
    kind = op.attr("activation", "")
    parameters = list(op.attr("activation_params") or [])
    if not kind:
        return x
    if kind in ("Relu", "Sigmoid", "Tanh"):
        return op.b(kind, x)
    if kind == "LeakyRelu":
        return op.b("LeakyRelu", x, alpha=float(parameters[0] if parameters else 0.01))
    if kind == "Clip":
        bounds = [op.b.constant(np.asarray(p, x.dtype)) for p in parameters]
        return op.b("Clip", x, *bounds)
    if kind == "HardSigmoid":
        return op.apply("HardSigmoid", x, alpha=parameters[0], beta=parameters[1])
    raise refuse(f"the activation {kind!r} is not supported")


@repairs("FusedConv", domain=_MICROSOFT)
def _fused_conv(op: Op) -> Repaired:
    attrs = {k: v for k, v in op.attrs.items() if not k.startswith("activation")}
    inputs = [v for v in op.inputs[:3] if v is not None]
    result = op.apply("Conv", *inputs, **attrs)
    addend = op.get(3)
    return _activated(op, result if addend is None else op.b("Add", result, addend))


@repairs("FusedGemm", domain=_MICROSOFT)
def _fused_gemm(op: Op) -> Repaired:
    attrs = {k: v for k, v in op.attrs.items() if not k.startswith("activation")}
    inputs = [v for v in op.inputs if v is not None]
    return _activated(op, op.apply("Gemm", *inputs, **attrs))


def _normalised(op: Op, x: Value, scale: Value, bias: Value | None, simplified: bool) -> Value:
    """Layer normalisation over the last axis; `simplified` leaves the mean in."""
    b = op.b
    epsilon = float(op.attr("epsilon", 1e-5 if simplified else 1e-12))
    wide = b.cast(x, np.float32) if x.dtype == np.float16 else x
    last = [x.rank - 1]
    centred = wide if simplified else b("Sub", wide, reduced(op, "ReduceMean", wide, last, True))
    variance = reduced(op, "ReduceMean", b("Mul", centred, centred), last, True)
    normal = b("Div", centred, b("Sqrt", b("Add", variance, epsilon)))
    result = b("Mul", b.cast(normal, x.dtype), scale)
    return result if bias is None else b("Add", result, bias)


@repairs("SkipLayerNormalization", domain=_MICROSOFT)
def _skip_layer_norm(op: Op) -> Repaired:
    b = op.b
    total = b("Add", op[0], op[1])
    bias = op.get(4)
    total = total if bias is None else b("Add", total, bias)
    return _with_sum(op, _normalised(op, total, op[2], op.get(3), False), total)


@repairs("SkipSimplifiedLayerNormalization", domain=_MICROSOFT)
def _skip_simplified(op: Op) -> Repaired:
    b = op.b
    total = b("Add", op[0], op[1])
    bias = op.get(3)
    total = total if bias is None else b("Add", total, bias)
    return _with_sum(op, _normalised(op, total, op[2], None, True), total)


def _with_sum(op: Op, result: Value, total: Value) -> Repaired:
    """Outputs: result, mean, inverse deviation, sum."""
    if op.wants(1) or op.wants(2):
        raise refuse("its mean and deviation are outputs of training only")
    return [result, None, None, total][: len(op.outputs)]


@repairs("SimplifiedLayerNormalization")
@repairs("SimplifiedLayerNormalization", domain=_MICROSOFT)
def _simplified(op: Op) -> Repaired:
    return op.apply(
        "RMSNormalization", op[0], op[1], axis=op.attr("axis", -1),
        epsilon=op.attr("epsilon", 1e-5),
    )  # fmt: skip


@repairs("BiasAdd", domain=_MICROSOFT)
def _bias_add(op: Op) -> Repaired:
    return op.b("Add", op.b("Add", op[0], op[1]), op[2])


@repairs("Attention", domain=_MICROSOFT)
def _attention(op: Op) -> Repaired:
    """Self-attention of BERT: input [batch, time, width], weights [width, 3 * width], bias."""
    b, x = op.b, op[0]
    for index, what in ((4, "past"), (5, "attention bias"), (6, "past length")):
        if op.get(index) is not None:
            raise refuse(f"its input {what} is not supported")
    if op.attr("do_rotary", 0) or len(op.outputs) > 1:
        raise refuse("rotary embedding and the present state are not supported")
    if op.attr("qkv_hidden_sizes"):
        raise refuse("qkv_hidden_sizes is not supported")
    heads = int(op.attrs["num_heads"])
    batch, time, _ = x.shape
    projected = b("MatMul", x, op[1])
    bias = op.get(2)
    projected = projected if bias is None else b("Add", projected, bias)
    width = projected.shape[-1] // 3
    parts = [b.slice(projected, 2, i * width, (i + 1) * width) for i in range(3)]
    result = _heads(op, parts, heads, _mask(op, batch, time))
    return b.reshape(result, (batch, time, width))


def _heads(op: Op, parts: list[Value], heads: int, mask: Value | None) -> Value:
    """Attention of queries, keys and values [batch, time, width]; the result is [b, t, h, d]."""
    b = op.b

    def split(value: Value, order: tuple[int, ...]) -> Value:
        batch, time, width = value.shape
        return b.transpose(b.reshape(value, (batch, time, heads, width // heads)), order)

    query, value = split(parts[0], (0, 2, 1, 3)), split(parts[2], (0, 2, 1, 3))
    key = split(parts[1], (0, 2, 3, 1))
    scale = float(op.attr("scale", 0.0)) or 1.0 / math.sqrt(query.shape[-1])
    scores = b("Mul", b("MatMul", query, key), scale)
    if mask is not None:
        scores = b("Add", scores, mask)
    if op.attr("unidirectional", 0):
        time, keys = scores.shape[-2:]
        hidden = np.triu(np.full((time, keys), op.attr("mask_filter_value", -10000.0)), 1)
        scores = b("Add", scores, b.constant(hidden.astype(scores.dtype)))
    weights = b("Softmax", scores, axis=3)
    return b.transpose(b("MatMul", weights, value), (0, 2, 1, 3))


def _mask(op: Op, batch: int, time: int) -> Value | None:
    """The mask of 0 and 1 [batch, time] as numbers to add to the scores."""
    b, given = op.b, op.get(3)
    if given is None:
        return None
    if given.shape != (batch, time):
        raise refuse(f"a mask of the shape {list(given.shape)} is not supported")
    fill = b.constant(np.asarray(op.attr("mask_filter_value", -10000.0), op[0].dtype))
    zero = b.constant(np.zeros((), op[0].dtype))
    seen = b("Greater", given, b.constant(np.zeros((), given.dtype)))
    return b.reshape(b("Where", seen, zero, fill), (batch, 1, 1, time))


@repairs("MultiHeadAttention", domain=_MICROSOFT)
def _multi_head(op: Op) -> Repaired:
    """Inputs: query, key, value [batch, time, width], bias [3 * width], key mask, score bias."""
    b = op.b
    if op.get(1) is None or op.get(2) is None or op[1].rank != 3 or op[0].rank != 3:
        raise refuse("packed or head-first inputs are not supported")
    if any(op.get(i) is not None for i in range(6, 10)) or len(op.outputs) > 1:
        raise refuse("past and present states are not supported")
    parts = [op[0], op[1], op[2]]
    bias = op.get(3)
    if bias is not None:
        width, value_width = op[0].shape[-1], op[2].shape[-1]
        ends = [0, width, 2 * width, 2 * width + value_width]
        parts = [b("Add", p, b.slice(bias, 0, ends[i], ends[i + 1])) for i, p in enumerate(parts)]
    heads = int(op.attrs["num_heads"])
    mask = op.get(5)
    if op.get(4) is not None:
        shifted = Op(op.kind, op.name, [op[0], None, None, op[4]], op.attrs, [], op.opset, b)
        extra = _mask(shifted, op[0].shape[0], op[1].shape[1])
        mask = extra if mask is None or extra is None else b("Add", mask, extra)
    result = _heads(op, parts, heads, mask)
    return b.reshape(result, (*op[0].shape[:2], op[2].shape[-1]))
