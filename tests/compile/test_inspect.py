"""What `edgesdk inspect` counts, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
import onnx.parser
import pytest
from onnx import numpy_helper

import edgesdk
from edgesdk.cli.inspection import inspect_model, report_text
from edgesdk.errors import UsageError
from edgesdk.profiles import target_families


def write(folder: Path, body: str, inputs: str, **weights: np.ndarray[Any, Any]) -> Path:
    text = f'<ir_version: 8, opset_import: ["": 17]> g ({inputs}) => (float y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    model.graph.output[0].ClearField("type")
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    path = folder / "net.onnx"
    onnx.save(model, path)
    return path


def weight(*shape: int) -> np.ndarray[Any, Any]:
    return np.full(shape, 0.5, np.float32)


@pytest.mark.parametrize(
    ("body", "inputs", "weights", "flops"),
    [
        # 2 for each multiply-add, 1 for each bias.
        (
            "y = Conv <pads = [1,1,1,1]> (x, w, b)",
            "float[2,3,8,8] x",
            {"w": weight(4, 3, 3, 3), "b": weight(4)},
            2 * (2 * 4 * 8 * 8) * (3 * 3 * 3) + 2 * 4 * 8 * 8,
        ),
        # Depthwise: one input channel for each output.
        (
            "y = Conv <group = 6, strides = [2,2]> (x, w)",
            "float[1,6,9,9] x",
            {"w": weight(6, 1, 3, 3)},
            2 * (6 * 4 * 4) * 9,
        ),
        # Transposed: each input element meets the whole kernel.
        (
            "y = ConvTranspose <strides = [2,2]> (x, w)",
            "float[1,3,4,4] x",
            {"w": weight(3, 5, 2, 2)},
            2 * (3 * 4 * 4) * 5 * 2 * 2,
        ),
        ("y = MatMul (x, w)", "float[2,7,8] x", {"w": weight(8, 5)}, 2 * 2 * 7 * 8 * 5),
        ("y = MaxPool <kernel_shape = [3,3]> (x)", "float[1,2,5,5] x", {}, 2 * 3 * 3 * 9),
        ("y = ReduceMax <axes = [1]> (x)", "float[4,9] x", {}, 36),
        ("y = Softmax (x)", "float[4,9] x", {}, 5 * 36),
        ("a = Transpose (x) y = Relu (a)", "float[4,9] x", {}, 36),
    ],
)
def test_operations(
    tmp_path: Path, body: str, inputs: str, weights: dict[str, Any], flops: int
) -> None:
    assert inspect_model(write(tmp_path, body, inputs, **weights), {}).flops == flops


def squeezenet_flops() -> int:
    """SqueezeNet 1.1 (Iandola et al. 2016; the forresti/SqueezeNet release), layer by layer."""
    flops = 0

    def conv(channels: int, filters: int, kernel: int, size: int) -> None:
        nonlocal flops
        outputs = filters * size * size
        flops += 2 * outputs * channels * kernel * kernel + 2 * outputs  # with bias and Relu

    def fire(channels: int, squeeze: int, expand: int, size: int) -> None:
        conv(channels, squeeze, 1, size)
        conv(squeeze, expand, 1, size)
        conv(squeeze, expand, 3, size)

    conv(3, 64, 3, 111)
    flops += 9 * 64 * 55 * 55
    fire(64, 16, 64, 55)
    fire(128, 16, 64, 55)
    flops += 9 * 128 * 27 * 27
    fire(128, 32, 128, 27)
    fire(256, 32, 128, 27)
    flops += 9 * 256 * 13 * 13
    fire(256, 48, 192, 13)
    fire(384, 48, 192, 13)
    fire(384, 64, 256, 13)
    fire(512, 64, 256, 13)
    conv(512, 1000, 1, 13)
    return flops + 1000 * 13 * 13 + 5 * 1000  # the mean of each channel, and Softmax


def test_a_known_network() -> None:
    light = Path(onnx.backend.test.__file__).parent / "data" / "light" / "light_squeezenet.onnx"
    report = inspect_model(light, {})
    assert report.flops == squeezenet_flops()
    assert report.operators["Conv"] == 26
    assert "FLOP a run" in report_text(report)


def test_memory_is_what_the_bundle_takes(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "a = Conv <pads = [1,1,1,1]> (x, w) b = Relu (a) c = MaxPool <kernel_shape = [2,2]> (b)"
        " y = Conv (c, v)",
        "float[1,16,12,12] x",
        w=weight(32, 16, 3, 3),
        v=weight(8, 32, 1, 1),
    )
    report = inspect_model(path, {}, ["local", "rpi4"])
    assert [t.target for t in report.targets] == ["local", "rpi4"]
    manifest = edgesdk.compile(path, output=tmp_path / "out").manifest
    memory = report.targets[0].memory
    assert memory is not None
    assert memory.weights_bytes == manifest.weights_bytes
    assert memory.activations_bytes == manifest.arena_bytes > 0
    assert memory.kernel_calls == manifest.build["kernel_calls"]
    assert (memory.inputs_bytes, memory.outputs_bytes) == (16 * 12 * 12 * 4, 8 * 11 * 11 * 4)
    assert report.parameters == 32 * 16 * 9 + 8 * 32


def test_an_unknown_target_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown target 'rpi44'"):
        inspect_model(write(tmp_path, "y = Neg (x)", "float[2] x"), {}, ["rpi44"])


def test_a_family_means_all_its_boards(tmp_path: Path) -> None:
    report = inspect_model(write(tmp_path, "y = Neg (x)", "float[2] x"), {}, ["jetson"])
    boards = [board.name for board in target_families()["jetson"]]
    assert [t.target for t in report.targets] == boards
    assert all(t.memory is not None for t in report.targets)


def test_weights_in_constant_nodes_are_parameters(tmp_path: Path) -> None:
    body = "w = Constant <value = float[3] {1.0, 2.0, 3.0}> () y = Add (x, w)"
    assert inspect_model(write(tmp_path, body, "float[2,3] x"), {}).parameters == 3
