"""What devices say about themselves, and what that means for a bundle.

The files named emulated-* and debian-12-* are recorded from the script; the others are written
after the formats of kernels and libraries, for systems that no recording was at hand of.
"""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from edgesdk.bundle.manifest import ContractInfo
from edgesdk.deploy.facts import DeviceFacts, check_device, parse_facts
from edgesdk.errors import DeviceMismatchError
from edgesdk.profiles import load_target
from edgesdk.resources import data_folder

GOLDEN = Path(__file__).parent.parent / "golden" / "facts"


def golden(name: str) -> DeviceFacts:
    return parse_facts((GOLDEN / f"{name}.txt").read_text(encoding="utf-8"))


def contract(target: str, **changes: object) -> ContractInfo:
    c = load_target(target).contract
    info = ContractInfo(c.os, c.machine, c.libc, c.libc_version, c.cpu_features)
    return dataclasses.replace(info, **changes)  # type: ignore[arg-type]


def test_a_raspberry_pi_4_in_full() -> None:
    assert golden("raspberry-pi-os-12-aarch64") == DeviceFacts(
        os="linux",
        machine="aarch64",
        kernel="6.6.51+rpt-rpi-v8",
        os_release="debian 12",
        programs="aarch64",
        libc="glibc",
        libc_version="2.36",
        board="Raspberry Pi 4 Model B Rev 1.4",
        cpu_model="4x Cortex-A72",
        cpu_features=frozenset({"fp", "asimd", "evtstrm", "crc32", "cpuid"}),
        cores=4,
        memory_total_kib=3882268,
        memory_available_kib=3415904,
        disk_available_kib=24117248,
        governor="ondemand",
        frequency_khz=600000,
        max_frequency_khz=1800000,
        temperature_c=48.2,
        throttled="0x50000",
    )


@pytest.mark.parametrize(
    ("name", "programs", "libc", "version", "system"),
    [
        ("raspberry-pi-os-11-pi3-armhf", "arm", "glibc", "2.31", "raspbian 11"),
        ("raspberry-pi-os-12-armhf-64-bit-kernel", "arm", "glibc", "2.36", "raspbian 12"),
        ("buildroot-busybox-glibc-armv7", "arm", "glibc", "2.34", "buildroot 2022.02.9"),
        ("alpine-musl-aarch64", "aarch64", "musl", "1.2.5", "alpine 3.20.3"),
        ("android-13-toybox", "aarch64", "bionic", "33", "Android 13"),
        ("mixed-cores-rk3399", "aarch64", "glibc", "2.35", "ubuntu 22.04"),
        ("debian-12-x86_64", "x86_64", "glibc", "2.36", "debian 12"),
        ("emulated-debian-12-arm64", "aarch64", "glibc", "2.36", "debian 12"),
        ("emulated-debian-12-armhf", "arm", "glibc", "2.36", "debian 12"),
    ],
)
def test_the_system_of_every_kind(
    name: str, programs: str, libc: str, version: str, system: str
) -> None:
    facts = golden(name)
    assert (facts.programs, facts.libc, facts.libc_version) == (programs, libc, version)
    assert facts.os_release == system


def test_mixed_cores_have_what_all_have() -> None:
    facts = golden("mixed-cores-rk3399")
    assert facts.cpu_model == "4x Cortex-A53 + 1x Cortex-A72 + 1x implementer 0x99 part 0x123"
    assert facts.cpu_features is not None
    assert "asimd" in facts.cpu_features
    assert "asimddp" not in facts.cpu_features
    assert facts.cores == 5
    assert facts.governor == "schedutil/performance"
    assert facts.max_frequency_khz == 1_800_000
    assert facts.temperature_c == 45.0


@pytest.mark.parametrize("arch", ["arm64", "armhf"])
def test_emulation_makes_features_unknown_not_missing(arch: str) -> None:
    facts = golden(f"emulated-debian-12-{arch}")
    assert facts.cpu_features is None
    assert facts.cpu_model is None
    assert facts.notes == ("its CPU features are unknown: it is emulated on another CPU",)
    check_device(contract("rpi4" if arch == "arm64" else "rpi4-32"), facts, name="board")


def test_an_x86_machine_shows_its_cpu() -> None:
    facts = golden("debian-12-x86_64")
    assert facts.cpu_features is not None
    assert "sse2" in facts.cpu_features
    assert facts.cpu_model


@pytest.mark.parametrize(
    ("device", "target"),
    [
        ("raspberry-pi-os-12-aarch64", "rpi4"),
        ("raspberry-pi-os-12-aarch64", "rpi3"),
        ("raspberry-pi-os-12-armhf-64-bit-kernel", "rpi4-32"),
    ],
)
def test_bundles_that_fit(device: str, target: str) -> None:
    check_device(contract(target), golden(device), name="pi")


def test_a_32_bit_kernel_lists_32_bit_features() -> None:
    check_device(
        contract("rpi3-32", libc_version="2.31"), golden("raspberry-pi-os-11-pi3-armhf"), name="pi"
    )


@pytest.mark.parametrize(
    ("device", "target", "sentence"),
    [
        (
            "debian-12-x86_64",
            "rpi4",
            "the bundle cannot run on pi: it is x86_64, and the bundle is for aarch64",
        ),
        (
            "raspberry-pi-os-12-armhf-64-bit-kernel",
            "rpi4",
            "the bundle cannot run on pi: its kernel is aarch64, but its system runs 32-bit ARM "
            "programs, and the bundle is 64-bit ARM",
        ),
        (
            "raspberry-pi-os-12-aarch64",
            "rpi4-32",
            "the bundle cannot run on pi: its kernel is aarch64, but its system runs 64-bit ARM "
            "programs, and the bundle is 32-bit ARM",
        ),
        (
            "raspberry-pi-os-11-pi3-armhf",
            "rpi3-32",
            "the bundle cannot run on pi: it has glibc 2.31, and the bundle needs 2.36 or newer",
        ),
        (
            "alpine-musl-aarch64",
            "rpi5",
            "the bundle cannot run on pi: its C library is musl, and the bundle needs glibc",
        ),
        (
            "android-13-toybox",
            "rpi4",
            "the bundle cannot run on pi: it runs android, and the bundle is for linux",
        ),
        (
            "debian-armel-soft-float",
            "rpi3-32",
            "the bundle cannot run on pi: its system passes floating-point numbers in software "
            "(armel), and the bundle needs hard float (armhf)",
        ),
    ],
)
def test_bundles_that_do_not_fit(device: str, target: str, sentence: str) -> None:
    with pytest.raises(DeviceMismatchError) as caught:
        check_device(contract(target), golden(device), name="pi")
    assert caught.value.message == sentence
    assert caught.value.hint


def test_missing_cpu_features_are_named() -> None:
    with pytest.raises(DeviceMismatchError) as caught:
        check_device(contract("rpi5"), golden("raspberry-pi-os-12-aarch64"), name="pi")
    assert caught.value.message.startswith(
        "the bundle cannot run on pi: its CPU (4x Cortex-A72) has no "
    )
    assert "asimddp" in caught.value.message


def test_versions_are_numbers_not_text() -> None:
    facts = dataclasses.replace(golden("raspberry-pi-os-12-aarch64"), libc_version="2.4")
    with pytest.raises(DeviceMismatchError, match=r"glibc 2\.4"):
        check_device(contract("rpi4", libc_version="2.31"), facts, name="pi")


def test_what_a_device_cannot_tell_is_no_reason_to_refuse() -> None:
    check_device(contract("rpi4"), DeviceFacts(os="linux", machine="aarch64"), name="pi")


def test_an_answer_that_is_cut_off_is_refused() -> None:
    whole = (GOLDEN / "alpine-musl-aarch64.txt").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="incomplete"):
        parse_facts(whole.replace("end=yes\n", ""))
    with pytest.raises(ValueError, match="incomplete"):
        parse_facts("Welcome!\n")


@pytest.mark.parametrize("how", ["file", "standard input"])
def test_the_script_answers_on_this_machine(how: str) -> None:
    script = data_folder("device_scripts") / "device_facts.sh"
    argv = ["sh", str(script), "/"] if how == "file" else ["sh", "-s", "--", "/not/there/yet"]
    done = subprocess.run(
        argv,
        input=None if how == "file" else script.read_bytes(),
        capture_output=True,
        timeout=30,
        check=True,
    )
    assert done.stderr == b""
    facts = parse_facts(done.stdout.decode())
    assert facts.os == "linux"
    assert facts.programs == facts.machine
    assert facts.libc == "glibc"
    assert facts.disk_available_kib
    assert facts.cores


def test_extensions_of_a_risc_v_cpu() -> None:
    """As Linux prints them on a VisionFive 2 and on a board whose cores differ."""
    answer = (GOLDEN / "debian-12-x86_64.txt").read_text(encoding="utf-8")
    lines = [line for line in answer.splitlines() if not line.startswith(("machine=", "flags="))]
    lines.insert(0, "machine=riscv64")
    one = parse_facts("\n".join(["isa=rv64imafdc_zicsr_zba", *lines]))
    assert one.cpu_features == {"i", "m", "a", "f", "d", "c", "zicsr", "zba"}
    both = ["isa=rv64imafdcv_zicsr", "isa=rv64imafdc_zicsr"]
    assert parse_facts("\n".join([*both, *lines])).cpu_features == set("imafdc") | {"zicsr"}
    assert parse_facts("\n".join(lines)).cpu_features is None


def test_a_risc_v_cpu_without_vectors_is_refused_code_with_them() -> None:
    answer = (GOLDEN / "debian-12-x86_64.txt").read_text(encoding="utf-8")
    facts = dataclasses.replace(
        parse_facts(answer),
        machine="riscv64",
        programs="riscv64",
        cpu_features=frozenset("imafdc"),
    )
    check_device(contract("linux-riscv64"), facts, name="vf2")
    with pytest.raises(DeviceMismatchError, match="has no v, which the bundle uses"):
        check_device(contract("linux-riscv64-v"), facts, name="vf2")
