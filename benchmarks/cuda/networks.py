"""The networks that are measured on GPUs, as ONNX files with random weights.

ResNet-50 and SqueezeNet 1.0 are those of benchmarks/cpu/models.py. ResNet-18 (He et al., "Deep
Residual Learning for Image Recognition", 2015) and MobileNetV2 (Sandler et al., "MobileNetV2:
Inverted Residuals and Linear Bottlenecks", 2018) are written down here, with the normalisation
folded into the convolutions as an exporter leaves them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path.append(str(Path(__file__).resolve().parents[1] / "cpu"))
import models as cpu_models

from edgesdk.resources import cache_folder

NAMES = ("resnet50", "resnet18", "mobilenet_v2", "squeezenet")
_SEED = 0


def path_of(name: str) -> Path:
    """The ONNX file of a network, made when it is not in edgesdk's cache folder."""
    if name not in _BUILDERS:
        return cpu_models.prepare(name).model
    path = cache_folder() / "bench" / "cuda" / f"{name}.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        network = _Network()
        _BUILDERS[name](network)
        onnx.save(network.model(name), path)
    return path


class _Network:
    """Builds a graph front to back; `value` names the last tensor, `channels` its channels."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(_SEED)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.value, self.channels = "input", 3

    def add(self, operator: str, *inputs: str, **attributes: object) -> str:
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def weight(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def conv(self, outputs: int, window: int, *, stride: int = 1, groups: int = 1) -> None:
        fan_in = self.channels // groups * window * window
        shape = (outputs, self.channels // groups, window, window)
        # Sums of residual blocks keep their size when each block adds a part.
        weight = self.rng.standard_normal(shape) * np.sqrt(1.0 / fan_in)
        bias = self.rng.standard_normal(outputs) * 0.1
        self.value = self.add(
            "Conv",
            self.value,
            self.weight(weight),
            self.weight(bias),
            kernel_shape=[window, window],
            strides=[stride, stride],
            pads=[window // 2] * 4,
            group=groups,
        )
        self.channels = outputs

    def relu(self) -> None:
        self.value = self.add("Relu", self.value)

    def relu6(self) -> None:
        low, high = self.weight(np.array(0.0)), self.weight(np.array(6.0))
        self.value = self.add("Clip", self.value, low, high)

    def classify(self) -> None:
        pooled = self.add("GlobalAveragePool", self.value)
        flat = self.add("Flatten", pooled)
        weight = self.rng.standard_normal((self.channels, 1000)) / np.sqrt(self.channels)
        self.value = self.add("Gemm", flat, self.weight(weight), self.weight(np.zeros(1000)))

    def model(self, name: str) -> onnx.ModelProto:
        self.nodes[-1].output[0] = "output"
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, 224, 224])],
            [helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, 1000])],
            self.weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def _resnet18(network: _Network) -> None:
    network.conv(64, 7, stride=2)
    network.relu()
    network.value = network.add(
        "MaxPool", network.value, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]
    )
    for stage, outputs in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            entry, channels = network.value, network.channels
            network.conv(outputs, 3, stride=stride)
            network.relu()
            network.conv(outputs, 3)
            result = network.value
            if stride == 2:
                network.value, network.channels = entry, channels
                network.conv(outputs, 1, stride=2)
                entry = network.value
            network.value = network.add("Add", result, entry)
            network.relu()
    network.classify()


def _mobilenet_v2(network: _Network) -> None:
    network.conv(32, 3, stride=2)
    network.relu6()
    for expansion, outputs, times, first_stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):  # fmt: skip
        for index in range(times):
            stride = first_stride if index == 0 else 1
            entry, channels = network.value, network.channels
            if expansion > 1:
                network.conv(channels * expansion, 1)
                network.relu6()
            network.conv(network.channels, 3, stride=stride, groups=network.channels)
            network.relu6()
            network.conv(outputs, 1)
            if stride == 1 and channels == outputs:
                network.value = network.add("Add", network.value, entry)
    network.conv(1280, 1)
    network.relu6()
    network.classify()


_BUILDERS = {"resnet18": _resnet18, "mobilenet_v2": _mobilenet_v2}
