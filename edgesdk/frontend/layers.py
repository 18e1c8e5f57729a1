"""The layers of a model: its nodes as the user knows them, their values, and models cut out of it.

A layer is a node of the main graph that computes something at run time; what lies in functions,
branches and loops belongs to the node that enters them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgesdk.frontend.graph import Value
from edgesdk.frontend.importer import walk_model
from edgesdk.frontend.integers import is_quantised
from edgesdk.frontend.sources import open_source


@dataclass(frozen=True, eq=False)
class Layer:
    """A node of the model: its name, its operator, and the tensors that it reads and computes.

    `reads` and `outputs` are those known at run time only, by name. `nodes` is the node itself,
    after those that only put tensors into the sequences that it reads.
    """

    name: str
    operator: str
    reads: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[onnx.NodeProto, ...]

    def __str__(self) -> str:
        return f"{self.name!r} ({self.operator})"


@dataclass(frozen=True)
class LayeredModel:
    """A model's layers in an order in which they can run.

    `constants` holds what is known of tensors while compiling (weights, and what was computed from
    weights and shapes), by name. `outputs` are those of the model that a layer computes;
    `quantised` is that of `ImportedModel`.
    """

    path: Path
    layers: tuple[Layer, ...]
    constants: Mapping[str, np.ndarray[Any, Any]]
    outputs: tuple[str, ...]
    quantised: bool

    @property
    def tensors(self) -> tuple[str, ...]:
        """What the layers compute."""
        return tuple(o for layer in self.layers for o in layer.outputs)

    def layer_of(self, tensor: str) -> Layer | None:
        """The layer that computes `tensor`; None for an input or a constant."""
        return next((layer for layer in self.layers if tensor in layer.outputs), None)

    def ancestors(self, layer: Layer) -> list[Layer]:
        """Returns `layer` and the layers that it depends on, in their order."""
        needed = set(layer.outputs)
        found = []
        for candidate in reversed(self.layers):
            if needed & set(candidate.outputs):
                found.append(candidate)
                needed |= set(candidate.reads)
        return found[::-1]


def load_layers(path: Path, shapes: Mapping[str, Sequence[int]]) -> LayeredModel:
    """Reads the layers of the model `path`, in its form in ONNX, with the input shapes `shapes`.

    Only layers that the outputs depend on are among them. Raises what `import_model` raises.
    """
    walked = walk_model(path, shapes=shapes)
    env, graph = walked.walker.env, walked.proto.graph
    makers = {o: node for node in graph.node for o in node.output if isinstance(env.get(o), list)}
    needed = {o.name for o in graph.output}
    layers = []
    for node in reversed(graph.node):
        outputs = tuple(o for o in node.output if o and _at_run_time(env.get(o)))
        if not needed & set(outputs):
            continue
        nodes, reads = _with_makers(node, makers)
        reads = tuple(r for r in reads if _at_run_time(env.get(r)))
        layers.append(Layer(node.name or outputs[0], node.op_type, reads, outputs, nodes))
        needed |= set(reads)
    constants = {
        name: item.const
        for name, item in env.items()
        if isinstance(item, Value) and item.const is not None
    }
    results = tuple(o.name for o in graph.output if _at_run_time(env.get(o.name)))
    return LayeredModel(
        path=open_source(path).onnx,
        layers=tuple(layers[::-1]),
        constants=constants,
        outputs=results,
        quantised=is_quantised(walked.proto),
    )


def _at_run_time(item: Any) -> bool:
    """Whether a tensor in a walker's environment is computed on the device."""
    return isinstance(item, Value) and item.const is None


def _with_makers(
    node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto]
) -> tuple[tuple[onnx.NodeProto, ...], tuple[str, ...]]:
    """`node` after those that make the sequences it reads, and the tensors that they all read."""
    nodes: list[onnx.NodeProto] = []
    reads: dict[str, None] = {}

    def enter(current: onnx.NodeProto) -> None:
        for name in names_read(current):
            maker = makers.get(name)
            if maker is None:
                reads[name] = None
            elif all(maker is not seen for seen in nodes):
                enter(maker)
        nodes.append(current)

    enter(node)
    return tuple(nodes), tuple(reads)


def names_read(node: onnx.NodeProto) -> list[str]:
    """Returns the tensors that `node` reads, its subgraphs included."""
    names = [i for i in node.input if i]
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            inside = {i.name for i in graph.input} | {t.name for t in graph.initializer}
            for inner in graph.node:
                names += [n for n in names_read(inner) if n not in inside]
                inside |= set(inner.output)
            names += [o.name for o in graph.output if o.name not in inside]
    return names


def cut_model(
    model: LayeredModel,
    layers: Iterable[Layer],
    values: Mapping[str, np.ndarray[Any, Any]],
    outputs: Sequence[str],
) -> onnx.ModelProto:
    """Returns a model of some `layers` that computes the tensors `outputs`.

    What the layers read and do not compute become inputs, of the shapes and types in `values`.
    """
    unique = {id(node): node for layer in layers for node in layer.nodes}
    protos = list(unique.values())
    computed = {o for node in protos for o in node.output}
    original = onnx.load(model.path, load_external_data=False)
    inputs, initializers = [], []
    for name in dict.fromkeys(n for proto in protos for n in names_read(proto)):
        if name in computed:
            continue
        if name in model.constants:
            initializers.append(numpy_helper.from_array(np.asarray(model.constants[name]), name))
        else:
            inputs.append(_info(name, values[name]))
    infos = [_info(name, values[name]) for name in outputs]
    graph = helper.make_graph(protos, "cut", inputs, infos, initializers)
    return helper.make_model(
        graph,
        opset_imports=original.opset_import,
        functions=original.functions,
        ir_version=original.ir_version,
    )


def _info(name: str, array: np.ndarray[Any, Any]) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, kind, array.shape)
