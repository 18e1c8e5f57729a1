"""Every shipped profile loads, what is wrong is named, and `local` never overstates a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgesdk.errors import ConfigError, EdgeSdkError, UsageError
from edgesdk.host import detect_host
from edgesdk.profiles import (
    CpuInfo,
    load_target,
    machine_of,
    missing_cpu_features,
    target_names,
)
from edgesdk.resources import data_folder
from edgesdk.toolchain import load_toolchain

SHIPPED = sorted(path.stem for path in data_folder("targets").glob("*.toml"))

GOOD = """
description = "a board"
toolchain = "gnu-aarch64"
[tvm]
kind = "llvm"
mtriple = "aarch64-linux-gnu"
mcpu = "cortex-a72"
[cpu]
cores = 4
l1d-kib = 32
l2-kib = 1024
vector-bits = 128
vector-registers = 32
[contract]
os = "linux"
machine = ["aarch64"]
cpu-features = ["asimd"]
libraries = ["libc.so.6"]
libc = "glibc"
libc-version = "2.31"
"""


@pytest.fixture(autouse=True)
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty configuration folder: no profile of the user who runs the tests gets in."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "edgesdk" / "targets"
    folder.mkdir(parents=True)
    return folder


def test_the_promised_targets_are_shipped() -> None:
    assert target_names()[0] == "local"
    assert {
        "linux-riscv64",
        "linux-riscv64-v",
        "linux-x86_64",
        "rpi3",
        "rpi3-32",
        "rpi4",
        "rpi4-32",
        "rpi5",
        "rpizero2",
        "windows-x86_64",
        "macos-arm64",
        "ios-arm64",
        "macos-arm64-metal",
        "ios-arm64-metal",
    } <= set(target_names())


@pytest.mark.parametrize("name", [n for n in SHIPPED if load_target(n).gpu is None])
def test_shipped_profile_is_complete(name: str) -> None:
    profile = load_target(name)
    assert profile.name == name
    assert profile.description
    assert profile.path == data_folder("targets") / f"{name}.toml"
    assert profile.tvm["kind"] == "llvm"
    assert profile.tvm["num-cores"] == profile.cpu.cores
    libc, library, form = {
        "linux": ("glibc", "libc.so.6", "elf"),
        "android": ("bionic", "libc.so", "elf"),
        "windows": (None, "kernel32.dll", "pe"),
        "macos": (None, "/usr/lib/libSystem.B.dylib", "macho"),
        "ios": (None, "/usr/lib/libSystem.B.dylib", "macho-archive"),
    }[profile.contract.os]
    assert profile.contract.libc == libc
    assert profile.contract.cpu_features
    assert library in profile.contract.libraries
    toolchain = load_toolchain(profile.toolchain)
    assert (toolchain.builds_for, toolchain.format) == (profile.machine, form)


@pytest.mark.parametrize(
    ("emulator", "said"),
    [
        ('qemu = "aarch64"', "qemu and cpu are needed"),
        ('kind = "bochs"', "'emulator.kind' is 'bochs'"),
    ],
)
def test_wrong_emulator(tmp_path: Path, emulator: str, said: str) -> None:
    path = tmp_path / "board.toml"
    path.write_text(f"{GOOD}[emulator]\n{emulator}\n")
    with pytest.raises(ConfigError, match=said):
        load_target(str(path))


@pytest.mark.parametrize("name", [n for n in SHIPPED if n.endswith("-32")])
def test_32_bit_profiles_are_hard_float_armv7(name: str) -> None:
    profile = load_target(name)
    assert profile.machine == "arm"
    assert profile.triple.endswith("gnueabihf")
    assert profile.tvm["mfloat-abi"] == "hard"
    assert profile.contract.machine == ("armv7l", "armv8l", "aarch64")
    assert profile.cpu.vector_registers == 16


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rpi3", CpuInfo(4, 32, 512, 128, 32)),
        ("rpi4", CpuInfo(4, 32, 1024, 128, 32)),
        ("rpi5", CpuInfo(4, 64, 512, 128, 32, l3_kib=2048)),
        ("rpizero2", CpuInfo(4, 32, 512, 128, 32)),
    ],
)
def test_caches_and_registers_of_the_boards(name: str, expected: CpuInfo) -> None:
    assert load_target(name).cpu == expected


def test_unknown_target_suggests_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        load_target("rpi-4")
    assert caught.value.exit_code == 2
    assert caught.value.message == "unknown target 'rpi-4'"
    assert caught.value.hint == "did you mean 'rpi4'?"


def test_target_like_nothing_points_to_the_list() -> None:
    with pytest.raises(UsageError) as caught:
        load_target("zzzzzz")
    assert caught.value.hint == "see `edgesdk targets` for the known ones"


def test_path_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "myboard.toml"
    path.write_text(GOOD)
    profile = load_target(str(path))
    assert (profile.name, profile.path) == ("myboard", path)
    assert profile.emulator is None
    assert profile.tvm == {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}
    with pytest.raises(UsageError, match=r"other\.toml"):
        load_target(str(tmp_path / "other.toml"))


def test_users_folder_is_searched_and_wins(own_config: Path) -> None:
    (own_config / "myboard.toml").write_text(GOOD)
    (own_config / "rpi4.toml").write_text(GOOD)
    assert "myboard" in target_names()
    assert load_target("myboard").description == "a board"
    assert load_target("rpi4").path == own_config / "rpi4.toml"


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("l2-kib", "l2-kb", "unknown key 'cpu.l2-kb'", "did you mean 'l2-kib'?"),
        ("l2-kib", "l2_kib", "unknown key 'cpu.l2_kib'", "did you mean 'l2-kib'?"),
        ("[contract]", "[kontract]", "unknown key 'kontract'", "did you mean 'contract'?"),
        ("cores = 4", 'cores = "4"', "'cpu.cores' is '4', not an integer", None),
        ("cores = 4", "cores = true", "'cpu.cores' is True, not an integer", None),
        ("cores = 4", "cores = 0", "cpu.cores is 0, must be > 0", None),
        ("cores = 4", "", "the key 'cpu.cores' is missing", "add 'cpu.cores' to it"),
        ('"aarch64"]', "1]", "'contract.machine[0]' is 1, not a string", None),
        ('["aarch64"]', '"aarch64"', "'contract.machine' is 'aarch64', not a list", None),
        ('"glibc"', '"glibcc"', "'contract.libc' is 'glibcc'", "did you mean 'glibc'?"),
        ('"2.31"', '"new"', "contract.libc-version is 'new', not like '2.36'", None),
        ('kind = "llvm"', "", "the key 'tvm.kind' is missing", 'add kind = "llvm"'),
        ('mtriple = "aarch64-linux-gnu"', "", "the key 'tvm.mtriple' is missing", None),
        ('description = "a board"', "description", "is not valid TOML", None),
        ('description = "a board"', "detect = true", "unknown key 'tvm'", None),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, old: str, new: str, message: str, hint: str | None
) -> None:
    assert old in GOOD
    path = tmp_path / "board.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_target(str(path))
    assert caught.value.exit_code == 3
    assert str(path) in caught.value.message
    assert message in caught.value.message
    assert caught.value.hint
    assert hint is None or caught.value.hint == hint


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text(GOOD.replace("aarch64-linux-gnu", "sparc64-linux-gnu"))
    with pytest.raises(ConfigError, match="sparc64"):
        load_target(str(path))


def test_accelerator_takes_the_triple_of_its_host(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    host = '[tvm]\nkind = "cuda"\narch = "sm_87"\n[tvm.host]'
    path.write_text(GOOD.replace("[tvm]", host))
    assert load_target(str(path)).triple == "aarch64-linux-gnu"


@pytest.mark.parametrize(
    ("triple", "machine"),
    [
        ("aarch64-linux-gnu", "aarch64"),
        ("armv7l-linux-gnueabihf", "arm"),
        ("x86_64-linux-gnu", "x86_64"),
    ],
)
def test_machine_of(triple: str, machine: str) -> None:
    assert machine_of(triple) == machine


@pytest.mark.parametrize(
    ("features", "missing"),
    [
        ("fp asimd evtstrm crc32 cpuid", ()),  # a 64-bit kernel
        ("half thumb neon vfpv3 vfpv4 crc32", ()),  # a 32-bit one
        ("half thumb vfpv3 crc32", ("neon", "vfpv4")),
        # A Raspberry Pi 2 has NEON, but is no Armv8.
        ("half thumb vfp edsp neon vfpv3 tls vfpv4 idiva idivt vfpd32 lpae evtstrm", ("crc32",)),
    ],
)
def test_32_bit_contract_on_both_kernels(features: str, missing: tuple[str, ...]) -> None:
    wanted = load_target("rpi4-32").contract.cpu_features
    assert missing_cpu_features(wanted, features.split()) == missing


# What /proc/cpuinfo prints, shortened to the lines that are read.
BASE = "fpu sse sse2 cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
V3 = f"{BASE} avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


def x86(*cores: str) -> str:
    return "\n\n".join(f"processor : {i}\nmodel name : X\nflags : {f}" for i, f in enumerate(cores))


@pytest.mark.parametrize(
    ("cpuinfo", "mcpu", "mattr", "bits", "registers"),
    [
        (x86("fpu sse sse2"), "x86-64", None, 128, 16),
        (x86(BASE), "x86-64-v2", None, 128, 16),
        (x86(V3), "x86-64-v3", None, 256, 16),
        (x86(f"{V3} avx_vnni"), "x86-64-v3", ["+avxvnni"], 256, 16),
        (x86(f"{V4} avx512_vnni"), "x86-64-v4", ["+avx512vnni", "-prefer-256-bit"], 512, 32),
        # FMA hidden by the virtual machine: no level that needs it, whatever else is there.
        (x86(V4.replace(" fma", "")), "x86-64-v2", None, 128, 16),
        # One core without AVX-512 decides for all.
        (x86(V4, V3), "x86-64-v3", None, 256, 16),
        # A level is all below it too.
        (x86(V3.replace(" sse4_2", "")), "x86-64", None, 128, 16),
    ],
)
def test_local_x86_takes_no_feature_that_is_not_listed(
    cpuinfo: str, mcpu: str, mattr: list[str] | None, bits: int, registers: int
) -> None:
    host = detect_host(machine="x86_64", cpuinfo=cpuinfo)
    assert host.tvm["mcpu"] == mcpu
    assert host.tvm.get("mattr") == mattr
    assert (host.cpu.vector_bits, host.cpu.vector_registers) == (bits, registers)
    assert set(host.contract.cpu_features) <= host.cpu_features


def test_local_aarch64() -> None:
    pi4 = "processor : 0\nFeatures : fp asimd evtstrm crc32 cpuid\nModel : Raspberry Pi 4 Model B"
    host = detect_host(machine="aarch64", cpuinfo=pi4)
    assert host.cpu_name == "Raspberry Pi 4 Model B"
    assert host.tvm["mtriple"] == "aarch64-linux-gnu"
    assert host.tvm["mattr"] == ["+neon", "+crc"]
    assert (host.cpu.vector_bits, host.cpu.vector_registers) == (128, 32)
    assert host.contract.machine == ("aarch64",)
    assert missing_cpu_features(load_target("rpi4").contract.cpu_features, host.cpu_features) == ()


def test_local_refuses_a_machine_without_tvm() -> None:
    with pytest.raises(ConfigError, match="armv7l"):
        detect_host(machine="armv7l", cpuinfo="Features : neon")
    with pytest.raises(ConfigError, match="lists no CPU features"):
        detect_host(machine="x86_64", cpuinfo="processor : 0")


def test_local_reads_caches_and_counts_physical_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    caches = [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K")]
    for i, (level, kind, size) in enumerate(caches):
        index = tmp_path / "cpu0" / "cache" / f"index{i}"
        for name, value in (("level", level), ("type", kind), ("size", size)):
            write(index / name, value)
        write(index / "coherency_line_size", "128")
    for cpu, siblings in enumerate(("0-1", "0-1", "2-3", "2-3")):
        write(tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list", siblings)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    cpu = detect_host(machine="x86_64", cpuinfo=x86(V3), sys_cpu=tmp_path).cpu
    assert (cpu.l1d_kib, cpu.l2_kib, cpu.l3_kib, cpu.cache_line_bytes) == (48, 2048, 0, 128)
    assert cpu.cores == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1})
    host = detect_host(machine="x86_64", cpuinfo=x86(V3), sys_cpu=tmp_path)
    assert (host.cpu.cores, host.tvm["num-cores"]) == (1, 1)


def test_local_is_this_machine() -> None:
    profile = load_target("local")
    assert 1 <= profile.cpu.cores <= len(os.sched_getaffinity(0))
    assert profile.cpu.l2_kib > 0
    assert profile.contract.libc_version == os.confstr("CS_GNU_LIBC_VERSION").split()[1]
    assert profile.contract.machine == (os.uname().machine,)


def test_errors_are_edgesdk_errors_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(EdgeSdkError) as caught:
        load_target(str(path))
    assert "\n" not in caught.value.message


def test_reading_profiles_needs_nothing_heavy() -> None:
    code = (
        "import sys; from edgesdk.profiles import load_target, target_names\n"
        "[load_target(n) for n in target_names()]\n"
        "import edgesdk.toolchain, edgesdk.deploy.doctor, edgesdk.bundle.audit\n"
        "heavy = ('tvm', 'onnx', 'onnxruntime', 'numpy', 'elftools')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"
