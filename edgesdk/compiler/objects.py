"""Object files as code generation leaves them: their symbols, and what a linker must not see.

ELF through pyelftools; COFF (Windows) and Mach-O (Apple) here, as much as is needed of 64-bit
little-endian files: "PE Format" of Microsoft, and <mach-o/loader.h> and <mach-o/nlist.h> of Apple.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Collection, Iterator

from edgesdk.errors import CompileError

_ELF = b"\x7fELF"
_MACHO = b"\xcf\xfa\xed\xfe"

# COFF
_COFF_MACHINES = (0x8664, 0xAA64)
_SECTION_BYTES, _COFF_SYMBOL_BYTES = 40, 18
_CLASS_EXTERNAL = 2
_DIRECTIVES = b".drectve"
_COMDAT, _REMOVE = 0x1000, 0x800

# Mach-O
_LC_SYMTAB = 2
_NLIST_BYTES = 16
_N_EXT, _N_TYPE, _N_SECT, _N_PEXT, _N_STAB = 0x01, 0x0E, 0x0E, 0x10, 0xE0


def global_symbols(data: bytes) -> list[str]:
    """Returns the names of an object file's global symbols, as C has them.

    Raises CompileError for a format that is none of the three.
    """
    if data.startswith(_ELF):
        from elftools.elf.elffile import ELFFile

        table = ELFFile(io.BytesIO(data)).get_section_by_name(".symtab")
        return [s.name for s in table.iter_symbols() if s.entry["st_info"]["bind"] != "STB_LOCAL"]
    if data.startswith(_MACHO):
        # C names have a "_" in front there.
        return [name.removeprefix("_") for _, name, kind in _macho_symbols(data) if kind & _N_EXT]
    return [name for _, name in _coff_symbols(data)]


def fit_for_linking(data: bytearray, *, provided: Collection[str]) -> None:
    """Changes an object in place: the library shows nothing of it, and edgert's symbols win.

    `provided` names what edgert defines, and the object perhaps, too, as a weak variable. ELF needs
    no change: the linker has a list of what is shown, and weak gives way. In Mach-O, globals become
    private ones. In COFF, LLVM's directives to export every function are blanked, and since there
    are no weak definitions, provided symbols become undefined ones. Raises CompileError as
    `global_symbols` does.
    """
    if data.startswith(_ELF):
        return
    if data.startswith(_MACHO):
        for place, _, kind in list(_macho_symbols(data)):
            if kind & _N_EXT and kind & _N_TYPE == _N_SECT:
                data[place + 4] |= _N_PEXT
        return
    sections = _coff_sections(data)
    for header in sections:
        if data[header : header + 8] == _DIRECTIVES:
            size, start = struct.unpack_from("<II", data, header + 16)
            data[start : start + size] = b" " * size
    for place, name in list(_coff_symbols(data)):
        (section,) = struct.unpack_from("<h", data, place + 12)
        if section > 0 and name in provided:
            struct.pack_into("<Ih", data, place + 8, 0, 0)
            # The variable's own section, which nothing refers to any more.
            flags = sections[section - 1] + 36
            (kind,) = struct.unpack_from("<I", data, flags)
            struct.pack_into("<I", data, flags, kind & ~_COMDAT | _REMOVE)


def _coff_symbols(data: bytes | bytearray) -> Iterator[tuple[int, str]]:
    """Place in the file and name of each global symbol."""
    table, count = _coff_header(data)[2:4]
    strings = table + count * _COFF_SYMBOL_BYTES
    index = 0
    while index < count:
        place = table + index * _COFF_SYMBOL_BYTES
        short, storage, extra = struct.unpack_from("<8s8xBB", data, place)
        if storage == _CLASS_EXTERNAL:
            long = short[:4] == b"\0\0\0\0"
            offset = int.from_bytes(short[4:], "little")
            yield place, _text(data, strings + offset) if long else short.rstrip(b"\0").decode()
        index += 1 + extra


def _coff_sections(data: bytes | bytearray) -> list[int]:
    """Places of the section headers."""
    _, count, _, _, optional_bytes = _coff_header(data)
    return [20 + optional_bytes + i * _SECTION_BYTES for i in range(count)]


def _coff_header(data: bytes | bytearray) -> tuple[int, int, int, int, int]:
    """Machine, number of sections, place and number of symbols, size of the optional header."""
    if len(data) < 20 or int.from_bytes(data[:2], "little") not in _COFF_MACHINES:
        raise CompileError("code generation gave an object file of an unknown format")
    return struct.unpack_from("<HH4xIIH", data)


def _macho_symbols(data: bytes | bytearray) -> Iterator[tuple[int, str, int]]:
    """Place in the file, name and type byte of each symbol."""
    position = 32
    for _ in range(int.from_bytes(data[16:20], "little")):
        command, size = struct.unpack_from("<II", data, position)
        if command == _LC_SYMTAB:
            table, count, strings = struct.unpack_from("<III", data, position + 8)
            for entry in range(table, table + count * _NLIST_BYTES, _NLIST_BYTES):
                offset, kind = struct.unpack_from("<IB", data, entry)
                if not kind & _N_STAB:
                    yield entry, _text(data, strings + offset), kind
        position += size


def _text(data: bytes | bytearray, start: int) -> str:
    return bytes(data[start : data.index(b"\0", start)]).decode()
