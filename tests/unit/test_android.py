"""Android's toolchains and targets: which is found, and what the audit refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from edgesdk.bundle.audit import AuditReport, check_contract
from edgesdk.errors import ConfigError, ContractError, ToolMissingError
from edgesdk.profiles import load_target
from edgesdk.resources import data_folder
from edgesdk.stubs import symbols_of
from edgesdk.toolchain import load_toolchain

TARGETS = ("android-arm64-adreno", "android-arm64-cpu", "android-arm64-mali")
ROOT_VARIABLES = ("ANDROID_NDK_HOME", "ANDROID_NDK_ROOT", "ANDROID_HOME")


@pytest.fixture(autouse=True)
def no_ndk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever this machine has does not count."""
    for name in ROOT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def an_ndk(folder: Path) -> Path:
    """An NDK as far as finding it goes: its three commands."""
    commands = folder / "toolchains" / "llvm" / "prebuilt" / "linux-x86_64" / "bin"
    commands.mkdir(parents=True)
    for name in ("clang", "clang++", "llvm-strip"):
        (commands / name).write_text("#!/bin/sh\necho clang version 14.0.7\n")
        (commands / name).chmod(0o755)
    return commands


@pytest.mark.parametrize("variable", ["ANDROID_NDK_HOME", "ANDROID_NDK_ROOT"])
def test_the_ndk_is_where_the_variable_says(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = an_ndk(tmp_path / "ndk")
    monkeypatch.setenv(variable, str(tmp_path / "ndk"))
    toolchain = load_toolchain("android-aarch64")
    assert toolchain.name == "android-aarch64"
    found = toolchain.require("aarch64")
    assert found.cxx == (str(commands / "clang++"), "--target=aarch64-linux-android29")
    assert found.strip == (str(commands / "llvm-strip"),)
    assert toolchain.version() == "clang version 14.0.7"


def test_of_several_ndks_in_the_sdk_the_newest_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("25.2.9519653", "9.0.1", "27.0.12077973"):
        an_ndk(tmp_path / "sdk" / "ndk" / version)
    monkeypatch.setenv("ANDROID_HOME", str(tmp_path / "sdk"))
    assert "/27.0.12077973/" in load_toolchain("android-aarch64").require().cc[0]


def test_without_an_ndk_zig_takes_its_place() -> None:
    assert load_toolchain("android-aarch64").name == "zig-android-aarch64"


def test_a_variable_that_names_no_folder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANDROID_NDK_HOME", "/nowhere")
    with pytest.raises(ConfigError, match="ANDROID_NDK_HOME is '/nowhere', which is no folder"):
        load_toolchain("android-aarch64")


def test_with_neither_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolMissingError, match="needs ziglang") as caught:
        load_toolchain("android-aarch64").require()
    assert "pip install 'edgesdk[zig]'" in str(caught.value.hint)
    assert "ANDROID_NDK_HOME" in str(caught.value.hint)


def good_report() -> AuditReport:
    """A library as an Android target wants it."""
    return AuditReport(
        path=Path("libnet.so"),
        machine="aarch64",
        bits=64,
        hard_float=None,
        soname="libnet.so",
        needed=("libc.so", "libm.so", "libdl.so"),
        run_path=(),
        versions={},
        exports=("edgesdk_get_api",),
        undefined=("__errno", "expf", "dlopen"),
        page_bytes=16384,
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"undefined": ("__errno_location",)}, "needs the symbol __errno_location"),
        ({"needed": ("libc.so.6",)}, "needs libc.so.6, which"),
        ({"needed": ("libstdc++.so.6",)}, "needs libstdc"),
        ({"needed": ("libc++_shared.so",)}, "needs libc"),
        ({"page_bytes": 4096}, "fits pages of 4096 bytes"),
        ({"versions": {"GLIBC_2.17": ("memcpy",)}}, "has bionic"),
    ],
)
def test_the_audit_refuses_what_android_does_not_load(
    target: str, changes: dict[str, object], message: str
) -> None:
    profile = load_target(target)
    check_contract(good_report(), profile)
    with pytest.raises(ContractError, match=message):
        check_contract(dataclasses.replace(good_report(), **changes), profile)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", TARGETS)
def test_targets_name_all_four_parts_of_the_triple(target: str) -> None:
    """With three, LLVM takes "linux" for a vendor and uses x18, which belongs to Android."""
    profile = load_target(target)
    assert profile.triple == "aarch64-unknown-linux-android29"
    assert profile.contract.libc_version == "29"


def test_lists_of_symbols_hold_names_and_variables() -> None:
    folder = data_folder("toolchains") / "android"
    libc = symbols_of(folder / "libc.so.txt")
    assert [name for name, kind in libc.items() if kind] == ["stderr", "stdout"]
    assert libc["__libc_init"] == ""
    # What musl's headers would make of these, Android has not.
    assert not {"__errno_location", "__libc_start_main", "__assert_fail"} & set(libc)
    assert symbols_of(folder / "libdl.so.txt").keys() == {
        "dladdr",
        "dlclose",
        "dlerror",
        "dlopen",
        "dlsym",
    }
