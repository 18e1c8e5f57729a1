"""TFLite's operators that treat each element alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgesdk.frontend.graph import element_type
from edgesdk.frontend.tflite.operators import CONVERSIONS, Conversion, activated, converts
from edgesdk.frontend.tflite.writer import Operator, RefusedOperatorError, real_array


def _elementwise(kind: str, **attrs: Any) -> Conversion:
    """Operator `kind` of ONNX on all inputs, in whichever order they are."""

    def convert(op: Operator) -> None:
        nchw = op.w.nchw(*op.inputs)
        values = [op.w.real(t, nchw=nchw) for t in op.inputs if t is not None]
        value = op.w.node(kind, *values, **attrs)
        fused = getattr(op.options, "fusedActivationFunction", 0)
        op.w.put(op.out, activated(op, value) if fused else value, nchw=nchw)

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
