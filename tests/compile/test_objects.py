"""Objects of the three formats, as LLVM writes them, and what is made of them before linking."""

from __future__ import annotations

import importlib.util
import re
import struct
from pathlib import Path

import onnx
import pytest
import tvm
from onnx import TensorProto, helper
from tvm import te

import edgesdk
from edgesdk.bundle import Bundle
from edgesdk.bundle.audit import audit_library
from edgesdk.bundle.macho import read_archive
from edgesdk.compiler import codegen
from edgesdk.compiler.objects import fit_for_linking, global_symbols
from edgesdk.errors import CompileError
from edgesdk.proc import run_command
from edgesdk.profiles import load_target

TARGETS = ("rpi4", "linux-x86_64", "windows-x86_64", "macos-arm64", "ios-arm64")


def built(target: str, folder: Path) -> Path:
    """An object with one kernel that has a parallel loop and calls libm."""
    x = te.placeholder((1024,), name="x")
    y = te.compute((1024,), lambda i: te.power(x[i], x[i]), name="y")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([x, y]))
    schedule.parallel(schedule.get_loops(schedule.get_sblock("y"))[0])
    path = folder / "kernel.o"
    profile = load_target(target)
    codegen.write_object({"power": schedule.mod["main"]}, tvm.target.Target(profile.tvm), path)
    return path


@pytest.mark.parametrize("target", TARGETS)
def test_symbols_are_named_alike_in_all_formats(target: str, tmp_path: Path) -> None:
    path = built(target, tmp_path)
    names = set(global_symbols(path.read_bytes()))
    wanted = {"__tvm_ffi_power", "__TVMBackendParallelLaunch", "powf"}
    assert wanted | {"TVMFFIErrorSetRaisedFromCStrParts"} <= names
    codegen.check_symbols(path)


def test_windows_exports_nothing_and_takes_edgerts_symbols(tmp_path: Path) -> None:
    """As binutils read it."""
    path = built("windows-x86_64", tmp_path)
    nm = run_command(["x86_64-w64-mingw32-nm", path], timeout_s=60).stdout_text
    assert re.search(r"^ +U __TVMBackendParallelLaunch$", nm, re.MULTILINE)
    assert re.search(r" T __tvm_ffi_power$", nm, re.MULTILINE)
    dump = ["x86_64-w64-mingw32-objdump", "-s", "-j", ".drectve", path]
    assert "-export" not in run_command(dump, timeout_s=60).stdout_text


def test_apples_globals_become_private(tmp_path: Path) -> None:
    data = built("macos-arm64", tmp_path).read_bytes()
    # Apple's <mach-o/loader.h>: the symbol table's command.
    place = 32
    while struct.unpack_from("<I", data, place)[0] != 2:
        place += struct.unpack_from("<I", data, place + 4)[0]
    table, count, strings = struct.unpack_from("<III", data, place + 8)
    found = {}
    for i in range(count):
        offset, kind, section = struct.unpack_from("<IBB", data, table + 16 * i)
        name = data[strings + offset : data.index(b"\0", strings + offset)].decode()
        found[name] = (bool(kind & 0x01), bool(kind & 0x10), section)
    external, private, section = found["___tvm_ffi_power"]
    assert external and private and section > 0
    external, private, section = found["_powf"]
    assert external and not private and section == 0


def test_an_unknown_format_is_refused() -> None:
    for data in (b"", b"\x7fELG" + bytes(100), bytes(100)):
        with pytest.raises(CompileError, match="unknown format"):
            global_symbols(data)
        with pytest.raises(CompileError, match="unknown format"):
            fit_for_linking(bytearray(data), provided=())


needs_zig = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="the optional extra 'zig' is not installed"
)


def api_functions(bundle: Bundle) -> set[str]:
    header = (bundle.path / "include" / "edgesdk_model.h").read_text()
    declared = set(re.findall(r"\b(edgesdk_(?:model_\w+|get_api))\(", header))
    return declared | {"edgesdk_open_net"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "net", [x], [y])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(proto, tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


@needs_zig
def test_a_library_for_macs(model: Path) -> None:
    bundle = edgesdk.compile(model, target="macos-arm64", output=model.with_name("out"))
    assert bundle.manifest.verification.how == "not run"
    report = audit_library(bundle.library)
    assert (report.machine, report.os, report.soname) == ("aarch64", "macos", "@rpath/libnet.dylib")
    assert report.needed == ("/usr/lib/libSystem.B.dylib",)
    assert set(report.exports) == api_functions(bundle)
    assert not report.unsigned
    cmake = (bundle.path / "lib/cmake/net/netConfig.cmake").read_text()
    assert 'IMPORTED_SONAME "@rpath/libnet.dylib"' in cmake


@needs_zig
def test_objects_for_iphones(model: Path) -> None:
    bundle = edgesdk.compile(model, target="ios-arm64", output=model.with_name("out"))
    assert bundle.manifest.verification.how == "not run"
    assert (bundle.manifest.library, bundle.manifest.launcher) == ("lib/libnet.a", "")
    images = read_archive(bundle.library)
    assert {(i.machine, i.system, i.system_version) for i in images} == {("aarch64", "ios", "13.0")}
    report = audit_library(bundle.library)
    assert set(report.exports) == api_functions(bundle)
    assert str(Path.home()).encode() not in bundle.library.read_bytes()
    assert "launcher" not in (bundle.path / "README.md").read_text()
    cmake = (bundle.path / "lib/cmake/net/netConfig.cmake").read_text()
    assert "add_library(net::net STATIC IMPORTED)" in cmake
