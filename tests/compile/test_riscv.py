"""64-bit RISC-V, with and without vectors: right on the emulated CPU, and only what it promises."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import edgesdk
from edgesdk.bundle import Bundle
from edgesdk.proc import CommandResult, run_command
from edgesdk.profiles import load_target
from edgesdk.toolchain import find_qemu, load_toolchain

PLAIN, VECTORS, WIDE = "rv64", "rv64,v=true,vlen=128", "rv64,v=true,vlen=256"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolution, a sigmoid and a matrix product."""
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((16, 8, 3, 3)).astype(np.float32)
    weight = rng.standard_normal((16 * 8 * 8, 24)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Sigmoid", ["c"], ["s"]),
            helper.make_node("Flatten", ["s"], ["f"]),
            helper.make_node("MatMul", ["f", "w"], ["y"]),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 24])],
        [numpy_helper.from_array(kernel, "k"), numpy_helper.from_array(weight, "w")],
    )
    path = tmp_path_factory.mktemp("riscv") / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


@pytest.mark.parametrize(
    ("target", "runs_on", "refused_on"),
    [("linux-riscv64", (PLAIN, VECTORS), None), ("linux-riscv64-v", (VECTORS, WIDE), PLAIN)],
)
def test_is_right_and_uses_what_the_target_has(
    model: Path, tmp_path: Path, target: str, runs_on: tuple[str, ...], refused_on: str | None
) -> None:
    bundle = edgesdk.compile(model, target=target, output=tmp_path / "bundle")
    assert bundle.manifest.verification.how == "emulated"
    for cpu in runs_on:
        result = _selftest(bundle, cpu)
        assert result.ok, result.stderr_text
        assert "self-test: ok" in result.stdout_text
    code = run_command(["riscv64-linux-gnu-objdump", "-d", bundle.library], timeout_s=60)
    # Vector arithmetic has the major opcode 0x57; the file does not say that it may be decoded.
    vectors = re.findall(r"\.4byte\s+0x[0-9a-f]*[5d]7\b", code.stdout_text)
    assert (len(vectors) > 100) == (refused_on is not None)
    if refused_on is not None:
        result = _selftest(bundle, refused_on)
        assert result.returncode == 7 and "this CPU lacks 'v'" in result.stderr_text


def _selftest(bundle: Bundle, cpu: str) -> CommandResult:
    qemu = find_qemu("riscv64")
    sysroot = load_toolchain(load_target(bundle.manifest.target).toolchain).sysroot
    assert qemu is not None and sysroot is not None
    argv = [qemu, "-cpu", cpu, "-L", sysroot, bundle.launcher, bundle.library]
    return run_command([*argv, "--selftest", bundle.golden], timeout_s=300)
