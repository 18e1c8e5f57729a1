"""Compiling needs at most three times a model's size in memory, beside what the process needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

# Memory counts from where everything is imported: that is the same for the smallest model.
PROGRAM = """
import json, resource, sys
import edgesdk, edgesdk.compiler, edgesdk.frontend
import numpy, onnx, onnxruntime, tvm

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

edgesdk.compile(sys.argv[1], output="small")
base = peak_bytes()
bundle = edgesdk.compile(sys.argv[2], output="large")
print(json.dumps({"bytes": peak_bytes() - base, "weights": bundle.manifest.weights_bytes}))
"""


def save(path: Path, operator: str, weight_shape: tuple[int, ...], layers: int) -> None:
    rng = np.random.default_rng(0)
    channels = weight_shape[0]
    shape = [1, channels, *(7 for _ in weight_shape[2:])]
    scale = np.float32(1 / np.sqrt(np.prod(weight_shape) / channels))
    attributes = {"pads": [1, 1, 1, 1]} if operator == "Conv" else {}
    nodes, weights = [], []
    for i in range(layers):
        weight = rng.standard_normal(weight_shape, np.float32) * scale
        weights.append(numpy_helper.from_array(weight, f"w{i}"))
        nodes.append(helper.make_node(operator, [f"h{i}", f"w{i}"], [f"s{i}"], **attributes))
        nodes.append(helper.make_node("Relu", [f"s{i}"], [f"h{i + 1}"]))
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name in ("h0", f"h{layers}")
    ]
    graph = helper.make_graph(nodes, path.stem, ports[:1], ports[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)


@pytest.mark.parametrize(
    ("operator", "shape", "layers"),
    [("MatMul", (2560, 2560), 4), ("Conv", (512, 512, 3, 3), 11)],
)
def test_a_model_of_100_mb(
    tmp_path: Path, operator: str, shape: tuple[int, ...], layers: int
) -> None:
    save(tmp_path / "small.onnx", operator, (16, 16, *shape[2:]), 1)
    save(tmp_path / "large.onnx", operator, shape, layers)
    size_bytes = (tmp_path / "large.onnx").stat().st_size
    assert size_bytes > 100_000_000
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, "small.onnx", "large.onnx"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["weights"] >= 0.99 * size_bytes
    assert report["bytes"] <= 3 * size_bytes
