"""Builds device_scripts/ with CMake: natively, with sanitizers, and for other machines."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgesdk.formats import FORMATS, ObjectFormat
from edgesdk.proc import CommandResult, run_command
from edgesdk.profiles import load_target
from edgesdk.toolchain import emulator_command, load_toolchain

ROOT = Path(__file__).resolve().parents[2]
BUILD_LIMIT_S = 600.0
RUN_LIMIT_S = 300.0

# Sanitizers end the program at the first finding. A failing allocation is something to test, and
# the tests fork while threads run.
ENVIRONMENT = {
    "ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=1",
    "TSAN_OPTIONS": "allocator_may_return_null=1:die_after_fork=0:halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


# The tests use std::thread, which edgert does not: Debian's other mingw-w64 has it.
TEST_COMPILERS = {"windows-x86_64": "x86_64-w64-mingw32-g++-posix"}


@dataclass(frozen=True)
class Build:
    """A finished build. `prefix` goes before its programs (qemu), or is empty."""

    folder: Path
    prefix: tuple[str, ...] = ()
    form: ObjectFormat = FORMATS["elf"]

    @property
    def launcher(self) -> Path:
        return self.folder / self.form.program.format("edgesdk-run")

    def library(self, model: str) -> Path:
        return self.folder / "tests" / self.form.library.format(model)

    def program(self, name: str) -> Path:
        return self.folder / "tests" / self.form.program.format(name)

    def run(self, *argv: str | Path, env: dict[str, str] | None = None) -> CommandResult:
        return run_command(
            [*self.prefix, *argv], timeout_s=RUN_LIMIT_S, env={**ENVIRONMENT, **(env or {})}
        )


def build_device_scripts(kind: str) -> Build:
    """Builds `kind`: "plain", "asan", "tsan", or a target profile to build for and emulate.

    The folders stay, so that the next run compiles only what changed.
    """
    folder = ROOT / "build" / "device_scripts" / kind
    options = [f"-DTVM_FFI_INCLUDE={_tvm_ffi_include()}"]
    prefix: tuple[str, ...] = ()
    form = FORMATS["elf"]
    sanitizers = {"plain": "", "asan": "address,undefined", "tsan": "thread"}
    if kind in sanitizers:
        options.append(f"-DEDGESDK_SANITIZE={sanitizers[kind]}")
    else:
        profile = load_target(kind)
        toolchain = load_toolchain(profile.toolchain)
        form = toolchain.object_format
        compiler = TEST_COMPILERS.get(kind, toolchain.compilers[0].cxx[0])
        if shutil.which(compiler) is None:
            pytest.skip(f"{compiler} is not installed: {toolchain.install_command}")
        prefix = emulator_command(profile, toolchain)
        options += [
            f"-DCMAKE_SYSTEM_NAME={profile.contract.os.capitalize()}",
            f"-DCMAKE_SYSTEM_PROCESSOR={profile.machine}",
            f"-DCMAKE_CXX_COMPILER={compiler}",
        ]
    for argv in (
        ["cmake", "-S", ROOT / "device_scripts", "-B", folder, *options],
        ["cmake", "--build", folder, "--parallel", "2"],
    ):
        result = run_command(argv, timeout_s=BUILD_LIMIT_S)
        assert result.ok, result.stdout_text + result.stderr_text
    return Build(folder, prefix, form)


def _tvm_ffi_include() -> Path:
    spec = importlib.util.find_spec("tvm_ffi")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "include"
