"""examples/cuda_cpp, built by its README's commands.

Here there is no GPU: the network is this CPU's, which the same program runs, and what needs a GPU
is refused in words.
"""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
from example_programs import EXAMPLES, attempt, commands, run_here
from onnx import TensorProto, helper

PROGRAM = "build/gpu/gpu_latency"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the README's first commands were typed, for this machine's CPU."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "examples").symlink_to(EXAMPLES)
    shape = [1, 8, 16, 16]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Add", ["a", "x"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(folder / "net.onnx"))
    lines = [line.replace("cuda-sm_90", "local") for line in commands("cuda_cpp")]
    assert [line for line in lines if "gpu_latency" in line] == lines[3:]
    run_here(lines[:3], folder)
    return folder


def test_prints_a_histogram(here: Path) -> None:
    said = run_here([f"{PROGRAM} --runs 250"], here).splitlines()
    assert said[:2] == ["net on the cpu", "inputs and outputs on the host"]
    rows = [re.fullmatch(r" *([\d.]+) us +(\d+) (#*)", line) for line in said[2:-1]]
    assert len(rows) == 17 and all(rows)
    counts = [int(row[2]) for row in rows if row]
    starts = [float(row[1]) for row in rows if row]
    assert sum(counts) == 250 and starts == sorted(starts)
    # A bar's length is its share of the longest, rounded up.
    assert [len(row[3]) for row in rows if row] == [-(-50 * n // max(counts)) for n in counts]
    last = re.fullmatch(
        r"250 runs: median ([\d.]+) us, p99 ([\d.]+) us, fastest ([\d.]+) us, slowest ([\d.]+) us",
        said[-1],
    )
    assert last is not None
    median, p99, fastest, slowest = (float(text) for text in last.groups())
    assert fastest <= median <= p99 <= slowest and fastest == starts[0]


def test_a_library_for_the_cpu_has_no_gpu_memory(here: Path) -> None:
    result = attempt([f"{PROGRAM} --on-gpu"], here)
    assert result.returncode == 1
    assert result.stderr_text == (
        "gpu_latency: 'net' was built for 'local', which has no memory but the CPU's\n"
    )


@pytest.mark.parametrize("options", ["--runs", "--runs 0", "--runs many", "--gpu", "net.onnx"])
def test_wrong_options(here: Path, options: str) -> None:
    result = attempt([f"{PROGRAM} {options}"], here)
    assert result.returncode == 2
    assert result.stderr_text.startswith("usage: gpu_latency ")


def test_needs_a_network(here: Path) -> None:
    result = attempt(["cmake -S examples/cuda_cpp -B build/none"], here)
    assert not result.ok and "which network? -DNETWORK=NAME" in result.stderr_text
