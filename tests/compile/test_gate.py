"""The numeric gate: what may differ from the reference, and what may not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

import edgesdk
from edgesdk import api
from edgesdk.bundle.manifest import read_manifest
from edgesdk.compiler import gate
from edgesdk.errors import UsageError, VerificationError
from edgesdk.numerics import tolerance_of


def tanh_model(folder: Path) -> Path:
    graph = helper.make_graph(
        [helper.make_node("Tanh", ["x"], ["y"], name="n")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 5))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, 5))],
    )
    path = folder / "net.onnx"
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


class OtherReference:
    """A reference that differs: by `shift` always, by `spread` more when it does not optimise."""

    shift = 0.0
    spread = 0.0

    def __init__(
        self,
        path: Path,
        shapes: object,
        *,
        optimise: bool = True,
        outputs: object = None,
    ) -> None:
        self.optimise = optimise

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        y = np.tanh(inputs["x"])
        largest = np.abs(y).max()
        moved = self.shift + (0.0 if self.optimise else self.spread)
        return {"y": (y + moved * largest).astype(np.float32)}


def compile_with(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, shift: float, spread: float
) -> edgesdk.Bundle:
    import edgesdk.frontend

    monkeypatch.setattr(OtherReference, "shift", shift)
    monkeypatch.setattr(OtherReference, "spread", spread)
    monkeypatch.setattr(edgesdk.frontend, "Reference", OtherReference)
    return api.compile(tanh_model(folder), output=folder / "out")


def test_a_result_that_agrees_passes_at_the_usual_tolerance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verification = compile_with(monkeypatch, tmp_path, shift=0.0, spread=0.0).manifest.verification
    assert verification.how == "native"
    assert verification.tolerance == 1e-4
    assert verification.max_relative_error is not None
    assert verification.max_relative_error < 1e-6


def test_a_result_that_differs_leaves_no_bundle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(VerificationError, match=r"'y' differs by 0\.001"):
        compile_with(monkeypatch, tmp_path, shift=0.001, spread=0.0)
    assert not (tmp_path / "out").exists()


def test_the_spread_of_the_reference_widens_the_tolerance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = compile_with(monkeypatch, tmp_path, shift=0.001, spread=0.001)
    assert bundle.manifest.verification.tolerance == pytest.approx(0.004, rel=0.01)


def test_but_never_so_far_that_anything_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(VerificationError, match=r"allowed 0\.01"):
        compile_with(monkeypatch, tmp_path, shift=0.05, spread=0.5)


def test_an_index_that_flips_widens_nothing() -> None:
    expected = {"y": np.ones(5, np.float32), "best": np.array([3])}
    assert tolerance_of(expected, {**expected, "best": np.array([4])}) == 1e-4


def test_the_manifest_says_what_was_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x = np.linspace(-9, 9, 10, dtype=np.float32).reshape(2, 5)
    bundle = edgesdk.compile(tanh_model(tmp_path), output=tmp_path / "out", inputs={"x": x})
    verification = edgesdk.Bundle(bundle.path, read_manifest(bundle.path)).manifest.verification
    assert verification.seeds == (0, 1, 2) and verification.given_inputs
    assert verification.min_cosine == pytest.approx(1.0, abs=1e-12)
    assert verification.detail == ""


def test_a_manifest_of_before_cosines_and_of_after_can_be_read(tmp_path: Path) -> None:
    bundle = edgesdk.compile(tanh_model(tmp_path), output=tmp_path / "out")
    path = bundle.path / "manifest.json"
    data = json.loads(path.read_text())
    for name in ("min_cosine", "seeds", "given_inputs"):
        del data["verification"][name]
    data["verification"]["something_new"] = 1
    path.write_text(json.dumps(data))
    verification = read_manifest(bundle.path).verification
    assert verification.how == "native" and verification.min_cosine is None
    assert verification.seeds == ()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"z": np.zeros((2, 5), np.float32)}, "net has no input 'z'"),
        ({"x": np.zeros((5, 2), np.float32)}, "the input 'x' is float32 5x2, not float32 2x5"),
        ({}, "the input 'x' is missing"),
    ],
)
def test_given_inputs_must_fit(inputs: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        edgesdk.compile(tanh_model(tmp_path), output=tmp_path / "out", inputs=inputs)
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


@pytest.mark.parametrize(
    ("flops", "native", "emulated"),
    [(1, 3, 3), (10**9 // 2, 3, 2), (10**12, 3, 1), (None, 3, 1)],
)
def test_emulated_runs_get_fewer_seeds(
    monkeypatch: pytest.MonkeyPatch, flops: int | None, native: int, emulated: int
) -> None:
    for prefix, count in (((), native), (("qemu",), emulated), (None, 1)):
        monkeypatch.setattr(gate, "_runner", lambda profile, toolchain, found=prefix: found)
        assert gate.choose_seeds(None, None, flops) == (0, 1, 2)[:count]  # type: ignore[arg-type]


def half_model(folder: Path, output: str) -> Path:
    model = onnx.parser.parse_model(
        f"""
        <ir_version: 8, opset_import: ["": 17]>
        g (float16[2,5] x) => (float16[2,5] {output}) {{
            [wide] a = Mul (x, large)
            [square] b = Mul (a, a)
            [root] y = Sqrt (b)
        }}"""
    )
    large = numpy_helper.from_array(np.asarray(1000, np.float16), "large")
    model.graph.initializer.append(large)
    path = folder / "half.onnx"
    onnx.save(model, path)
    return path


def test_where_half_precision_overflows_is_named(tmp_path: Path) -> None:
    # ONNX Runtime computes a chain in single precision: it has no infinity in y.
    with pytest.raises(VerificationError) as caught:
        edgesdk.compile(half_model(tmp_path, "y"), output=tmp_path / "out")
    assert caught.value.message == (
        "output 'y' has NaN or infinity where the reference has not, first in the layer 'square'"
        " (Mul), whose numbers overflow float16"
    )
    cut = onnx.load(tmp_path / "out.mismatch" / "model.onnx")
    assert [node.name for node in cut.graph.node] == ["square", "root"]
    assert np.isinf(np.load(tmp_path / "out.mismatch" / "actual.npy")).any()
    assert np.isfinite(np.load(tmp_path / "out.mismatch" / "expected.npy")).all()


def test_where_the_reference_itself_overflows_is_said(tmp_path: Path) -> None:
    bundle = edgesdk.compile(half_model(tmp_path, "b"), output=tmp_path / "out")
    detail = bundle.manifest.verification.detail
    assert detail.startswith("'b' has NaN or infinity, in the reference, too")
    assert "They begin in the layer 'square' (Mul)." in detail
