"""Quantising a network, and what becomes of it: the same numbers as in ONNX Runtime, by steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from command_line import Cli
from onnx import TensorProto, helper, numpy_helper

from edgesdk.compiler import compile_model
from edgesdk.compiler.gate import run_launcher
from edgesdk.frontend import import_model
from edgesdk.profiles import load_target
from edgesdk.quantisation import quantize_model

SIZE = (1, 3, 40, 40)


def network(path: Path) -> Path:
    """A little of everything that quantised networks have: picture, pooling, residual, depthwise,
    concatenation, hard swish, global mean, classifier."""
    draw = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def constant(name: str, *shape: int) -> str:
        array = draw.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)
        weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def add(kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def conv(x: str, y: str, ins: int, outs: int, k: int, stride: int = 1, group: int = 1) -> str:
        parts = [x, constant(f"{y}_w", outs, ins // group, k, k), constant(f"{y}_b", outs)]
        pads, strides = [k // 2] * 4, [stride, stride]
        return add("Conv", parts, y, kernel_shape=[k, k], pads=pads, strides=strides, group=group)

    x = add("Relu", [conv("x", "c1", 3, 32, 3, 2)], "r1")
    x = add("MaxPool", [x], "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    y = add("Relu", [conv(x, "c2", 32, 16, 1)], "r2")
    y = add("Relu", [conv(y, "c3", 16, 16, 3)], "r3")
    x = add("Relu", [add("Add", [conv(y, "c4", 16, 32, 1), x], "sum")], "r4")
    y = add("Relu", [conv(x, "c5", 32, 32, 3, group=32)], "r5")
    y = add("Concat", [y, x], "both", axis=1)
    y = add("HardSwish", [conv(y, "c6", 64, 48, 3, 2)], "swish")
    y = add("Flatten", [add("GlobalAveragePool", [y], "mean")], "flat")
    add("Gemm", [y, constant("fc_w", 10, 48), constant("fc_b", 10)], "out", transB=1)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, SIZE)],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, (1, 10))],
        weights,
    )
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


def sample(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def samples(folder: Path, count: int = 6) -> Path:
    folder.mkdir()
    for seed in range(count):
        np.savez(folder / f"{seed}.npz", x=sample(seed))
    return folder


def without_optimisation(path: Path) -> onnxruntime.InferenceSession:
    """ONNX Runtime computing what the operators say, in floats."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.graph_optimization_level = level
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("activations", ["uint8", "int8"])
def test_every_quantised_tensor_is_that_of_onnx_runtime(activations: Any, tmp_path: Path) -> None:
    quantised = tmp_path / "q.onnx"
    quantize_model(
        network(tmp_path / "net.onnx"),
        calibration=samples(tmp_path / "samples"),
        output=quantised,
        activations=activations,
    )
    model = onnx.load(quantised)
    kind = TensorProto.UINT8 if activations == "uint8" else TensorProto.INT8
    inside = [n.output[0] for n in model.graph.node if n.op_type == "QuantizeLinear"]
    assert len(inside) > 10
    model.graph.output.extend(helper.make_tensor_value_info(n, kind, None) for n in inside)
    onnx.save(model, quantised)
    compiled = compile_model(
        import_model(quantised), load_target("local"), build=tmp_path, name_build=lambda: "test"
    )
    assert compiled.coverage.problems == ()
    x = sample(99)
    results = run_launcher((), library=compiled.library, launcher=compiled.launcher, inputs=[x])
    expected = without_optimisation(quantised).run(None, {"x": x})
    for name, actual, wanted in zip(["out", *inside], results, expected, strict=True):
        if name == "out":
            continue
        steps = np.abs(actual.astype(int) - wanted.astype(int))
        assert steps.max() <= 1, name
        # Numbers halfway between two steps may go either way, and they are few.
        assert np.mean(steps != 0) < 0.01, name


def test_a_residual_network_moves_only_integers(tmp_path: Path) -> None:
    """Between its convolutions nothing is stored as float, and no layout is changed."""
    import tvm

    from edgesdk.compiler.lower import lower

    quantised = tmp_path / "q.onnx"
    quantize_model(
        network(tmp_path / "net.onnx"),
        calibration=samples(tmp_path / "samples", 2),
        output=quantised,
    )
    profile = load_target("local")
    with tvm.target.Target(profile.tvm):
        main = lower(import_model(quantised).module, profile)["main"]
    stored = [b.var.ty for block in main.body.blocks for b in block.bindings][:-1]
    names = [str(b.value) for block in main.body.blocks for b in block.bindings]
    integers = [n for n in names if re.search("(direct|depthwise|dense)_int8", n)]
    assert len(integers) == 7  # six convolutions and the classifier
    large_floats = [t for t in stored if t.dtype == "float32" and np.prod(t.shape.values) > 5000]
    assert large_floats == []


def test_the_report_is_what_the_models_say(tmp_path: Path) -> None:
    path, quantised = network(tmp_path / "net.onnx"), tmp_path / "q.onnx"
    done = quantize_model(path, calibration=samples(tmp_path / "samples"), output=quantised)
    assert (done.samples, done.compared, done.operators) == (6, 6, 7)
    assert done.size_bytes == quantised.stat().st_size < done.original_bytes / 2
    real = onnxruntime.InferenceSession(str(path))
    rounded = without_optimisation(quantised)
    pairs = [(s.run(None, {"x": sample(i)})[0] for s in (real, rounded)) for i in range(6)]
    a, b = (np.concatenate(arrays).ravel() for arrays in zip(*pairs, strict=True))
    (error,) = done.outputs
    assert error.name == "out"
    # The report's results come from ONNX Runtime's integer kernels, which differ by steps.
    assert error.max_relative_error == pytest.approx(
        np.abs(a - b).max() / np.abs(a).max(), abs=0.02
    )
    assert error.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=0.001)
    assert error.cosine > 0.99
    same = np.mean(a.reshape(6, 10).argmax(1) == b.reshape(6, 10).argmax(1))
    assert error.top1_agreement == pytest.approx(same, abs=1 / 6 + 1e-9)


def test_seven_bits(tmp_path: Path) -> None:
    quantised = tmp_path / "q.onnx"
    quantize_model(
        network(tmp_path / "net.onnx"),
        calibration=samples(tmp_path / "samples", 1),
        output=quantised,
        reduce_range=True,
        per_channel=False,
    )
    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(quantised).graph.initializer}
    integers = [w for n, w in weights.items() if n.endswith("_w_quantized")]
    assert len(integers) == 7
    assert all(w.dtype == np.int8 and np.abs(w).max() in (63, 64) for w in integers)


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    path = network(tmp_path / "net.onnx")
    folder = samples(tmp_path / "samples", 2)
    said = cli("quantize", str(path), "--calibration", str(folder), "-o", str(tmp_path / "q.onnx"))
    assert said.code == 0
    assert f"wrote {tmp_path / 'q.onnx'}" in said.out and "7 operators in integers" in said.out
    said = cli("quantize", str(tmp_path / "q.onnx"), "--calibration", str(folder))
    assert said.code == 5 and "is quantised already" in said.err
    arguments = ("--calibration", str(folder), "-o", str(tmp_path / "q.onnx"), "--json")
    data = json.loads(cli("quantize", str(path), *arguments).out)
    assert data["samples"] == 2 and data["outputs"][0]["name"] == "out"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no .npz or .npy file"),
        ({"0.npz": {"X": np.zeros(SIZE, np.float32)}}, "has no array for the input 'x'"),
        ({"0.npz": {"x": np.zeros((1, 3, 4, 4), np.float32)}}, "x is float32[1x3x4x4]"),
        ({"0.npz": {"x": np.zeros(SIZE)}}, "x is float64[1x3x40x40]"),
        ({"0.npz": {"x": np.full(SIZE, np.nan, np.float32)}}, "x has NaN or infinity"),
    ],
)
def test_samples_that_do_not_fit(cli: Cli, files: Any, message: str, tmp_path: Path) -> None:
    path = network(tmp_path / "net.onnx")
    folder = tmp_path / "samples"
    folder.mkdir()
    for name, arrays in files.items():
        np.savez(folder / name, **arrays)
    said = cli("quantize", str(path), "--calibration", str(folder), "-o", str(tmp_path / "q.onnx"))
    assert said.code == 2 and message in said.err
    assert not (tmp_path / "q.onnx").exists()


def test_a_file_that_is_no_array(cli: Cli, tmp_path: Path) -> None:
    path = network(tmp_path / "net.onnx")
    folder = tmp_path / "samples"
    folder.mkdir()
    (folder / "0.npy").write_text("no array")
    said = cli("quantize", str(path), "--calibration", str(folder), "-o", str(tmp_path / "q.onnx"))
    assert said.code == 2 and "0.npy is not a .npy file of numbers" in said.err


def test_a_missing_folder(cli: Cli, tmp_path: Path) -> None:
    path = network(tmp_path / "net.onnx")
    said = cli("quantize", str(path), "--calibration", str(tmp_path / "none"))
    assert said.code == 2 and "there is no calibration folder" in said.err
