"""The doctor finds what is missing and says the command that brings it."""

from __future__ import annotations

import collections
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgesdk.deploy import doctor
from edgesdk.deploy.doctor import Finding, diagnose
from edgesdk.errors import UsageError


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return home


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "no-programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))


def by_name(target: str | None = None) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(target)}


def bare(command: str | None) -> str:
    """Whoever is not root gets "sudo" in front."""
    assert command is not None
    return command.removeprefix("sudo ")


def test_every_finding_that_is_not_ok_has_a_fix_and_only_those() -> None:
    findings = diagnose()
    assert len({f.name for f in findings}) == len(findings)
    for finding in findings:
        assert finding.detail
        assert (finding.fix is None) == finding.ok


def test_all_shipped_targets_are_looked_at() -> None:
    names = set(by_name())
    assert {"toolchain native", "toolchain gnu-aarch64", "toolchain gnu-armhf"} <= names
    assert {"emulator aarch64", "emulator arm", "binfmt arm"} <= names
    assert {
        "Python",
        "package apache-tvm",
        "package apache-tvm-ffi",
        "cache folder",
        "SSH",
    } <= names


def test_only_what_the_target_needs_is_looked_at() -> None:
    names = set(by_name("rpi4-32"))
    assert {n for n in names if n.startswith("toolchain")} == {"toolchain gnu-armhf"}
    assert {n for n in names if n.startswith("emulator")} == {"emulator arm"}
    assert not any(n.startswith(("emulator", "binfmt")) for n in by_name("local"))


def test_unknown_target() -> None:
    with pytest.raises(UsageError):
        diagnose("rpi44")


def test_compiler_that_works() -> None:
    found = by_name("rpi5")["toolchain gnu-aarch64"]
    assert found.ok
    assert found.detail.startswith("aarch64-linux-gnu-g++")


@pytest.mark.usefixtures("empty_path")
def test_machine_with_nothing_installed() -> None:
    found = by_name()
    native, aarch64 = found["toolchain native"], found["toolchain gnu-aarch64"]
    assert not native.ok
    assert native.required
    assert bare(native.fix) == "apt-get install g++"
    assert bare(aarch64.fix) == "apt-get install g++-aarch64-linux-gnu"
    emulator = found["emulator aarch64"]
    assert not emulator.ok
    assert not emulator.required
    assert bare(emulator.fix) == "apt-get install qemu-user-static"


def test_compiler_that_cannot_link_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # g++ without libstdc++: --version works, a program does not.
    for name in ("g++", "gcc", "strip"):
        program = tmp_path / name
        program.write_text(
            '#!/bin/sh\ncase "$*" in\n*--version*) echo "g++ 99" ;;\n'
            '*) echo "fatal error: thread: No such file or directory" >&2; exit 1 ;;\nesac\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    doctor_finding = by_name("local")["toolchain native"]
    assert not doctor_finding.ok
    assert "fatal error: thread: No such file" in doctor_finding.detail
    assert bare(doctor_finding.fix) == "apt-get install g++"


def test_wrong_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "apache-tvm-ffi":
            return "0.1.15.post1"
        if name == "paramiko":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = by_name("local")
    ffi, paramiko = found["package apache-tvm-ffi"], found["package paramiko"]
    assert not ffi.ok
    assert ffi.detail == "0.1.15.post1, but ==0.1.14.post1 is needed"
    assert ffi.fix == "pip install apache-tvm-ffi==0.1.14.post1"
    assert not paramiko.ok
    assert paramiko.detail == "not installed"
    assert paramiko.fix is not None
    assert paramiko.fix.startswith("pip install 'paramiko>=")
    assert found["package apache-tvm"].ok


def test_extras_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["numpy>=1", "ziglang>=0.13; extra == 'zig'", "nothing>=1; python_version < '3'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert [n for n in by_name("local") if n.startswith("package")] == ["package numpy"]


def test_little_disk_space(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40, 2**29))
    found = by_name("local")["cache folder"]
    folder = own_home / ".cache" / "edgesdk"
    assert not found.ok
    assert found.detail == f"{folder}, 0.5 GiB free, 1 GiB is needed"
    assert found.fix == f"rm -rf {folder}"


def test_binfmt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_BINFMT", tmp_path)
    found = by_name("rpi4")["binfmt aarch64"]
    assert (found.ok, found.required) == (False, False)
    assert found.fix == f"mount -t binfmt_misc none {tmp_path}"
    (tmp_path / "register").touch()
    fix = by_name("rpi4")["binfmt aarch64"].fix
    assert bare(fix) == "apt-get install binfmt-support qemu-user-static"
    (tmp_path / "qemu-aarch64").write_text("disabled\n")
    assert not by_name("rpi4")["binfmt aarch64"].ok
    (tmp_path / "qemu-aarch64").write_text("enabled\ninterpreter /usr/bin/qemu-aarch64\n")
    assert by_name("rpi4")["binfmt aarch64"].ok


def test_ssh(own_home: Path) -> None:
    found = by_name("local")["SSH"]
    assert (found.ok, found.fix, found.required) == (False, "ssh-keygen -t ed25519", False)
    (own_home / ".ssh").mkdir()
    (own_home / ".ssh" / "id_ed25519.pub").touch()
    assert not by_name("local")["SSH"].ok
    (own_home / ".ssh" / "id_ed25519").touch()
    (own_home / ".ssh" / "config").touch()
    assert by_name("local")["SSH"].detail == f"{own_home / '.ssh'}: config, id_ed25519"


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from edgesdk.deploy.doctor import diagnose; diagnose('local')\n"
        "print([m for m in ('tvm', 'onnx', 'onnxruntime', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "[]"
