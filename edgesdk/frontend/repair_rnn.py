"""LSTM, GRU and RNN unrolled over time: all input products at once, then one step after another.

Both directions, initial states, sequence lengths (constant or not), peepholes, clipping, either
layout and every activation of the specification. A sequence is as long as the input's shape says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from edgesdk.frontend.control import ITERATION_LIMIT
from edgesdk.frontend.graph import Value
from edgesdk.frontend.model import ValueHint
from edgesdk.frontend.repair import Op, Repaired, refuse, repairs

Activation = Callable[[Value], Value]
# One step: the projected input of time t and the states before it to the states after it.
Step = Callable[[Value, list[Value]], list[Value]]

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


@dataclass(frozen=True)
class _Cell:
    """One direction of a layer: weights turned for x @ w, biases summed where they may be."""

    recurrent: Value  # [hidden, gates * hidden]
    recurrent_bias: Value | None  # [gates * hidden], of GRU only
    peephole: list[Value] | None  # input, output, forget: [hidden] each
    activations: list[Activation]
    hidden: int


@repairs("LSTM", "GRU", "RNN")
def _recurrent(op: Op) -> Repaired:
    b, x = op.b, op[0]
    if x.rank != 3:
        raise refuse(f"its input has {x.rank} dimensions instead of 3")
    batch_first = bool(op.attr("layout", 0))
    if batch_first:
        x = b.transpose(x, (1, 0, 2))
    length, batch, _ = x.shape
    if length > ITERATION_LIMIT:
        raise refuse(f"its sequence of {length} steps is longer than {ITERATION_LIMIT}")
    op.note("unrolled over time")
    hidden = op[2].shape[-1]
    direction = op.attr("direction", "forward")
    backward = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    activations = _activations(op, len(backward))
    states_count = 2 if op.kind == "LSTM" else 1
    lengths = _lengths(op, length)
    rows: list[list[Value]] = []
    finals: list[list[Value]] = []
    for index, back in enumerate(backward):
        cell, projected = _prepare(op, x, index, activations[index], hidden)
        states = [
            _initial(op, 5 + s, index, (batch, hidden), batch_first) for s in range(states_count)
        ]
        step = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}[op.kind](op, cell)
        outputs: list[Value] = [states[0]] * length
        for t in reversed(range(length)) if back else range(length):
            at = b.reshape(b.slice(projected, 0, t, t + 1), projected.shape[1:])
            after = step(at, states)
            outputs[t] = after[0]
            if lengths is not None:
                active = b("Greater", lengths, b.constant(np.asarray(t, np.int32)))
                zero = b.constant(np.zeros((), x.dtype))
                outputs[t] = b("Where", active, after[0], zero)
                after = [b("Where", active, n, o) for n, o in zip(after, states, strict=True)]
            states = after
        rows.append(outputs)
        finals.append(states)
    return _results(op, rows, finals, batch_first)


def _results(
    op: Op, rows: list[list[Value]], finals: list[list[Value]], batch_first: bool
) -> list[Value | None]:
    """Y is [time, direction, batch, hidden], Y_h and Y_c [direction, batch, hidden]."""
    b = op.b
    batch, hidden = finals[0][0].shape
    results: list[Value | None] = [None]
    if op.wants(0):
        wide = [[b.reshape(v, (1, 1, batch, hidden)) for v in r] for r in rows]
        whole = b.concat([b.concat(list(r), 0) for r in wide], 1)
        results[0] = b.transpose(whole, (2, 0, 1, 3)) if batch_first else whole
    for s in range(len(finals[0])):
        last = b.concat([b.reshape(f[s], (1, batch, hidden)) for f in finals], 0)
        results.append(b.transpose(last, (1, 0, 2)) if batch_first else last)
    return results[: len(op.outputs)]


def _lengths(op: Op, length: int) -> Value | None:
    """The lengths as a column [batch, 1], None where every sequence is whole."""
    given = op.get(4)
    if given is None or (given.const is not None and (given.const == length).all()):
        return None
    op.hint(given, ValueHint(1, length))
    return op.b.reshape(op.b.cast(given, np.int32), (given.size, 1))


def _initial(
    op: Op, index: int, direction: int, shape: tuple[int, int], batch_first: bool
) -> Value:
    given = op.get(index)
    if given is None:
        return op.b.constant(np.zeros(shape, op[0].dtype))
    axis = 1 if batch_first else 0
    return op.b.reshape(op.b.slice(given, axis, direction, direction + 1), shape)


def _prepare(
    op: Op, x: Value, index: int, activations: list[Activation], hidden: int
) -> tuple[_Cell, Value]:
    """Returns the cell and the products of every input with its weights, bias included."""
    b, gates = op.b, _GATES[op.kind]
    length, batch, width = x.shape

    def of_direction(position: int, shape: tuple[int, ...]) -> Value | None:
        value = op.get(position)
        return None if value is None else b.reshape(b.slice(value, 0, index, index + 1), shape)

    weight = of_direction(1, (gates * hidden, width))
    recurrent = of_direction(2, (gates * hidden, hidden))
    if weight is None or recurrent is None:
        raise refuse("its weights are missing")
    flat = b.reshape(x, (length * batch, width))
    product = b("MatMul", flat, b.transpose(weight, (1, 0)))
    both = of_direction(3, (2, gates * hidden))
    recurrent_bias = None
    if both is not None:
        bias, recurrent_bias = (
            b.reshape(b.slice(both, 0, i, i + 1), (gates * hidden,)) for i in range(2)
        )
        if op.kind != "GRU":  # GRU may multiply the recurrent bias by a gate first
            bias, recurrent_bias = b("Add", bias, recurrent_bias), None
        product = b("Add", product, bias)
    peephole = of_direction(7, (3, hidden)) if op.kind == "LSTM" else None
    parts = None
    if peephole is not None:
        parts = [b.reshape(b.slice(peephole, 0, i, i + 1), (hidden,)) for i in range(3)]
    cell = _Cell(b.transpose(recurrent, (1, 0)), recurrent_bias, parts, activations, hidden)
    return cell, b.reshape(product, (length, batch, gates * hidden))


def _parts(op: Op, value: Value, hidden: int) -> list[Value]:
    count = value.shape[1] // hidden
    return [op.b.slice(value, 1, i * hidden, (i + 1) * hidden) for i in range(count)]


def _clipped(op: Op, value: Value) -> Value:
    limit = op.attr("clip")
    if not limit:
        return value
    bounds = [op.b.constant(np.asarray(v, value.dtype)) for v in (-limit, limit)]
    return op.b("Clip", value, *bounds)


def _lstm(op: Op, cell: _Cell) -> Step:
    """Hochreiter and Schmidhuber's cell as ONNX has it, gates in the order i, o, f, c."""
    b, (f, g, h) = op.b, cell.activations

    def step(x: Value, states: list[Value]) -> list[Value]:
        hidden, memory = states
        i, o, forget, c = _parts(op, b("Add", x, b("MatMul", hidden, cell.recurrent)), cell.hidden)
        if cell.peephole is not None:
            i = b("Add", i, b("Mul", memory, cell.peephole[0]))
            forget = b("Add", forget, b("Mul", memory, cell.peephole[2]))
        i = f(_clipped(op, i))
        if op.attr("input_forget", 0):
            keep = b("Sub", b.constant(np.ones((), x.dtype)), i)
        else:
            keep = f(_clipped(op, forget))
        memory = b("Add", b("Mul", keep, memory), b("Mul", i, g(_clipped(op, c))))
        if cell.peephole is not None:
            o = b("Add", o, b("Mul", memory, cell.peephole[1]))
        return [b("Mul", f(_clipped(op, o)), h(memory)), memory]

    return step


def _gru(op: Op, cell: _Cell) -> Step:
    """Cho and others' cell, gates in the order z, r, h."""
    b, (f, g), n = op.b, cell.activations, cell.hidden
    gates_weight = b.slice(cell.recurrent, 1, 0, 2 * n)
    new_weight = b.slice(cell.recurrent, 1, 2 * n, 3 * n)
    gates_bias = new_bias = None
    if cell.recurrent_bias is not None:
        gates_bias = b.slice(cell.recurrent_bias, 0, 0, 2 * n)
        new_bias = b.slice(cell.recurrent_bias, 0, 2 * n, 3 * n)
    linear_first = bool(op.attr("linear_before_reset", 0))

    def shifted(value: Value, bias: Value | None) -> Value:
        return value if bias is None else b("Add", value, bias)

    def step(x: Value, states: list[Value]) -> list[Value]:
        hidden = states[0]
        x_gates = b.slice(x, 1, 0, 2 * n)
        gates = shifted(b("Add", x_gates, b("MatMul", hidden, gates_weight)), gates_bias)
        z, r = (f(_clipped(op, v)) for v in _parts(op, gates, n))
        if linear_first:
            inner = b("Mul", r, shifted(b("MatMul", hidden, new_weight), new_bias))
        else:
            inner = shifted(b("MatMul", b("Mul", r, hidden), new_weight), new_bias)
        new = g(_clipped(op, b("Add", b.slice(x, 1, 2 * n, 3 * n), inner)))
        rest = b("Sub", b.constant(np.ones((), x.dtype)), z)
        return [b("Add", b("Mul", rest, new), b("Mul", z, hidden))]

    return step


def _rnn(op: Op, cell: _Cell) -> Step:
    b, (f,) = op.b, cell.activations

    def step(x: Value, states: list[Value]) -> list[Value]:
        return [f(_clipped(op, b("Add", x, b("MatMul", states[0], cell.recurrent))))]

    return step


def _activations(op: Op, directions: int) -> list[list[Activation]]:
    """The activations of each direction; alphas and betas are taken up in their order."""
    default = _DEFAULTS[op.kind]
    names = list(op.attr("activations") or default * directions)
    alphas = iter(op.attr("activation_alpha") or [])
    betas = iter(op.attr("activation_beta") or [])
    made = [_activation(op, name, alphas, betas) for name in names]
    if len(made) != len(default) * directions:
        raise refuse(f"it has {len(made)} activations instead of {len(default) * directions}")
    return [made[i * len(default) : (i + 1) * len(default)] for i in range(directions)]


# The alphas and betas that the specification takes where the model gives none.
_ALPHA = {"affine": 1.0, "leakyrelu": 0.01, "thresholdedrelu": 1.0, "scaledtanh": 1.0,
          "hardsigmoid": 0.2, "elu": 1.0}  # fmt: skip
_BETA = {"affine": 0.0, "scaledtanh": 1.0, "hardsigmoid": 0.5}


def _activation(op: Op, name: str, alphas: Iterator[float], betas: Iterator[float]) -> Activation:
    from edgesdk.frontend import repair_basic

    b, kind = op.b, name.lower()
    if kind in ("sigmoid", "tanh", "relu"):
        core = {"sigmoid": "Sigmoid", "tanh": "Tanh", "relu": "Relu"}[kind]
        return lambda x: b(core, x)
    alpha = float(next(alphas, _ALPHA[kind])) if kind in _ALPHA else 0.0
    beta = float(next(betas, _BETA[kind])) if kind in _BETA else 0.0
    if kind == "affine":
        return lambda x: b("Add", b("Mul", x, alpha), beta)
    if kind == "scaledtanh":
        return lambda x: b("Mul", b("Tanh", b("Mul", x, beta)), alpha)
    if kind == "hardsigmoid":
        return lambda x: repair_basic.hard_sigmoid(op, x, alpha, beta)
    if kind == "leakyrelu":
        return lambda x: b("LeakyRelu", x, alpha=alpha)
    known = {"thresholdedrelu": "ThresholdedRelu", "elu": "Elu", "softsign": "Softsign",
             "softplus": "Softplus"}  # fmt: skip
    if kind not in known:
        raise refuse(f"the activation {name!r} is unknown")
    return lambda x: op.apply(known[kind], x, alpha=alpha)
