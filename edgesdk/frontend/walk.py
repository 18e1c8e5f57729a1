"""Walks an ONNX model once and builds the static graph of core operators.

Functions are entered, `If`, `Loop` and `Scan` are unrolled where their condition or trip count is
constant, every other node goes to its repair. Nodes that cannot be compiled are collected and
refused all at once, each with its name and reason.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import helper

from edgesdk.errors import ModelError, UnsupportedModelError
from edgesdk.frontend import control, repair
from edgesdk.frontend.graph import (
    Builder,
    Graph,
    RefusedNodeError,
    Value,
    element_type,
    prune,
)
from edgesdk.frontend.load import LoadedModel, to_array
from edgesdk.frontend.model import ValueHint
from edgesdk.frontend.sources import REFUSED_DOMAIN

# More nodes than this after unrolling would take hours to compile.
NODE_LIMIT = 60_000


class Unknown:
    """Stands for a value that a refused node would have produced."""


UNKNOWN = Unknown()
# A value of the model: a tensor, a sequence of tensors, an absent optional, or unknown.
Item = Value | list[Any] | Unknown | None
Env = MutableMapping[str, Item]


@dataclass(frozen=True)
class Scope:
    """What a node's words mean: operator sets by domain, and a function's attribute values."""

    opsets: dict[str, int]
    attributes: dict[str, onnx.AttributeProto] = field(default_factory=dict)


class Walker:
    """Builds a `Graph` from a loaded model; see `walk`."""

    def __init__(self, model: LoadedModel) -> None:
        repair.load_all()
        self.b = Builder()
        self.model = model
        self.functions = {(f.domain, f.name, f.overload): f for f in model.proto.functions}
        self.refused: list[tuple[str, str, str]] = []
        self.notes: Counter[tuple[str, str]] = Counter()
        self.hints: dict[int, ValueHint] = {}
        self.depth = 0
        self.env: Env = {}

    def walk(self, inputs: dict[str, Value], outputs: Sequence[str] | None = None) -> Graph:
        """Walks the main graph, whose tensors are in `env` afterwards, by the model's names.

        The result computes the tensors `outputs`, by default the model's outputs. Raises
        UnsupportedModelError with every refused node.
        """
        graph = self.model.proto.graph
        env = self.env = dict(inputs)
        for name, array in self.model.weights.items():
            if name not in inputs:
                env[name] = self.b.constant(array, name)
        self.model.weights = {}
        opsets = {
            ("" if o.domain == "ai.onnx" else o.domain): o.version
            for o in self.model.proto.opset_import
        }
        opsets.setdefault("", self.model.opset)
        self.run_nodes(graph.node, env, Scope(opsets))
        declared = {o.name: o.type.tensor_type.elem_type for o in graph.output}
        wanted = [o.name for o in graph.output] if outputs is None else outputs
        values: list[Value] = []
        for name in wanted:
            item = env.get(name)
            if isinstance(item, Value):
                values.append(item)
            elif not self.refused and name not in env:
                raise ModelError(f"no node computes the output {name!r}")
            elif not isinstance(item, Unknown):
                self.refused.append((name, "output", "it is a sequence, not a tensor"))
        if self.refused:
            raise _refusal(self.refused)
        for name, value in zip(wanted, values, strict=True):
            if declared.get(name) and declared[name] != element_type(value.dtype):
                raise ModelError(
                    f"the output {name!r} is {value.dtype.name}, and declared as another type",
                    hint="the model is inconsistent: export it again",
                )
        result = Graph(list(inputs.values()), values, self.b.nodes)
        prune(result)
        return result

    def run_graph(self, graph: onnx.GraphProto, outer: Env, feeds: Env, scope: Scope) -> list[Item]:
        """Walks a subgraph that sees `outer`; returns its outputs."""
        env: Env = ChainMap(dict(feeds), outer)
        for tensor in graph.initializer:
            env[tensor.name] = self.b.constant(to_array(tensor), tensor.name)
        self.run_nodes(graph.node, env, scope)
        return [env.get(o.name) for o in graph.output]

    def run_nodes(self, nodes: Any, env: Env, scope: Scope) -> None:
        for node in nodes:
            self.run_node(node, env, scope)

    def run_node(self, node: onnx.NodeProto, env: Env, scope: Scope) -> None:
        missing = [i for i in node.input if i and i not in env]
        name = node.name or next((o for o in node.output if o), node.op_type)
        if missing:
            raise ModelError(f"node {name!r} ({node.op_type}) reads {missing[0]!r}, never computed")
        items = [env[i] if i else None for i in node.input]
        if len(self.b.nodes) > NODE_LIMIT:
            raise UnsupportedModelError(
                f"unrolling {name!r} ({node.op_type}) makes more than {NODE_LIMIT} nodes",
                hint="fix a shorter sequence with --shape",
                nodes=((name, node.op_type, "too many nodes after unrolling"),),
            )
        outer_origin = self.b.origin
        if self.depth == 0:
            self.b.origin = name
        start = len(self.b.nodes)
        try:
            results = self._results(node, name, items, env, scope)
        except RefusedNodeError as error:
            self.refused.append((name, node.op_type, str(error)))
            results = [UNKNOWN] * len(node.output)
        except _MALFORMED:
            types = ", ".join(map(control.type_text, items)) or "nothing"
            reason = f"its inputs or attributes do not fit the operator; it reads {types}"
            self.refused.append((name, node.op_type, reason))
            results = [UNKNOWN] * len(node.output)
        self.b.origin = outer_origin
        fresh = {id(o) for n in self.b.nodes[start:] for o in n.outputs}
        for output, item in zip(node.output, results, strict=False):
            if output:
                if isinstance(item, Value) and id(item) in fresh:
                    item.label = output
                env[output] = item

    def _results(
        self, node: onnx.NodeProto, name: str, items: list[Item], env: Env, scope: Scope
    ) -> list[Item]:
        domain = "" if node.domain == "ai.onnx" else node.domain
        function = self.functions.get((node.domain, node.op_type, node.overload))
        if function is not None:
            return self._call(function, node, items, scope)
        attributes = [self._bound(a, scope) for a in node.attribute]
        present = [a for a in attributes if a is not None]
        special = control.SPECIAL.get(node.op_type) if not domain else None
        if special is not None:
            attrs = {a.name: _python(a) for a in present}
            return special(self, control.Special(node, name, items, attrs, env, scope))
        known = (domain, node.op_type) in repair.REPAIRS or (
            not domain and node.op_type in repair.UNCHANGED
        )
        if any(isinstance(i, Unknown) for i in items):
            # Its inputs are not needed to see that there is no way to compile it.
            if not known:
                _body_schema(node, domain, scope)
            return [UNKNOWN] * len(node.output)
        if any(isinstance(i, list) for i in items):
            raise RefusedNodeError("sequences of tensors are not supported here")
        inputs = [i if isinstance(i, Value) else None for i in items]
        if any(v is not None and v.dtype.kind in "OUS" for v in inputs):
            raise RefusedNodeError("strings are not supported")
        if not known:
            return self._expand(node, domain, inputs, present, scope)
        attrs = repair.Attributes({a.name: _python(a) for a in present})
        opset = scope.opsets.get(domain, 1)
        outputs = list(node.output)
        op = repair.Op(
            node.op_type, name, inputs, attrs, outputs, opset, self.b, self.hints, self.notes
        )
        if (domain, node.op_type) not in repair.REPAIRS:
            _refuse_unread(op, domain)
            return [self.b(node.op_type, *inputs)]
        result = repair.REPAIRS[domain, node.op_type](op)
        _refuse_unread(op, domain)
        return [result] if isinstance(result, Value) else list(result)

    def _bound(self, attr: onnx.AttributeProto, scope: Scope) -> onnx.AttributeProto | None:
        if not attr.ref_attr_name:
            return attr
        value = scope.attributes.get(attr.ref_attr_name)
        if value is None:
            return None  # left out by the caller: the operator's default holds
        copy = onnx.AttributeProto()
        copy.CopyFrom(value)
        copy.name = attr.name
        return copy

    def _call(
        self, function: Any, node: onnx.NodeProto, items: list[Item], scope: Scope
    ) -> list[Item]:
        """Walks a function's body with the caller's values."""
        given = {a.name: b for a in node.attribute if (b := self._bound(a, scope)) is not None}
        defaults = {a.name: a for a in function.attribute_proto}
        opsets = {
            ("" if o.domain == "ai.onnx" else o.domain): o.version for o in function.opset_import
        }
        padded = [*items, *[None] * (len(function.input) - len(items))]
        env: Env = dict(zip(function.input, padded, strict=False))
        self.depth += 1
        if self.depth > 64:
            raise ModelError(f"function {function.name!r} calls itself")
        try:
            self.run_nodes(function.node, env, Scope(opsets, {**defaults, **given}))
        finally:
            self.depth -= 1
        return [env.get(o) for o in function.output]

    def _expand(
        self,
        node: onnx.NodeProto,
        domain: str,
        inputs: list[Value | None],
        attributes: list[onnx.AttributeProto],
        scope: Scope,
    ) -> list[Item]:
        """Replaces an operator by the function body in ONNX's own definition."""
        schema = _body_schema(node, domain, scope)
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        del copy.attribute[:]
        copy.attribute.extend(attributes)
        function = None
        if schema.has_function:
            function = schema.function_body
        elif schema.has_context_dependent_function:
            types = [
                helper.make_tensor_type_proto(
                    helper.np_dtype_to_tensor_dtype(v.dtype), v.shape
                ).SerializeToString()
                for v in inputs
                if v is not None
            ]
            body = schema.get_context_dependent_function(copy.SerializeToString(), types)
            function = onnx.FunctionProto.FromString(body) if body else None
        if function is None:
            raise RefusedNodeError(f"operator {node.op_type} is not supported")
        for name, default in schema.attributes.items():
            if name not in {a.name for a in attributes} and default.default_value.name:
                copy.attribute.append(default.default_value)
        self.notes[node.op_type, "written out as ONNX defines it"] += 1
        return self._call(function, copy, list(inputs), Scope(scope.opsets))


# What Python raises when a repair meets a node that breaks its operator's definition.
_MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,  # NumPy's, of a tensor of more than 32 dimensions
    StopIteration,
    TypeError,
    ValueError,
)


def _refuse_unread(op: repair.Op, domain: str) -> None:
    """Refuses a node with an attribute that its repair does not know and that changes it."""
    unread = set(op.attrs) - op.attrs.read - repair.WITHOUT_EFFECT
    if not unread:
        return
    defaults: dict[str, Any] = {}
    if not domain:
        try:
            schema = onnx.defs.get_schema(op.kind, op.opset, "")
        except onnx.defs.SchemaError:
            return
        defaults = {
            n: _python(a.default_value)
            for n, a in schema.attributes.items()
            if n in unread and a.default_value.name
        }
    for name in sorted(unread):
        value = op.attrs[name]
        if value != defaults.get(name) and value not in (0, 0.0, "", []):
            raise RefusedNodeError(f"its attribute {name}={value!r} is not supported")


def _body_schema(node: onnx.NodeProto, domain: str, scope: Scope) -> Any:
    """The schema of an operator that ONNX may define by others; RefusedNodeError if it does not."""
    if domain == REFUSED_DOMAIN:
        raise RefusedNodeError(node.doc_string)
    schema = _schema(node.op_type, scope) if not domain else None
    if schema is None or not (schema.has_function or schema.has_context_dependent_function):
        what = f"{domain}.{node.op_type}" if domain else node.op_type
        raise RefusedNodeError(f"operator {what} is not supported")
    return schema


def _schema(kind: str, scope: Scope) -> Any:
    try:
        return onnx.defs.get_schema(kind, scope.opsets.get("", 1), "")
    except onnx.defs.SchemaError:
        return None


def _python(attr: onnx.AttributeProto) -> Any:
    """Returns an attribute as a Python value: text decoded, tensors as arrays."""
    if attr.type == onnx.AttributeProto.TENSOR:
        return to_array(attr.t)
    if attr.type == onnx.AttributeProto.STRING:
        return attr.s.decode("utf-8", "replace")
    if attr.type == onnx.AttributeProto.STRINGS:
        return [s.decode("utf-8", "replace") for s in attr.strings]
    value = helper.get_attribute_value(attr)
    return list(value) if isinstance(value, list | tuple) else value


def _refusal(refused: list[tuple[str, str, str]]) -> UnsupportedModelError:
    name, kind, reason = refused[0]
    others = len(refused) - 1
    more = f", and {others} more node{'s' if others > 1 else ''}" if others else ""
    return UnsupportedModelError(
        f"node {name!r} ({kind}) cannot be compiled: {reason}{more}",
        hint="`edgesdk inspect` lists them all; see docs/operators.md for what is supported",
        nodes=tuple(refused),
    )
