"""The registry of repairs: one small function per ONNX operator, from any operator set to the core.

A repair receives the model's node (`Op`) and returns the value, or the values, that take the place
of its outputs; it builds them with `op.b`. Operators of the core set that mean the same in every
operator set since 7 need none: they are listed in `UNCHANGED`. Whatever is in neither, and has no
function body in ONNX's own definition, is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgesdk.frontend.graph import CORE_OPSET, Builder, RefusedNodeError, Value
from edgesdk.frontend.model import ValueHint

Repaired = Value | Sequence[Value | None]
Repair = Callable[["Op"], Repaired]


class Attributes(dict[str, Any]):
    """A node's attributes, which remember what was read: an unread one must not be ignored."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def items(self) -> Any:
        self.read |= set(self)
        return super().items()


# Attributes that say nothing about inference, or only something where the repair looks at them.
WITHOUT_EFFECT = frozenset(
    {
        "axis",  # of a quantisation by one scale for the whole tensor
        "consumed_inputs",
        "hidden_size",  # the weights say it
        "is_test",
        "momentum",
        "noop_with_empty_axes",  # where axes are given
        "num_outputs",  # where sizes are given
        "ratio",
        "saturate",  # of 8-bit floats, which are refused
        "seed",
        "stash_type",
        "storage_order",  # of indices that are not wanted
    }
)


@dataclass
class Op:
    """A node of the model while it is repaired: static inputs, attributes as Python values."""

    kind: str
    name: str
    inputs: list[Value | None]
    attrs: Attributes
    outputs: list[str]
    opset: int
    b: Builder
    hints: dict[int, ValueHint] = field(default_factory=dict)
    notes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __getitem__(self, index: int) -> Value:
        """The input `index`, which must be there."""
        value = self.get(index)
        if value is None:
            raise RefusedNodeError(f"its input {index} is missing")
        return value

    def get(self, index: int) -> Value | None:
        """The input `index`, None where it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def attr(self, name: str, default: Any = None) -> Any:
        return self.attrs.get(name, default)

    def array(self, index: int, what: str) -> np.ndarray[Any, Any]:
        """The content of input `index`; refuses when it is only known at run time."""
        value = self[index]
        if value.const is None:
            raise RefusedNodeError(
                f"its {what} are computed at run time; only static shapes are compiled"
            )
        return value.const

    def int_list(self, index: int, what: str) -> list[int]:
        return [int(i) for i in self.array(index, what).reshape(-1)]

    def wants(self, index: int) -> bool:
        """Whether the model uses output `index`."""
        return index < len(self.outputs) and self.outputs[index] != ""

    def apply(self, kind: str, *inputs: Value, **attrs: Any) -> Value:
        """The only output of ONNX's operator `kind` in its newest form, repaired itself."""
        inner = Op(kind, self.name, list(inputs), Attributes(attrs), ["y"], CORE_OPSET, self.b)
        result = REPAIRS["", kind](inner)
        assert isinstance(result, Value)
        return result

    def note(self, text: str) -> None:
        """Tells the user what is rewritten here, and why."""
        self.notes[self.kind, text] += 1

    def hint(self, value: Value, hint: ValueHint) -> None:
        """Notes which integers `value` may take, when it comes from an input unchanged."""
        while value.producer is not None and value.producer.op in _CARRIES:
            source = value.producer.inputs[0]
            if source is None:
                return
            value = source
        self.hints.setdefault(id(value), hint)


_CARRIES = {"Reshape", "Transpose", "Cast", "Slice", "Expand", "Concat", "Gather"}

REPAIRS: dict[tuple[str, str], Repair] = {}

# Core operators whose meaning and form are the same in every operator set from 7 on.
_SAME_WORDS = (
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Cos"
    " Cosh Div Equal Erf Exp Floor GatherElements Greater GreaterOrEqual IsNaN Less"
    " LessOrEqual Log MatMul Neg Not Or And Xor Reciprocal Relu Round Sigmoid Sign"
    " Sin Sinh Sqrt Sub Tan Tanh Where Add Mul"
)
UNCHANGED = frozenset(_SAME_WORDS.split())


def repairs(*kinds: str, domain: str = "") -> Callable[[Repair], Repair]:
    """Registers a repair for operators `kinds` of `domain` ("" is ONNX's own)."""

    def register(function: Repair) -> Repair:
        for kind in kinds:
            REPAIRS[domain, kind] = function
        return function

    return register


def refuse(reason: str) -> RefusedNodeError:
    return RefusedNodeError(reason)


def positive_axis(axis: int, rank: int) -> int:
    """Returns `axis` counted from the front. Refuses one outside the rank."""
    if not -rank <= axis < max(rank, 1):
        raise RefusedNodeError(f"its axis {axis} is outside a tensor of {rank} dimensions")
    return axis + rank if axis < 0 else axis


def load_all() -> None:
    """Imports the modules that register repairs."""
    from edgesdk.frontend import (  # noqa: F401
        repair_basic,
        repair_conv,
        repair_index,
        repair_microsoft,
        repair_more,
        repair_norm,
        repair_quant,
        repair_resize,
        repair_rnn,
        repair_sample,
        repair_shape,
    )
