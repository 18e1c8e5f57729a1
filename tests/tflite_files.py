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
        interpreter = open_interpreter(self._packed())
        for detail in interpreter.get_tensor_details():
            index = detail["index"]
            if index < len(self.graph.tensors) and not self.graph.tensors[index].buffer:
                self.graph.tensors[index].shape = [int(d) for d in detail["shape"]]
        return self._packed()

    def _packed(self) -> bytes:
        builder = flatbuffers.Builder(1024)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())


def open_interpreter(content: bytes) -> Interpreter:
    """TFLite with its own kernels, or with XNNPACK's where these lack an operator."""
    own = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    try:
        interpreter = Interpreter(model_content=content, experimental_op_resolver_type=own)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError):
        interpreter = Interpreter(model_content=content)
        interpreter.allocate_tensors()
    return interpreter


def interpret(content: bytes, feeds: Sequence[np.ndarray]) -> list[np.ndarray]:
    """TFLite's results for `feeds`."""
    interpreter = open_interpreter(content)
    for detail, array in zip(interpreter.get_input_details(), feeds, strict=True):
        if list(detail["shape"]) != list(array.shape):
            interpreter.resize_tensor_input(detail["index"], array.shape)
    interpreter.allocate_tensors()
    for detail, array in zip(interpreter.get_input_details(), feeds, strict=True):
        interpreter.set_tensor(detail["index"], array)
    interpreter.invoke()
    return [interpreter.get_tensor(d["index"]) for d in interpreter.get_output_details()]


def quantised_net() -> bytes:
    """A small image classifier in 8 bits: weights per channel, every activation quantised."""
    rng = np.random.default_rng(11)
    net = Net()

    def weight(shape: tuple[int, ...], axis: int, x_scale: float) -> tuple[int, int]:
        """Random weights with a scale for each output channel, and their bias."""
        channels = shape[axis]
        scales = rng.uniform(0.002, 0.01, channels)
        w = net.const(rng.integers(-127, 128, shape), "int8", scale=scales, axis=axis)
        bias = rng.integers(-500, 500, channels)
        return w, net.const(bias, "int32", scale=scales * x_scale)

    def activation(scale: float, zero: int) -> int:
        return net.tensor((1,), "int8", scale=scale, zero=zero)

    x = net.input((1, 16, 16, 3), "int8", name="image", scale=1 / 127, zero=0)
    first = net.op(
        "CONV_2D", [x, *weight((8, 3, 3, 3), 0, 1 / 127)], [activation(6 / 255, -128)], version=3,
        options="Conv2DOptions", strideH=2, strideW=2, dilationHFactor=1, dilationWFactor=1,
        fusedActivationFunction=3,
    )  # fmt: skip
    deep = net.op(
        "DEPTHWISE_CONV_2D", [first, *weight((1, 3, 3, 8), 3, 6 / 255)], [activation(0.0517, -8)],
        version=3, options="DepthwiseConv2DOptions", strideH=1, strideW=1, dilationHFactor=1,
        dilationWFactor=1, depthMultiplier=1,
    )  # fmt: skip
    added = net.op("ADD", [first, deep], [activation(0.0613, -18)], version=2, options="AddOptions")
    pooled = net.op(
        "MAX_POOL_2D", [added], [activation(0.0613, -18)], version=2, options="Pool2DOptions",
        filterHeight=2, filterWidth=2, strideH=2, strideW=2,
    )  # fmt: skip
    mean = net.op(
        "MEAN", [pooled, net.const([1, 2], "int32")], [activation(0.0309, -28)], version=2,
        options="ReducerOptions",
    )  # fmt: skip
    scores = net.op(
        "FULLY_CONNECTED", [mean, *weight((5, 8), 0, 0.0309)], [activation(0.0493, 2)], version=4,
        options="FullyConnectedOptions",
    )  # fmt: skip
    return net.bytes(
        added,
        net.op("SOFTMAX", [scores], [activation(1 / 256, -128)], version=2,
               options="SoftmaxOptions", beta=1.0),
        net.op("DEQUANTIZE", [scores], version=2),
    )  # fmt: skip
