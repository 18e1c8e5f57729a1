"""What a core graph costs: operations on floats or integers, a multiply-add counting as two."""

from __future__ import annotations

import math

from edgesdk.frontend.graph import Graph, Node, Value

# Nodes that move data and compute nothing.
_MOVING = (
    "Reshape Transpose Expand Tile Concat Slice Pad Gather GatherElements ScatterElements Cast"
    " Where"
)
_REDUCING = "ReduceSum ReduceMean ReduceProd ReduceMax ReduceMin ArgMax ArgMin"
_MOVES = frozenset(_MOVING.split())
_REDUCTIONS = frozenset(_REDUCING.split())
# Largest element, difference, exponential, sum, quotient.
_PER_SOFTMAX_ELEMENT = 5


def count_flops(graph: Graph) -> int:
    """Returns the operations of one run.

    Convolutions and matrix products count 2 for each multiply-add, padding included; poolings and
    reductions 1 for each element read; everything else that computes 1 for each element written.
    """
    return sum(_node_flops(node) for node in graph.nodes)


def _node_flops(node: Node) -> int:
    out = node.outputs[0]
    if node.op in _MOVES:
        return 0
    if node.op == "Conv":  # weight [out, in / group, ...]
        return 2 * out.size * math.prod(_input(node, 1).shape[1:])
    if node.op == "ConvTranspose":  # weight [in, out / group, ...]
        return 2 * _input(node, 0).size * math.prod(_input(node, 1).shape[1:])
    if node.op == "MatMul":
        return 2 * out.size * _input(node, 0).shape[-1]
    if node.op in ("MaxPool", "AveragePool"):
        return out.size * math.prod(node.attrs["kernel_shape"])
    if node.op in _REDUCTIONS:
        return _input(node, 0).size
    if node.op in ("Softmax", "LogSoftmax"):
        return _PER_SOFTMAX_ELEMENT * out.size
    return out.size


def _input(node: Node, index: int) -> Value:
    value = node.inputs[index]
    assert value is not None
    return value
