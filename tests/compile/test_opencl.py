"""Models on OpenCL: PoCL, which runs it on this machine's CPU, through the whole pipeline.

One thread of PoCL's compiles a kernel in tenths of a second, so libraries here are few and small.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from conformance import backend_cases, check_cases
from test_template_properties import Conv, Dense, check

import edgesdk
from edgesdk.compiler import opencl
from edgesdk.compiler.device_code import DeviceCode, DeviceKernel, Launch
from edgesdk.errors import ToolMissingError
from edgesdk.frontend import Reference
from edgesdk.host import require_gpu
from edgesdk.profiles import GpuInfo, load_target

TARGET = "linux-x86_64-opencl"
# Functions with other names in OpenCL C, bools, several results of a sum, 64-bit integers, doubles.
CASES = (
    "test_acos",
    "test_and2d",
    "test_argmax_default_axis_example",
    "test_cumsum_1d",
    "test_gather_0",
    "test_softmax_axis_0",
    "test_top_k",
)


@pytest.fixture(scope="module", autouse=True)
def driver() -> None:
    gpu = load_target(TARGET).gpu
    assert gpu is not None
    require_gpu(gpu)  # tools/setup.sh installs PoCL


def test_onnx_cases(tmp_path: Path) -> None:
    cases = [case for case in backend_cases() if case.name in CASES]
    assert len(cases) == len(CASES)
    outcomes = check_cases(cases, tmp_path, target=TARGET)
    assert {c.name: o for c, o in zip(cases, outcomes, strict=True) if o.status != "ok"} == {}


@pytest.mark.parametrize("shared_kib", [32, 0])
@pytest.mark.parametrize("seed", [None, 1])
def test_products(shared_kib: int, seed: int | None, tmp_path: Path) -> None:
    """With tiles in shared memory, and in registers alone; by default, and with drawn knobs."""
    profile = load_target(TARGET)
    assert profile.gpu is not None
    gpu = dataclasses.replace(profile.gpu, shared_kib=shared_kib)
    one, none = (1, 1), (0, 0, 0, 0)
    cases = [
        Conv(1, 1, 16, 24, (12, 14), (3, 3), one, one, (1, 1, 1, 1), "Relu"),
        Conv(1, 2, 8, 12, (9, 9), (3, 3), (2, 2), one, (1, 1, 1, 1), ""),
        Conv(1, 1, 3, 8, (16, 16), (3, 3), (2, 2), one, none, "Add"),
        Dense(12, 40, 24),
    ]
    check(dataclasses.replace(profile, gpu=gpu), cases, tmp_path, seed=seed)


def test_a_bundle(tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[1,8,6,6] x, float[8,8,3,3] w)'
        " => (float[1,8,6,6] y) { c = Conv <pads = [1,1,1,1]> (x, w)  y = Relu (c) }"
    )
    onnx.save(onnx.parser.parse_model(text), model)
    bundle = edgesdk.compile(model, target=TARGET, output=tmp_path / "bundle")
    assert bundle.manifest.verification.how == "native"
    assert bundle.manifest.contract.gpu is not None
    assert bundle.manifest.contract.gpu.api == "opencl"
    rng = np.random.default_rng(5)
    inputs = {
        "x": rng.standard_normal((1, 8, 6, 6)).astype(np.float32),
        "w": rng.standard_normal((8, 8, 3, 3)).astype(np.float32),
    }
    (wanted,) = Reference(model, {}).run(inputs).values()
    (result,) = edgesdk.run(bundle, inputs).values()
    np.testing.assert_allclose(result, wanted, atol=1e-5 * np.abs(wanted).max())


def test_tiny_shapes(tmp_path: Path) -> None:
    """Shapes on which schedules made for large ones have failed."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["": 17]>
        g (float[1,1,3,10] a, float[2,1,4,20] b, float[2,2] c, float[2,2] d, float[1,4,3,3] e)
        => (float[1,1,3,9] p, float[2,1,2,20] q, float[2,1] r, float[1,1,1,1] s)
        <float[1,1,1,2] v = {1.5, -2.0}, float[1,1,3,1] w = {0.5, 1.0, -1.0}> {
            p = Conv (a, v)
            q = Conv (b, w)
            product = Mul (c, d)
            axis = Constant <value_ints = [1]> ()
            r = ReduceSum (product, axis)
            rows = ReduceMean <axes = [2, 3]> (e)
            s = ReduceMean <axes = [1]> (rows)
        }"""
    )
    onnx.save(model, tmp_path / "tiny.onnx")
    for target in (TARGET, "cuda-sm_90", "jetson-orin-nano"):
        bundle = edgesdk.compile(
            tmp_path / "tiny.onnx", target=target, output=tmp_path / target, verify=target == TARGET
        )
        coverage = bundle.manifest.build["coverage"]["rungs"]
        assert not any(rung.startswith("cpu") for rung in coverage), coverage


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESDK_OPENCL_LIBRARY", "/no/such/libOpenCL.so")
    with pytest.raises(ToolMissingError, match="no OpenCL here"):
        require_gpu(GpuInfo("opencl", multiprocessors=1, shared_kib=32))


def test_source_that_every_compiler_takes() -> None:
    source = (
        "#ifdef cl_khr_fp64\n#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n"
        "#elif defined(cl_amd_fp64)\n#pragma OPENCL EXTENSION cl_amd_fp64 : enable\n"
        '#else\n#error "none"\n#endif\n\n'
        "__kernel void k(__global bool* restrict a);\n"
        "__kernel void k(__global bool* restrict a) {\n"
        "  __global float b[2];\n"
        "  b[0] = acosf(a[0]);\n"
        "}\n"
    )
    kernel = DeviceKernel((Launch("k", (1, 1, 1), (8, 2, 1), 0, (0,)),), ())
    gpu = GpuInfo("opencl", multiprocessors=1, shared_kib=32)
    adapted = opencl.adapt(DeviceCode(source, {"k": kernel}), gpu)
    assert adapted.source == (
        "#define acosf acos\n"
        "#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n\n"
        "__attribute__((reqd_work_group_size(8, 2, 1)))\n"
        "__kernel void k(__global uchar* restrict a) {\n"
        "  float b[2];\n"
        "  b[0] = acosf(a[0]);\n"
        "}\n"
    )
    (image,) = opencl.compile_images(adapted.source, gpu)
    assert image.data == adapted.source.encode() + b"\0"
