"""Writes ONNX nodes for the operators of a TFLite file, and keeps each tensor's forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from edgesdk.frontend.graph import CORE_OPSET, element_type
from edgesdk.frontend.sources import REFUSED_DOMAIN, Conversion
from edgesdk.frontend.tflite.file import (
    Array,
    content_of,
    entries,
    operator_names,
    tensor_type,
    text,
)

# The axes of the file in the order of ONNX, and back.
TO_NCHW = (0, 3, 1, 2)
TO_NHWC = (0, 2, 3, 1)


class RefusedOperatorError(Exception):
    """An operator cannot be converted; the text is the reason, for people."""


@dataclass
class Form:
    """The ONNX values that hold one tensor: in the file's order, with channels first."""

    plain: str = ""
    nchw: str = ""


@dataclass(eq=False)
class Tensor:
    """A tensor of the file: `shape` as written there, `const` its content where that is known.

    `open` says that some of its sizes are for the user to choose; they are 1 in `shape`.
    `scale` is None unless it is quantised; `zero` counts in its own integers, `axis` is that of
    several scales. `stored` and `real` are its values as they are and dequantised.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    const: Array | None = None
    open: bool = False
    scale: Array | None = None
    zero: Array | None = None
    axis: int = 0
    stored: Form = field(default_factory=Form)
    real: Form = field(default_factory=Form)

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass
class Operator:
    """An operator of the file while it is converted: its inputs (None where left out)."""

    kind: str
    version: int
    inputs: list[Tensor | None]
    outputs: list[Tensor]
    options: Any
    custom: bytes
    w: Writer

    def __getitem__(self, index: int) -> Tensor:
        """The input `index`, which must be there."""
        tensor = self.get(index)
        if tensor is None:
            raise RefusedOperatorError(f"its input {index} is missing")
        return tensor

    def get(self, index: int) -> Tensor | None:
        """The input `index`, None where it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    @property
    def out(self) -> Tensor:
        return self.outputs[0]

    def array(self, index: int, what: str) -> Array:
        """The content of input `index`; refuses what is only known at run time."""
        tensor = self[index]
        if tensor.const is None:
            raise RefusedOperatorError(f"its {what} are computed at run time")
        return tensor.const

    def ints(self, index: int, what: str) -> list[int]:
        return [int(i) for i in self.array(index, what).reshape(-1)]


class Writer:
    """Writes ONNX nodes for the operators of a TFLite model's first graph."""

    def __init__(self, model: Any, content: bytes) -> None:
        self.model, self.content = model, content
        self.graph = model.subgraphs[0]
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, Array] = {}
        self.counts: Counter[str] = Counter()
        self.taken: set[str] = set()
        self.label = ""
        self.tensors = [self._tensor(t) for t in self.graph.tensors]
        self.inputs = [self.tensors[i] for i in self.graph.inputs]
        for tensor in self.inputs:
            tensor.const = None
            tensor.stored.plain = tensor.name

    def operator(self, raw: Any) -> Operator:
        """Returns an operator of the file with its tensors, and counts it."""
        code = self.model.operatorCodes[raw.opcodeIndex]
        number = max(int(code.builtinCode), int(code.deprecatedBuiltinCode))
        kind = operator_names().get(number, f"operator number {number}")
        if kind == "CUSTOM":
            kind = text(code.customCode) or "CUSTOM"
        self.counts[kind] += 1
        inputs = [self.tensors[i] if i >= 0 else None for i in entries(raw.inputs)]
        outputs = [self.tensors[i] for i in entries(raw.outputs)]
        custom = bytes(raw.customOptions) if raw.customOptions is not None else b""
        # Options that a writer left out have the schema's defaults.
        options = raw.builtinOptions if raw.builtinOptions is not None else raw.builtinOptions2
        # A converter that fused several operators joins their names.
        self.label = outputs[0].name.split(";")[0] if outputs else kind
        return Operator(kind, int(code.version), inputs, outputs, options, custom, self)

    # Writing.

    def node(self, kind: str, *inputs: str, **attrs: Any) -> str:
        """Appends an ONNX node and returns its only output."""
        return self.many(kind, inputs, 1, **attrs)[0]

    def many(
        self, kind: str, inputs: Sequence[str], outputs: int, *, domain: str = "", **attrs: Any
    ) -> list[str]:
        names = [self.fresh(f"{self.label}/{kind}") for _ in range(outputs)]
        attrs = {k: v for k, v in attrs.items() if v is not None}
        label = names[0] if names else self.label
        self.nodes.append(
            helper.make_node(kind, list(inputs), names, name=label, domain=domain, **attrs)
        )
        return names

    def constant(self, array: Any, name: str = "") -> str:
        """Adds a weight and returns its name."""
        label = self.fresh(name or f"{self.label}/const")
        self.weights[label] = np.asarray(array)
        return label

    def integers(self, items: Sequence[int]) -> str:
        return self.constant(np.asarray(list(items), np.int64))

    def fresh(self, name: str) -> str:
        result, count = name, 1
        while result in self.taken:
            count += 1
            result = f"{name}_{count}"
        self.taken.add(result)
        return result

    # Reading tensors.

    def nchw(self, *tensors: Tensor | None) -> bool:
        """Whether an operator that treats all elements alike had best take channels first.

        `tensors` are its operands: one of them is there in that order only, and all have four
        dimensions or are constants that broadcast.
        """
        given = [t for t in tensors if t is not None]
        forms = [t.stored for t in given if t.const is None]
        first = any(form.nchw and not form.plain for form in forms)
        return first and all(t.rank == 4 or (t.const is not None and t.rank < 4) for t in given)

    def stored(self, tensor: Tensor, *, nchw: bool = False) -> str:
        """The ONNX value of `tensor` as it is stored, computed at run time."""
        form = tensor.stored
        if not form.plain and not form.nchw:
            raise RefusedOperatorError(f"it reads {tensor.name!r}, which is never computed")
        if nchw and not form.nchw:
            form.nchw = self.node("Transpose", form.plain, perm=list(TO_NCHW))
        if not nchw and not form.plain:
            form.plain = self.node("Transpose", form.nchw, perm=list(TO_NHWC))
        return form.nchw if nchw else form.plain

    def real(self, tensor: Tensor, *, nchw: bool = False) -> str:
        """The ONNX value of `tensor`, dequantised, in the file's order or with channels first.

        A constant of fewer than four dimensions gets leading ones before its axes change places.
        """
        if tensor.const is None and tensor.scale is None:
            return self.stored(tensor, nchw=nchw)
        order = "nchw" if nchw else "plain"
        known: str = getattr(tensor.real, order)
        if known:
            return known
        if tensor.const is None:
            value = self._dequantised(self.stored(tensor, nchw=nchw), tensor, tensor.axis)
        else:
            array = real_array(tensor)
            if nchw and array.size > 1:
                array = array.reshape((*[1] * (4 - array.ndim), *array.shape)).transpose(TO_NCHW)
            value = self.constant(np.ascontiguousarray(array), tensor.name)
        setattr(tensor.real, order, value)
        return value

    def weight(self, tensor: Tensor, perm: Sequence[int]) -> str:
        """`tensor` with its axes in the order `perm`; integers stay integers in the model."""
        if tensor.const is None:
            return self.node("Transpose", self.real(tensor), perm=list(perm))
        array = np.ascontiguousarray(tensor.const.transpose(perm))
        if tensor.scale is None:
            return self.constant(array, tensor.name)
        if tensor.dtype.name not in _DEQUANTISABLE:
            return self.constant(real_array(tensor).transpose(perm), tensor.name)
        name = self.constant(array, tensor.name)
        return self._dequantised(name, tensor, list(perm).index(tensor.axis))

    def _dequantised(self, value: str, tensor: Tensor, axis: int) -> str:
        return self.node("DequantizeLinear", value, *self._scale(tensor), axis=axis)

    def _scale(self, tensor: Tensor) -> tuple[str, str]:
        assert tensor.scale is not None and tensor.zero is not None
        several = tensor.scale.size > 1
        scale = tensor.scale if several else tensor.scale.reshape(())
        zero = tensor.zero if several else tensor.zero.reshape(())
        return self.constant(scale), self.constant(zero)

    # Writing results.

    def put(self, tensor: Tensor, value: str, *, nchw: bool = False) -> None:
        """Makes the ONNX value `value` the result `tensor`, quantised if the file says so."""
        form = "nchw" if nchw else "plain"
        if tensor.scale is not None:
            if tensor.scale.size > 1:
                raise RefusedOperatorError("its result has a scale for each channel")
            value = self.node("QuantizeLinear", value, *self._scale(tensor))
        setattr(tensor.stored, form, value)

    def refuse(self, op: Operator, reason: str) -> None:
        """Writes a node that the walker will refuse with `reason`."""
        self.many(op.kind, [], 0, domain=REFUSED_DOMAIN)
        node = self.nodes[-1]
        node.doc_string = reason
        for tensor in op.outputs:
            tensor.stored = Form(plain=self.fresh(f"{tensor.name}/refused"))
            tensor.scale = None
            node.output.append(tensor.stored.plain)

    def finish(self, name: str) -> Conversion:
        outputs: list[onnx.ValueInfoProto] = []
        for index in self.graph.outputs:
            tensor = self.tensors[index]
            self.label = tensor.name
            constant = tensor.const
            value = self.stored(tensor) if constant is None else self.constant(constant)
            label = tensor.name
            if label in {o.name for o in outputs} or tensor in self.inputs:
                label = self.fresh(label)
            self.nodes.append(helper.make_node("Identity", [value], [label], name=label))
            outputs.append(onnx.ValueInfoProto(name=label))
            outputs[-1].type.tensor_type.elem_type = element_type(tensor.dtype)
        inputs = [
            helper.make_tensor_value_info(t.name, element_type(t.dtype), dims)
            for t, dims in zip(self.inputs, map(self._dims, self.graph.inputs), strict=True)
        ]
        graph = helper.make_graph(self.nodes, name, inputs, outputs)
        proto = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", CORE_OPSET)],
            ir_version=10,
            producer_name=text(self.model.description),
        )
        more = len(self.model.subgraphs) - 1
        notes = (f"{name}: {more} more graphs in the file are not used",) if more else ()
        return Conversion(proto, self.weights, dict(self.counts.most_common()), notes)

    def _dims(self, index: int) -> list[int | str]:
        """An input's sizes; those that the file leaves open have no name."""
        raw = self.graph.tensors[index]
        signature = raw.shapeSignature if raw.shapeSignature is not None else raw.shape
        return [int(d) if d >= 0 else "" for d in entries(signature)]

    def _tensor(self, raw: Any) -> Tensor:
        name = self.fresh(text(raw.name) or "tensor")
        shape = tuple(int(d) for d in entries(raw.shape))
        dtype = tensor_type(raw.type)
        tensor = Tensor(name, shape, dtype)
        tensor.open = any(int(d) < 0 for d in entries(raw.shapeSignature))
        quantisation = raw.quantization
        if quantisation is not None and len(entries(quantisation.scale)):
            if quantisation.detailsType:
                raise ValueError(f"{name!r} is quantised in a way that is not known here")
            tensor.scale = np.asarray(quantisation.scale, np.float32)
            zero = entries(quantisation.zeroPoint)
            tensor.zero = np.asarray(zero if len(zero) else [0] * tensor.scale.size)
            tensor.zero = np.broadcast_to(tensor.zero, tensor.scale.shape).astype(dtype)
            tensor.axis = int(quantisation.quantizedDimension)
        octets = self._octets(self.model.buffers[raw.buffer])
        if octets.size and not raw.isVariable:
            tensor.const = content_of(raw, octets, shape, dtype)
        return tensor

    def _octets(self, buffer: Any) -> Array:
        """A buffer's bytes: in the flatbuffer, or behind its end."""
        start, size = int(buffer.offset or 0), int(buffer.size or 0)
        if start > 1:
            if start + size > len(self.content):
                raise ValueError("weights are missing at its end")
            return np.frombuffer(self.content, np.uint8, size, start)
        return np.asarray(entries(buffer.data), np.uint8)


def real_array(tensor: Tensor) -> Array:
    """The content of a constant, dequantised to float32 where it is quantised."""
    assert tensor.const is not None
    if tensor.scale is None:
        return tensor.const
    assert tensor.zero is not None
    shape = [1] * tensor.const.ndim
    if tensor.scale.size > 1:
        shape[tensor.axis] = tensor.scale.size
    centred = tensor.const.astype(np.float64) - tensor.zero.astype(np.float64).reshape(shape)
    return (centred * tensor.scale.astype(np.float64).reshape(shape)).astype(np.float32)


_DEQUANTISABLE = ("int8", "uint8", "int16", "uint16", "int32")
