"""Every shipped toolchain loads, builds what it says, and names the package when it is missing."""

from __future__ import annotations

import dataclasses
import importlib.util
import platform
import sys
from pathlib import Path

import pytest

from edgesdk.errors import CompileError, ConfigError, ToolMissingError
from edgesdk.proc import run_command
from edgesdk.profiles import load_target, machine_of
from edgesdk.resources import data_folder
from edgesdk.toolchain import Compilers, emulator_command, find_qemu, load_toolchain

SHIPPED = sorted(path.stem for path in data_folder("toolchains").glob("*.toml"))
INSTALLED = ("native", "gnu-aarch64", "gnu-armhf")

PROGRAM = """\
#include <cstdio>
#include <thread>
#include "answer.h"
int main() {
  int seen = 0;
  std::thread([&] { seen = ANSWER; }).join();
#ifdef LOUD
  std::printf("%d from %s\\n", seen, __FILE__);
#endif
}
"""


@pytest.fixture(autouse=True)
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "edgesdk" / "toolchains"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any compiler."""
    folder = tmp_path / "no-programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))


def test_the_promised_toolchains_are_shipped() -> None:
    assert SHIPPED == [
        "android-aarch64",
        "gnu-aarch64",
        "gnu-armhf",
        "gnu-riscv64",
        "mingw-x86_64",
        "native",
        "zig-aarch64",
        "zig-android-aarch64",
        "zig-armhf",
        "zig-ios-aarch64",
        "zig-macos-aarch64",
        "zig-windows-x86_64",
        "zig-x86_64",
    ]


@pytest.mark.parametrize("name", [n for n in SHIPPED if n != "android-aarch64"])
def test_shipped_toolchain_loads(name: str) -> None:
    toolchain = load_toolchain(name)
    assert toolchain.name == name
    assert toolchain.description
    suffix = name.rpartition("-")[2] if "-" in name else ""
    suffix = {"armhf": "arm"}.get(suffix, suffix)
    assert toolchain.builds_for == (suffix or machine_of(platform.machine()))
    if name.startswith("zig-"):
        assert toolchain.install_command.startswith("pip install 'edgesdk[zig]'")
        assert toolchain.python_module == "ziglang"
    else:
        assert toolchain.install_command.removeprefix("sudo ").startswith("apt-get install g++")


def test_unknown_toolchain_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load_toolchain("gnu-arch64")
    assert caught.value.hint == "did you mean 'gnu-aarch64'?"


def test_users_toolchain(own_config: Path) -> None:
    (own_config / "mine.toml").write_text(
        'description = "mine"\nmachine = "aarch64"\n[packages]\napt = ["gcc"]\n'
        '[[compilers]]\ncc = ["mycc"]\ncxx = ["mycxx"]\n'
    )
    assert load_toolchain("mine").compilers[0].cxx == ("mycxx",)
    (own_config / "empty.toml").write_text(
        'description = "empty"\nmachine = "aarch64"\ncompilers = []\n[packages]\n'
    )
    with pytest.raises(ConfigError, match="a compiler command is empty"):
        load_toolchain("empty")


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("native", "g++"),
        ("gnu-aarch64", "g++-aarch64-linux-gnu"),
        ("gnu-armhf", "g++-arm-linux-gnueabihf"),
    ],
)
@pytest.mark.usefixtures("empty_path")
def test_missing_compiler_names_the_package(name: str, package: str) -> None:
    with pytest.raises(ToolMissingError) as caught:
        load_toolchain(name).require()
    assert caught.value.exit_code == 4
    assert name in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.removeprefix("sudo ") == f"apt-get install {package}"


def test_missing_zig_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolMissingError) as caught:
        load_toolchain("zig-aarch64").require()
    assert caught.value.message == (
        "the toolchain 'zig-aarch64' needs ziglang, which is not installed"
    )
    assert caught.value.hint == "pip install 'edgesdk[zig]'"


def test_zig_runs_in_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    cxx = load_toolchain("zig-armhf").require().cxx
    assert cxx[:4] == (sys.executable, "-m", "ziglang", "c++")
    assert cxx[-1] == "arm-linux-gnueabihf.2.27"


def test_toolchain_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load_toolchain("gnu-armhf").require("x86_64")
    assert caught.value.message == "the toolchain 'gnu-armhf' builds for arm, not for x86_64"
    assert caught.value.hint == "set another toolchain in the profile, e.g. 'zig-x86_64'"


def test_a_later_alternative_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("clang", "clang++", "strip"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_toolchain("native").require().cxx == ("clang++",)


def build(name: str, folder: Path) -> Path:
    toolchain = load_toolchain(name)
    (folder / "include").mkdir()
    (folder / "include" / "answer.h").write_text("#define ANSWER NUMBER\n")
    source = folder / "program.cc"
    source.write_text(PROGRAM)
    compiled = toolchain.compile_object(
        source,
        folder / "program.o",
        include=[folder / "include"],
        defines={"NUMBER": "42", "LOUD": ""},
    )
    return toolchain.link_executable([compiled], folder / "program")


def test_native_program_runs(tmp_path: Path) -> None:
    program = build("native", tmp_path)
    toolchain = load_toolchain("native")
    before = program.stat().st_size
    toolchain.strip(program)
    assert program.stat().st_size < before
    result = run_command([program], timeout_s=60)
    # __FILE__ tells nothing of the folder it was built in.
    assert result.stdout_text == "42 from program.cc\n"
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == [
        "program",
        "program.cc",
        "program.o",
    ]


@pytest.mark.parametrize(
    ("target", "cpu"),
    [
        ("rpi3", "cortex-a53"),
        ("rpi4", "cortex-a72"),
        ("rpi5", "cortex-a76"),
        ("rpi4-32", "max"),
        ("linux-riscv64", "rv64"),
    ],
)
def test_program_runs_on_the_emulated_cpu_of_the_target(
    tmp_path: Path, target: str, cpu: str
) -> None:
    profile = load_target(target)
    emulator = emulator_command(profile, load_toolchain(profile.toolchain))
    assert emulator[1:3] == ("-cpu", cpu)
    program = build(profile.toolchain, tmp_path)
    result = run_command([*emulator, program], timeout_s=60)
    assert result.stdout_text == "42 from program.cc\n"


@pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="the optional extra 'zig' is not installed"
)
def test_zig_program_runs_on_the_emulated_cpu(tmp_path: Path) -> None:
    profile = load_target("rpi4")
    emulator = emulator_command(profile, load_toolchain("zig-aarch64"))
    result = run_command([*emulator, build("zig-aarch64", tmp_path)], timeout_s=60)
    assert result.stdout_text == "42 from program.cc\n"


@pytest.mark.usefixtures("empty_path")
def test_missing_emulator_names_the_package() -> None:
    assert find_qemu("aarch64") is None
    with pytest.raises(ToolMissingError) as caught:
        emulator_command(load_target("rpi4"), load_toolchain("gnu-aarch64"))
    assert caught.value.hint is not None
    assert caught.value.hint.removeprefix("sudo ") == "apt-get install qemu-user-static"


def test_missing_sysroot_names_the_package(tmp_path: Path) -> None:
    toolchain = dataclasses.replace(
        load_toolchain("gnu-armhf"), sysroot=str(tmp_path / "no-such-folder")
    )
    with pytest.raises(ToolMissingError) as caught:
        emulator_command(load_target("rpi4-32"), toolchain)
    assert caught.value.hint is not None
    assert caught.value.hint.removeprefix("sudo ") == "apt-get install g++-arm-linux-gnueabihf"


def test_target_without_emulator() -> None:
    with pytest.raises(ConfigError, match="no \\[emulator\\]"):
        emulator_command(load_target("linux-x86_64"), load_toolchain("native"))


@pytest.mark.parametrize("name", INSTALLED)
def test_compile_error_is_the_compilers_first_one(name: str, tmp_path: Path) -> None:
    source = tmp_path / "broken.cc"
    source.write_text("int f() {\n  return nowhere;\n}\nint g() { return other; }\n")
    with pytest.raises(CompileError) as caught:
        load_toolchain(name).compile_object(source, tmp_path / "broken.o")
    assert caught.value.message.startswith("cannot compile broken.cc: ")
    assert "error: 'nowhere' was not declared" in caught.value.message
    assert caught.value.hint is not None
    assert str(source) in caught.value.hint
    assert list(tmp_path.glob("broken.o*")) == []


def test_link_error_names_the_missing_symbol(tmp_path: Path) -> None:
    toolchain = load_toolchain("native")
    source = tmp_path / "needs.c"
    source.write_text(
        "int nowhere(void);\n"
        '__attribute__((visibility("default"))) int f(void) { return nowhere(); }\n'
    )
    compiled = toolchain.compile_object(source, tmp_path / "needs.o")
    with pytest.raises(CompileError, match="undefined reference to `nowhere'"):
        toolchain.link_shared([compiled], tmp_path / "libneeds.so", soname="libneeds.so")
    with pytest.raises(CompileError, match="cannot find -lnosuchlibrary"):
        toolchain.link_executable([compiled], tmp_path / "x", libraries=["nosuchlibrary"])
    assert not (tmp_path / "libneeds.so").exists()


def test_strip_of_what_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    with pytest.raises(CompileError, match="cannot strip text"):
        load_toolchain("native").strip(tmp_path / "text")


def test_fingerprint_changes_with_flags_and_compiler() -> None:
    native = load_toolchain("native")
    assert native.fingerprint() == load_toolchain("native").fingerprint()
    other_flags = dataclasses.replace(native, compile_flags=("-O1",))
    prints = {t.fingerprint() for t in (native, other_flags, load_toolchain("gnu-aarch64"))}
    assert len(prints) == 3
    assert all(len(p) == 16 for p in prints)


def test_version_line() -> None:
    assert load_toolchain("gnu-aarch64").version().startswith("aarch64-linux-gnu-g++")


def test_full_disk_is_told_as_such(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        "echo \"Fatal error: can't write 10 bytes to x.o: 'No space left on device'\" >&2\n"
        "exit 1\n"
    )
    compiler.chmod(0o755)
    command = (str(compiler),)
    toolchain = dataclasses.replace(
        load_toolchain("native"), compilers=(Compilers(cc=command, cxx=command),)
    )
    with pytest.raises(CompileError) as caught:
        toolchain.compile_object(tmp_path / "x.cc", tmp_path / "x.o")
    assert caught.value.message == "cannot compile x.cc: no space left on the disk"
    assert caught.value.hint == "free some space"
