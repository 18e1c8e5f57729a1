"""The audit reads what really linked libraries need, and finds each kind of broken promise."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from edgesdk.bundle.audit import AuditReport, audit_library, check_contract, version_key
from edgesdk.errors import ContractError
from edgesdk.profiles import TargetProfile, load_target
from edgesdk.toolchain import load_toolchain

# Threads, exceptions, thread-local storage, dlopen and libm: all that edgert uses, and more.
SOURCE = """\
#include <dlfcn.h>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>
extern "C" __attribute__((visibility("default"))) double f(double x, int n, const char* name) {
  std::mutex mutex;
  std::condition_variable changed;
  thread_local double sum = 0;
  double total = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) {
    threads.emplace_back([&, i] {
      sum += std::exp(x) + expf(static_cast<float>(i));
      std::lock_guard<std::mutex> lock(mutex);
      total += sum;
      changed.notify_all();
    });
  }
  for (auto& thread : threads) thread.join();
  try {
    if (dlopen(name, RTLD_NOW) == nullptr) throw std::runtime_error(std::string("no ") + name);
  } catch (const std::exception& error) {
    return -1;
  }
  return total;
}
"""
TOOLCHAIN_TARGETS = [
    ("native", "linux-x86_64", "x86_64", 64, None, "2.35"),
    ("gnu-aarch64", "rpi4", "aarch64", 64, None, "2.35"),
    ("gnu-armhf", "rpi4-32", "arm", 32, True, "2.34"),
    ("gnu-riscv64", "linux-riscv64", "riscv64", 64, None, "2.35"),
]


@functools.cache
def _built(name: str, folder: Path) -> Path:
    toolchain = load_toolchain(name)
    source = folder / f"{name}.cc"
    source.write_text(SOURCE)
    return toolchain.link_shared(
        [toolchain.compile_object(source, folder / f"{name}.o")],
        folder / f"lib{name}.so",
        soname="libsample.so",
        exported=["f"],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


def with_contract(profile: TargetProfile, **changes: Any) -> TargetProfile:
    return dataclasses.replace(profile, contract=dataclasses.replace(profile.contract, **changes))


@pytest.mark.parametrize(
    ("toolchain", "target", "machine", "bits", "hard_float", "newest"), TOOLCHAIN_TARGETS
)
def test_what_a_linked_library_is_and_needs(
    folder: Path,
    toolchain: str,
    target: str,
    machine: str,
    bits: int,
    hard_float: bool | None,
    newest: str,
) -> None:
    report = audit_library(_built(toolchain, folder))
    assert (report.machine, report.bits, report.hard_float) == (machine, bits, hard_float)
    assert report.soname == "libsample.so"
    assert report.exports == ("f",)
    assert {"libc.so.6", "libm.so.6"} <= set(report.needed)
    assert set(report.needed) <= set(load_target(target).contract.libraries)
    assert report.run_path == ()
    # Nothing of libstdc++ or libgcc: they are linked in.
    assert report.glibcxx is None
    assert all(version.startswith("GLIBC_") for version in report.versions)
    # glibc 2.34 moved dlopen and threads into libc; libgcc's unwinder asks for 2.35 where it can.
    assert report.glibc is not None
    assert version_key("2.34") <= version_key(report.glibc) <= version_key(newest)
    assert "dlopen" in report.versions["GLIBC_2.34"]
    assert "expf" in report.versions["GLIBC_2.27"]
    assert "dlopen" in report.undefined
    assert not report.text_relocations
    assert not report.executable_stack
    check_contract(report, load_target(target))


def test_local_keeps_its_own_contract(folder: Path) -> None:
    check_contract(audit_library(_built("native", folder)), load_target("local"))


def test_pages_of_16_kib_on_aarch64(folder: Path) -> None:
    from elftools.elf.elffile import ELFFile

    with _built("gnu-aarch64", folder).open("rb") as stream:
        loads = [s for s in ELFFile(stream).iter_segments() if s["p_type"] == "PT_LOAD"]
    assert {s["p_align"] for s in loads} == {16384}


def test_lowered_floor_is_found(folder: Path) -> None:
    report = audit_library(_built("gnu-aarch64", folder))
    profile = with_contract(load_target("rpi4"), libc_version="2.31")
    with pytest.raises(ContractError) as caught:
        check_contract(report, profile)
    assert caught.value.exit_code == 5
    symbol = report.versions[f"GLIBC_{report.glibc}"][0]
    assert caught.value.message == (
        f"libgnu-aarch64.so needs GLIBC_{report.glibc} (symbol {symbol}), "
        "the target rpi4 promises 2.31"
    )
    assert caught.value.hint is not None
    assert "zig-aarch64" in caught.value.hint


def test_machine_is_found(folder: Path) -> None:
    with pytest.raises(ContractError) as caught:
        check_contract(audit_library(_built("native", folder)), load_target("rpi4"))
    assert caught.value.message == ("libnative.so is built for x86_64, the target rpi4 is aarch64")


def test_library_that_is_not_promised_is_found(folder: Path) -> None:
    toolchain = load_toolchain("native")
    source = folder / "atomic.c"
    source.write_text(
        "#include <stdatomic.h>\nstruct big { char bytes[64]; };\n_Atomic struct big shared;\n"
        '__attribute__((visibility("default"))) struct big get(void) { return shared; }\n'
    )
    compiled = toolchain.compile_object(source, folder / "atomic.o")
    library = toolchain.link_shared(
        [compiled], folder / "libatomicuser.so", soname="x", libraries=["atomic"]
    )
    report = audit_library(library)
    assert "libatomic.so.1" in report.needed
    with pytest.raises(
        ContractError, match=r"needs libatomic\.so\.1, which the target linux-x86_64"
    ):
        check_contract(report, load_target("linux-x86_64"))


def test_shared_cxx_library_is_found(folder: Path) -> None:
    toolchain = dataclasses.replace(load_toolchain("native"), link_flags=())
    _built("native", folder)
    library = toolchain.link_shared(
        [folder / "native.o"], folder / "libsharedcxx.so", soname="libsharedcxx.so"
    )
    report = audit_library(library)
    assert report.glibcxx is not None
    assert version_key(report.glibcxx) >= (3, 4)
    with pytest.raises(ContractError, match=r"needs libstdc\+\+\.so\.6"):
        check_contract(report, load_target("linux-x86_64"))


def test_executable_stack_and_run_path_are_found(folder: Path) -> None:
    toolchain = load_toolchain("native")
    _built("native", folder)
    stack = toolchain.link_shared(
        [folder / "native.o"], folder / "libstack.so", soname="x", flags=["-Wl,-z,execstack"]
    )
    with pytest.raises(ContractError, match=r"libstack\.so asks for an executable stack"):
        check_contract(audit_library(stack), load_target("linux-x86_64"))
    for entry, allowed in (("/opt/build", False), ("$ORIGIN/../lib", True)):
        library = toolchain.link_shared(
            [folder / "native.o"], folder / "librun.so", soname="x", flags=[f"-Wl,-rpath,{entry}"]
        )
        report = audit_library(library)
        assert report.run_path == (entry,)
        if allowed:
            check_contract(report, load_target("linux-x86_64"))
        else:
            with pytest.raises(ContractError, match="looks for libraries in /opt/build"):
                check_contract(report, load_target("linux-x86_64"))


def test_text_relocations_are_found(folder: Path) -> None:
    # 32-bit ARM still lets a shared library hold an absolute address in its code.
    toolchain = load_toolchain("gnu-armhf")
    source = folder / "absolute.S"
    source.write_text(
        '.section .note.GNU-stack,"",%progbits\n.text\n.arm\n.globl f\n.type f, %function\n'
        "f: ldr r0, =outside\n bx lr\n.ltorg\n.globl outside\n.data\noutside: .word 1\n"
    )
    compiled = toolchain.compile_object(source, folder / "absolute.o")
    library = toolchain.link_shared(
        [compiled], folder / "libabsolute.so", soname="x", flags=["-Wl,-z,notext"]
    )
    report = audit_library(library)
    assert report.text_relocations
    with pytest.raises(ContractError, match="has text relocations"):
        check_contract(report, load_target("rpi4-32"))


REPORT = AuditReport(
    path=Path("libx.so"),
    machine="arm",
    bits=32,
    hard_float=True,
    soname="libx.so",
    needed=("libc.so.6",),
    run_path=(),
    versions={"GLIBC_2.4": ("abort",)},
    exports=(),
    undefined=(),
)


@pytest.mark.parametrize(
    ("changes", "contract", "message"),
    [
        ({"hard_float": False}, {}, "libx.so passes floats the soft-float way"),
        (
            {"versions": {"GLIBC_2.4": ("abort",), "GLIBC_2.38": ("strlcpy",)}},
            {},
            "libx.so needs GLIBC_2.38 (symbol strlcpy), the target rpi4-32 promises 2.36",
        ),
        (
            {"versions": {"GLIBC_2.37": ("a",), "GLIBC_2.4": ("b",), "GLIBC_2.100": ("c",)}},
            {},
            "libx.so needs GLIBC_2.100 (symbol c), the target rpi4-32 promises 2.36",
        ),
        (
            {"versions": {"GLIBC_PRIVATE": ("_dl_x",)}},
            {},
            "libx.so needs GLIBC_PRIVATE (symbol _dl_x), which is glibc's own",
        ),
        (
            {},
            {"libc": "musl", "libc_version": None},
            "libx.so needs GLIBC_2.4 (symbol abort), the target rpi4-32 has musl",
        ),
    ],
)
def test_other_violations(changes: dict[str, Any], contract: dict[str, Any], message: str) -> None:
    check_contract(REPORT, load_target("rpi4-32"))
    profile = with_contract(load_target("rpi4-32"), **contract)
    with pytest.raises(ContractError) as caught:
        check_contract(dataclasses.replace(REPORT, **changes), profile)
    assert caught.value.message.startswith(message)
    assert caught.value.hint


def test_versions_are_numbers() -> None:
    versions = {f"GLIBC_{v}": ("x",) for v in ("2.4", "2.17", "2.9", "PRIVATE")}
    assert dataclasses.replace(REPORT, versions=versions).glibc == "2.17"
    assert dataclasses.replace(REPORT, versions={}).glibc is None


def test_no_elf_file_truncated_or_missing(folder: Path) -> None:
    path = folder / "broken.so"
    with pytest.raises(ContractError, match="does not exist"):
        audit_library(path)
    whole = _built("native", folder).read_bytes()
    # Cut anywhere, it is an error of ours, never a crash: the section headers are at the end.
    for size in (0, 3, 16, 63, 64, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ContractError, match=r"broken\.so"):
            audit_library(path)
    path.write_bytes(b"MZ" + whole[2:])
    with pytest.raises(ContractError, match="is not a whole PE file"):
        audit_library(path)
    path.write_bytes(b"!!" + whole[2:])
    with pytest.raises(ContractError, match="is not a whole ELF file"):
        audit_library(path)


def test_file_without_section_headers_cannot_hide_anything(folder: Path) -> None:
    data = bytearray(_built("native", folder).read_bytes())
    data[40:48] = bytes(8)  # e_shoff
    data[60:62] = bytes(2)  # e_shnum
    path = folder / "bare.so"
    path.write_bytes(data)
    with pytest.raises(ContractError, match="has no section headers"):
        audit_library(path)
