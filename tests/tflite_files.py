"""Writes small TFLite files with the schema's own classes, and runs them in TFLite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

_TYPES = {
    "float32": "FLOAT32", "float16": "FLOAT16", "int8": "INT8", "uint8": "UINT8", "int16": "INT16",
    "int32": "INT32", "int64": "INT64", "bool": "BOOL",
}  # fmt: skip


@dataclass
class Net:
    """A graph under construction: `tensor`, then `op`, which returns its outputs' numbers."""

    inputs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = schema.ModelT()
        self.model.version = 3
        self.model.description = "test"
        self.model.buffers = [schema.BufferT()]
        self.model.operatorCodes = []
        self.graph = schema.SubGraphT()
        self.graph.tensors, self.graph.operators = [], []
        self.model.subgraphs = [self.graph]

    def tensor(
        self,
        shape: Sequence[int],
        dtype: str = "float32",
        *,
        name: str = "",
        signature: Sequence[int] | None = None,
        scale: Any = None,
        zero: Any = 0,
        axis: int = 0,
    ) -> int:
        tensor = schema.TensorT()
        tensor.shape = list(shape)
        tensor.shapeSignature = None if signature is None else list(signature)
        tensor.type = getattr(schema.TensorType, _TYPES[dtype])
        tensor.name = name or f"t{len(self.graph.tensors)}"
        if scale is not None:
            tensor.quantization = schema.QuantizationParametersT()
            tensor.quantization.scale = np.atleast_1d(scale).astype(np.float32).tolist()
            zeros = np.broadcast_to(zero, np.atleast_1d(scale).shape)
            tensor.quantization.zeroPoint = zeros.astype(np.int64).tolist()
            tensor.quantization.quantizedDimension = axis
        self.graph.tensors.append(tensor)
        return len(self.graph.tensors) - 1

    def input(self, shape: Sequence[int], dtype: str = "float32", **more: Any) -> int:
        index = self.tensor(shape, dtype, **more)
        self.inputs.append(index)
        return index

    def const(self, array: Any, dtype: str = "", **more: Any) -> int:
        array = np.asarray(array, dtype or None)
        array = array.astype({"float64": "float32"}.get(array.dtype.name, array.dtype.name))
        index = self.tensor(array.shape, array.dtype.name, **more)
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(array.tobytes(), np.uint8)
        self.model.buffers.append(buffer)
        self.graph.tensors[index].buffer = len(self.model.buffers) - 1
        return index

    def op(
        self,
        kind: str,
        inputs: Sequence[int],
        outputs: Sequence[int] | str = "float32",
        *,
        version: int = 1,
        options: str = "",
        **settings: Any,
    ) -> int:
        """Appends an operator; `outputs` are tensors, or the type of the only one."""
        code = schema.OperatorCodeT()
        code.builtinCode = getattr(schema.BuiltinOperator, kind)
        code.deprecatedBuiltinCode = min(code.builtinCode, 127)
        code.version = version
        self.model.operatorCodes.append(code)
        operator = schema.OperatorT()
        operator.opcodeIndex = len(self.model.operatorCodes) - 1
        operator.inputs = list(inputs)
        if isinstance(outputs, str):
            outputs = [self.tensor((1,), outputs)]
        operator.outputs = list(outputs)
        if options:
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, options)
            operator.builtinOptions = getattr(schema, f"{options}T")()
            for name, value in settings.items():
                assert hasattr(operator.builtinOptions, name), name
                setattr(operator.builtinOptions, name, value)
        self.graph.operators.append(operator)
        return operator.outputs[0]

    def bytes(self, *outputs: int) -> bytes:
        """The file. The interpreter fills in the shapes that follow from the inputs'."""
        self.graph.inputs, self.graph.outputs = self.inputs, list(outputs)
        interpreter = Interpreter(model_content=self._packed())
        interpreter.allocate_tensors()
        for detail in interpreter.get_tensor_details():
            index = detail["index"]
            if index < len(self.graph.tensors) and not self.graph.tensors[index].buffer:
                self.graph.tensors[index].shape = [int(d) for d in detail["shape"]]
        return self._packed()

    def _packed(self) -> bytes:
        builder = flatbuffers.Builder(1024)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())


def interpret(content: bytes, feeds: Sequence[np.ndarray]) -> list[np.ndarray]:
    """TFLite's results for `feeds`, by its own kernels where these have all operators."""
    try:
        interpreter = Interpreter(
            model_content=content,
            experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        )
    except ValueError:
        interpreter = Interpreter(model_content=content)
    for detail, array in zip(interpreter.get_input_details(), feeds, strict=True):
        if list(detail["shape"]) != list(array.shape):
            interpreter.resize_tensor_input(detail["index"], array.shape)
    interpreter.allocate_tensors()
    for detail, array in zip(interpreter.get_input_details(), feeds, strict=True):
        interpreter.set_tensor(detail["index"], array)
    interpreter.invoke()
    return [interpreter.get_tensor(d["index"]) for d in interpreter.get_output_details()]
