"""Windows libraries: what a PE file needs and shows, and the files that programs link it with.

Source of both: Microsoft's "PE Format" (image files, and "Archive (Library) File Format" with its
"Import Library Format").
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgesdk.errors import ContractError

_MACHINES = {0x8664: "x86_64", 0xAA64: "aarch64", 0x14C: "i386", 0x1C4: "arm"}
_MACHINE_X86_64 = 0x8664
_PE32_PLUS = 0x20B
_EXPORT_TABLE, _IMPORT_TABLE, _DELAY_IMPORT_TABLE = 0, 1, 13

# DllCharacteristics
_DYNAMIC_BASE = 0x40
_NX_COMPAT = 0x100

# Import libraries
_IMPORT_BY_NAME = 1 << 2
_RVA_RELOCATION = 3  # IMAGE_REL_AMD64_ADDR32NB
_CLASS_EXTERNAL, _CLASS_STATIC, _CLASS_SECTION = 2, 3, 104
_WRITABLE_DATA = 0xC0000040


@dataclass(frozen=True)
class PeImage:
    """A program or library of Windows. `imports` has the symbols wanted from each library.

    `name` is the one that the file itself gives, with which programs that link it will ask for it.
    """

    machine: str
    bits: int
    name: str | None
    imports: Mapping[str, tuple[str, ...]]
    exports: tuple[str, ...]
    moves: bool
    data_executes: bool


def read_image(path: Path) -> PeImage:
    """Reads the PE file `path`. Raises ContractError when it is damaged or of 32 bits."""
    try:
        return _Reader(path.read_bytes()).image()
    except (struct.error, IndexError, ValueError) as error:
        raise ContractError(f"{path.name} is not a whole PE file: {error}") from error


def link_files(path: Path) -> dict[str, bytes]:
    """Returns what programs need to link the DLL `path`: file name -> content.

    NAME.lib is for Microsoft's and LLVM's linker, libNAME.dll.a the same for GNU's, and NAME.def
    for whoever makes an import library of another kind. Raises ContractError as `read_image`.
    """
    exports = read_image(path).exports
    library = import_library(path.name, exports)
    definition = f"LIBRARY {path.name}\nEXPORTS\n" + "".join(f"    {e}\n" for e in exports)
    return {
        f"{path.stem}.lib": library,
        f"lib{path.stem}.dll.a": library,
        f"{path.stem}.def": definition.encode(),
    }


def import_library(library: str, exports: Sequence[str]) -> bytes:
    """Returns an import library for the functions `exports` of the x86-64 DLL `library`.

    In the short format, which Microsoft's linker, LLVM's and (as lib*.dll.a) GNU's read alike.
    """
    stem = library.rpartition(".")[0]
    descriptor, end = f"__IMPORT_DESCRIPTOR_{stem}", "__NULL_IMPORT_DESCRIPTOR"
    thunk_end = f"\x7f{stem}_NULL_THUNK_DATA"
    members = [
        ([descriptor], _descriptor(library, descriptor, end, thunk_end)),
        ([end], _coff([(b".idata$3", bytes(20), _WRITABLE_DATA, [])], [(end, 1, _CLASS_EXTERNAL)])),
        (
            [thunk_end],
            _coff(
                [(name, bytes(8), _WRITABLE_DATA, []) for name in (b".idata$5", b".idata$4")],
                [(thunk_end, 1, _CLASS_EXTERNAL)],
            ),
        ),
    ]
    for name in sorted(exports):
        text = name.encode() + b"\0" + library.encode() + b"\0"
        header = struct.pack(
            "<HHHHIIHH", 0, 0xFFFF, 0, _MACHINE_X86_64, 0, len(text), 0, _IMPORT_BY_NAME
        )
        members.append(([name, f"__imp_{name}"], header + text))
    return _archive(library, members)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        start = self._number("I", 0x3C)
        if data[start : start + 4] != b"PE\0\0":
            raise ValueError("it has no PE header")
        self._machine, count, optional_bytes = struct.unpack_from("<HH12xH", data, start + 4)
        self._optional = start + 24
        if self._number("H", self._optional) != _PE32_PLUS:
            raise ValueError("it is no 64-bit file")
        sections = self._optional + optional_bytes
        # Address in memory, bytes in the file, place in the file.
        self._sections = [
            struct.unpack_from("<III", data, sections + i * 40 + 12) for i in range(count)
        ]

    def image(self) -> PeImage:
        flags = self._number("H", self._optional + 70)
        name, exports = self._exports()
        return PeImage(
            machine=_MACHINES.get(self._machine, f"machine {self._machine:#x}"),
            bits=64,
            name=name,
            imports=self._imports(_IMPORT_TABLE, 20, 12, 0)
            | self._imports(_DELAY_IMPORT_TABLE, 32, 4, 16),
            exports=exports,
            moves=bool(flags & _DYNAMIC_BASE),
            data_executes=not flags & _NX_COMPAT,
        )

    def _exports(self) -> tuple[str | None, tuple[str, ...]]:
        table = self._table(_EXPORT_TABLE)
        if table is None:
            return None, ()
        name, count, names = (self._number("I", table + offset) for offset in (12, 24, 32))
        entries = self._place(names) if count else 0
        exports = [self._text(self._number("I", entries + 4 * i)) for i in range(count)]
        return self._text(name), tuple(sorted(exports))

    def _imports(self, table: int, entry_bytes: int, name: int, lookup: int) -> dict[str, tuple]:
        """Reads one table of imports, whose entries hold their name and lookup table there."""
        found: dict[str, tuple[str, ...]] = {}
        entry = self._table(table)
        while entry is not None and self._number("I", entry + name):
            library = self._text(self._number("I", entry + name))
            symbols = []
            thunk = self._place(self._number("I", entry + lookup))
            while value := self._number("Q", thunk):
                by_number = value >> 63
                symbols.append(f"#{value & 0xFFFF}" if by_number else self._text(value + 2))
                thunk += 8
            found[library] = tuple(symbols)
            entry += entry_bytes
        return found

    def _table(self, index: int) -> int | None:
        """Place in the file of one of the tables of the header, None if there is none."""
        if index >= self._number("I", self._optional + 108):
            return None
        address = self._number("I", self._optional + 112 + 8 * index)
        return self._place(address) if address else None

    def _place(self, address: int) -> int:
        for start, size, offset in ((s[0], s[1], s[2]) for s in self._sections):
            if start <= address < start + size:
                return offset + address - start
        raise ValueError(f"nothing is at address {address:#x}")

    def _text(self, address: int) -> str:
        start = self._place(address)
        return self._data[start : self._data.index(b"\0", start)].decode("ascii")

    def _number(self, kind: str, place: int) -> int:
        (number,) = struct.unpack_from(f"<{kind}", self._data, place)
        return int(number)


def _descriptor(library: str, descriptor: str, end: str, thunk_end: str) -> bytes:
    """The object with the entry of the import table: where the names and addresses will be."""
    name = library.encode() + b"\0"
    name += b"\0" * (len(name) % 2)
    # The fields at 12, 0 and 16 are addresses of symbols 2, 3 and 4 below.
    relocations = [(12, 2), (0, 3), (16, 4)]
    return _coff(
        [
            (b".idata$2", bytes(20), _WRITABLE_DATA, relocations),
            (b".idata$6", name, _WRITABLE_DATA, []),
        ],
        [
            (descriptor, 1, _CLASS_EXTERNAL),
            (".idata$2", 1, _CLASS_SECTION),
            (".idata$6", 2, _CLASS_STATIC),
            (".idata$4", 0, _CLASS_SECTION),
            (".idata$5", 0, _CLASS_SECTION),
            (end, 0, _CLASS_EXTERNAL),
            (thunk_end, 0, _CLASS_EXTERNAL),
        ],
    )


def _coff(
    sections: Sequence[tuple[bytes, bytes, int, Sequence[tuple[int, int]]]],
    symbols: Sequence[tuple[str, int, int]],
) -> bytes:
    """An object file. Sections: name, bytes, kind, relocations (place, symbol's number).

    Symbols: name, number of the section (0: elsewhere), storage class.
    """
    headers, body = b"", b""
    start = 20 + 40 * len(sections)
    for name, data, kind, relocations in sections:
        place = start + len(body)
        table = place + len(data) if relocations else 0
        headers += struct.pack(
            "<8sIIIIIIHHI", name, 0, 0, len(data), place, table, 0, len(relocations), 0, kind
        )
        body += data
        body += b"".join(
            struct.pack("<IIH", at, symbol, _RVA_RELOCATION) for at, symbol in relocations
        )
    entries, strings = b"", b""
    for text, section, storage in symbols:
        raw = text.encode("latin-1")
        if len(raw) > 8:
            raw, strings = struct.pack("<II", 0, 4 + len(strings)), strings + raw + b"\0"
        entries += struct.pack("<8sIhHBB", raw, 0, section, 0, storage, 0)
    header = struct.pack(
        "<HHIIIHH", _MACHINE_X86_64, len(sections), 0, start + len(body), len(symbols), 0, 0
    )
    return header + headers + body + entries + struct.pack("<I", 4 + len(strings)) + strings


def _archive(name: str, members: Sequence[tuple[Sequence[str], bytes]]) -> bytes:
    """An archive of `members` (the symbols of each, and its bytes), all called `name`."""
    short = f"{name}/"
    long_names = b"" if len(short) <= 16 else name.encode() + b"\0"
    index = [(symbol, number) for number, (symbols, _) in enumerate(members) for symbol in symbols]
    texts = b"".join(symbol.encode("latin-1") + b"\0" for symbol, _ in index)
    ordered = sorted(index, key=lambda entry: entry[0].encode("latin-1"))
    sorted_texts = b"".join(symbol.encode("latin-1") + b"\0" for symbol, _ in ordered)
    first_bytes = 4 + 4 * len(index) + len(texts)
    second_bytes = 8 + 4 * len(members) + 2 * len(index) + len(sorted_texts)

    heads = [_member_bytes(first_bytes), _member_bytes(second_bytes)]
    heads += [_member_bytes(len(long_names))] if long_names else []
    offsets, place = [], 8 + sum(heads)
    for _, data in members:
        offsets.append(place)
        place += _member_bytes(len(data))

    first = struct.pack(f">I{len(index)}I", len(index), *(offsets[n] for _, n in index)) + texts
    second = struct.pack(f"<I{len(members)}I", len(members), *offsets)
    second += struct.pack(f"<I{len(index)}H", len(index), *(n + 1 for _, n in ordered))
    out = b"!<arch>\n" + _member("/", first) + _member("/", second + sorted_texts)
    if long_names:
        out += _member("//", long_names)
    for _, data in members:
        out += _member("/0" if long_names else short, data)
    return out


def _member(name: str, data: bytes) -> bytes:
    head = f"{name:<16}{0:<12}{'':<6}{'':<6}{0:<8}{len(data):<10}`\n".encode()
    return head + data + b"\n" * (len(data) % 2)


def _member_bytes(size: int) -> int:
    return 60 + size + size % 2
