"""The contract audit: what a linked file needs from a device, against what the target promises.

It reads the file itself, so it sees what the linker really did (a newer glibc on the build machine,
a library that crept in, soft-float objects), whatever the flags were meant to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgesdk.errors import ContractError
from edgesdk.profiles import TargetProfile
from edgesdk.resources import data_folder
from edgesdk.stubs import symbols_of

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

# ELF e_machine -> the names that `TargetProfile.machine` uses.
_MACHINES = {
    "EM_AARCH64": "aarch64",
    "EM_ARM": "arm",
    "EM_X86_64": "x86_64",
    "EM_RISCV": "riscv64",
    "EM_386": "i386",
}

# "ELF for the Arm Architecture", e_flags: floats travel in VFP registers.
_EF_ARM_ABI_FLOAT_HARD = 0x400

# The first bytes of files that are not ELF.
_PE = b"MZ"
_MACHO = b"\xcf\xfa\xed\xfe"
_ARCHIVE = b"!<arch>\n"

# What a model's library shows: edgesdk_model.h and its own opening function.
_API_PREFIX = "edgesdk_"

# System V ABI, gABI and GNU extensions.
_PF_X = 1
_DF_TEXTREL = 4


@dataclass(frozen=True)
class AuditReport:
    """What the file at `path` is and needs.

    `hard_float` is None where the machine has one float ABI only. `needed` are the libraries that
    the system loads with it. `versions` maps each required symbol version ("GLIBC_2.34") to the
    symbols that ask for it. `run_path` holds the entries of RPATH and RUNPATH. `shown_on_purpose`
    says that the linker had a list of the `exports`. A file with `fixed_address` can be loaded
    nowhere else. `os` is the system that it is for, if the format tells. `unsigned` is a file that
    its system wants signed. `page_bytes` is the largest page of memory that it can be loaded with,
    where the file decides that.
    """

    path: Path
    machine: str
    bits: int
    hard_float: bool | None
    soname: str | None
    needed: tuple[str, ...]
    run_path: tuple[str, ...]
    versions: Mapping[str, tuple[str, ...]]
    exports: tuple[str, ...]
    undefined: tuple[str, ...] = field(repr=False)
    text_relocations: bool = False
    executable_stack: bool = False
    fixed_address: bool = False
    shown_on_purpose: bool = True
    os: str | None = None
    unsigned: bool = False
    page_bytes: int | None = None

    @property
    def glibc(self) -> str | None:
        """The oldest glibc that this file runs with, e.g. "2.34"; None when it needs none."""
        return self._highest("GLIBC_")

    @property
    def glibcxx(self) -> str | None:
        """The newest GLIBCXX version that it needs of libstdc++.so, or None."""
        return self._highest("GLIBCXX_")

    def _highest(self, prefix: str) -> str | None:
        found = [v.removeprefix(prefix) for v in self.versions if v.startswith(prefix)]
        # GLIBC_PRIVATE is no version; check_contract refuses it.
        return max((v for v in found if v[0].isdigit()), key=version_key, default=None)


def audit_library(path: Path) -> AuditReport:
    """Reads the shared library or executable `path`, of ELF, PE or Mach-O.

    Raises ContractError when it is none of them, or damaged.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as stream:
            start = stream.read(8)
            if start.startswith(_PE):
                return _from_pe(path)
            if start.startswith(_MACHO):
                return _from_macho(path)
            if start == _ARCHIVE:
                return _from_archive(path)
            return _read(path, ELFFile(stream))
    except FileNotFoundError:
        raise ContractError(f"{path} does not exist") from None
    except (ELFError, UnicodeDecodeError) as error:
        raise ContractError(f"{path.name} is not a whole ELF file: {error}") from error


def check_contract(report: AuditReport, profile: TargetProfile) -> None:
    """Raises ContractError with the first promise of `profile` that `report` breaks."""
    violation = _first_violation(report, profile)
    if violation is not None:
        message, hint = violation
        raise ContractError(f"{report.path.name} {message}", hint=hint)


def version_key(version: str) -> tuple[int, ...]:
    """Orders versions such as "2.4" < "2.17"."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _first_violation(report: AuditReport, profile: TargetProfile) -> tuple[str, str] | None:
    contract, name = profile.contract, profile.name
    toolchain_hint = f"check the toolchain {profile.toolchain!r} with `edgesdk doctor`"
    if report.machine != profile.machine:
        return f"is built for {report.machine}, the target {name} is {profile.machine}", (
            toolchain_hint
        )
    if report.os is not None and report.os != contract.os:
        return f"is built for {report.os}, the target {name} is {contract.os}", toolchain_hint
    if report.hard_float is False:
        return f"passes floats the soft-float way, the target {name} is hard-float", (
            'set mfloat-abi = "hard" in the [tvm] table of the profile'
        )
    if report.text_relocations:
        return "has text relocations, which hardened systems refuse to load", toolchain_hint
    if report.executable_stack:
        return "asks for an executable stack, which hardened systems refuse", toolchain_hint
    if report.fixed_address:
        return "can be loaded at one address only, which hardened systems refuse", toolchain_hint
    if report.unsigned:
        return "has no code signature, without which its system does not load it", toolchain_hint
    strays = [name for name in report.exports if not name.startswith(_API_PREFIX)]
    if strays and not report.shown_on_purpose:
        return f"shows the symbol {strays[0]}, which is no part of the C API", toolchain_hint
    for entry in report.run_path:
        if not entry.startswith("$ORIGIN"):
            return f"looks for libraries in {entry}, a folder of the build machine", toolchain_hint
    # The version says more than the library does, so it comes first, and the newest before all.
    for version in sorted(report.versions, key=_newest_first):
        problem = _version_problem(version, report.versions[version], profile)
        if problem is not None:
            return problem
    # Windows does not tell upper from lower case in their names.
    fold = str.lower if contract.os == "windows" else str
    promised = {fold(library) for library in contract.libraries}
    for library in report.needed:
        if fold(library) not in promised:
            return f"needs {library}, which the target {name} does not promise", (
                f"link without it, or add it to 'contract.libraries' of {profile.path or name}"
            )
    if contract.symbols:
        toolchains = data_folder("toolchains")
        known = {symbol for file in contract.symbols for symbol in symbols_of(toolchains / file)}
        for symbol in report.undefined:
            if symbol not in known:
                return f"needs the symbol {symbol}, which the target {name} does not promise", (
                    f"link without it, or add it to one of {', '.join(contract.symbols)}"
                )
    pages = report.page_bytes
    if contract.page_bytes and pages is not None and pages < contract.page_bytes:
        return f"fits pages of {pages} bytes, the target {name} has {contract.page_bytes}", (
            f"link with -Wl,-z,max-page-size={contract.page_bytes}"
        )
    return None


def _newest_first(version: str) -> tuple[int, ...]:
    number = version.rpartition("_")[2]
    return tuple(-part for part in version_key(number)) if number[:1].isdigit() else ()


def _version_problem(
    version: str, symbols: tuple[str, ...], profile: TargetProfile
) -> tuple[str, str] | None:
    contract = profile.contract
    who = f"needs {version} (symbol {symbols[0]})"
    family, _, number = version.partition("_")
    if family != "GLIBC":
        return None  # then it also needs a library that is not libc
    if contract.libc is not None and contract.libc != "glibc":
        return f"{who}, the target {profile.name} has {contract.libc}", (
            f"check the toolchain {profile.toolchain!r}"
        )
    if not number[:1].isdigit():
        return f"{who}, which is glibc's own and changes with every release", (
            "use what glibc documents instead"
        )
    floor = contract.libc_version
    if floor is not None and version_key(number) > version_key(floor):
        return f"{who}, the target {profile.name} promises {floor}", (
            f'use toolchain = "zig-{"armhf" if profile.machine == "arm" else profile.machine}"'
            ", or a newer floor (docs/targets.md)"
        )
    return None


def _read(path: Path, elf: ELFFile) -> AuditReport:
    from elftools.elf.dynamic import DynamicSegment
    from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
    from elftools.elf.sections import SymbolTableSection

    if elf.num_sections() == 0:
        # The loader does not need them, but without them a violation could hide.
        raise ContractError(f"{path.name} has no section headers", hint="do not strip them")
    machine = _MACHINES.get(elf["e_machine"], str(elf["e_machine"]))
    soname, needed, run_path, text_relocations = None, [], [], False
    tag: Any  # pyelftools sets .needed, .soname, .rpath, .runpath as the kind of tag has it
    for segment in elf.iter_segments():
        if not isinstance(segment, DynamicSegment):
            continue
        for tag in segment.iter_tags():
            kind = tag.entry.d_tag
            if kind == "DT_NEEDED":
                needed.append(tag.needed)
            elif kind == "DT_SONAME":
                soname = tag.soname
            elif kind in ("DT_RPATH", "DT_RUNPATH"):
                run_path += (tag.rpath if kind == "DT_RPATH" else tag.runpath).split(":")
            elif kind == "DT_TEXTREL" or (kind == "DT_FLAGS" and tag.entry.d_val & _DF_TEXTREL):
                text_relocations = True

    symbols = elf.get_section_by_name(".dynsym")
    numbers = elf.get_section_by_name(".gnu.version")
    required = elf.get_section_by_name(".gnu.version_r")
    names_by_index: dict[int, str] = {}
    if isinstance(required, GNUVerNeedSection):
        for _, entries in required.iter_versions():
            names_by_index |= {entry["vna_other"]: entry.name for entry in entries}

    versions: dict[str, list[str]] = {name: [] for name in names_by_index.values()}
    exports, undefined = [], []
    if isinstance(symbols, SymbolTableSection):
        for index, symbol in enumerate(symbols.iter_symbols()):
            if not symbol.name or symbol["st_info"]["bind"] == "STB_LOCAL":
                continue
            if symbol["st_shndx"] != "SHN_UNDEF":
                if symbol["st_other"]["visibility"] in ("STV_DEFAULT", "STV_PROTECTED"):
                    exports.append(symbol.name)
                continue
            undefined.append(symbol.name)
            if isinstance(numbers, GNUVerSymSection):
                version = numbers.get_symbol(index)["ndx"]
                if version in names_by_index:
                    versions[names_by_index[version]].append(symbol.name)

    stacks = [s for s in elf.iter_segments() if s["p_type"] == "PT_GNU_STACK"]
    loaded = [s for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
    return AuditReport(
        path=path,
        machine=machine,
        bits=elf.elfclass,
        hard_float=bool(elf["e_flags"] & _EF_ARM_ABI_FLOAT_HARD) if machine == "arm" else None,
        soname=soname,
        needed=tuple(needed),
        run_path=tuple(run_path),
        versions={v: tuple(sorted(s)) or ("?",) for v, s in sorted(versions.items())},
        exports=tuple(sorted(exports)),
        undefined=tuple(sorted(undefined)),
        text_relocations=text_relocations,
        # Without the header the kernel falls back to an executable stack.
        executable_stack=not stacks or any(s["p_flags"] & _PF_X for s in stacks),
        page_bytes=min((s["p_align"] for s in loaded), default=None),
    )


def _from_pe(path: Path) -> AuditReport:
    from edgesdk.bundle.pe import read_image

    image = read_image(path)
    return AuditReport(
        path=path,
        machine=image.machine,
        bits=image.bits,
        hard_float=None,
        soname=image.name,
        needed=tuple(image.imports),
        run_path=(),
        versions={},
        exports=image.exports,
        undefined=tuple(sorted({s for symbols in image.imports.values() for s in symbols})),
        executable_stack=image.data_executes,
        fixed_address=not image.moves,
        shown_on_purpose=False,
        os="windows",
    )


def _from_macho(path: Path) -> AuditReport:
    from edgesdk.bundle.macho import read_image

    image = read_image(path)
    return AuditReport(
        path=path,
        machine=image.machine,
        bits=image.bits,
        hard_float=None,
        soname=image.name,
        needed=image.libraries,
        run_path=image.run_path,
        versions={},
        exports=image.exports,
        undefined=image.undefined,
        executable_stack=image.stack_executes,
        fixed_address=not image.moves,
        shown_on_purpose=False,
        os=image.system,
        unsigned=not image.signed,
    )


def _from_archive(path: Path) -> AuditReport:
    from edgesdk.bundle.macho import read_archive

    images = read_archive(path)
    first = images[0]
    # If there is one for another system, that is what there is to say.
    odd = next((i for i in images if (i.machine, i.system) != (first.machine, first.system)), first)
    return AuditReport(
        path=path,
        machine=odd.machine,
        bits=64,
        hard_float=None,
        soname=None,
        needed=(),  # Xcode's linker finds out
        run_path=(),
        versions={},
        exports=tuple(sorted({name for image in images for name in image.exports})),
        undefined=tuple(sorted({name for image in images for name in image.undefined})),
        shown_on_purpose=False,
        os=odd.system,
    )
