"""What zig makes for Android without an NDK: the layouts that it compiles with, and the files.

golden/android/bionic.txt is golden/android/layout.c compiled with the headers of bionic itself
(libc/include and libc/kernel of its sources at 731631f3), for level 29.
"""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest

from edgesdk.bundle.audit import audit_library, check_contract
from edgesdk.compiler.link import agent, launcher
from edgesdk.proc import run_command
from edgesdk.profiles import load_target
from edgesdk.toolchain import load_toolchain

GOLDEN = Path(__file__).parent.parent / "golden" / "android"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="the optional extra 'zig' is not installed"
)


def numbers(path: Path) -> dict[str, int]:
    """The constants `layout_NAME` of an object file."""
    from elftools.elf.elffile import ELFFile

    found = {}
    with path.open("rb") as stream:
        elf = ELFFile(stream)
        for symbol in elf.get_section_by_name(".symtab").iter_symbols():
            if symbol.name.startswith("layout_"):
                section = elf.get_section(symbol["st_shndx"])
                empty = section["sh_type"] == "SHT_NOBITS"
                data = bytes(8) if empty else section.data()[symbol["st_value"] :][:8]
                found[symbol.name.removeprefix("layout_")] = struct.unpack("<q", data)[0]
    return found


def test_types_and_constants_are_those_of_bionic(tmp_path: Path) -> None:
    lines = (GOLDEN / "bionic.txt").read_text().splitlines()
    expected = {name: int(value) for name, value in map(str.split, lines)}
    toolchain = load_toolchain("zig-android-aarch64")
    flags = ("-O0", "-D_GNU_SOURCE")
    built = toolchain.compile_object(GOLDEN / "layout.c", tmp_path / "layout.o", flags=flags)
    assert len(expected) == 75
    assert numbers(built) == expected


@pytest.mark.parametrize("program", [launcher, agent])
def test_programs_keep_the_contract(program: object) -> None:
    toolchain = load_toolchain("zig-android-aarch64")
    path = program(toolchain)  # type: ignore[operator]
    report = audit_library(path)
    check_contract(report, load_target("android-arm64-cpu"))
    assert report.versions == {}
    assert report.page_bytes == 16384
    assert set(report.needed) == {"libc.so", "libdl.so"}
    disassembly = run_command(["aarch64-linux-gnu-objdump", "-d", path], timeout_s=60).stdout_text
    assert "ret" in disassembly
    # Android's own register: it may hold the shadow stack.
    assert " x18" not in disassembly and " w18" not in disassembly


def test_a_function_that_is_in_no_list_does_not_link(tmp_path: Path) -> None:
    from edgesdk.errors import CompileError

    (tmp_path / "net.c").write_text(
        "#include <netdb.h>\n#pragma GCC visibility push(default)\n"
        "int resolve(void) { return getaddrinfo(0, 0, 0, 0); }\n"
    )
    toolchain = load_toolchain("zig-android-aarch64")
    built = toolchain.compile_object(tmp_path / "net.c", tmp_path / "net.o")
    with pytest.raises(CompileError, match="undefined symbol: getaddrinfo"):
        toolchain.link_shared([built], tmp_path / "libnet.so", soname="libnet.so", exported=["r*"])
