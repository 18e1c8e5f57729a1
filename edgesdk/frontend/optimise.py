"""Tidies the core graph: integers are used where it can be, and constant scales and shifts move
into the convolution before them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from edgesdk.frontend.graph import Graph, Node, Value, prune
from edgesdk.frontend.integers import use_integers


def optimise(graph: Graph) -> None:
    """Rewrites `graph` in place: conv(x, w) * s + t becomes conv(x, w * s) + t.

    What is quantised becomes integer arithmetic (`integers.py`).

    The scale and shift are constants per channel, as batch normalisation leaves them; a shift
    between the convolution and the scale is scaled too. Results change by rounding only.
    """
    use_integers(graph)
    uses = Counter(id(v) for n in graph.nodes for v in n.inputs if v is not None)
    uses.update(id(v) for v in graph.outputs)
    replaced: dict[int, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        node.inputs = [replaced.get(id(v), v) if v is not None else None for v in node.inputs]
        kept = _absorbed(node, uses)
        if kept is None:
            nodes.append(node)
            continue
        out = node.outputs[0]
        replaced[id(out)] = kept
        uses[id(kept)] = uses[id(out)]
        kept.label = out.label
    graph.nodes = nodes
    graph.outputs = [replaced.get(id(v), v) for v in graph.outputs]
    prune(graph)


def _absorbed(node: Node, uses: Counter[int]) -> Value | None:
    """Moves a scale or shift into what computes its input; returns that input if it could."""
    if node.op not in ("Mul", "Add"):
        return None
    for data, constant in (node.inputs, node.inputs[::-1]):
        assert data is not None and constant is not None
        channel = _per_channel(constant, data)
        if channel is None or uses[id(data)] != 1 or data.producer is None:
            continue
        shift = data.producer if data.producer.op == "Add" else None
        before = data if shift is None else _shifted(shift)
        conv = _convolution(before, uses) if before is not None else None
        if conv is None:
            continue
        if node.op == "Mul":
            _scale_weight(conv, channel)
            if shift is not None:
                _combine(shift, channel, np.multiply)
            return data
        if shift is not None:
            _combine(shift, channel, np.add)
            return data
    return None


def _shifted(add: Node) -> Value | None:
    """The data that `add` shifts by a constant per channel (always its second input)."""
    data, constant = add.inputs
    assert data is not None and constant is not None
    return data if _per_channel(constant, data) is not None else None


def _per_channel(constant: Value, data: Value) -> np.ndarray[Any, Any] | None:
    """`constant` as one number per channel of `data` (axis 1), or None."""
    if constant.const is None or data.const is not None or data.rank < 3 or not data.is_float:
        return None
    shape = (1,) * (data.rank - constant.rank) + constant.shape
    if len(shape) != data.rank or constant.size not in (1, data.shape[1]):
        return None
    if any(d != 1 for i, d in enumerate(shape) if i != 1):
        return None
    return np.broadcast_to(constant.const.reshape(-1), (data.shape[1],))


def _convolution(value: Value, uses: Counter[int]) -> Node | None:
    """The convolution with constant weights whose only use leads to `value`."""
    node = value.producer
    while node is not None and uses[id(value)] == 1:
        source = node.inputs[0]
        if node.op in ("Conv", "ConvTranspose"):
            weight = node.inputs[1]
            return node if weight is not None and weight.const is not None else None
        if node.op != "Reshape" or source is None or source.shape[:2] != value.shape[:2]:
            return None
        value, node = source, source.producer
    return None


def _scale_weight(conv: Node, channel: np.ndarray[Any, Any]) -> None:
    weight = conv.inputs[1]
    assert weight is not None and weight.const is not None
    array = weight.const
    if conv.op == "Conv":  # [out, in / group, ...]
        factor = channel.reshape(-1, *[1] * (array.ndim - 1))
    else:  # [in, out / group, ...]: each group of inputs has its own outputs
        groups = conv.attrs["group"]
        table = channel.reshape(groups, 1, -1)
        rows = np.repeat(table, array.shape[0] // groups, axis=1)
        factor = rows.reshape(array.shape[0], array.shape[1], *[1] * (array.ndim - 2))
    conv.inputs[1] = _value(array * factor, weight)


def _combine(shift: Node, channel: np.ndarray[Any, Any], function: Any) -> None:
    """Scales or extends the constant that `shift` adds."""
    data, constant = shift.inputs
    assert data is not None and constant is not None
    old = _per_channel(constant, data)
    assert old is not None
    shape = (1, -1, *[1] * (data.rank - 2))
    shift.inputs[1] = _value(function(old, channel).reshape(shape), constant)


def _value(array: np.ndarray[Any, Any], like: Value) -> Value:
    array = array.astype(like.dtype)
    return Value(like.label, array.shape, like.dtype, array)
