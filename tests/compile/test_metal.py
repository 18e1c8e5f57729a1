"""Models on Metal: kernels as Metal's language, run on this machine's CPU by a stand-in.

Nothing here is Apple's. The stand-in has edgert's calls and builds the kernels with g++
(tests/device_scripts/fake_metal), so that values and barriers are those of the generated code; what
Metal's own compiler says to it is known on Apple's systems only.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import onnx.parser
import pytest
from conformance import backend_cases, check_cases
from test_template_properties import Conv, Dense, check

import edgesdk
from edgesdk.bundle.audit import audit_library
from edgesdk.compiler import metal
from edgesdk.compiler.device_code import DeviceCode, DeviceKernel, Launch
from edgesdk.errors import ToolMissingError
from edgesdk.host import require_gpu
from edgesdk.proc import run_command
from edgesdk.profiles import GpuInfo, load_target
from edgesdk.resources import data_folder

TARGETS = ("macos-arm64-metal", "ios-arm64-metal")
FAKE = Path(__file__).parents[1] / "device_scripts" / "fake_metal"
# Functions with other names than in C, bools, 64-bit integers, halves.
CASES = (
    "test_acos",
    "test_and2d",
    "test_argmax_default_axis_example",
    "test_cast_FLOAT_to_FLOAT16",
    "test_cumsum_1d",
    "test_erf",
    "test_gather_0",
    "test_mod_mixed_sign_float32",
    "test_mod_mixed_sign_int8",
    "test_pow",
    "test_round",
    "test_softmax_axis_0",
    "test_top_k",
)
CONVOLUTION = """
    <ir_version: 8, opset_import: ["": 17]> g (float[1,8,6,6] x, float[8,8,3,3] w)
    => (float[1,8,6,6] y) { c = Conv <pads = [1,1,1,1]> (x, w)  y = Relu (c) }"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The profile of this machine with a GPU like a Mac's, whose driver is the stand-in."""
    folder = tmp_path_factory.mktemp("metal")
    library = folder / "libfake_metal.so"
    compile_it = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", FAKE / "fake_metal.cc"]
    assert run_command([*compile_it, "-o", library, "-ldl"], timeout_s=120).ok

    def sections(name: str) -> dict[str, str]:
        text = (data_folder("targets") / f"{name}.toml").read_text()
        parts = re.split(r"(?m)^\[([\w.]+)\]\n", text)
        return dict(zip(parts[1::2], parts[2::2], strict=True))

    here = sections("linux-x86_64-opencl") | {
        key: sections(TARGETS[0])[key] for key in ("tvm", "gpu")
    }
    profile = folder / "stand-in.toml"
    profile.write_text(
        'description = "a stand-in for Metal"\ntoolchain = "native"\n\n'
        + "".join(f"[{key}]\n{text}" for key, text in here.items())
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESDK_METAL_LIBRARY", str(library))
        patch.setenv("FAKE_METAL_COMPILER", str(FAKE / "compile.sh"))
        yield str(profile)


def test_onnx_cases(stand_in: str, tmp_path: Path) -> None:
    cases = [case for case in backend_cases() if case.name in CASES]
    assert len(cases) == len(CASES)
    outcomes = check_cases(cases, tmp_path, target=stand_in)
    assert {c.name: o for c, o in zip(cases, outcomes, strict=True) if o.status != "ok"} == {}


@pytest.mark.parametrize("seed", [None, 1])
def test_products(stand_in: str, seed: int | None, tmp_path: Path) -> None:
    """By default, and with drawn knobs."""
    one, none = (1, 1), (0, 0, 0, 0)
    cases = [
        Conv(1, 1, 16, 24, (12, 14), (3, 3), one, one, (1, 1, 1, 1), "Relu"),
        Conv(1, 2, 8, 12, (9, 9), (3, 3), (2, 2), one, (1, 1, 1, 1), ""),
        Conv(1, 1, 3, 8, (16, 16), (3, 3), (2, 2), one, none, "Add"),
        Dense(12, 40, 24),
        # 22 blocks of terms, in two halves: TVM cannot tell its vectors' lanes.
        Conv(1, 1, 88, 4, (16, 16), (1, 1), one, one, none, ""),
    ]
    check(load_target(stand_in), cases, tmp_path, seed=seed)


def test_a_bundle(stand_in: str, tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(CONVOLUTION), tmp_path / "net.onnx")
    bundle = edgesdk.compile(tmp_path / "net.onnx", target=stand_in, output=tmp_path / "bundle")
    assert bundle.manifest.verification.how == "native"
    assert bundle.manifest.contract.gpu is not None
    assert bundle.manifest.contract.gpu.api == "metal"
    (code,) = bundle.manifest.build["device_code"]
    assert (code["format"], code["driver"]) == ("metal", "2.2")
    # Metal's compiler wants to know of each pointer which memory it is to; that of this machine
    # does not.
    library = bundle.library.read_bytes()
    start = library.index(b"#include <metal_stdlib>")
    source = library[start : library.index(b"\0", start)].decode()
    pointers = re.findall(r"((?:\w+ )?\w+)\s?\*\s?(?:\)|\w+_ptr \[\[)", source)
    assert len(pointers) > 10
    assert {p.split()[0] for p in pointers} <= {"device", "thread", "threadgroup"}


@pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="the optional extra 'zig' is not installed"
)
@pytest.mark.parametrize("target", TARGETS)
def test_libraries_for_apples_systems(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EDGESDK_METAL_LIBRARY", raising=False)
    onnx.save(onnx.parser.parse_model(CONVOLUTION), tmp_path / "net.onnx")
    bundle = edgesdk.compile(tmp_path / "net.onnx", target=target, output=tmp_path / "bundle")
    assert bundle.manifest.verification.how == "not run"
    assert "no Metal here" in (bundle.manifest.verification.detail or "")
    report = audit_library(bundle.library)
    # No framework: Metal is found at run time.
    assert report.needed == (("/usr/lib/libSystem.B.dylib",) if target.startswith("mac") else ())
    assert "edgesdk_open_net" in report.exports


def test_without_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGESDK_METAL_LIBRARY", raising=False)
    with pytest.raises(ToolMissingError, match="no Metal here: it is on Apple's systems only"):
        require_gpu(GpuInfo("metal", multiprocessors=1, shared_kib=32))


def test_source_is_made_fit() -> None:
    """One file of many, memory for what has none, places of vectors, names, numbers of threads."""
    one = (
        "// Function: {0}\n#include <metal_stdlib>\nusing namespace metal;\n\n"
        "union __TVMArgUnion {{\n int v_int[2];\n}};\n\n"
        "kernel void {0}(  device float* a_ptr [[ buffer(0) ]]) {{\n"
        "  thread float sums[4];\n  thread float plain[4];\n  device float lost[9];\n"
        "  plain[0] = erf(tanhf(a_ptr[0]));\n"
        "  *(device float4*)(a_ptr + 0) = *(thread float4*)(sums + 0);\n}}\n\n\n"
    )
    launches = {n: Launch(n, (1, 1, 1), (8, 4, 1), 0, (0,)) for n in ("f", "g")}
    kernels = {n: DeviceKernel((launch,), ()) for n, launch in launches.items()}
    gpu = load_target(TARGETS[0]).gpu
    assert gpu is not None
    source = metal.adapt(DeviceCode(one.format("f") + one.format("g"), kernels), gpu).source
    assert source.count("#include") == 1 and "union" not in source
    assert source.count("  alignas(16) thread float sums[4];\n  thread float plain[4];\n") == 2
    assert source.count("  thread float lost[9];\n") == 2
    assert source.count("[[max_total_threads_per_threadgroup(32)]]\nkernel void ") == 2
    assert "#define tanhf tanh\n" in source
