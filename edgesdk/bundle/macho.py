"""Apple's libraries: what a 64-bit Mach-O file needs and shows.

Source: Apple's <mach-o/loader.h> and <mach-o/nlist.h>.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgesdk.errors import ContractError

_MACHINES = {0x0100000C: "aarch64", 0x01000007: "x86_64"}
_SYSTEMS = {1: "macos", 2: "ios"}
_EXECUTABLE = 2

# <ar.h>, and the table of contents that ranlib makes.
_ARCHIVE = b"!<arch>\n"
_SYMBOL_TABLE = b"__.SYMDEF"

# Flags of the header.
_ALLOW_STACK_EXECUTION = 0x20000
_PIE = 0x200000

# Symbols that linkers make for each file, for itself: where it begins. zig shows them since 0.16.
_LINKERS_OWN = ("_mh_execute_header", "_mh_dylib_header", "__dso_handle")

# Load commands.
_SYMTAB, _LOAD_DYLIB, _ID_DYLIB, _BUILD_VERSION = 0x02, 0x0C, 0x0D, 0x32
_CODE_SIGNATURE = 0x1D
_LOAD_WEAK_DYLIB, _RPATH, _REEXPORT_DYLIB = 0x80000018, 0x8000001C, 0x8000001F

# The type byte of a symbol.
_N_STAB, _N_PEXT, _N_TYPE, _N_EXT = 0xE0, 0x10, 0x0E, 0x01


@dataclass(frozen=True)
class MachOImage:
    """A program or library of Apple's systems. `exports` and `undefined` are named as in C.

    `system` is "macos" or "ios" (None: another one, or not said), `system_version` the oldest
    version that it is for, such as "11.0". `name` is the one that programs linked with it ask for.
    `signed` says that there is a signature, whoever's.
    """

    machine: str
    bits: int
    system: str | None
    system_version: str | None
    name: str | None
    libraries: tuple[str, ...]
    run_path: tuple[str, ...]
    exports: tuple[str, ...]
    undefined: tuple[str, ...]
    moves: bool
    stack_executes: bool
    signed: bool


def read_image(path: Path) -> MachOImage:
    """Reads the Mach-O file `path`. Raises ContractError when it is damaged."""
    try:
        return _read(path.read_bytes())
    except (struct.error, ValueError) as error:
        raise ContractError(f"{path.name} is not a whole Mach-O file: {error}") from error


def read_archive(path: Path) -> list[MachOImage]:
    """Reads the objects of the archive `path`, in BSD's format.

    `exports` and `undefined` are those of each. Raises ContractError when it is damaged.
    """
    data = path.read_bytes()
    images, place = [], len(_ARCHIVE)
    try:
        while place < len(data):
            header = data[place : place + 60].decode("ascii")
            size, name_bytes = int(header[48:58]), 0
            if header.startswith("#1/"):  # the name is in front of the data
                name_bytes = int(header[3:16])
            start = place + 60 + name_bytes
            member = data[start : place + 60 + size]
            if len(member) != size - name_bytes:
                raise ValueError("it ends within an object")
            if not data[place + 60 : start].startswith(_SYMBOL_TABLE):
                images.append(_read(member))
            place += 60 + size + size % 2
        if not images:
            raise ValueError("it has no objects")
    except (struct.error, ValueError) as error:
        raise ContractError(f"{path.name} is not a whole archive: {error}") from error
    return images


def _read(data: bytes) -> MachOImage:
    machine, kind, flags = struct.unpack_from("<4xI4xI8xI", data)
    name, system, version, signed = None, None, None, False
    libraries, run_path = [], []
    exports: list[str] = []
    undefined: list[str] = []
    for command, place in _commands(data):
        if command == _ID_DYLIB:
            name = _command_text(data, place)
        elif command in (_LOAD_DYLIB, _LOAD_WEAK_DYLIB, _REEXPORT_DYLIB):
            libraries.append(_command_text(data, place))
        elif command == _RPATH:
            run_path.append(_command_text(data, place))
        elif command == _CODE_SIGNATURE:
            signed = True
        elif command == _BUILD_VERSION:
            number, oldest = struct.unpack_from("<II", data, place + 8)
            system = _SYSTEMS.get(number)
            version = f"{oldest >> 16}.{oldest >> 8 & 0xFF}"
        elif command == _SYMTAB:
            for symbol, type_byte in _symbols(data, place):
                if symbol in _LINKERS_OWN:
                    continue
                if type_byte & _N_EXT and not type_byte & (_N_STAB | _N_PEXT):
                    (exports if type_byte & _N_TYPE else undefined).append(symbol)
    return MachOImage(
        machine=_MACHINES.get(machine, f"machine {machine:#x}"),
        bits=64,
        system=system,
        system_version=version,
        name=name,
        libraries=tuple(libraries),
        run_path=tuple(run_path),
        exports=tuple(sorted(exports)),
        undefined=tuple(sorted(undefined)),
        moves=kind != _EXECUTABLE or bool(flags & _PIE),
        stack_executes=bool(flags & _ALLOW_STACK_EXECUTION),
        signed=signed,
    )


def _commands(data: bytes) -> Iterator[tuple[int, int]]:
    """Number and place of each load command."""
    place = 32
    for _ in range(int.from_bytes(data[16:20], "little")):
        command, size = struct.unpack_from("<II", data, place)
        yield command, place
        place += size


def _command_text(data: bytes, place: int) -> str:
    (offset,) = struct.unpack_from("<I", data, place + 8)
    return _text(data, place + offset)


def _symbols(data: bytes, place: int) -> Iterator[tuple[str, int]]:
    """Name in C and type byte of each symbol of the table that the command at `place` tells of."""
    table, count, strings = struct.unpack_from("<III", data, place + 8)
    for entry in range(table, table + 16 * count, 16):
        offset, type_byte = struct.unpack_from("<IB", data, entry)
        yield _text(data, strings + offset).removeprefix("_"), type_byte


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode("utf-8")
