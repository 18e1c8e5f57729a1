"""The reader of Apple's libraries, on files written here after Apple's headers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from edgesdk.bundle.audit import audit_library, check_contract
from edgesdk.bundle.macho import read_image
from edgesdk.errors import ContractError
from edgesdk.profiles import load_target

ARM64, X86_64 = 0x0100000C, 0x01000007
PRIVATE, EXPORTED, IMPORTED, DEBUG = 0x1F, 0x0F, 0x01, 0x24


def text_command(command: int, fixed: bytes, text: str) -> bytes:
    body = struct.pack("<I", 12 + len(fixed)) + fixed + text.encode() + b"\0"
    body += bytes(-len(body) % 8)
    return struct.pack("<II", command, 8 + len(body)) + body


def dylib(**changes: Any) -> bytes:
    """A library as zig links them; `changes` replace what it says."""
    what = {
        "machine": ARM64,
        "kind": 6,
        "flags": 0x85,
        "name": "@rpath/libnet.dylib",
        "libraries": ["/usr/lib/libSystem.B.dylib"],
        "run_path": [],
        "platform": 1,
        "signed": True,
        "symbols": [("_edgesdk_get_api", EXPORTED), ("_malloc", IMPORTED), ("_k0", PRIVATE)],
    } | changes
    versions = struct.pack("<III", 2, 0x10000, 0x10000)
    commands = [text_command(0x0D, versions, what["name"])]
    commands += [text_command(0x0C, versions, library) for library in what["libraries"]]
    commands += [text_command(0x8000001C, b"", entry) for entry in what["run_path"]]
    commands.append(struct.pack("<IIIIII", 0x32, 24, what["platform"], 0x000B0000, 0x000C0100, 0))
    if what["signed"]:
        commands.append(struct.pack("<IIII", 0x1D, 16, 0, 0))
    strings, entries = b"\0", b""
    for name, kind in what["symbols"]:
        entries += struct.pack("<IBBHQ", len(strings), kind, 1, 0, 0)
        strings += name.encode() + b"\0"
    size = sum(map(len, commands)) + 24
    table = 32 + size
    symtab = struct.pack("<IIIIII", 2, 24, table, len(what["symbols"]), table + len(entries), 1)
    header = struct.pack("<4sIIIIIII", b"\xcf\xfa\xed\xfe", what["machine"], 0, what["kind"],
                         len(commands) + 1, size, what["flags"], 0)  # fmt: skip
    return header + b"".join(commands) + symtab + entries + strings


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "libnet.dylib"
    path.write_bytes(dylib(**changes))
    return path


def test_what_a_library_is_and_needs(tmp_path: Path) -> None:
    image = read_image(write(tmp_path, run_path=["@loader_path"]))
    assert (image.machine, image.bits) == ("aarch64", 64)
    assert (image.system, image.system_version) == ("macos", "11.0")
    assert image.name == "@rpath/libnet.dylib"
    assert image.libraries == ("/usr/lib/libSystem.B.dylib",)
    assert image.run_path == ("@loader_path",)
    assert (image.exports, image.undefined) == (("edgesdk_get_api",), ("malloc",))
    assert image.moves and image.signed and not image.stack_executes


def test_the_linkers_own_symbols_are_no_exports(tmp_path: Path) -> None:
    own = [("___dso_handle", EXPORTED), ("__mh_dylib_header", EXPORTED), ("_f", EXPORTED)]
    assert read_image(write(tmp_path, symbols=own)).exports == ("f",)


def test_symbols_for_debuggers_are_no_exports(tmp_path: Path) -> None:
    symbols = [("_edgesdk_get_api", EXPORTED), ("_k0", DEBUG), ("_k1", 0x0E)]
    assert read_image(write(tmp_path, symbols=symbols)).exports == ("edgesdk_get_api",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": X86_64}, "is built for x86_64, the target macos-arm64 is aarch64"),
        ({"platform": 2}, "is built for ios, the target macos-arm64 is macos"),
        ({"signed": False}, "has no code signature"),
        ({"flags": 0x20085}, "asks for an executable stack"),
        ({"libraries": ["/opt/lib/libz.dylib"]}, "needs /opt/lib/libz.dylib"),
        ({"run_path": ["/opt/lib"]}, "looks for libraries in /opt/lib"),
        ({"kind": 2}, "can be loaded at one address only"),
        ({"symbols": [("___tvm_ffi_k0", EXPORTED)]}, "shows the symbol __tvm_ffi_k0"),
    ],
)
def test_the_audit_finds_what_breaks_the_contract(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    profile = load_target("macos-arm64")
    check_contract(audit_library(write(tmp_path)), profile)
    with pytest.raises(ContractError, match=message):
        check_contract(audit_library(write(tmp_path, **changes)), profile)


def test_a_damaged_file_is_no_crash(tmp_path: Path) -> None:
    whole = dylib()
    path = tmp_path / "libnet.dylib"
    for size in range(4, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ContractError, match=r"libnet\.dylib is not a whole Mach-O file"):
            audit_library(path)


def archive(*members: bytes) -> bytes:
    """As ranlib leaves it: a table of contents, then the objects, each with its name in front."""
    out = b"!<arch>\n"
    for name, data in ((b"__.SYMDEF", b"\0" * 8), *((b"object.o", m) for m in members)):
        name = name + bytes(-len(name) % 8)
        size = len(name) + len(data)
        out += f"#1/{len(name):<13}{0:<12}{0:<6}{0:<6}{644:<8}{size:<10}`\n".encode()
        out += name + data + b"\n" * (size % 2)
    return out


def test_archives_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "libnet.a"
    profile = load_target("ios-arm64")
    api, kernel = {"kind": 1, "platform": 2}, {"kind": 1, "platform": 2, "symbols": []}
    path.write_bytes(archive(dylib(**api), dylib(**kernel)))
    report = audit_library(path)
    assert (report.machine, report.os) == ("aarch64", "ios")
    assert (report.exports, report.undefined) == (("edgesdk_get_api",), ("malloc",))
    check_contract(report, profile)
    path.write_bytes(archive(dylib(**api), dylib(kind=1, platform=1)))
    with pytest.raises(ContractError, match="is built for macos, the target ios-arm64 is ios"):
        check_contract(audit_library(path), profile)
    whole = archive(dylib(**api))
    for size in (8, 30, 100, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ContractError, match=r"libnet\.a is not a whole archive"):
            audit_library(path)
