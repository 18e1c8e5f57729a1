"""The graph between ONNX and Relax: every shape static, every known value a constant.

`Builder` appends nodes in ONNX's words at one operator set (`CORE_OPSET`). What it is given as
constants it computes at once with ONNX Runtime, the same program that is the reference; a tensor
without elements is a constant too. So shape arithmetic, empty axes and constant branches vanish
while the graph is built, and what remains are the nodes that run on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
from onnx import helper, numpy_helper

# The operator set that the graph speaks: the youngest whose words the emitter knows.
CORE_OPSET = 21
# A tensor beyond this is a mistake in the shapes, not a model for a small device.
LARGEST_TENSOR_BYTES = 8 * 2**30
_OPSETS = [helper.make_opsetid("", CORE_OPSET)]
# Constants up to this many elements are shown to shape inference (Reshape's shape, axes, ...).
_SHAPE_DATA_LIMIT = 4096


class RefusedNodeError(Exception):
    """A node cannot be compiled; the text is the reason, for people."""


@dataclass(frozen=True, eq=False)
class Stored:
    """How a constant is stored in a quantised model: it is `numbers` * `scale`.

    `numbers` are int16, less their zero point; `scale` has as many dimensions, and broadcasts.
    """

    numbers: np.ndarray[Any, Any]
    scale: np.ndarray[Any, Any]

    def transposed(self, perm: Sequence[int]) -> Stored:
        return Stored(self.numbers.transpose(perm), self.scale.transpose(perm))

    def reshaped(self, shape: tuple[int, ...]) -> Stored | None:
        """None where the scales of the new shape are not one for each of its first axis."""
        numbers, scale = self.numbers.reshape(shape), self.scale
        if scale.size == 1:
            return Stored(numbers, scale.reshape((1,) * len(shape)))
        if scale.shape[0] != scale.size or not shape or shape[0] != scale.size:
            return None
        return Stored(numbers, scale.reshape(scale.size, *[1] * (len(shape) - 1)))


@dataclass(eq=False)
class Value:
    """A tensor: `shape` in elements, NumPy `dtype`, its content where known (`const`), and how that
    was quantised, if it was (`stored`)."""

    label: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    const: np.ndarray[Any, Any] | None = None
    producer: Node | None = None
    stored: Stored | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_float(self) -> bool:
        return self.dtype.kind == "f" or self.dtype.name == "bfloat16"


@dataclass(eq=False)
class Node:
    """One operation of the core set. `origin` is the model's own node that it came from."""

    op: str
    inputs: list[Value | None]
    attrs: dict[str, Any]
    outputs: list[Value] = field(default_factory=list)
    origin: str = ""


@dataclass
class Graph:
    """A whole model: nodes in an order in which they can run."""

    inputs: list[Value]
    outputs: list[Value]
    nodes: list[Node]


class Builder:
    """Appends nodes, infers their types and computes what is constant.

    Calling it, `b("Add", x, 1.0)`, appends a node and returns its only output; Python numbers
    become constants of the first tensor's type. Raises RefusedNodeError when an output has no
    static shape.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.origin = ""

    def constant(self, array: Any, label: str = "const") -> Value:
        """Returns `array` as a value, bytes untouched (a view where NumPy gives one)."""
        array = np.asarray(array)
        return Value(label, tuple(array.shape), array.dtype, array)

    def ints(self, items: Sequence[int]) -> Value:
        """Returns a one-dimensional int64 constant."""
        return self.constant(np.asarray(list(items), np.int64))

    def __call__(self, op: str, *inputs: Value | float | bool | None, **attrs: Any) -> Value:
        return self.many(op, *inputs, outputs=1, **attrs)[0]

    def many(
        self, op: str, *inputs: Value | float | bool | None, outputs: int, **attrs: Any
    ) -> list[Value]:
        """Appends a node with several outputs and returns them."""
        like = next((i for i in inputs if isinstance(i, Value)), None)
        if like is None:
            raise RefusedNodeError("all its inputs are missing")
        values = [
            self.constant(np.asarray(i, like.dtype)) if isinstance(i, int | float) else i
            for i in inputs
        ]
        node = Node(op, values, {k: v for k, v in attrs.items() if v is not None})
        known = all(v is None or v.const is not None for v in values)
        if known and op == "Reshape" and values[0] is not None and values[1] is not None:
            result = self.constant(_reshaped(values[0], values[1]))
            if values[0].stored is not None:
                result.stored = values[0].stored.reshaped(result.shape)
            return [result]
        if known:
            results = [self.constant(a) for a in evaluate(node, outputs)]
            if op == "Transpose" and values[0] is not None and values[0].stored is not None:
                perm = attrs.get("perm", range(values[0].rank)[::-1])
                results[0].stored = values[0].stored.transposed(perm)
            return results
        node.origin = self.origin
        for index, (shape, dtype) in enumerate(infer(node, outputs)):
            if dtype.isbuiltin != 1 and 0 not in shape:
                raise RefusedNodeError(f"its output is {dtype.name}, which is not supported")
            size_bytes = math.prod(shape) * dtype.itemsize
            if size_bytes > LARGEST_TENSOR_BYTES:
                raise RefusedNodeError(f"its output takes {size_bytes / 2**30:.0f} GiB")
            out = Value(f"{op.lower()}_{index}", shape, dtype, producer=node)
            if out.size == 0:
                out.const = np.empty(shape, dtype)
            node.outputs.append(out)
        if any(v.const is None for v in node.outputs):
            self.nodes.append(node)
        return node.outputs

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Returns `value` in the static `shape`; the same value when it has it already."""
        if value.shape == tuple(shape):
            return value
        return self("Reshape", value, self.ints(shape))

    def cast(self, value: Value, dtype: Any) -> Value:
        """Returns `value` converted to `dtype`; the same value when it has it already."""
        if value.dtype == np.dtype(dtype):
            return value
        return self("Cast", value, to=element_type(np.dtype(dtype)))

    def transpose(self, value: Value, perm: Sequence[int]) -> Value:
        """Returns `value` with its axes in the order `perm`."""
        if list(perm) == list(range(value.rank)):
            return value
        return self("Transpose", value, perm=list(perm))

    def slice(self, value: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
        """Returns elements `start` to before `stop` along `axis`, all within the tensor."""
        if start == 0 and stop == value.shape[axis] and step == 1:
            return value
        bounds = [self.ints([i]) for i in (start, stop, axis, step)]
        return self("Slice", value, *bounds)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Joins values along `axis`; those without elements change nothing."""
        filled = [v for v in values if v.size] or list(values[:1])
        return filled[0] if len(filled) == 1 else self("Concat", *filled, axis=axis)

    def take(self, value: Value, positions: Sequence[int], axis: int) -> Value:
        """Returns the slices of `value` at constant `positions` along `axis`."""
        return self("Gather", value, self.ints(positions), axis=axis)

    def expand(self, value: Value, shape: Sequence[int]) -> Value:
        """Broadcasts `value` to `shape`, which must be what broadcasting gives."""
        if value.shape == tuple(shape):
            return value
        return self("Expand", value, self.ints(shape))


def _reshaped(data: Value, target: Value) -> np.ndarray[Any, Any]:
    assert data.const is not None and target.const is not None
    dims = [int(d) for d in target.const]
    dims = [data.shape[i] if d == 0 and i < data.rank else d for i, d in enumerate(dims)]
    return data.const.reshape(dims)


def infer(node: Node, outputs: int) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Returns the static shape and type of each output, by ONNX's own inference.

    Raises RefusedNodeError when a dimension is not known before the model runs.
    """
    proto = _proto(node, outputs)
    types, data = {}, {}
    # ONNX has no convolution of int32, which quantised ones are made of here.
    integers = node.op == "Conv" and node.inputs[0] is not None and not node.inputs[0].is_float
    for name, value in zip(proto.input, node.inputs, strict=True):
        if value is None:
            continue
        kind = onnx.TensorProto.FLOAT if integers else element_type(value.dtype)
        types[name] = helper.make_tensor_type_proto(kind, value.shape)
        if value.const is not None and value.rank <= 1 and value.size <= _SHAPE_DATA_LIMIT:
            data[name] = numpy_helper.from_array(np.ascontiguousarray(value.const), name)
    try:
        schema = onnx.defs.get_schema(node.op, CORE_OPSET, "")
        found = onnx.shape_inference.infer_node_outputs(
            schema, proto, types, data, opset_imports=_OPSETS
        )
    except (
        onnx.shape_inference.InferenceError,
        onnx.checker.ValidationError,
        onnx.defs.SchemaError,
    ) as error:
        raise RefusedNodeError(f"its types do not fit: {_first_line(error)}") from error
    result = []
    for name in proto.output:
        tensor = found[name].tensor_type if name in found else onnx.TypeProto.Tensor()
        dims = list(tensor.shape.dim)
        if not tensor.HasField("shape") or any(not d.HasField("dim_value") for d in dims):
            raise RefusedNodeError("the shape of its output depends on values at run time")
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if integers and node.inputs[0] is not None:
            dtype = node.inputs[0].dtype
        result.append((tuple(d.dim_value for d in dims), np.dtype(dtype)))
    return result


def evaluate(node: Node, outputs: int) -> list[np.ndarray[Any, Any]]:
    """Computes a node whose inputs are all constant, with ONNX Runtime on the CPU.

    Raises RefusedNodeError when ONNX Runtime and ONNX's reference both refuse.
    """
    import onnxruntime
    from onnx.reference import ReferenceEvaluator

    proto = _proto(node, outputs)
    infos, initializers, feeds = [], [], {}
    for name, value in zip(proto.input, node.inputs, strict=True):
        if value is None or value.const is None:
            continue
        array = np.ascontiguousarray(value.const).reshape(value.shape)
        if array.dtype.isbuiltin == 1 and array.dtype.kind in "fiub":
            kind = element_type(array.dtype)
            infos.append(helper.make_tensor_value_info(name, kind, array.shape))
            feeds[name] = array
        else:  # 4-bit, 8-bit float and bfloat16 cannot be fed from NumPy
            initializers.append(numpy_helper.from_array(array, name))
    # ONNX Runtime infers the output's types; it only wants the names.
    graph = helper.make_graph(
        [proto], "one", infos, [onnx.ValueInfoProto(name=o) for o in proto.output], initializers
    )
    model = helper.make_model(graph, opset_imports=_OPSETS, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return [np.asarray(a) for a in session.run(None, feeds)]
    except Exception as error:
        try:
            return [np.asarray(a) for a in ReferenceEvaluator(model).run(None, feeds)]
        except Exception:
            raise RefusedNodeError(f"it cannot be computed: {_first_line(error)}") from error


def element_type(dtype: np.dtype[Any]) -> int:
    """Returns ONNX's number for a NumPy type."""
    return int(helper.np_dtype_to_tensor_dtype(dtype))


def _proto(node: Node, outputs: int) -> onnx.NodeProto:
    names = [f"i{i}" if v is not None else "" for i, v in enumerate(node.inputs)]
    proto = helper.make_node(node.op, names, [f"o{i}" for i in range(outputs)])
    for key, value in node.attrs.items():
        if isinstance(value, np.ndarray):
            value = numpy_helper.from_array(value, key)
        elif isinstance(value, list | tuple) and not value:
            proto.attribute.append(
                onnx.AttributeProto(name=key, type=onnx.AttributeProto.INTS, ints=[])
            )
            continue
        proto.attribute.append(helper.make_attribute(key, value))
    return proto


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."


def prune(graph: Graph) -> None:
    """Drops the nodes that no output needs."""
    needed: set[int] = {id(v) for v in graph.outputs}
    kept = []
    for node in reversed(graph.nodes):
        if any(id(o) in needed for o in node.outputs):
            kept.append(node)
            needed |= {id(v) for v in node.inputs if v is not None}
    graph.nodes = kept[::-1]
