"""Quantised networks as integer arithmetic, from the form in which they are exchanged.

A quantised network says what it means in floats: numbers are dequantised, an operator computes, and
its result is quantised. Repairs leave the two operators in the graph as ONNX has them,
QuantizeLinear and DequantizeLinear, for 8-bit tensors with one constant scale. Here they become
arithmetic of the core set, and as much of it as possible that of integers:

- What only moves or selects numbers does so before they are dequantised.
- A convolution or product of a dequantised tensor and dequantised constants sums integers, and the
  sums are scaled.
- Where a result is quantised, the division by the scale is put into the scales before it.

Results differ from those in floats by rounding: by one step of the quantisation where a number lies
halfway between two.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx

from edgesdk.frontend.graph import Builder, Graph, Node, Value, prune

# Their first input (Concat: all) is moved or selected, and zero stays what it is.
_MOVES = {"Reshape", "Transpose", "Slice", "Expand", "Gather", "Concat", "Tile", "MaxPool"}
# f(c * x) = c * f(x) for c > 0; what else they read are shapes, bounds and addends.
_PASSES = {
    "Reshape", "Transpose", "Slice", "Expand", "Concat", "MaxPool", "AveragePool", "Relu",
    "LeakyRelu",
}  # fmt: skip
# A bias that is a multiple of the sums' scale is added to them as an integer. What it may be off.
_BIAS_STEPS = 0.02
_QUANTISED = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QGemm"}


def is_quantised(model: onnx.ModelProto) -> bool:
    """Whether an ONNX model has operators on quantised tensors."""
    return any(
        node.op_type in _QUANTISED or node.op_type.startswith("QLinear")
        for node in model.graph.node
    )


def use_integers(graph: Graph) -> None:
    """Rewrites `graph` in place, so that no QuantizeLinear or DequantizeLinear is left."""
    _postpone(graph)
    _join_quantised(graph)
    _multiply_integers(graph)
    _expand(graph)
    prune(graph)


def _postpone(graph: Graph) -> None:
    """Moves DequantizeLinear behind what only moves numbers; afterwards each has one reader."""
    outputs = {id(v) for v in graph.outputs}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "DequantizeLinear":
            if id(node.outputs[0]) in outputs:
                nodes.append(node)
            continue
        real = [v for v in node.inputs if v is not None and _dequantised(v) is not None]
        if node.op in _MOVES and real and _move(node, nodes):
            if id(node.outputs[0]) in outputs:
                nodes.append(node.outputs[0].producer)  # type: ignore[arg-type]
            continue
        for index, value in enumerate(node.inputs):
            made = _dequantised(value) if value is not None else None
            if made is not None:
                node.inputs[index] = _copy(made, nodes)
        nodes.append(node)
    graph.nodes = nodes


def _dequantised(value: Value) -> Node | None:
    """The DequantizeLinear that computes `value`."""
    made = value.producer
    return made if made is not None and made.op == "DequantizeLinear" else None


def _copy(node: Node, nodes: list[Node]) -> Value:
    old = node.outputs[0]
    copy = Node(node.op, list(node.inputs), dict(node.attrs), origin=node.origin)
    copy.outputs = [Value(old.label, old.shape, old.dtype, producer=copy)]
    nodes.append(copy)
    return copy.outputs[0]


def _move(node: Node, nodes: list[Node]) -> bool:
    """Appends `node` on integers; what it computed becomes the output of a DequantizeLinear."""
    if len(node.outputs) != 1:
        return False
    count = len(node.inputs) if node.op == "Concat" else 1
    made = [_dequantised(v) if v is not None else None for v in node.inputs[:count]]
    first = made[0]
    if first is None or any(m is None or not _same_scale(m, first) for m in made):
        return False
    stored = [m.inputs[0] for m in made if m is not None]
    old = node.outputs[0]
    inner = Node(node.op, [*stored, *node.inputs[count:]], dict(node.attrs), origin=node.origin)
    assert stored[0] is not None
    inner.outputs = [Value(f"{old.label}_stored", old.shape, stored[0].dtype, producer=inner)]
    nodes.append(inner)
    real = Node("DequantizeLinear", [inner.outputs[0], *first.inputs[1:]], {}, [old], node.origin)
    old.producer = real
    return True


def _same_scale(one: Node, other: Node) -> bool:
    if one.inputs[0] is None or other.inputs[0] is None:
        return False
    return one.inputs[0].dtype == other.inputs[0].dtype and _parameters(one) == _parameters(other)


def _parameters(node: Node) -> tuple[np.float32, int]:
    """Scale and zero point of a quantising or dequantising node."""
    scale, zero = node.inputs[1:3]
    assert scale is not None and scale.const is not None
    assert zero is not None and zero.const is not None
    return np.float32(scale.const.item()), int(zero.const.item())


def _join_quantised(graph: Graph) -> None:
    """Joins numbers after they are quantised, and drops what quantises as it was before."""
    readers = _readers(graph)
    replaced: dict[int, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        node.inputs = [replaced.get(id(v), v) if v is not None else None for v in node.inputs]
        source = node.inputs[0] if node.op == "QuantizeLinear" else None
        joined = source.producer if source is not None else None
        if source is None or joined is None:
            nodes.append(node)
        elif _undoes(node, joined):
            replaced[id(node.outputs[0])] = _first(joined)
        elif joined.op == "Concat" and len(readers[id(source)]) == 1 and joined in nodes:
            nodes.remove(joined)
            parts = [_requantised(part, node, nodes) for part in joined.inputs if part is not None]
            out = node.outputs[0]
            joined = Node("Concat", list(parts), joined.attrs, [out], joined.origin)
            out.producer = joined
            nodes.append(joined)
        else:
            nodes.append(node)
    graph.nodes = nodes
    graph.outputs = [replaced.get(id(v), v) for v in graph.outputs]


def _undoes(node: Node, made: Node) -> bool:
    """Whether `node` quantises what `made` dequantised, in the same way."""
    if made.op != "DequantizeLinear" or _first(made).dtype != node.outputs[0].dtype:
        return False
    return _parameters(node) == _parameters(made)


def _requantised(part: Value, like: Node, nodes: list[Node]) -> Value:
    """`part` quantised as `like` does it."""
    made = part.producer
    if made is not None and _undoes(like, made):
        return _first(made)
    node = Node(like.op, [part, *like.inputs[1:]], dict(like.attrs), origin=like.origin)
    node.outputs = [Value(part.label, part.shape, like.outputs[0].dtype, producer=node)]
    nodes.append(node)
    return node.outputs[0]


def _multiply_integers(graph: Graph) -> None:
    """Convolutions, products and means of dequantised tensors become ones of integers."""
    b = Builder()
    readers = _readers(graph)
    absorbed: set[int] = set()
    for node in graph.nodes:
        if id(node) in absorbed:
            continue
        b.origin = node.origin
        source = node.inputs[0] if node.inputs else None
        made = _dequantised(source) if source is not None else None
        if made is None or node.op not in ("Conv", "MatMul", "ReduceMean"):
            b.nodes.append(node)
        elif node.op == "ReduceMean":
            _become(b, node.outputs[0], _mean(b, node, made))
        else:
            weight = node.inputs[1]
            if weight is None or weight.stored is None or not _scaled_outside(node, weight):
                b.nodes.append(node)
                continue
            bias = _bias(node, readers)
            if bias is not None:
                absorbed.add(id(bias))
            last = node if bias is None else bias
            _become(b, last.outputs[0], _sum(b, node, made, weight, bias))
    graph.nodes = b.nodes


def _readers(graph: Graph) -> dict[int, list[Node | None]]:
    """Who reads each value; None is the model's output."""
    found: dict[int, list[Node | None]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            if value is not None:
                found.setdefault(id(value), []).append(node)
    for value in graph.outputs:
        found.setdefault(id(value), []).append(None)
    return found


def _become(b: Builder, old: Value, new: Value) -> None:
    """`old`, which other nodes read, is computed by what computes `new`, the last node of `b`."""
    node = b.nodes[-1]
    assert node.outputs == [new]
    node.outputs = [old]
    old.producer = node


def _scaled_outside(node: Node, weight: Value) -> bool:
    """Whether the weights' scale is one number for each output channel, or one for all."""
    assert weight.stored is not None
    shape = weight.stored.scale.shape
    if node.op == "MatMul":
        return weight.rank == 2 and shape[0] == 1
    return all(d == 1 for d in shape[1:])


def _bias(node: Node, readers: dict[int, list[Node | None]]) -> Node | None:
    """The node that adds a constant to each channel of what `node` computes, if nothing else reads
    that."""
    out = node.outputs[0]
    uses = readers.get(id(out), [])
    add = uses[0] if len(uses) == 1 else None
    if add is None or add.op != "Add" or add.inputs[0] is not out:
        return None
    constant = add.inputs[1]
    if constant is None or constant.const is None:
        return None
    axis = 1 if node.op == "Conv" else out.rank - 1
    shape = (1,) * (out.rank - constant.rank) + constant.shape
    if len(shape) != out.rank or any(d != 1 for i, d in enumerate(shape) if i != axis):
        return None
    return add


def _sum(b: Builder, node: Node, made: Node, weight: Value, bias: Node | None) -> Value:
    """Sums of (data - zero) * (weight - zero) as int32, and the bias; then scaled."""
    data = made.inputs[0]
    assert data is not None and weight.stored is not None
    data_scale, zero = _parameters(made)
    wide = b.cast(data, np.int32)
    if zero:
        wide = b("Sub", wide, b.constant(np.int32(zero)))
    total = b(node.op, wide, b.constant(weight.stored.numbers.astype(np.int32)), **node.attrs)
    scale = data_scale * weight.stored.scale.astype(np.float32).reshape(-1)
    # How a number for each channel is shaped.
    tail = total.rank - 2 if node.op == "Conv" else 0
    shape = (scale.size, *[1] * tail)
    after = None
    if bias is not None and bias.inputs[1] is not None and bias.inputs[1].const is not None:
        addend = bias.inputs[1].const.astype(np.float64).reshape(-1)
        steps = addend / scale.astype(np.float64)
        rounded = np.rint(steps)
        if np.all(np.abs(steps - rounded) <= _BIAS_STEPS + 1e-6 * np.abs(steps)) and np.all(
            np.abs(rounded) < 2**31
        ):
            whole = rounded.astype(np.int32)
            total = b("Add", total, b.constant(whole.reshape(-1, *[1] * tail)))
        else:
            after = b.constant(bias.inputs[1].const)
    result = b("Mul", b.cast(total, np.float32), b.constant(scale.reshape(shape)))
    return result if after is None else b("Add", result, after)


def _mean(b: Builder, node: Node, made: Node) -> Value:
    """The mean of the stored numbers, which is exact, then dequantised."""
    data = made.inputs[0]
    assert data is not None
    scale, zero = _parameters(made)
    mean = b("ReduceMean", b.cast(data, np.float32), *node.inputs[1:], **node.attrs)
    if zero:
        mean = b("Sub", mean, b.constant(np.float32(zero)))
    return b("Mul", mean, b.constant(scale))


def _expand(graph: Graph) -> None:
    """Writes the quantising and dequantising operators that are left as arithmetic."""
    uses = Counter(id(v) for n in graph.nodes for v in n.inputs if v is not None)
    uses.update(id(v) for v in graph.outputs)
    for node in graph.nodes:
        source = node.inputs[0] if node.inputs else None
        if node.op == "QuantizeLinear" and source is not None and _divisible(source, uses):
            _divide(source, _parameters(node)[0])
            node.inputs[1] = Value("one", (), np.dtype(np.float32), np.ones((), np.float32))
    b = Builder()
    for node in graph.nodes:
        b.origin = node.origin
        if node.op == "QuantizeLinear":
            _become(b, node.outputs[0], _quantise(b, node))
        elif node.op == "DequantizeLinear":
            _become(b, node.outputs[0], _dequantise(b, node))
        else:
            b.nodes.append(node)
    graph.nodes = b.nodes


def _divisible(value: Value, uses: Counter[int]) -> bool:
    """Whether a factor of `value` can be put into scales before it, for nobody else to see."""
    node = value.producer
    if node is None or uses[id(value)] != 1:
        return False
    if node.op == "DequantizeLinear" or _is_scaling(node):
        return True
    if node.op == "Add":
        return all(v is not None and (_is_constant(v) or _divisible(v, uses)) for v in node.inputs)
    if node.op == "Mul":
        return _divisible(_first(node), uses)
    if node.op == "Clip":
        bounds = [v for v in node.inputs[1:] if v is not None]
        return all(_is_constant(v) for v in bounds) and _divisible(_first(node), uses)
    if node.op == "Concat":
        return all(v is not None and _divisible(v, uses) for v in node.inputs)
    return node.op in _PASSES and _divisible(_first(node), uses)


def _is_constant(value: Value) -> bool:
    return value.const is not None


def _first(node: Node) -> Value:
    assert node.inputs[0] is not None
    return node.inputs[0]


def _is_scaling(node: Node) -> bool:
    """A product of an unscaled tensor and a constant, as `_sum` and `_mean` write it."""
    factor = node.inputs[1] if node.op == "Mul" else None
    return factor is not None and factor.const is not None and factor.dtype == np.float32


def _divide(value: Value, divisor: np.float32) -> None:
    """Divides `value` by `divisor`; see `_divisible`."""
    node = value.producer
    assert node is not None
    if node.op == "DequantizeLinear" or _is_scaling(node):
        node.inputs[1] = _quotient(node.inputs[1], divisor)
    elif node.op == "Clip":
        _divide(_first(node), divisor)
        node.inputs[1:] = [None if v is None else _quotient(v, divisor) for v in node.inputs[1:]]
    elif node.op == "Add":
        for index, part in enumerate(node.inputs):
            assert part is not None
            if part.const is not None:
                node.inputs[index] = _quotient(part, divisor)
            else:
                _divide(part, divisor)
    else:
        for part in node.inputs if node.op == "Concat" else node.inputs[:1]:
            assert part is not None
            _divide(part, divisor)


def _quotient(constant: Value | None, divisor: np.float32) -> Value:
    assert constant is not None and constant.const is not None
    array = (np.asarray(constant.const, np.float32) / divisor).astype(np.float32)
    return Value(constant.label, constant.shape, constant.dtype, array)


def _quantise(b: Builder, node: Node) -> Value:
    source = node.inputs[0]
    assert source is not None
    scale, zero = _parameters(node)
    dtype = node.outputs[0].dtype
    scaled = source if scale == 1 else b("Div", source, b.constant(scale))
    return quantised(b, scaled, b.constant(np.float32(zero)), dtype)


def quantised(b: Builder, x: Value, zero: Value, dtype: np.dtype[Any]) -> Value:
    """round(x) + zero, all float32, half to even and saturated to `dtype`."""
    info = np.iinfo(dtype)
    rounded = b("Round", x)
    if zero.const is None or zero.const.any():
        rounded = b("Add", rounded, zero)
    return b.cast(b("Clip", rounded, float(info.min), float(info.max)), dtype)


def _dequantise(b: Builder, node: Node) -> Value:
    data = node.inputs[0]
    assert data is not None
    scale, zero = _parameters(node)
    # Exact: 8-bit integers and their differences are floats.
    real = b.cast(data, np.float32)
    if zero:
        real = b("Sub", real, b.constant(np.float32(zero)))
    return b("Mul", real, b.constant(scale))
