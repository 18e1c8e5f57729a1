"""Emits the core graph as Relax: one expression per node, each checked against the graph's types.

Relax is written directly, and not through TVM's ONNX importer, because the graph is static and
small in words here: what is emitted is known to be right on every target, no packed function of
TVM's runtime is called, and weights go into the module one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax, te
from tvm.relax import op as R

from edgesdk.errors import ModelError
from edgesdk.frontend import kernels
from edgesdk.frontend.graph import Graph, Node, Value

Emit = Callable[["_Emitter", Node, list[Any]], Any]
_EMITTERS: dict[str, Emit] = {}


def emit_module(graph: Graph, names: dict[int, str]) -> tvm.IRModule:
    """Returns a module whose `main` computes `graph`.

    `names` gives the identifier of each value by its `id`. Constants are released from the graph
    as they enter the module. Raises ModelError when TVM infers another type than ONNX does.
    """
    return _Emitter(names).run(graph)


class _Emitter:
    def __init__(self, names: dict[int, str]) -> None:
        self.bb = relax.BlockBuilder()
        self.names = names
        self.exprs: dict[int, Any] = {}

    def run(self, graph: Graph) -> tvm.IRModule:
        for given in graph.inputs:
            kind = relax.TensorType(given.shape, given.dtype.name)
            self.exprs[id(given)] = relax.Var(self.names[id(given)], kind)
        params = [self.exprs[id(v)] for v in graph.inputs]
        last_use = {id(v): node for node in graph.nodes for v in node.inputs if v is not None}
        with self.bb.function("main", params):
            with self.bb.dataflow():
                for node in graph.nodes:
                    self.node(node)
                    for value in node.inputs:
                        if value is not None and last_use[id(value)] is node:
                            self.release(value, graph)
                outputs = self.outputs(graph)
                result = outputs[0] if len(outputs) == 1 else relax.Tuple(outputs)
                result = self.bb.emit_output(result)
            self.bb.emit_func_output(result)
        return self.bb.get()

    def release(self, value: Value, graph: Graph) -> None:
        if value.const is not None and all(value is not o for o in graph.outputs):
            value.const = None
            self.exprs.pop(id(value), None)

    def outputs(self, graph: Graph) -> list[Any]:
        """The outputs, each a tensor of its own: an input or a second output is copied."""
        seen = {id(v) for v in graph.inputs}
        results = []
        for value in graph.outputs:
            expr = self.expr(value)
            if id(value) in seen:
                expr = self.bb.emit_te(_copied, expr, primfunc_name_hint="copy")
            seen.add(id(value))
            results.append(expr)
        return results

    def expr(self, value: Value) -> Any:
        if id(value) not in self.exprs:
            assert value.const is not None
            array = np.ascontiguousarray(value.const).reshape(value.shape)
            self.exprs[id(value)] = relax.const(array, value.dtype.name)
        return self.exprs[id(value)]

    def node(self, node: Node) -> None:
        emit = _EMITTERS.get(node.op)
        if emit is None:
            raise ModelError(f"node {node.origin!r}: {node.op} is left over after the repairs")
        args = [self.argument(node, i, v) for i, v in enumerate(node.inputs)]
        try:
            result = emit(self, node, args)
            result = self.bb.normalize(result)
        except (RuntimeError, ValueError, TypeError) as error:
            text = " ".join(str(error).split())[-200:]
            raise ModelError(f"node {node.origin!r}: TVM refuses {node.op}: {text}") from error
        self.check(node, result)
        name = self.names[id(node.outputs[0])]
        self.exprs[id(node.outputs[0])] = self.bb.emit(result, name_hint=name)

    def argument(self, node: Node, index: int, value: Value | None) -> Any:
        if value is None:
            return None
        return value.const if index in _VALUES.get(node.op, ()) else self.expr(value)

    def check(self, node: Node, result: Any) -> None:
        want = node.outputs[0]
        shape = tuple(int(d) for d in result.ty.shape)
        if shape != want.shape or str(result.ty.dtype) != want.dtype.name:
            raise ModelError(
                f"node {node.origin!r}: TVM makes {node.op} {result.ty.dtype}{list(shape)}"
                f" where ONNX says {want.dtype.name}{list(want.shape)}",
                hint="this is a defect of edgesdk: please report it with the model",
            )


def _copied(x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda *i: x(*i), name="copy")


# Inputs that Relax wants as plain numbers, by operator and position.
_VALUES = {
    "Reshape": (1,), "Expand": (1,), "Tile": (1,), "Slice": (1, 2, 3, 4), "Pad": (1, 2),
    "ReduceSum": (1,), "ReduceMax": (1,), "ReduceMin": (1,),
    "ReduceMean": (1,), "ReduceProd": (1,),
}  # fmt: skip


def emits(*kinds: str) -> Callable[[Emit], Emit]:
    def register(function: Emit) -> Emit:
        for kind in kinds:
            _EMITTERS[kind] = function
        return function

    return register


def _simple(kind: str, function: Callable[..., Any]) -> None:
    _EMITTERS[kind] = lambda emitter, node, args: function(*args)


for _kind, _function in {
    "Abs": R.abs, "Neg": R.negative, "Sqrt": R.sqrt, "Exp": R.exp, "Log": R.log, "Sin": R.sin,
    "Cos": R.cos, "Tan": R.tan, "Asin": R.asin, "Acos": R.acos, "Atan": R.atan, "Sinh": R.sinh,
    "Cosh": R.cosh, "Asinh": R.asinh, "Acosh": R.acosh, "Atanh": R.atanh, "Sigmoid": R.sigmoid,
    "Tanh": R.tanh, "Erf": R.erf, "Floor": R.floor, "Ceil": R.ceil, "Round": R.round,
    "Not": R.logical_not, "IsNaN": R.isnan, "IsInf": R.isinf,
    "BitwiseNot": R.bitwise_not,
    "Add": R.add, "Sub": R.subtract, "Mul": R.multiply, "Div": R.divide, "Pow": R.power,
    "And": R.logical_and, "Or": R.logical_or, "Xor": R.logical_xor, "Equal": R.equal,
    "Greater": R.greater, "Less": R.less, "GreaterOrEqual": R.greater_equal,
    "LessOrEqual": R.less_equal, "BitwiseAnd": R.bitwise_and, "BitwiseOr": R.bitwise_or,
    "BitwiseXor": R.bitwise_xor, "Where": R.where,
}.items():  # fmt: skip
    _simple(_kind, _function)


@emits("Reciprocal")
def _reciprocal(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    return R.divide(relax.const(1, node.outputs[0].dtype.name), args[0])


@emits("Max", "Min")
def _extreme(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    """NaN wins, as in ONNX Runtime; LLVM's maximum would lose it."""
    x, y = args
    if not node.outputs[0].is_float:
        return (R.maximum if node.op == "Max" else R.minimum)(x, y)
    for number, other, operand in ((0, x, y), (1, y, x)):
        source = node.inputs[number]
        constant = source.const if source is not None else None
        if constant is not None and not np.isnan(constant).any():
            # The constant first: generated code compares and selects, and so hands NaN on.
            return (R.maximum if node.op == "Max" else R.minimum)(other, operand)
    before = (R.greater if node.op == "Max" else R.less)(x, y)
    return R.where(R.logical_or(before, R.isnan(x)), x, y)


@emits("Mod")
def _mod(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    return (R.mod if node.attrs.get("fmod") else R.floor_mod)(*args)


@emits("BitShift")
def _bit_shift(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    return (R.left_shift if node.attrs["direction"] == "LEFT" else R.right_shift)(*args)


@emits("Clip")
def _clip(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    x, low, high = [*args, None, None][:3]
    if low is not None:  # the bound first: see _extreme
        x = R.maximum(low, x)
    return x if high is None else R.minimum(high, x)


@emits("Relu")
def _relu(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    return R.maximum(relax.const(0, node.outputs[0].dtype.name), args[0])


@emits("Sign")
def _sign(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    dtype = node.outputs[0].dtype
    zero, one = (relax.const(v, dtype.name) for v in (0, 1))
    positive = R.greater(args[0], zero)
    if dtype.kind == "u":
        return R.where(positive, one, zero)
    rest = R.where(R.less(args[0], zero), relax.const(-1, dtype.name), args[0])
    return R.where(positive, one, rest)


@emits("Cast")
def _cast(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    source, target = node.inputs[0], node.outputs[0].dtype
    assert source is not None
    if target == np.bool_:
        return R.not_equal(args[0], relax.const(0, source.dtype.name))
    x = args[0]
    if source.is_float and target.kind == "u" and target.itemsize < 8:
        # A negative float has no unsigned value in LLVM; ONNX Runtime wraps it around.
        x = R.astype(x, "int64" if target.itemsize == 4 else "int32")
    return R.astype(x, target.name)


@emits("LeakyRelu")
def _leaky_relu(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    return R.nn.leakyrelu(args[0], node.attrs["alpha"])


def _wide(node: Node, x: Any) -> Any:
    """Half precision is summed in single precision, as ONNX Runtime does."""
    return R.astype(x, "float32") if node.outputs[0].dtype == np.float16 else x


def _narrow(node: Node, x: Any) -> Any:
    return R.astype(x, "float16") if node.outputs[0].dtype == np.float16 else x


@emits("MatMul")
def _matmul(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    wide = "float32" if node.outputs[0].dtype == np.float16 else None
    return _narrow(node, R.matmul(args[0], args[1], out_dtype=wide))


@emits("Softmax", "LogSoftmax")
def _softmax(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    function = R.nn.softmax if node.op == "Softmax" else R.nn.log_softmax
    return _narrow(node, function(_wide(node, args[0]), axis=node.attrs["axis"]))


@emits("ReduceSum", "ReduceMean", "ReduceProd")
def _reduce(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    function = {"ReduceSum": R.sum, "ReduceMean": R.mean, "ReduceProd": R.prod}[node.op]
    axes, keepdims = [int(a) for a in args[1]], bool(node.attrs["keepdims"])
    return _narrow(node, function(_wide(node, args[0]), axes, keepdims))


@emits("ReduceMax", "ReduceMin")
def _reduce_extreme(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    return emitter.bb.call_te(
        kernels.reduce_extreme,
        args[0],
        [int(a) for a in args[1]],
        bool(node.attrs["keepdims"]),
        node.op == "ReduceMin",
        primfunc_name_hint="max" if node.op == "ReduceMax" else "min",
    )


@emits("ArgMax", "ArgMin")
def _arg(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    return emitter.bb.call_te(
        kernels.arg_extreme,
        args[0],
        node.attrs["axis"],
        bool(node.attrs["keepdims"]),
        node.op == "ArgMin",
        primfunc_name_hint=node.op.lower(),
    )


@emits("Transpose")
def _transpose(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    return R.permute_dims(args[0], node.attrs["perm"])


@emits("Reshape")
def _reshape(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    return R.reshape(args[0], node.outputs[0].shape)


@emits("Expand")
def _expand(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    return R.broadcast_to(args[0], node.outputs[0].shape)


@emits("Tile")
def _tile(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    return R.tile(args[0], [int(r) for r in args[1]])


@emits("Concat")
def _concat(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    return R.concat(args, node.attrs["axis"])


@emits("Slice")
def _slice(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    starts, stops, axes, steps = ([int(i) for i in a] for a in args[1:5])
    return R.strided_slice(args[0], axes, starts, stops, steps, assume_inbound=True)


@emits("Pad")
def _pad(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    rank = len(node.outputs[0].shape)
    amounts = [int(p) for p in args[1]]
    value = args[2].item()
    return emitter.bb.call_te(
        kernels.pad, args[0], amounts[:rank], amounts[rank:], value, primfunc_name_hint="pad"
    )


@emits("Gather")
def _gather(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    indices = node.inputs[1]
    checked = indices is not None and indices.const is not None
    return emitter.bb.call_te(
        kernels.take, *args, node.attrs["axis"], checked, primfunc_name_hint="take"
    )


@emits("GatherElements")
def _gather_elements(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    return emitter.bb.call_te(
        kernels.gather_elements, *args, node.attrs["axis"], primfunc_name_hint="gather_elements"
    )


@emits("ScatterElements")
def _scatter_elements(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    reduction = {"none": "update"}.get(node.attrs["reduction"], node.attrs["reduction"])
    return R.scatter_elements(*args, axis=node.attrs["axis"], reduction=reduction)


@emits("Conv", "ConvTranspose")
def _conv(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    flat = len(node.outputs[0].shape) == 4
    if node.op == "Conv":
        function = R.nn.conv2d if flat else R.nn.conv3d
    else:
        function = R.nn.conv2d_transpose if flat else R.nn.conv3d_transpose
    half = node.outputs[0].dtype == np.float16
    result = function(
        args[0],
        args[1],
        strides=node.attrs["strides"],
        padding=node.attrs["pads"],
        dilation=node.attrs["dilations"],
        groups=node.attrs["group"],
        out_dtype="float32" if half else None,
    )
    return _narrow(node, result)


@emits("MaxPool")
def _max_pool(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    n = len(node.attrs["kernel_shape"])
    pads = node.attrs["pads"]
    if n == 2:  # its kernel is chosen with the layout (edgesdk.schedules)
        return R.nn.max_pool2d(
            args[0],
            node.attrs["kernel_shape"],
            strides=node.attrs["strides"],
            padding=pads,
            dilation=node.attrs["dilations"],
        )
    return emitter.bb.call_te(
        kernels.max_pool,
        args[0],
        node.attrs["kernel_shape"],
        node.attrs["strides"],
        node.attrs["dilations"],
        pads[:n],
        pads[n:],
        primfunc_name_hint=f"max_pool{n}d",
    )


@emits("AveragePool")
def _average_pool(emitter: _Emitter, node: Node, args: list[Any]) -> Any:
    function = R.nn.avg_pool2d if len(node.outputs[0].shape) == 4 else R.nn.avg_pool3d
    result = function(
        _wide(node, args[0]),
        node.attrs["kernel_shape"],
        strides=node.attrs["strides"],
        padding=node.attrs["pads"],
    )
    return _narrow(node, result)


def emitted_operators() -> frozenset[str]:
    """The operators of the core set."""
    return frozenset(_EMITTERS)
