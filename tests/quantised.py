"""Networks of quantised operators, each with exact results from NumPy in 64-bit integers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

# Input type and zero point, output type and zero point: among them the extremes of both.
TYPES = {
    "u8 to s8": (np.uint8, 255, np.int8, -128),
    "s8 to u8": (np.int8, -128, np.uint8, 0),
    "u8 to u8": (np.uint8, 3, np.uint8, 255),
    "s8 to s8": (np.int8, 127, np.int8, 5),
}

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "3x3": {"channels": 64, "out": 64, "size": (14, 14), "pads": [1, 1, 1, 1]},
    "picture": {"channels": 3, "out": 20, "size": (17, 23), "strides": [2, 2], "pads": [1] * 4},
    "channels that fill no block": {"channels": 19, "out": 21, "size": (9, 9)},
    "one channel out": {"channels": 24, "out": 1, "size": (10, 10)},
    "1x1": {"channels": 64, "out": 40, "size": (13, 13), "window": (1, 1)},
    "1x1 stride 2": {
        "channels": 32, "out": 32, "size": (14, 14), "window": (1, 1), "strides": [2, 2],
    },
    "dilated": {
        "channels": 16, "out": 16, "size": (15, 15), "dilations": [2, 3], "pads": [2, 3, 2, 3],
    },
    "one wide": {"channels": 32, "out": 32, "size": (50, 1), "window": (5, 1)},
    "one wide, few channels": {
        "channels": 2, "out": 8, "size": (50, 1), "window": (3, 1), "pads": [1, 0, 1, 0],
    },
    "depthwise": {"channels": 40, "out": 40, "size": (14, 14), "group": 40, "pads": [1] * 4},
    "depthwise 5x5, stride 2": {
        "channels": 32, "out": 32, "size": (15, 15), "group": 32, "window": (5, 5),
        "strides": [2, 2], "pads": [2] * 4,
    },
    "depthwise without padding": {"channels": 32, "out": 32, "size": (9, 9), "group": 32},
    "groups of whole blocks": {"channels": 64, "out": 32, "size": (8, 8), "group": 2},
    "groups that fill no block": {
        "channels": 30, "out": 12, "size": (8, 8), "group": 3, "pads": [1] * 4,
    },
    "a prime number of columns": {
        "channels": 16, "out": 20, "size": (3, 39), "pads": [1, 0, 1, 0],
    },
    "weights of 7 bits": {
        "channels": 24, "out": 24, "size": (7, 7), "pads": [1] * 4, "weight_range": (-64, 65),
    },
    "weights of one scale, unsigned": {
        "channels": 16, "out": 16, "size": (6, 6), "weight_zero": 128, "bias": False,
    },
}  # fmt: skip

# Rows, terms, columns of matrix products.
PRODUCTS = {"one row": (1, 64, 100), "odd sizes": (7, 63, 33), "rows": (12, 128, 48)}


@dataclass
class Network:
    """Operators side by side, each with an input and an output of its own."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    feeds: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    expected: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    seed: int = 0

    def save(self, path: Path) -> None:
        inputs = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in self.feeds.items()
        ]
        outputs = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in self.expected.items()
        ]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, self.constants)
        opset = helper.make_opsetid("", 17)
        onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)

    def constant(self, array: Any, dtype: Any = None) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def data(self, shape: tuple[int, ...], dtype: Any) -> tuple[str, np.ndarray[Any, Any]]:
        """Numbers over the whole range; the first channels hold its ends only."""
        self.seed += 1
        limits = np.iinfo(dtype)
        drawn = np.random.default_rng(self.seed).integers(limits.min, limits.max + 1, shape)
        drawn[..., :1] = limits.min
        drawn[:, -1:] = limits.max
        name = f"x{len(self.feeds)}"
        self.feeds[name] = drawn.astype(dtype)
        return name, self.feeds[name]

    def add(self, node: onnx.NodeProto, result: np.ndarray[Any, Any]) -> None:
        self.nodes.append(node)
        self.expected[node.output[0]] = result


def network(
    convolutions: Iterable[tuple[str, str]], products: Iterable[tuple[str, str]]
) -> Network:
    """Operators of the cases given as (case, types)."""
    made = Network()
    for case, types in convolutions:
        add_convolution(made, types, **CONVOLUTIONS[case])
    for case, types in products:
        add_product(made, types, *PRODUCTS[case])
    return made


def add_convolution(
    made: Network,
    types: str,
    *,
    channels: int,
    out: int,
    size: tuple[int, int],
    window: tuple[int, int] = (3, 3),
    group: int = 1,
    weight_zero: int = 0,
    bias: bool = True,
    weight_range: tuple[int, int] = (-128, 128),
    **attributes: Any,
) -> None:
    """A QLinearConv with a weight scale for each channel, or one for all."""
    x_type, x_zero, y_type, y_zero = TYPES[types]
    x_name, x = made.data((1, channels, *size), x_type)
    draw = np.random.default_rng(made.seed + 100)
    unsigned = weight_zero != 0
    low, high = (0, 256) if unsigned else weight_range
    weight = draw.integers(low, high, (out, channels // group, *window))
    shift = draw.integers(-5000, 5000, out) if bias else np.zeros(out, np.int64)
    scales = draw.uniform(0.001, 0.003, 1 if unsigned else out).astype(np.float32)
    total = convolve(x.astype(np.int64) - x_zero, weight - weight_zero, group, **attributes)
    total += shift.reshape(1, -1, 1, 1)
    # Most results fill the output's range, some lie outside of it.
    x_scale, y_scale = np.float32(0.02), np.float32(0.02 * 0.002 * total.std() / 60)
    weight_type = np.uint8 if unsigned else np.int8
    zeros = np.full(scales.shape, weight_zero, weight_type)
    inputs = [
        x_name, made.constant(x_scale), made.constant(x_zero, x_type),
        made.constant(weight, weight_type), made.constant(scales.reshape(-1) if not unsigned
        else scales[0]), made.constant(zeros if not unsigned else zeros[0]),
        made.constant(y_scale), made.constant(y_zero, y_type),
        *([made.constant(shift, np.int32)] if bias else []),
    ]  # fmt: skip
    node = helper.make_node(
        "QLinearConv", inputs, [f"y{len(made.nodes)}"], group=group, **attributes
    )
    made.add(
        node, requantise(total, (x_scale * scales / y_scale).reshape(1, -1, 1, 1), y_zero, y_type)
    )


def add_product(made: Network, types: str, rows: int, terms: int, columns: int) -> None:
    """A QLinearMatMul with constant weights."""
    x_type, x_zero, y_type, y_zero = TYPES[types]
    x_name, x = made.data((rows, terms), x_type)
    weight = np.random.default_rng(made.seed + 100).integers(-128, 128, (terms, columns))
    total = (x.astype(np.int64) - x_zero) @ weight
    x_scale, w_scale = np.float32(0.02), np.float32(0.003)
    y_scale = np.float32(0.02 * 0.003 * total.std() / 60)
    inputs = [
        x_name, made.constant(x_scale), made.constant(x_zero, x_type),
        made.constant(weight, np.int8), made.constant(w_scale), made.constant(0, np.int8),
        made.constant(y_scale), made.constant(y_zero, y_type),
    ]  # fmt: skip
    node = helper.make_node("QLinearMatMul", inputs, [f"y{len(made.nodes)}"])
    made.add(node, requantise(total, x_scale * w_scale / y_scale, y_zero, y_type))


def convolve(
    x: np.ndarray[Any, Any],
    weight: np.ndarray[Any, Any],
    group: int = 1,
    *,
    strides: Iterable[int] = (1, 1),
    dilations: Iterable[int] = (1, 1),
    pads: Iterable[int] = (0, 0, 0, 0),
) -> np.ndarray[Any, Any]:
    """[N, C, H, W] * [O, C/group, KH, KW], as ONNX's Conv defines it."""
    (sy, sx), (dy, dx) = strides, dilations
    top, left, bottom, right = pads
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    n, _, height, width = x.shape
    out, per_group, kh, kw = weight.shape
    out_h = (height - (kh - 1) * dy - 1) // sy + 1
    out_w = (width - (kw - 1) * dx - 1) // sx + 1
    total = np.zeros((n, out, out_h, out_w), np.int64)
    per_out = out // group
    for ky in range(kh):
        for kx in range(kw):
            rows = slice(ky * dy, ky * dy + (out_h - 1) * sy + 1, sy)
            columns = slice(kx * dx, kx * dx + (out_w - 1) * sx + 1, sx)
            for g in range(group):
                outs = slice(g * per_out, (g + 1) * per_out)
                part = x[:, g * per_group : (g + 1) * per_group, rows, columns]
                total[:, outs] += np.einsum("nchw,oc->nohw", part, weight[outs, :, ky, kx])
    return total


def requantise(
    total: np.ndarray[Any, Any], factor: Any, zero: int, dtype: Any
) -> np.ndarray[Any, Any]:
    """As ONNX defines QLinearConv: scaled, rounded half to even, shifted, saturated."""
    limits = np.iinfo(dtype)
    scaled = np.rint(total.astype(np.float32) * np.asarray(factor, np.float32))
    return np.clip(scaled + zero, limits.min, limits.max).astype(dtype)
