"""Random valid graphs of common operators, compiled as a user would, against ONNX Runtime.

`graphs` is a hypothesis strategy; `check` compiles and runs a graph and says what is wrong. Every
node is computed by ONNX Runtime while the graph grows, so that only valid nodes with sane numbers
stay. Operators with jumps (Floor, ArgMax, ...) read only tensors that no rounding has touched:
otherwise a difference of one unit in the last place would become one of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hypothesis import assume
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from edgesdk.compiler import gate
from edgesdk.compiler.probe import Probe
from edgesdk.errors import UnsupportedModelError
from edgesdk.frontend import Reference
from edgesdk.numerics import compare, tolerance_of
from edgesdk.profiles import load_target
from edgesdk.toolchain import load_toolchain

OPSET = 20
LARGEST_ELEMENTS = 20_000
LARGEST_NUMBER = 1e4
# An output that changes by more than this when its inputs change in their last place says nothing.
WORST_CONDITION = 2e-4

Array = np.ndarray[Any, Any]


@dataclass
class Tensor:
    """A tensor of the graph. `exact` says that its numbers have not been rounded."""

    name: str
    array: Array
    exact: bool


@dataclass
class RandomGraph:
    """A graph while it grows, and the model at the end."""

    draw: Callable[[Any], Any]
    tensors: list[Tensor] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    inputs: dict[str, Array] = field(default_factory=dict)

    def pick(self, items: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(items)))

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def tensor(self, accept: Callable[[Tensor], bool] = lambda t: True) -> Tensor:
        """One of the tensors so far that fits, late ones more often; Unfit if there is none."""
        fitting = [t for t in self.tensors if accept(t)]
        if not fitting:
            raise Unfit
        return fitting[-1 - min(self.integer(0, 2 * len(fitting)) // 2, len(fitting) - 1)]

    def floats(self, *shape: int, scale: float = 1.0) -> Array:
        """Multiples of 1/8, so that equal numbers occur; chosen by one drawn seed."""
        rng = np.random.default_rng(self.integer(0, 2**16))
        return (np.round(rng.standard_normal(shape) * 8).clip(-32, 32) / 8 * scale).astype(
            np.float32
        )

    def integers(self, low: int, high: int, shape: Sequence[int], dtype: Any = np.int64) -> Array:
        rng = np.random.default_rng(self.integer(0, 2**16))
        return np.asarray(rng.integers(low, high, shape), dtype)

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.asarray(values, np.int64))

    def add(self, kind: str, *inputs: Tensor | str, outputs: int = 1, **attrs: Any) -> None:
        """Appends a node if ONNX Runtime computes it to something sane."""
        names = [i.name if isinstance(i, Tensor) else i for i in inputs]
        out = [f"t{len(self.nodes)}_{i}" for i in range(outputs)]
        node = helper.make_node(kind, names, out, name=f"n{len(self.nodes)}", **attrs)
        read = [i for i in inputs if isinstance(i, Tensor)]
        arrays = _computed(node, {t.name: t.array for t in read}, self.constants)
        if arrays is None or any(a.size > LARGEST_ELEMENTS for a in arrays):
            raise Unfit
        if kind != "Slice" and any(a.size == 0 for a in arrays):
            raise Unfit  # windows larger than what they slide over are refused
        for array in arrays:
            if array.dtype.kind == "f" and not np.all(np.abs(array) <= LARGEST_NUMBER):
                raise Unfit
        exact = all(t.exact for t in read) and kind in _EXACT
        self.nodes.append(node)
        self.tensors += [
            Tensor(n, a, exact or a.dtype.kind != "f") for n, a in zip(out, arrays, strict=True)
        ]

    def model(self) -> onnx.ModelProto:
        """The model; every tensor that no node reads is an output."""
        read = {i for node in self.nodes for i in node.input}
        outputs = [
            helper.make_tensor_value_info(t.name, _kind(t.array), t.array.shape)
            for t in self.tensors
            if t.name not in read and t.name not in self.inputs
        ]
        inputs = [
            helper.make_tensor_value_info(n, _kind(a), a.shape) for n, a in self.inputs.items()
        ]
        weights = [numpy_helper.from_array(a, n) for n, a in self.constants.items() if n in read]
        graph = helper.make_graph(self.nodes, "random", inputs, outputs, weights)
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9
        )


class Unfit(Exception):
    """The operator that was drawn has no place in this graph."""


@dataclass(frozen=True)
class Example:
    """A model and what goes in."""

    model: onnx.ModelProto
    inputs: dict[str, Array]

    def __repr__(self) -> str:
        return onnx.printer.to_text(self.model)


@st.composite
def graphs(draw: Any, nodes: int = 12) -> Example:
    """Draws a graph of up to `nodes` nodes with one or two inputs, and the inputs."""
    graph = RandomGraph(draw)
    for index in range(graph.integer(1, 2)):
        rank = graph.pick([4, 4, 2, 3, 1, 5, 0])
        shape = [graph.integer(1, 6 if rank > 3 else 9) for _ in range(rank)]
        kind = graph.pick(["float32"] * 6 + ["int64", "int32", "bool", "uint8"])
        array = graph.floats(*shape)
        if kind != "float32":
            array = np.abs(array).astype(kind) if kind == "uint8" else array.astype(kind)
        graph.inputs[f"x{index}"] = array
        graph.tensors.append(Tensor(f"x{index}", array, True))
    for _ in range(graph.integer(1, nodes)):
        try:
            OPERATORS[graph.pick(sorted(OPERATORS))](graph)
        except Unfit:
            continue
    assume(graph.nodes)
    return Example(graph.model(), graph.inputs)


def check(example: Example, folder: Path) -> str:
    """Compiles and runs `example`; returns what is wrong, "" if nothing is.

    A refusal counts as wrong: all of these operators are supported.
    """
    path = folder / "random.onnx"
    onnx.save(example.model, path)
    shapes = {n: a.shape for n, a in example.inputs.items()}
    reference = Reference(path, shapes)
    expected = reference.run(example.inputs)
    other = Reference(path, shapes, optimise=False).run(example.inputs)
    moved = reference.run({n: _moved(a) for n, a in example.inputs.items()})
    profile = load_target("local")
    probe = Probe(profile, gate.executor(profile, load_toolchain(profile.toolchain)))
    try:
        actual = probe.run(path, example.inputs)
    except UnsupportedModelError as error:
        return f"refused: {error.message}"
    for name, array in expected.items():
        condition = compare(name, moved[name], array).max_relative_error
        if array.dtype.kind == "f" and condition > WORST_CONDITION:
            continue
        difference = compare(name, actual[name], array)
        tolerance = max(tolerance_of({name: array}, other), 4 * condition)
        if not difference.within(tolerance):
            return f"{name} {difference.describe(tolerance)}"
    return ""


def _moved(array: Array) -> Array:
    """The same numbers, floats a few units in the last place away."""
    return array * np.float32(1 + 2**-21) if array.dtype == np.float32 else array


def _computed(
    node: onnx.NodeProto, inputs: dict[str, Array], constants: dict[str, Array]
) -> list[Array] | None:
    import onnxruntime

    weights = [numpy_helper.from_array(constants[n], n) for n in node.input if n in constants]
    infos = [helper.make_tensor_value_info(n, _kind(a), a.shape) for n, a in inputs.items()]
    outputs = [onnx.ValueInfoProto(name=o) for o in node.output]
    graph = helper.make_graph([node], "one", infos, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return [np.asarray(a) for a in session.run(None, inputs)]
    except Exception:
        return None


def _kind(array: Array) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def _is_float(t: Tensor) -> bool:
    return t.array.dtype == np.float32


def _exact_float(t: Tensor) -> bool:
    return _is_float(t) and t.exact


def _ranked(*ranks: int) -> Callable[[Tensor], bool]:
    return lambda t: _is_float(t) and t.array.ndim in ranks and t.array.size > 0


# Results are numbers of the input, or exact where the input is.
_NAMES = """
Abs Neg Relu Max Min Identity Reshape Transpose Concat Split Slice Gather GatherElements Pad Squeeze
Unsqueeze Expand Tile Flatten Clip MaxPool ReduceMax ReduceMin Where Cast Trilu DepthToSpace
SpaceToDepth TopK Floor Ceil Round Sign Not Equal Greater Less ArgMax And Or Shape OneHot ScatterND
"""
_EXACT = frozenset(_NAMES.split())
OPERATORS: dict[str, Callable[[RandomGraph], None]] = {}


def operator(*kinds: str) -> Callable[[Any], Any]:
    """Registers a function (graph, kind) that appends a node of one of `kinds`."""

    def register(function: Callable[[RandomGraph, str], None]) -> Any:
        for kind in kinds:
            OPERATORS[kind] = lambda graph, k=kind: function(graph, k)
        return function

    return register


@operator("Abs", "Neg", "Relu", "Sigmoid", "Tanh", "Exp", "Erf", "Softplus", "Sin", "Cos")
def _unary(g: RandomGraph, kind: str) -> None:
    g.add(kind, g.tensor(_is_float))


@operator("HardSwish", "HardSigmoid", "Elu", "Selu", "Gelu", "LeakyRelu", "Mish", "Softsign")
def _activation(g: RandomGraph, kind: str) -> None:
    g.add(kind, g.tensor(_is_float))


@operator("Floor", "Ceil", "Round", "Sign")
def _jump(g: RandomGraph, kind: str) -> None:
    g.add(kind, g.tensor(_exact_float))


@operator("Sqrt", "Log")
def _positive(g: RandomGraph, kind: str) -> None:
    x = g.tensor(lambda t: _is_float(t) and t.array.size > 0 and bool(np.all(t.array > 0.01)))
    g.add(kind, x)


@operator("Add", "Sub", "Mul", "Max", "Min")
def _binary(g: RandomGraph, kind: str) -> None:
    numeric = g.tensor(lambda t: t.array.dtype.kind in "fi")
    if g.integer(0, 1):
        other = g.tensor(lambda t: t.array.dtype == numeric.array.dtype)
        g.add(kind, *g.pick([(numeric, other), (other, numeric)]))
        return
    axes = [d if g.integer(0, 1) else 1 for d in numeric.array.shape]
    shape = axes[g.integer(0, len(axes)) :]
    array = g.floats(*shape).astype(numeric.array.dtype)
    constant = g.constant(array)
    g.add(kind, *g.pick([(numeric, constant), (constant, numeric)]))


@operator("Div", "Pow")
def _by_constant(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_is_float)
    value = g.pick([0.5, 2.0, 3.0, 1.0] if kind == "Pow" else [0.25, -3.0, 7.0])
    if kind == "Pow" and value == 0.5 and np.any(x.array < 0):
        value = 2.0
    g.add(kind, x, g.constant(np.float32(value)))


@operator("Greater", "Less", "Equal")
def _comparison(g: RandomGraph, kind: str) -> None:
    x = g.tensor(lambda t: t.exact and t.array.dtype.kind in "fi")
    y = g.tensor(lambda t: t.exact and t.array.dtype == x.array.dtype)
    g.add(kind, x, y)


@operator("Not", "And", "Or", "Xor")
def _logic(g: RandomGraph, kind: str) -> None:
    x = g.tensor(lambda t: t.array.dtype == np.bool_)
    g.add(kind, *([x] if kind == "Not" else [x, g.tensor(lambda t: t.array.dtype == np.bool_)]))


@operator("Where")
def _where(g: RandomGraph, kind: str) -> None:
    condition = g.tensor(lambda t: t.array.dtype == np.bool_)
    x = g.tensor(lambda t: t.array.dtype.kind in "fi")
    g.add(kind, condition, x, g.tensor(lambda t: t.array.dtype == x.array.dtype))


@operator("Cast")
def _cast(g: RandomGraph, kind: str) -> None:
    x = g.tensor(lambda t: t.exact)
    kinds = ["float32", "int32", "int64", "bool"]
    if np.all(x.array >= 0):
        kinds.append("uint8")
    g.add(kind, x, to=_kind(np.empty(0, g.pick(kinds))))


@operator("Clip")
def _clip(g: RandomGraph, kind: str) -> None:
    low, high = g.pick([(-1.0, 1.0), (0.0, 6.0), (-0.5, 0.25)])
    g.add(kind, g.tensor(_is_float), g.constant(np.float32(low)), g.constant(np.float32(high)))


@operator("PRelu")
def _prelu(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(2, 3, 4))
    g.add(kind, x, g.constant(g.floats(x.array.shape[1], *[1] * (x.array.ndim - 2))))


@operator("Conv", "ConvTranspose")
def _conv(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(3, 4, 5))
    n = x.array.ndim - 2
    channels = x.array.shape[1]
    group = g.pick([d for d in range(1, channels + 1) if channels % d == 0])
    kernel = [g.integer(1, 3) for _ in range(n)]
    each = g.integer(1, 3)
    if kind == "Conv":
        weight = g.floats(group * each, channels // group, *kernel, scale=0.25)
    else:
        weight = g.floats(channels, each, *kernel, scale=0.25)
    attrs: dict[str, Any] = {"group": group, "strides": [g.integer(1, 2) for _ in range(n)]}
    attrs["dilations"] = [g.integer(1, 2) for _ in range(n)]
    if g.integer(0, 3) == 0:
        attrs["auto_pad"] = g.pick(["SAME_UPPER", "SAME_LOWER", "VALID"])
        if kind == "ConvTranspose" or attrs["auto_pad"] != "VALID":
            attrs["dilations"] = [1] * n
    else:
        attrs["pads"] = [g.integer(0, 2) for _ in range(2 * n)]
    inputs: list[Tensor | str] = [x, g.constant(weight)]
    if g.integer(0, 1):
        inputs.append(g.constant(g.floats(group * each)))
    g.add(kind, *inputs, **attrs)


@operator("MaxPool", "AveragePool", "LpPool")
def _pool(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(3, 4, 5))
    n = x.array.ndim - 2
    kernel = [g.integer(1, 3) for _ in range(n)]
    attrs: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": [g.integer(1, 3) for _ in range(n)],
        "ceil_mode": g.integer(0, 1),
    }
    if g.integer(0, 2):
        attrs["pads"] = [g.integer(0, k - 1) for k in kernel * 2]
    pads = attrs.get("pads", [0] * (2 * n))
    sizes = [d + pads[i] + pads[i + n] for i, d in enumerate(x.array.shape[2:])]
    if any(k > size for k, size in zip(kernel, sizes, strict=True)) and not attrs["ceil_mode"]:
        raise Unfit  # ONNX Runtime rounds towards zero here, ONNX down: refused
    if kind == "AveragePool":
        attrs["count_include_pad"] = g.integer(0, 1)
    g.add(kind, x, **attrs)


@operator("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(g: RandomGraph, kind: str) -> None:
    g.add(kind, g.tensor(_ranked(3, 4, 5)))


@operator("BatchNormalization", "InstanceNormalization")
def _normalise(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(3, 4, 5) if kind[0] == "I" else _ranked(2, 3, 4))
    channels = x.array.shape[1]
    weights = [g.floats(channels), g.floats(channels)]
    if kind[0] == "B":
        weights += [g.floats(channels), np.abs(g.floats(channels)) + np.float32(0.5)]
    g.add(kind, x, *map(g.constant, weights))


@operator("LayerNormalization")
def _layer_norm(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(2, 3, 4))
    axis = g.integer(1, x.array.ndim - 1)
    shape = x.array.shape[axis:]
    g.add(kind, x, g.constant(g.floats(*shape)), g.constant(g.floats(*shape)), axis=axis)


@operator("LRN")
def _lrn(g: RandomGraph, kind: str) -> None:
    g.add(kind, g.tensor(_ranked(4)), size=g.pick([1, 3, 5]))


@operator("Softmax", "LogSoftmax")
def _softmax(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(1, 2, 3, 4))
    g.add(kind, x, axis=g.integer(-x.array.ndim, x.array.ndim - 1))


@operator("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2")
def _reduce(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(1, 2, 3, 4, 5))
    axes = [a for a in range(x.array.ndim) if g.integer(0, 1)]
    keep = g.integer(0, 1)
    g.add(kind, x, *([g.ints(*axes)] if axes else []), keepdims=keep)


@operator("ArgMax", "ArgMin")
def _arg(g: RandomGraph, kind: str) -> None:
    x = g.tensor(lambda t: _exact_float(t) and t.array.ndim > 0 and t.array.size > 0)
    g.add(kind, x, axis=g.integer(0, x.array.ndim - 1), keepdims=g.integer(0, 1))


@operator("MatMul")
def _matmul(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(2, 3, 4))
    columns = g.integer(1, 9)
    shape = [x.array.shape[-1], columns]
    if x.array.ndim > 2 and g.integer(0, 1):
        shape = [*x.array.shape[:-2], *shape]
    g.add(kind, x, g.constant(g.floats(*shape, scale=0.25)))


@operator("Gemm")
def _gemm(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(2))
    turned, columns = g.integer(0, 1), g.integer(1, 9)
    rows = x.array.shape[0 if turned else 1]
    weight = g.floats(*g.pick([(rows, columns), (columns, rows)]), scale=0.25)
    trans_b = int(weight.shape[0] != rows or (weight.shape[1] == rows and g.integer(0, 1)))
    inputs: list[Tensor | str] = [x, g.constant(weight)]
    if g.integer(0, 1):
        inputs.append(g.constant(g.floats(weight.shape[0 if trans_b else 1])))
    g.add(kind, *inputs, transA=turned, transB=trans_b, alpha=g.pick([1.0, 0.5]))


@operator("Einsum")
def _einsum(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(3))
    weight = g.constant(g.floats(x.array.shape[2], g.integer(1, 5), scale=0.25))
    g.add(kind, x, weight, equation=g.pick(["abc,cd->abd", "abc,cd->bd", "abc,cd->dab"]))


@operator("Reshape")
def _reshape(g: RandomGraph, kind: str) -> None:
    x = g.tensor()
    dims = list(x.array.shape)
    g.add(kind, x, g.ints(*g.pick([[-1], [*dims[:1], -1], dims[::-1], [1, *dims], [-1, 1]])))


@operator("Flatten")
def _flatten(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(1, 2, 3, 4))
    g.add(kind, x, axis=g.integer(0, x.array.ndim))


@operator("Transpose")
def _transpose(g: RandomGraph, kind: str) -> None:
    x = g.tensor()
    g.add(kind, x, perm=g.draw(st.permutations(range(x.array.ndim))))


@operator("Concat")
def _concat(g: RandomGraph, kind: str) -> None:
    x = g.tensor(lambda t: t.array.ndim > 0)
    axis = g.integer(0, x.array.ndim - 1)

    def fits(t: Tensor) -> bool:
        same = [d for i, d in enumerate(t.array.shape) if i != axis]
        wanted = [d for i, d in enumerate(x.array.shape) if i != axis]
        return t.array.dtype == x.array.dtype and t.array.ndim == x.array.ndim and same == wanted

    g.add(kind, x, *(g.tensor(fits) for _ in range(g.integer(1, 2))), axis=axis)


@operator("Split")
def _split(g: RandomGraph, kind: str) -> None:
    x = g.tensor(lambda t: t.array.ndim > 0 and max(t.array.shape) > 1)
    axis = g.pick([i for i, d in enumerate(x.array.shape) if d > 1])
    first = g.integer(1, x.array.shape[axis] - 1)
    sizes = g.ints(first, x.array.shape[axis] - first)
    g.add(kind, x, sizes, axis=axis, outputs=2)


@operator("Slice")
def _slice(g: RandomGraph, kind: str) -> None:
    x = g.tensor(lambda t: t.array.ndim > 0)
    axis = g.integer(-x.array.ndim, x.array.ndim - 1)
    start, end, step = g.integer(-7, 7), g.integer(-9, 9), g.pick([1, 1, 2, -1, -2])
    g.add(kind, x, g.ints(start), g.ints(end), g.ints(axis), g.ints(step))


@operator("Gather")
def _gather(g: RandomGraph, kind: str) -> None:
    x = g.tensor(lambda t: t.array.ndim > 0 and t.array.size > 0)
    axis = g.integer(0, x.array.ndim - 1)
    shape = g.pick([(), (1,), (3,), (2, 2)])
    length = x.array.shape[axis]
    g.add(kind, x, g.constant(g.integers(-length, length, shape)), axis=axis)


@operator("GatherElements")
def _gather_elements(g: RandomGraph, kind: str) -> None:
    x = g.tensor(lambda t: t.array.ndim > 0 and t.array.size > 0)
    axis = g.integer(0, x.array.ndim - 1)
    indices = g.integers(0, x.array.shape[axis], x.array.shape)
    g.add(kind, x, g.constant(indices), axis=axis)


@operator("ScatterND")
def _scatter(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(1, 2, 3))
    rows = g.draw(st.permutations(range(x.array.shape[0])))[: g.integer(1, x.array.shape[0])]
    updates = g.floats(len(rows), *x.array.shape[1:])
    indices = np.asarray(rows, np.int64)[:, None]
    g.add(kind, x, g.constant(indices), g.constant(updates))


@operator("Pad")
def _pad(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(1, 2, 3, 4))
    mode = g.pick(["constant", "constant", "edge", "reflect"])
    low = -1 if mode == "constant" else 0
    amounts = [g.integer(low, 2) for _ in range(2 * x.array.ndim)]
    g.add(kind, x, g.ints(*amounts), mode=mode)


@operator("Squeeze", "Unsqueeze")
def _squeeze(g: RandomGraph, kind: str) -> None:
    if kind == "Unsqueeze":
        x = g.tensor(lambda t: t.array.ndim < 5)
        g.add(kind, x, g.ints(g.integer(-x.array.ndim - 1, x.array.ndim)))
    else:
        x = g.tensor(lambda t: 1 in t.array.shape)
        g.add(kind, x, g.ints(g.pick([i for i, d in enumerate(x.array.shape) if d == 1])))


@operator("Expand", "Tile")
def _repeat(g: RandomGraph, kind: str) -> None:
    x = g.tensor(lambda t: t.array.ndim > 0)
    if kind == "Tile":
        g.add(kind, x, g.ints(*(g.integer(1, 2) for _ in x.array.shape)))
    else:
        shape = [g.integer(1, 4) if d == 1 else d for d in x.array.shape]
        g.add(kind, x, g.ints(*g.pick([shape, [2, *shape]])))


@operator("Resize")
def _resize(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(4))
    mode = g.pick(["nearest", "linear", "cubic"])
    coordinates = g.pick(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
    scales = [1.0, 1.0, g.pick([2.0, 1.5, 0.6]), g.pick([2.0, 1.0, 0.75])]
    g.add(
        kind,
        x,
        "",
        g.constant(np.asarray(scales, np.float32)),
        mode=mode,
        coordinate_transformation_mode=coordinates,
    )


@operator("DepthToSpace", "SpaceToDepth")
def _depth(g: RandomGraph, kind: str) -> None:
    axis = 1 if kind == "DepthToSpace" else 2
    x = g.tensor(
        lambda t: _ranked(4)(t) and t.array.shape[axis] % 2 == 0 and t.array.shape[3] % 2 == 0
    )
    g.add(kind, x, blocksize=2)


@operator("TopK")
def _top_k(g: RandomGraph, kind: str) -> None:
    x = g.tensor(lambda t: _exact_float(t) and t.array.ndim > 0 and t.array.size > 0)
    axis = g.integer(0, x.array.ndim - 1)
    count = g.integer(1, x.array.shape[axis])
    g.add(kind, x, g.ints(count), axis=axis, largest=g.integer(0, 1), outputs=2)


@operator("CumSum")
def _cumsum(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(1, 2, 3))
    axis = g.constant(np.int64(g.integer(0, x.array.ndim - 1)))
    g.add(kind, x, axis, exclusive=g.integer(0, 1), reverse=g.integer(0, 1))


@operator("Trilu")
def _trilu(g: RandomGraph, kind: str) -> None:
    x = g.tensor(_ranked(2, 3))
    g.add(kind, x, g.constant(np.int64(g.integer(-2, 2))), upper=g.integer(0, 1))


@operator("OneHot")
def _one_hot(g: RandomGraph, kind: str) -> None:
    x = g.tensor(lambda t: t.array.dtype == np.int64 and t.array.ndim < 4)
    values = g.constant(np.asarray([0.5, 2.0], np.float32))
    g.add(kind, x, g.constant(np.int64(4)), values, axis=g.pick([-1, 0]))
