"""A few random graphs and damaged files, always the same ones; `fuzz.py` looks for more."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conformance_cases import CASES
from fuzz_files import mutations
from fuzz_graphs import OPERATORS, Example, check, graphs
from hypothesis import HealthCheck, Phase, given, settings

_HERE = Path(__file__).parent


def test_there_are_enough_operators() -> None:
    assert len(OPERATORS) > 80


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(
    max_examples=10,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(example=graphs())
def test_random_graphs_match_onnx_runtime(folder: Path, example: Example) -> None:
    assert check(example, folder) == ""


def test_damaged_files_end_in_a_clean_error(tmp_path: Path) -> None:
    chosen = CASES[::24]
    for number, case in enumerate(chosen):
        for index, (how, content) in enumerate(mutations(case.model(), 22, seed=number)):
            (tmp_path / f"{case.name}-{index:02}{how}.onnx").write_bytes(content)
    script = [sys.executable, str(_HERE / "fuzz_files.py"), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, f"{lines[-1]}: {done.stderr[-500:]}"
    ended = {line["file"]: line["ended"] for line in lines if "ended" in line}
    assert len(ended) == 22 * len(chosen)
    assert [pair for pair in ended.items() if pair[1].startswith("unclean")] == []
    kinds = Counter(text.partition(":")[0] for text in ended.values())
    # Most are refused, and some damage does no harm.
    assert kinds["code 5"] > len(ended) / 2 and kinds["accepted"] > 0
