"""`--precision fp16`: what is stored in half precision, and how far results are off then."""

from __future__ import annotations

import importlib
import re
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper, numpy_helper

import edgesdk
from edgesdk.compiler import half
from edgesdk.compiler.lower import lower as lowered
from edgesdk.errors import UsageError, VerificationError
from edgesdk.frontend import import_model
from edgesdk.precision import find_precision, in_precision
from edgesdk.profiles import load_target


def network(folder: Path, *, scale: float = 1.0) -> Path:
    """Convolutions with a residual, a depthwise one, a pooled vector, a product and softmax;
    `scale` multiplies what goes into the residual, and is divided out again."""
    draw = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        fan = int(np.prod(shape[1:]))
        return (draw.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)

    constants = {
        "w1": weight(32, 3, 3, 3),
        "w2": weight(32, 32, 3, 3),
        "wd": weight(32, 1, 3, 3),
        "w3": weight(64, 32, 1, 1),
        "b1": draw.standard_normal(32).astype(np.float32),
        "fc": weight(100, 64).T.copy(),
        "up": np.float32(scale),
        "down": np.float32(1 / scale),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], "first", strides=[2, 2], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "w2"], ["c"], "second", pads=[1] * 4),
        helper.make_node("Add", ["c", "r"], ["s"], "residual"),
        helper.make_node("Mul", ["s", "up"], ["large"], "large"),
        helper.make_node("MaxPool", ["large"], ["p"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Mul", ["p", "down"], ["q"], "small"),
        helper.make_node("Conv", ["q", "wd"], ["d"], "depthwise", group=32, pads=[1] * 4),
        helper.make_node("Conv", ["d", "w3"], ["e"], "last"),
        helper.make_node("GlobalAveragePool", ["e"], ["g"], "mean"),
        helper.make_node("Flatten", ["g"], ["f"], "flat"),
        helper.make_node("MatMul", ["f", "fc"], ["m"], "fc"),
        helper.make_node("Softmax", ["m"], ["y"], "softmax", axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (1, 3, 32, 32))],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (1, 100))],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    path = folder / "net.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("target", ["local", "rpi4"])
def test_half_the_size_and_little_error(target: str, tmp_path: Path) -> None:
    """The gate compares with ONNX Runtime in fp32, natively and emulated; the error is that of
    weights rounded to 2^-11."""
    path = network(tmp_path)
    bundles = {
        name: edgesdk.compile(path, target=target, output=tmp_path / name, precision=name)
        for name in ("fp32", "fp16")
    }
    exact, rounded = (bundles[name].manifest for name in ("fp32", "fp16"))
    assert rounded.precision == "fp16"
    assert rounded.verification.how in ("native", "emulated")
    assert 0.5 <= rounded.weights_bytes / exact.weights_bytes < 0.55
    assert exact.verification.max_relative_error < 1e-5
    assert 1e-5 < rounded.verification.max_relative_error < 2e-3
    assert rounded.verification.tolerance == 1e-2
    assert [t.dtype for t in (*rounded.inputs, *rounded.outputs)] == ["float32"] * 2


def everything_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU gets what a GPU gets."""
    module = importlib.import_module("edgesdk.compiler.lower")
    monkeypatch.setattr(
        module, "store_in_halves", lambda m, tensors: half.store_in_halves(m, tensors=True)
    )


def test_tensors_in_halves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU gets, here on a CPU: activations take half the memory, and the error is that of
    numbers rounded after each fused layer."""
    everything_in_halves(monkeypatch)
    path = network(tmp_path)
    exact = edgesdk.compile(path, output=tmp_path / "fp32").manifest
    rounded = edgesdk.compile(path, output=tmp_path / "fp16", precision="fp16").manifest
    assert rounded.arena_bytes < 0.6 * exact.arena_bytes
    assert 1e-5 < rounded.verification.max_relative_error < 4e-3


def test_overflow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """65504 is the largest half: numbers beyond it in memory are infinite, and the gate says in
    which layer. On a CPU they are not stored so."""
    path = network(tmp_path, scale=65536.0)
    bundle = edgesdk.compile(path, output=tmp_path / "cpu", precision="fp16")
    assert bundle.manifest.verification.max_relative_error < 2e-3
    everything_in_halves(monkeypatch)
    with pytest.raises(VerificationError) as caught:
        edgesdk.compile(path, output=tmp_path / "out", precision="fp16")
    said = re.search(
        r"first in the layer 'large' \(Mul\), whose numbers overflow float16: (\S+) is more than"
        r" 65504$",
        caught.value.message,
    )
    assert said is not None and 65504 < float(said[1]) < 65536 * 20
    readme = (tmp_path / "out.mismatch" / "README.md").read_text(encoding="utf-8")
    assert "--target local --precision fp16" in readme
    assert not (tmp_path / "out").exists()


def test_kernels_keep_their_templates(tmp_path: Path) -> None:
    """In halves the kernels are those of before, with conversions where they read and write."""
    from edgesdk.schedules import schedule_kernels

    path = network(tmp_path)
    for target in ("local", "cuda-sm_90"):
        rungs = {}
        for name in ("fp32", "fp16"):
            profile = in_precision(load_target(target), find_precision(name))
            with tvm.target.Target(profile.tvm):
                module = lowered(import_model(path).take_module(), profile)
            kernels = {
                gv.name_hint: function
                for gv, function in module.functions.items()
                if isinstance(function, tvm.tirx.PrimFunc)
            }
            _, coverage = schedule_kernels(kernels, profile)
            assert coverage.problems == ()
            rungs[name] = {rung: len(names) for rung, names in coverage.rungs.items()}
            types = {str(p.ty.dtype) for f in kernels.values() for p in f.params}
            assert ("float16" in types) is (name == "fp16")
        assert rungs["fp16"] == rungs["fp32"]


def test_weights_beyond_the_range_stay_floats() -> None:
    """And so do small ones."""
    from tvm import relax

    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64, 64), "float32"))
    large = np.ones((64, 64), np.float32)
    large[3, 4] = 7e4
    with bb.function("main", [x]):
        with bb.dataflow():
            out = x
            for value in (large, np.ones((64, 64), np.float32), np.ones(64, np.float32)):
                out = bb.emit(relax.op.multiply(out, relax.const(value)))
            out = bb.emit_output(out)
        bb.emit_func_output(out)
    module = tvm.relax.transform.LegalizeOps()(bb.get())
    module = tvm.relax.transform.ToNonDataflow()(module)
    module = half.store_in_halves(module, tensors=False)
    constants = []
    for binding in module["main"].body.blocks[0].bindings:
        constants += [str(a.ty.dtype) for a in binding.value.args[1].fields[1:]]
    assert constants == ["float32", "float16", "float32"]


def test_who_cannot(tmp_path: Path) -> None:
    path = network(tmp_path)
    with pytest.raises(UsageError) as caught:
        edgesdk.compile(path, target="linux-riscv64", output=tmp_path / "out", precision="fp16")
    assert caught.value.message == ("linux-riscv64 promises no CPU that converts half precision")
    profile = load_target("linux-x86_64")
    bare = partial(in_precision, precision=find_precision("fp16"))
    assert bare(profile).precision == "fp16"  # its level of the psABI has F16C
