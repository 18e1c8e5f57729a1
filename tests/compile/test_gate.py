"""The numeric gate: what may differ from the reference, and what may not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import edgesdk
from edgesdk import api
from edgesdk.errors import VerificationError


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

    def __init__(self, path: Path, shapes: object, *, optimise: bool = True) -> None:
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
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.onnx"]


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


def test_an_index_that_flips_widens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import edgesdk.frontend

    class Flipping(OtherReference):
        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            best = np.array([3 if self.optimise else 4])
            return {"y": np.ones(5, np.float32), "best": best}

    monkeypatch.setattr(edgesdk.frontend, "Reference", Flipping)
    model = SimpleNamespace(source=Path("net.onnx"), shapes={})
    expected = Flipping(Path("net.onnx"), {}).run({})
    assert api._tolerance(model, {}, expected) == 1e-4  # type: ignore[arg-type]
