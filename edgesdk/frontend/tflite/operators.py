"""TFLite's operators in ONNX's words: one small function for each kind, registered here.

The meaning of each is that of TFLite's own kernels (tensorflow/lite/kernels in its sources). They
stand in `layers`, `elements`, `axes` and `shapes`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgesdk.frontend.graph import element_type
from edgesdk.frontend.tflite.writer import TO_NCHW, Operator, RefusedOperatorError

Conversion = Callable[[Operator], None]
CONVERSIONS: dict[str, Conversion] = {}


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


# What the conversions share.

ACTIVATIONS: dict[int, tuple[str, tuple[float, ...]]] = {
    1: ("Relu", ()),
    2: ("Clip", (-1.0, 1.0)),
    3: ("Clip", (0.0, 6.0)),
    4: ("Tanh", ()),
}


def activated(op: Operator, value: str) -> str:
    """`value` after the activation that is fused into `op`."""
    number = int(op.options.fusedActivationFunction) if op.options is not None else 0
    if not number:
        return value
    if number not in ACTIVATIONS:
        raise RefusedOperatorError(f"its fused activation {number} is not supported")
    kind, bounds = ACTIVATIONS[number]
    return op.w.node(kind, value, *(op.w.constant(np.float32(b)) for b in bounds))


def axis_in_nchw(axis: int) -> int:
    return TO_NCHW.index(axis)


def positive_axis(axis: int, rank: int) -> int:
    if not -rank <= axis < max(rank, 1):
        raise RefusedOperatorError(f"its axis {axis} is outside {rank} dimensions")
    return axis + rank if axis < 0 else axis


def as_int64(op: Operator, index: int) -> str:
    """Input `index`, integers, as int64."""
    tensor = op[index]
    if tensor.const is not None:
        return op.w.constant(tensor.const.astype(np.int64))
    return op.w.node("Cast", op.w.real(tensor), to=element_type(np.dtype(np.int64)))
