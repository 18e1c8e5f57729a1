"""LLVM knows the CPU and every feature that a profile names, and its objects fit the toolchain.

TVM takes any mcpu and mattr: an unknown one costs a line on stderr and is ignored. So they are
checked here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.target import Target, codegen

from edgesdk.bundle.audit import audit_library, check_contract
from edgesdk.compiler.codegen import check_symbols, write_object
from edgesdk.errors import CompileError
from edgesdk.host import detect_host
from edgesdk.proc import run_command
from edgesdk.profiles import TargetProfile, load_target
from edgesdk.resources import data_folder
from edgesdk.toolchain import emulator_command, load_toolchain

SHIPPED = sorted(path.stem for path in data_folder("targets").glob("*.toml"))
LLVM_TARGETS = [name for name in SHIPPED if load_target(name).tvm["kind"] == "llvm"]

# /proc/cpuinfo name -> LLVM name, where they differ.
X86_NAMES = {"pni": "sse3", "sse4_1": "sse4.1", "sse4_2": "sse4.2", "bmi1": "bmi", "abm": "lzcnt"}
X86_NAMES |= {"lahf_lm": "sahf", "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16"}
X86_NAMES |= {"avx512_fp16": "avx512fp16", "avx512_vbmi2": "avx512vbmi2", "avx_vnni": "avxvnni"}
ARM_NAMES = {"asimd": "neon", "fp": "fp-armv8", "crc32": "crc", "atomics": "lse", "sha1": "sha2"}
ARM_NAMES |= {"asimddp": "dotprod", "asimdhp": "fullfp16", "fphp": "fullfp16", "asimdrdm": "rdm"}
ARM_NAMES |= {"pmull": "aes", "lrcpc": "rcpc", "dcpop": "ccpp", "vfpv4": "vfp4"}
# "v" is Zve64d with registers of 128 bits.
RISCV_NAMES = {"v": "zve64d"}

# Features that change what instructions a network's code may hold; the others that LLVM lists are
# tuning, or of no use outside a kernel.
X86_MATTERS = re.compile(r"sse|avx|fma|f16c|bmi|lzcnt|movbe|popcnt|aes|pclmul|sha|gfni|amx|xop")
ARM_MATTERS = re.compile(r"neon|vfp4$|crc$|aes$|sha|crypto|dotprod|fullfp16|lse$|rdm|i8mm|bf16|sve")
RISCV_MATTERS = re.compile(r"[mafdcvb]$|z(ve64d|vfh|vfhmin|fh|fhmin|ba|bb|bs)$")
BY_MACHINE = {
    "x86_64": (X86_NAMES, X86_MATTERS),
    "aarch64": (ARM_NAMES, ARM_MATTERS),
    "arm": (ARM_NAMES, ARM_MATTERS),
    "riscv64": (RISCV_NAMES, RISCV_MATTERS),
}


def features(tvm_table: dict[str, Any]) -> set[str]:
    return {str(f) for f in codegen.llvm_get_cpu_features(Target(tvm_table))}


@pytest.mark.parametrize("name", LLVM_TARGETS)
def test_llvm_knows_the_cpu_and_the_features(name: str) -> None:
    table = load_target(name).tvm
    assert codegen.llvm_is_valid_cpu(table["mcpu"], table["mtriple"])
    target = Target(table)
    assert str(target.attrs["mtriple"]) == table["mtriple"]
    assert int(target.attrs["num-cores"]) == table["num-cores"]
    enabled = features(table)
    without = features({k: v for k, v in table.items() if k != "mattr"})
    for attribute in table.get("mattr", []):
        sign, feature = attribute[0], attribute[1:]
        assert (feature in enabled) == (sign == "+"), attribute
        if sign == "-":
            assert feature in without, f"{attribute} takes away what the CPU does not have"


def test_the_check_above_can_fail() -> None:
    table = dict(load_target("rpi4").tvm)
    assert not codegen.llvm_is_valid_cpu("cortex-a720000", table["mtriple"])
    assert "nonsense" not in features({**table, "mattr": ["+nonsense"]})


@pytest.mark.parametrize("name", LLVM_TARGETS)
def test_the_contract_covers_what_llvm_may_use(name: str) -> None:
    profile = load_target(name)
    names, matters = BY_MACHINE[profile.machine]
    promised = {names.get(f, f) for f in profile.contract.cpu_features}
    if profile.machine == "x86_64":
        promised |= {"sse", "sse2", "crc32"}  # every x86-64; crc32 came with SSE 4.2
    used = {f for f in features(profile.tvm) if matters.match(f)}
    assert used and used <= promised


def kernel_object(profile: TargetProfile, path: Path) -> None:
    """A function y[i] = exp(x[i]) of 64 floats, which calls libm with a float."""
    x = tvm.te.placeholder((64,), "float32", name="x")
    y = tvm.te.compute((64,), lambda i: tvm.te.exp(x[i]) + x[i], name="y")
    write_object({"kernel": tvm.te.create_prim_func([x, y])}, Target(profile.tvm), path)


HOST = """\
#include <cmath>
#include <cstdint>
#include <cstdio>
struct Tensor {
  void* data;
  int32_t device[2];
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct Any {
  int32_t type;
  uint32_t zero;
  union {
    int64_t all;
    void* pointer;
  };
};
extern "C" void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t n) {
  std::printf("%s:", kind);
  for (int32_t i = 0; i < n; ++i) std::printf(" %s", parts[i]);
}
extern "C" int __tvm_ffi_kernel(void*, const Any*, int32_t, Any*);
int main() {
  alignas(64) float x[64], y[64];
  for (int i = 0; i < 64; ++i) x[i] = i / 16.0f - 2;
  int64_t shape = 64;
  Tensor tensors[2] = {{x, {1, 0}, 1, 2, 32, 1, &shape, nullptr, 0},
                       {y, {1, 0}, 1, 2, 32, 1, &shape, nullptr, 0}};
  Any arguments[2] = {}, result = {};
  for (int i = 0; i < 2; ++i) arguments[i].type = 7, arguments[i].pointer = &tensors[i];
  if (__tvm_ffi_kernel(nullptr, arguments, 2, &result) != 0) return 2;
  float worst = 0;
  for (int i = 0; i < 64; ++i) worst = std::fmax(worst, std::fabs(y[i] - std::exp(x[i]) - x[i]));
  std::printf("%s", worst < 1e-5f ? "right" : "wrong");
}
"""


@pytest.mark.parametrize("name", LLVM_TARGETS)
def test_a_kernel_of_tvm_links_keeps_the_contract_and_runs(name: str, tmp_path: Path) -> None:
    profile = load_target(name)
    toolchain = load_toolchain(profile.toolchain)
    if toolchain.python_module and importlib.util.find_spec(toolchain.python_module) is None:
        pytest.skip(f"the optional {toolchain.python_module} is not installed")
    kernel_object(profile, tmp_path / "kernel.o")
    (tmp_path / "host.cc").write_text(HOST)
    host = toolchain.compile_object(tmp_path / "host.cc", tmp_path / "host.o")
    # GNU ld refuses to join soft-float and hard-float objects, so this is a test of mfloat-abi.
    if toolchain.object_format.program is None:
        check_symbols(tmp_path / "kernel.o")
        return  # nothing here links a program for it
    program = tmp_path / toolchain.object_format.program.format("program")
    toolchain.link_executable([host, tmp_path / "kernel.o"], program)
    report = audit_library(program)
    assert report.hard_float is (True if profile.machine == "arm" else None)
    check_contract(report, profile)
    if profile.emulator is None and profile.contract.os != "linux":
        return  # nothing here runs it
    command = emulator_command(profile, toolchain) if profile.emulator else ()
    if name == "linux-x86_64" and "avx2" not in detect_host().cpu_features:
        pytest.skip("this machine has no AVX2")
    result = run_command([*command, program], timeout_s=120)
    assert result.stdout_text == "right", result.stderr_text


def test_soft_float_objects_are_refused(tmp_path: Path) -> None:
    profile = load_target("rpi4-32")
    table = {k: v for k, v in profile.tvm.items() if k != "mfloat-abi"}
    soft = dataclasses.replace(profile, tvm=table)
    kernel_object(soft, tmp_path / "kernel.o")
    toolchain = load_toolchain(profile.toolchain)
    (tmp_path / "host.cc").write_text(HOST)
    host = toolchain.compile_object(tmp_path / "host.cc", tmp_path / "host.o")
    with pytest.raises(CompileError, match="VFP register arguments"):
        toolchain.link_executable([host, tmp_path / "kernel.o"], tmp_path / "program")
