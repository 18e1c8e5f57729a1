"""Quantised operators, exactly: integers are subtracted, multiplied and summed as int32.

Rounding is half to even and saturating, as ONNX Runtime does it; scales are float32.
"""

from __future__ import annotations

import math

import numpy as np
from onnx import helper

from edgesdk.frontend import integers
from edgesdk.frontend.graph import Stored, Value
from edgesdk.frontend.repair import Op, Repaired, positive_axis, refuse, repairs
from edgesdk.frontend.repair_conv import conv, window

_QUANTISED = ("int8", "uint8", "int16", "uint16")


def _spread(op: Op, parameter: Value, x: Value) -> Value:
    """Shapes a scale or zero point to broadcast against `x`: per tensor, per axis or blocked."""
    b = op.b
    block = int(op.attr("block_size", 0))
    if parameter.size == 1 and not block:
        return b.reshape(parameter, ())
    axis = positive_axis(op.attr("axis", 1), x.rank)
    if block:
        repeated = [i // block for i in range(x.shape[axis])]
        return b.take(parameter, repeated, axis)
    return b.reshape(parameter, (parameter.size, *[1] * (x.rank - 1 - axis)))


@repairs("QuantizeLinear")
@repairs("QuantizeLinear", domain="com.microsoft")
def _quantize(op: Op) -> Repaired:
    x, zero = op[0], op.get(2)
    to = int(op.attr("output_dtype", 0))
    if zero is not None:
        dtype = zero.dtype
    else:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(to)) if to else np.dtype(np.uint8)
    if dtype.name not in _QUANTISED:
        raise refuse(f"quantisation to {dtype.name} is not supported")
    scale = _spread(op, op[1], x)
    spread = None if zero is None else _spread(op, zero, x)
    return quantised(op, x, scale, spread, dtype)


def quantised(op: Op, x: Value, scale: Value | None, zero: Value | None, dtype: np.dtype) -> Value:
    """round(x / scale) + zero, saturated to `dtype`; without a scale it is one."""
    b = op.b
    wide = b.cast(x, np.float32)
    scale = None if scale is None else b.cast(scale, np.float32)
    if scale is not None and _is_plain(scale, zero, dtype):
        zero = zero if zero is not None else b.constant(np.zeros((), dtype))
        return b("QuantizeLinear", wide, scale, zero)
    if scale is not None:
        wide = b("Div", wide, scale)
    if zero is None:
        zero = b.constant(np.zeros((), dtype))
    return integers.quantised(b, wide, b.cast(zero, np.float32), dtype)


def _is_plain(scale: Value, zero: Value | None, dtype: np.dtype) -> bool:
    """Whether numbers of one byte have one scale and zero point that are known: such operators stay
    in the graph for `integers.use_integers`."""
    known = all(v is None or (v.const is not None and v.shape == ()) for v in (scale, zero))
    return known and dtype.name in ("int8", "uint8")


@repairs("DequantizeLinear")
@repairs("DequantizeLinear", domain="com.microsoft")
def _dequantize(op: Op) -> Repaired:
    x, scale, zero = op[0], op[1], op.get(2)
    if x.dtype.name not in (*_QUANTISED, "int32"):
        if all(v is None or v.const is not None for v in op.inputs):
            attrs = dict(op.attrs.items())
            return op.b.many("DequantizeLinear", *op.inputs, outputs=1, **attrs)
        raise refuse(f"dequantisation of {x.dtype.name} is not supported")
    spread = None if zero is None else _spread(op, zero, x)
    return dequantised(op, x, _spread(op, scale, x), spread)


def dequantised(op: Op, x: Value, scale: Value, zero: Value | None) -> Value:
    """(x - zero) * scale, in the scale's type."""
    b = op.b
    if scale.dtype == np.float32 and x.const is None and _is_plain(scale, zero, x.dtype):
        zero = zero if zero is not None else b.constant(np.zeros((), x.dtype))
        return b("DequantizeLinear", x, scale, zero)
    real = b("Mul", b.cast(_centred(op, x, zero), scale.dtype), scale)
    if real.const is not None and real.dtype == np.float32 and x.dtype.name in ("int8", "uint8"):
        real.stored = _stored(x, scale, zero)
    return real


def _stored(x: Value, scale: Value, zero: Value | None) -> Stored | None:
    numbers, factor = x.const, scale.const
    if numbers is None or factor is None or (zero is not None and zero.const is None):
        return None
    wide = numbers.astype(np.int16)
    if zero is not None and zero.const is not None:
        wide = wide - zero.const.astype(np.int16)
    return Stored(wide, factor.reshape((1,) * (x.rank - scale.rank) + scale.shape))


def _centred(op: Op, x: Value, zero: Value | None) -> Value:
    wide = op.b.cast(x, np.int32)
    if zero is None or (zero.const is not None and not zero.const.any()):
        return wide
    return op.b("Sub", wide, op.b.cast(zero, np.int32))


@repairs("DynamicQuantizeLinear")
def _dynamic_quantize(op: Op) -> Repaired:
    b, x = op.b, op[0]
    axes = b.ints(range(x.rank))
    low = b("Min", b("ReduceMin", x, axes, keepdims=0), 0.0)
    high = b("Max", b("ReduceMax", x, axes, keepdims=0), 0.0)
    span = b("Sub", high, low)
    one = b.constant(np.ones((), np.float32))
    scale = b("Where", b("Equal", span, 0.0), one, b("Div", span, 255.0))
    zero = quantised(op, b("Div", b("Neg", low), scale), None, None, np.dtype(np.uint8))
    return [quantised(op, x, scale, zero, np.dtype(np.uint8)), scale, zero]


def _weight_zero(op: Op, zero: Value | None, rank: int) -> Value | None:
    """A convolution weight's zero point, one for all or one per output channel."""
    if zero is None or zero.size == 1:
        return None if zero is None else op.b.reshape(zero, ())
    return op.b.reshape(zero, (zero.size, *[1] * (rank - 1)))


def _integer_conv(op: Op, x: Value, weight: Value) -> Value:
    kernel = list(op.attr("kernel_shape") or weight.shape[2:])
    strides, dilations, before, after = window(op, kernel, x.shape[2:])
    return conv(op, x, weight, strides, dilations, before, after, int(op.attr("group", 1)))


def _zero_scalar(op: Op, zero: Value | None) -> Value | None:
    return None if zero is None else op.b.reshape(zero, ()) if zero.size == 1 else zero


@repairs("ConvInteger")
def _conv_integer(op: Op) -> Repaired:
    x = _centred(op, op[0], _zero_scalar(op, op.get(2)))
    weight = _centred(op, op[1], _weight_zero(op, op.get(3), op[1].rank))
    return _integer_conv(op, x, weight)


@repairs("QLinearConv")
def _qlinear_conv(op: Op) -> Repaired:
    b = op.b
    x = _centred(op, op[0], _zero_scalar(op, op[2]))
    weight = _centred(op, op[3], _weight_zero(op, op[5], op[3].rank))
    total = _integer_conv(op, x, weight)
    channels = (-1, *[1] * (total.rank - 2))
    bias = op.get(8)
    if bias is not None:
        total = b("Add", total, b.reshape(bias, (bias.size, *channels[1:])))
    scale = b("Div", b("Mul", b.reshape(op[1], ()), _flat(op, op[4])), b.reshape(op[6], ()))
    if scale.size > 1:
        scale = b.reshape(scale, (scale.size, *channels[1:]))
    product = b("Mul", b.cast(total, np.float32), scale)
    return quantised(op, product, None, b.reshape(op[7], ()), op[7].dtype)


def _flat(op: Op, value: Value) -> Value:
    return op.b.reshape(value, () if value.size == 1 else (value.size,))


def _row_zero(op: Op, zero: Value | None, operand: Value) -> Value | None:
    """A left operand's zero point: one for all, or one per row."""
    if zero is None or zero.size == 1:
        return _zero_scalar(op, zero)
    return zero if zero.rank == operand.rank else op.b.reshape(zero, (zero.size, 1))


@repairs("MatMulInteger")
def _matmul_integer(op: Op) -> Repaired:
    left = _centred(op, op[0], _row_zero(op, op.get(2), op[0]))
    right = _centred(op, op[1], _zero_scalar(op, op.get(3)))
    return op.b("MatMul", left, right)


@repairs("MatMulIntegerToFloat", domain="com.microsoft")
def _matmul_integer_to_float(op: Op) -> Repaired:
    b = op.b
    left = _centred(op, op[0], _zero_scalar(op, op.get(4)))
    right = _centred(op, op[1], _zero_scalar(op, op.get(5)))
    product = b.cast(b("MatMul", left, right), np.float32)
    product = b("Mul", product, b("Mul", _flat(op, op[2]), _flat(op, op[3])))
    bias = op.get(6)
    return product if bias is None else b("Add", product, bias)


@repairs("DynamicQuantizeMatMul", domain="com.microsoft")
def _dynamic_quantize_matmul(op: Op) -> Repaired:
    b = op.b
    x, scale, zero = (v for v in _dynamic_quantize(op) if v is not None)  # type: ignore[union-attr]
    right = _centred(op, op[1], _zero_scalar(op, op.get(3)))
    product = b.cast(b("MatMul", _centred(op, x, zero), right), np.float32)
    product = b("Mul", product, b("Mul", scale, _flat(op, op[2])))
    bias = op.get(4)
    return product if bias is None else b("Add", product, bias)


@repairs("QLinearMatMul")
def _qlinear_matmul(op: Op) -> Repaired:
    b = op.b
    left = _centred(op, op[0], _row_zero(op, op[2], op[0]))
    right = _centred(op, op[3], _zero_scalar(op, op[5]))
    total = b.cast(b("MatMul", left, right), np.float32)
    left_scale = b.cast(_row_zero(op, op[1], op[0]) or op[1], np.float32)
    scale = b("Mul", left_scale, b.cast(_zero_scalar(op, op[4]) or op[4], np.float32))
    scale = b("Div", scale, b.cast(b.reshape(op[6], ()), np.float32))
    return quantised(op, b("Mul", total, scale), None, b.reshape(op[7], ()), op[7].dtype)


@repairs("QGemm", domain="com.microsoft")
def _qgemm(op: Op) -> Repaired:
    """Inputs: A, scale, zero, B, scale, zero, C (int32), output scale, output zero."""
    b = op.b
    left = _centred(op, op[0], _zero_scalar(op, op[2]))
    right = _centred(op, op[3], _zero_scalar(op, op[5]))
    left = b.transpose(left, (1, 0)) if op.attr("transA", 0) else left
    right = b.transpose(right, (1, 0)) if op.attr("transB", 0) else right
    total = b("MatMul", left, right)
    if op.get(6) is not None:
        total = b("Add", total, op[6])
    alpha = float(op.attr("alpha", 1.0))
    scale = b("Mul", b("Mul", _flat(op, op[1]), _flat(op, op[4])), alpha)
    product = b("Mul", b.cast(total, np.float32), scale)
    if op.get(7) is None:
        return product
    zero = op.get(8)
    dtype = op[0].dtype if zero is None else zero.dtype
    spread = None if zero is None else b.reshape(zero, ())
    return quantised(op, product, b.reshape(op[7], ()), spread, dtype)


def _real(op: Op, index: int) -> Value:
    """Input `index` dequantised; its scale and zero point follow it."""
    zero = op.get(index + 2)
    return dequantised(op, op[index], _flat(op, op[index + 1]), _zero_scalar(op, zero))


def _requantised(op: Op, x: Value, index: int) -> Value:
    """`x` quantised with the scale at input `index` and the zero point behind it."""
    zero = op.get(index + 1)
    dtype = op[0].dtype if zero is None else zero.dtype
    spread = None if zero is None else op.b.reshape(zero, ())
    return quantised(op, x, op.b.reshape(op[index], ()), spread, dtype)


@repairs("QLinearAdd", "QLinearMul", domain="com.microsoft")
def _qlinear_binary(op: Op) -> Repaired:
    kind = op.kind.removeprefix("QLinear")
    return _requantised(op, op.b(kind, _real(op, 0), _real(op, 3)), 6)


@repairs("QLinearSigmoid", "QLinearLeakyRelu", domain="com.microsoft")
def _qlinear_unary(op: Op) -> Repaired:
    x = _real(op, 0)
    if op.kind == "QLinearSigmoid":
        return _requantised(op, op.b("Sigmoid", x), 3)
    return _requantised(op, op.b("LeakyRelu", x, alpha=float(op.attr("alpha", 0.01))), 3)


@repairs("QLinearGlobalAveragePool", domain="com.microsoft")
def _qlinear_global_pool(op: Op) -> Repaired:
    if op.attr("channels_last", 0):
        raise refuse("channels_last is not supported")
    x = _real(op, 0)
    axes = op.b.ints(range(2, x.rank))
    return _requantised(op, op.b("ReduceMean", x, axes, keepdims=1), 3)


@repairs("QLinearConcat", domain="com.microsoft")
def _qlinear_concat(op: Op) -> Repaired:
    """Inputs: output scale and zero, then (tensor, scale, zero) each."""
    parts = [_real(op, i) for i in range(2, len(op.inputs), 3)]
    whole = op.b.concat(parts, positive_axis(op.attrs["axis"], parts[0].rank))
    zero = op.b.reshape(op[1], ())
    return quantised(op, whole, op.b.reshape(op[0], ()), zero, zero.dtype)


@repairs("MatMulNBits", domain="com.microsoft")
def _matmul_nbits(op: Op) -> Repaired:
    """Weights packed by blocks along K; unpacked to the type of A while compiling."""
    b = op.b
    k, n, block, bits = (int(op.attrs[a]) for a in ("K", "N", "block_size", "bits"))
    if bits not in (4, 8):
        raise refuse(f"{bits}-bit weights are not supported")
    blocks = math.ceil(k / block)
    packed = op.array(1, "weights").reshape(n, blocks, -1)
    scales = op.array(2, "scales").reshape(n, blocks, 1).astype(np.float32)
    zeros = np.full((n, blocks), 1 << (bits - 1), np.float32)
    given = op.get(3)
    if given is not None:
        raw = op.array(3, "zero points")
        if raw.dtype == np.uint8:
            zeros = _unpacked(raw.reshape(n, -1), bits)[:, :blocks].astype(np.float32)
        else:
            zeros = raw.reshape(n, blocks).astype(np.float32)
    if op.get(4) is not None:
        raise refuse("its group index is not supported")
    whole = (_unpacked(packed, bits)[..., :block] - zeros[..., None]) * scales
    weight = whole.reshape(n, -1)[:, :k].T
    product = b("MatMul", op[0], b.constant(np.ascontiguousarray(weight).astype(op[0].dtype)))
    bias = op.get(5)
    return product if bias is None else b("Add", product, bias)


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return packed.astype(np.int32)
    halves = np.stack([packed & 15, packed >> 4], axis=-1)
    return halves.reshape(*packed.shape[:-1], -1).astype(np.int32)
