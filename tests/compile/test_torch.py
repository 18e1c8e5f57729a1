"""PyTorch modules and exported programs, compared with PyTorch as it runs them itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch_place import WHY_NOT, torch_python

from edgesdk.proc import run_command

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/torch_cases.py found."""
    python = torch_python()
    if python is None:
        pytest.skip(WHY_NOT)
    folder = tmp_path_factory.mktemp("torch")
    result = run_command(
        [python, TESTS / "torch_cases.py", folder],
        timeout_s=600,
        cwd=folder,
    )
    assert result.ok, result.stderr_text
    lines = result.stdout_text.strip().splitlines()
    return dict(json.loads(lines[-1]))


@pytest.mark.parametrize("name", ["cnn", "lstm", "transformer", "nested", "batch"])
def test_results_are_those_of_eager_pytorch(name: str, said: dict[str, Any]) -> None:
    found = said[name]
    assert found["reference"] == "PyTorch, CPU, fp32"
    assert max(found["errors"]) < 1e-5
    assert len(found["errors"]) == {"lstm": 2, "nested": 3}.get(name, 1)


def test_names(said: dict[str, Any]) -> None:
    assert said["cnn"]["name"] == "small_cnn"
    assert said["transformer"]["inputs"] == ["ids", "mask"]


def test_a_program_verifies_its_bundle(said: dict[str, Any]) -> None:
    assert said["batch"]["verified"] == ["golden inputs", "drawn inputs 1"]


@pytest.mark.parametrize(
    ("case", "code", "message", "hint"),
    [
        ("no inputs", 2, "needs inputs", "example_inputs="),
        ("training", 2, "training mode", ".eval()"),
        ("branch", 5, "PyTorch cannot export Branching", "ONNX"),
        ("nonzero", 5, "depends on values at run time", "inspect"),
        ("no model", 2, "not int", ".pt2"),
        ("open", 2, "leaves axis 0", "--shape image="),
    ],
)
def test_refusals(case: str, code: int, message: str, hint: str, said: dict[str, Any]) -> None:
    error = said["errors"][case]
    assert error["code"] == code
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert hint in error["hint"]
