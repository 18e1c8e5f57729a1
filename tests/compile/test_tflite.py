"""TFLite files the whole way: real models against TFLite's interpreter, refusals, names, verbs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_line import Cli
from real_models import TFLITE_MODELS, RealModel
from test_real_models import fetched
from test_tflite_operators import run_onnx
from tflite_files import Net, interpret, quantised_net

import edgesdk
from edgesdk.errors import UnsupportedModelError, VerificationError
from edgesdk.frontend import Reference, import_model
from edgesdk.frontend.tflite import convert_tflite


@pytest.mark.parametrize("model", TFLITE_MODELS, ids=lambda model: model.name)
def test_the_onnx_form_of_real_models(model: RealModel) -> None:
    path = fetched(model)
    converted = convert_tflite(path.read_bytes(), path.name)
    (graph_input,) = converted.proto.graph.input
    shape = [d.dim_value for d in graph_input.type.tensor_type.shape.dim]
    image = np.random.default_rng(3).random(shape).astype(np.float32)
    for array, wanted in zip(
        run_onnx(converted, [image]), interpret(path.read_bytes(), [image]), strict=True
    ):
        assert array.shape == wanted.shape
        np.testing.assert_allclose(array, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max() + 1e-7)
        assert np.any(wanted)
    # Channels come first from the first convolution to the last.
    kinds = [node.op_type for node in converted.proto.graph.node]
    assert kinds.count("Transpose") <= 5


def small(tmp_path: Path, *, name: str = "net.tflite") -> Path:
    """A network with an open batch, and names that are no identifiers."""
    net = Net()
    x = net.input((1, 6, 5, 3), name="serving_default_x:0", signature=(-1, 6, 5, 3))
    rng = np.random.default_rng(2)
    y = net.op(
        "CONV_2D",
        [x, net.const(rng.standard_normal((4, 3, 3, 3))), net.const(rng.standard_normal(4))],
        [net.tensor((1,), name="StatefulPartitionedCall/conv;bias")],
        options="Conv2DOptions", strideH=2, strideW=2, dilationHFactor=1, dilationWFactor=1,
        fusedActivationFunction=3,
    )  # fmt: skip
    pooled = net.op(
        "MEAN",
        [y, net.const([1, 2], "int32")],
        [net.tensor((1,), name="StatefulPartitionedCall:0")],
        options="ReducerOptions",
    )
    path = tmp_path / name
    path.write_bytes(net.bytes(y, pooled))
    return path


def test_verbs(cli: Cli) -> None:
    """init, inspect, compile, verify with fresh inputs, bench: as for an ONNX file."""
    small(cli.here)
    said = cli("inspect", "net.tflite", "--json")
    assert said.code == 0, said.err
    assert said.json["format"] == "TFLite"
    assert said.json["operators"] == {"CONV_2D": 1, "MEAN": 1}
    assert said.json["inputs"][0]["shape"] == [1, 6, 5, 3]
    assert "batch" in said.json["repairs"][0]
    assert cli("init", "net.tflite", "--target", "local").code == 0
    assert cli("compile", "--shape", "serving_default_x:0=2x6x5x3").code == 0
    said = cli("verify", "--json")
    assert said.code == 0, said.err
    assert said.json["reference"] == "TFLite's interpreter, CPU"
    assert len(said.json["checks"]) == 4
    said = cli("bench", "--against", "onnxruntime", "--repeat", "5", "--json")
    assert said.code == 0, said.err
    assert any("net.tflite was converted" in warning for warning in said.json["warnings"])


def test_names_and_values_are_the_files_own(tmp_path: Path) -> None:
    path = small(tmp_path)
    bundle = edgesdk.compile(
        path, shapes={"serving_default_x:0": (2, 6, 5, 3)}, output=tmp_path / "b"
    )
    assert [t.name for t in bundle.manifest.outputs] == [
        "StatefulPartitionedCall/conv;bias",
        "StatefulPartitionedCall:0",
    ]
    x = np.random.default_rng(9).standard_normal((2, 6, 5, 3)).astype(np.float32)
    outputs = edgesdk.run(bundle, {"serving_default_x:0": x})
    for array, wanted in zip(outputs.values(), interpret(path.read_bytes(), [x]), strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-5)


def test_refused_operators_are_named_together(tmp_path: Path) -> None:
    net = Net()
    x = net.input((2, 3))
    where = net.op("WHERE", [net.op("GREATER", [x, net.const(np.float32(0))], "bool")], "int64")
    net.op("REVERSE_SEQUENCE", [x, net.input((2,), "int32")], options="ReverseSequenceOptions")
    path = tmp_path / "net.tflite"
    path.write_bytes(net.bytes(where, len(net.graph.tensors) - 1))
    with pytest.raises(UnsupportedModelError) as caught:
        import_model(path)
    assert [(node, kind) for node, kind, _ in caught.value.nodes] == [
        ("t3", "WHERE"),
        ("t5", "REVERSE_SEQUENCE"),
    ]


def test_a_wrong_conversion_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate compares with the interpreter itself, so the converter's own mistakes show."""
    from edgesdk.frontend.tflite import operators

    monkeypatch.setitem(operators.ACTIVATIONS, 3, ("Relu", ()))  # RELU6 without its bound
    path = small(tmp_path, name="wrong.tflite")
    shapes = {"serving_default_x:0": (1, 6, 5, 3)}
    with pytest.raises(VerificationError, match="form in ONNX"):
        edgesdk.compile(path, shapes=shapes, output=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_the_reference_keeps_no_state_between_runs(tmp_path: Path) -> None:
    from test_tflite_operators import lstm

    net = Net()
    path = tmp_path / "lstm.tflite"
    path.write_bytes(net.bytes(lstm(net)))
    x = np.random.default_rng(4).standard_normal((2, 5, 3)).astype(np.float32)
    reference = Reference(path, {"t0": (2, 5, 3)})
    first, second = (reference.run({"t0": x}) for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


def test_a_quantised_network(tmp_path: Path) -> None:
    path = tmp_path / "net.tflite"
    path.write_bytes(quantised_net())
    bundle = edgesdk.compile(path, output=tmp_path / "b")
    assert "TFLite's interpreter" in bundle.manifest.verification.reference
    assert [t.dtype for t in bundle.manifest.outputs] == ["int8", "int8", "float32"]
    rng = np.random.default_rng(8)
    for _ in range(3):
        image = rng.integers(-128, 128, (1, 16, 16, 3)).astype(np.int8)
        outputs = list(edgesdk.run(bundle, {"image": image}).values())
        wanted = interpret(path.read_bytes(), [image])
        for array, expected in zip(outputs[:2], wanted[:2], strict=True):
            # A Softmax of few classes turns one step of a score into three.
            assert np.abs(array.astype(int) - expected).max() <= 3
            assert len(np.unique(expected)) >= 4
        np.testing.assert_allclose(outputs[2], wanted[2], rtol=0, atol=0.0493 * 1.01)


def test_weights_in_8_bits_alone(tmp_path: Path) -> None:
    """TFLite rounds the activations before it multiplies them; here they stay as they are."""
    net = Net()
    rng = np.random.default_rng(6)
    x = net.input((4, 32), name="x")
    weights, scale = rng.integers(-127, 128, (10, 32)), 0.01
    w = net.const(weights, "int8", scale=scale)
    y = net.op(
        "FULLY_CONNECTED", [x, w, net.const(np.zeros(10))], [net.tensor((1,), name="y")],
        options="FullyConnectedOptions", version=3,
    )  # fmt: skip
    path = tmp_path / "net.tflite"
    path.write_bytes(net.bytes(y))
    bundle = edgesdk.compile(path, output=tmp_path / "b")
    x_values = rng.standard_normal((4, 32)).astype(np.float32)
    result = edgesdk.run(bundle, {"x": x_values})["y"]
    exact = x_values.astype(np.float64) @ (weights * np.float64(np.float32(scale))).T
    np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-5)
    (rounded,) = interpret(path.read_bytes(), [x_values])
    assert 1e-4 < np.abs(rounded - exact).max() / np.abs(exact).max() < 0.02


def test_a_quantised_result_that_tflite_does_not_confirm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgesdk.frontend.tflite import operators

    monkeypatch.setitem(operators.ACTIVATIONS, 3, ("Clip", (0.0, 3.0)))
    path = tmp_path / "wrong.tflite"
    path.write_bytes(quantised_net())
    image = np.random.default_rng(8).integers(-128, 128, (1, 16, 16, 3)).astype(np.int8)
    with pytest.raises(VerificationError, match="steps of the quantisation"):
        Reference(path, {"image": (1, 16, 16, 3)}).run({"image": image})
