"""Toolchains: with what C and C++ are compiled and linked for a target, one TOML file each.

The flags that every toolchain takes stand here, those that go with the format of the linked files
in `formats.py`; what differs otherwise stands in `toolchains/*.toml`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edgesdk.errors import CompileError, ConfigError, ToolMissingError
from edgesdk.formats import FORMATS, ObjectFormat
from edgesdk.proc import CommandResult, run_command
from edgesdk.profiles import TargetProfile, machine_of
from edgesdk.resources import cache_folder, config_folder, data_folder
from edgesdk.settings import check_table, load_toml, suggestion

# Zig builds its C and C++ libraries on first use: 80 s and more on two cores.
_COMPILE_LIMIT_S = 900.0
_TOOL_LIMIT_S = 60.0

_COMPILE_FLAGS = (
    "-O2",
    "-DNDEBUG",
    "-ffunction-sections",
    "-fdata-sections",
    "-Wall",
)
_CXX_FLAGS = ("-std=c++17", "-fvisibility-inlines-hidden")

# Stands in a command for the file that it writes.
_OUTPUT = "{output}"

_DEBIAN_WINE = "/usr/lib/wine/wine64"
# The first program starts Wine's servers, which keep its output open for seconds after its end: so
# that is not the program whose output is read.
_START_WINE = """
mkdir -p "$WINEPREFIX"
"$0" wineboot --init </dev/null >/dev/null 2>&1
exec "$0" "$@"
"""

# What a linker says before "collect2: error: ld returned 1 exit status", which explains nothing.
_LINKER_MARKS = (
    "undefined reference",
    "undefined symbol",
    "multiple definition",
    "cannot find",
    "No space left",
    "error:",
)


@dataclass(frozen=True)
class Compilers:
    """One set of commands; "{python}" is this Python, an empty `strip` means nothing to strip.

    `link` links, by default `cxx` does: the C compiler spares zig building a C++ library first.
    `ar` makes archives, where there are no libraries (`ObjectFormat.program`).
    """

    cc: tuple[str, ...]
    cxx: tuple[str, ...]
    strip: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    ar: tuple[str, ...] = ()


@dataclass(frozen=True)
class Packages:
    """What to install when the commands are missing."""

    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    by_hand: str = ""  # another way, in words


@dataclass(frozen=True)
class Toolchain:
    """A toolchain file. `compilers` holds alternatives, of which the first installed one is used.

    `machine` is the machine it builds for ("native": this one), `format` that of the files it
    links, `sysroot` the folder with the target's C library for `qemu -L`, `python_module` a module
    the commands need, whose folder "{module}" stands for in `compile_flags`. "{folder}" there is
    the folder of the toolchain's file, "{root}" in the commands the first of `root` that is there:
    paths with variables of the environment and wildcards. Where it is not installed, the toolchain
    `otherwise` takes its place.

    `libraries` replaces what the format's systems have for a C program. `stubs` are lists of the
    symbols of libraries that only the device has (see `edgesdk.stubs`), `start` is the source of
    what comes before `main` in a program; both are paths in the folder of the file.
    """

    name: str
    description: str
    machine: str
    compilers: tuple[Compilers, ...]
    packages: Packages
    format: Literal["elf", "pe", "macho", "macho-archive"] = "elf"
    compile_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    sysroot: str | None = None
    python_module: str | None = None
    root: tuple[str, ...] = ()
    otherwise: str | None = None
    libraries: tuple[str, ...] | None = None
    stubs: tuple[str, ...] = ()
    start: str | None = None
    path: Path | None = field(default=None, compare=False)

    def require(self, machine: str | None = None) -> Compilers:
        """Returns the commands to use.

        Raises ToolMissingError naming the package when none is installed, and ConfigError when
        `machine`, the one that is wanted, is not what this toolchain builds for.
        """
        if machine is not None and machine != self.builds_for:
            raise ConfigError(
                f"the toolchain {self.name!r} builds for {self.builds_for}, not for {machine}",
                hint=f"set another toolchain in the profile, e.g. 'zig-{machine}'",
            )
        found = self._find()
        if found is not None:
            return found
        wanted = self.python_module or " or ".join(c.cxx[0] for c in self.compilers)
        raise ToolMissingError(
            f"the toolchain {self.name!r} needs {wanted}, which is not installed",
            hint=self.install_command,
        )

    @property
    def installed(self) -> bool:
        """Whether `require` finds its commands."""
        return self._find() is not None

    @property
    def folder(self) -> Path:
        """The folder of its file, from which `stubs` and `start` count."""
        return self.path.parent if self.path is not None else data_folder("toolchains")

    @property
    def builds_for(self) -> str:
        """The machine: "aarch64", "arm" or "x86_64"."""
        return machine_of(platform.machine()) if self.machine == "native" else self.machine

    @property
    def object_format(self) -> ObjectFormat:
        """The format of the files that it links."""
        return FORMATS[self.format]

    @property
    def install_command(self) -> str:
        """The command that installs it."""
        if self.packages.apt:
            return apt_command(*self.packages.apt)
        command = f"pip install {shlex.join(self.packages.pip)}"
        return f"{command}, or {self.packages.by_hand}" if self.packages.by_hand else command

    def compile_object(
        self,
        source: Path,
        output: Path,
        *,
        include: Sequence[Path] = (),
        defines: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
    ) -> Path:
        """Compiles `source` (C for .c and .S, else C++17) into the object `output`.

        A define with an empty value becomes `-DNAME`. Raises ToolMissingError, or CompileError with
        the compiler's first error.
        """
        tools = self.require()
        is_c = source.suffix in (".c", ".S", ".s")
        command = [*(tools.cc if is_c else tools.cxx), *_COMPILE_FLAGS]
        command += self.object_format.compile_flags
        command += [] if is_c else _CXX_FLAGS
        command += self._compile_flags()
        # No path of this machine in the product: __FILE__ is relative to its folder.
        command += [f"-ffile-prefix-map={folder}/=" for folder in (source.parent, *include)]
        command += [f"-I{folder}" for folder in include]
        command += [
            f"-D{name}={value}" if value else f"-D{name}" for name, value in (defines or {}).items()
        ]
        command += [*flags, "-c", str(source), "-o", _OUTPUT]
        self._build(command, output, f"compile {source.name}")
        return output

    def link_shared(
        self,
        objects: Sequence[Path],
        output: Path,
        *,
        soname: str,
        exported: Sequence[str] | None = None,
        libraries: Sequence[str] | None = None,
        flags: Sequence[str] = (),
    ) -> Path:
        """Links `objects` into the library `output`; a symbol left undefined is an error.

        `exported` names the symbols that it shows (the last character may be a "*"); without it,
        what the C++ library exports is exported again, so give it. Formats in which the objects
        say what is exported (PE) take no notice of it. `libraries` is by default all that the
        format's systems have for a C program. A format without programs has an archive of `objects`
        instead. Raises ToolMissingError, or CompileError with the linker's first error.
        """
        form = self.object_format
        if form.program is None:
            command = [*self.require().ar, "rcsD", _OUTPUT, *map(str, objects)]
            self._build(command, output, f"make {output.name}")
            return output
        extra = [flag.format(soname) for flag in form.shared_flags]
        if exported is None or form.exports is None:
            return self._link([*extra, *flags], objects, output, libraries)
        with tempfile.TemporaryDirectory(prefix="edgesdk-") as folder:
            names = Path(folder) / "exports"
            names.write_text(form.exports.text(exported), encoding="utf-8")
            extra.append(f"{form.exports.flag}{names}")
            return self._link([*extra, *flags], objects, output, libraries)

    def link_executable(
        self,
        objects: Sequence[Path],
        output: Path,
        *,
        libraries: Sequence[str] | None = None,
        flags: Sequence[str] = (),
    ) -> Path:
        """Links `objects` into the position independent executable `output`.

        `libraries` as in `link_shared`. Raises ToolMissingError, or CompileError with the linker's
        first error.
        """
        flags = [*self.object_format.program_flags, *flags]
        if self.start is not None:
            from edgesdk.stubs import start_object

            objects = [start_object(self), *objects]
        return self._link(flags, objects, output, libraries)

    def strip(self, path: Path) -> None:
        """Removes the symbols that running does not need from `path`, in place.

        Raises ToolMissingError or CompileError.
        """
        command = self.require().strip
        if not command:  # its link flags leave them out at once
            return
        argv = [*command, "--strip-unneeded", str(path)]
        result = run_command(argv, timeout_s=_TOOL_LIMIT_S, env={"LC_ALL": "C"})
        if not result.ok:
            raise _failure(result, f"strip {path.name}")

    def fingerprint(self) -> str:
        """Returns 16 hex digits that change with the compiler's version and with every flag."""
        tools = self.require()
        parts = (
            _version_line(tools.cc),
            _version_line(tools.cxx),
            *tools.cc,
            *tools.cxx,
            *tools.link,
            *tools.ar,
            *_COMPILE_FLAGS,
            *_CXX_FLAGS,
            repr(self.object_format),
            *self.compile_flags,
            *self.link_flags,
            *(self.libraries or ()),
            *self._contents(),
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def version(self) -> str:
        """Returns the first line that the C++ compiler prints for --version."""
        return _version_line(self.require().cxx)

    def _link(
        self,
        flags: Sequence[str],
        objects: Sequence[Path],
        output: Path,
        libraries: Sequence[str] | None,
    ) -> Path:
        form = self.object_format
        if libraries is None:
            libraries = form.libraries if self.libraries is None else self.libraries
        command = [*self.require().link, *form.link_flags, *self.link_flags, *flags]
        command += [*map(str, objects), *(f"-l{library}" for library in libraries)]
        if self.stubs:
            from edgesdk.stubs import stub_libraries

            command += map(str, stub_libraries(self))
        command += ["-o", _OUTPUT]
        self._build(command, output, f"link {output.name}")
        return output

    def _find(self) -> Compilers | None:
        root = _first_path(self.root, where=self.name)
        for candidate in self.compilers:
            found = Compilers(
                cc=_words(candidate.cc, root),
                cxx=_words(candidate.cxx, root),
                strip=_words(candidate.strip, root),
                link=_words(candidate.link or candidate.cxx, root),
                ar=_words(candidate.ar, root),
            )
            if all(shutil.which(c[0]) for c in (found.cc, found.cxx, found.strip) if c) and (
                self.python_module is None or importlib.util.find_spec(self.python_module)
            ):
                return found
        return None

    def _compile_flags(self) -> list[str]:
        spec = importlib.util.find_spec(self.python_module) if self.python_module else None
        module = str(Path(spec.origin).parent) if spec is not None and spec.origin else ""
        return [
            flag.replace("{module}", module).replace("{folder}", str(self.folder))
            for flag in self.compile_flags
        ]

    def _contents(self) -> list[str]:
        """What stands in the files that it brings along."""
        names = [*self.stubs, *([self.start] if self.start else [])]
        files = [self.folder / name for name in names]
        for flag in self.compile_flags:
            if flag.startswith("{folder}"):
                files += sorted((self.folder / flag.removeprefix("{folder}/")).glob("*.h"))
        return [file.read_text(encoding="utf-8") for file in files]

    def _build(self, command: list[str], output: Path, what: str) -> None:
        # To a folder beside it, then renamed: whoever finds `output` finds it whole. The name stays
        # the same, because linkers write it into libraries of Windows.
        with tempfile.TemporaryDirectory(prefix=".build.", dir=output.parent) as folder:
            partial = Path(folder) / output.name
            argv = [str(partial) if word == _OUTPUT else word for word in command]
            result = run_command(argv, timeout_s=_COMPILE_LIMIT_S, env={"LC_ALL": "C"})
            if not result.ok:
                raise _failure(result, what)
            partial.replace(output)


def load_toolchain(name: str) -> Toolchain:
    """Returns the toolchain `name` from `toolchains/` or that folder of the user's configuration.

    Where it is not installed, the one that its file names for that case. Raises ConfigError when
    there is none, or when its file is wrong.
    """
    files: dict[str, Path] = {}
    for folder in (data_folder("toolchains"), config_folder() / "toolchains"):
        files |= {path.stem: path for path in sorted(folder.glob("*.toml"))}
    if name not in files:
        raise ConfigError(
            f"unknown toolchain {name!r}",
            hint=suggestion(name, files, otherwise=f"known toolchains: {', '.join(files)}"),
        )
    path = files[name]
    toolchain = check_table(
        load_toml(path), Toolchain, where=str(path), given={"name": name, "path": path}
    )
    commands = [c for option in toolchain.compilers for c in (option.cc, option.cxx)]
    if not commands or not all(commands):
        raise ConfigError(
            f"{path}: a compiler command is empty",
            hint='write e.g. cxx = ["aarch64-linux-gnu-g++"]',
        )
    if toolchain.otherwise is not None and not toolchain.installed:
        return load_toolchain(toolchain.otherwise)
    return toolchain


def emulator_command(profile: TargetProfile, toolchain: Toolchain) -> tuple[str, ...]:
    """Returns what to put before a program of `profile` to run it here, emulated.

    Raises ConfigError when the profile has no emulator, ToolMissingError when the emulator or (for
    qemu) the target's C library is not installed.
    """
    if profile.emulator is None:
        raise ConfigError(
            f"the target {profile.name!r} has no [emulator]", hint="run it on a device instead"
        )
    if profile.emulator.kind == "wine":
        return _wine_command()
    program = find_qemu(profile.emulator.qemu)
    if program is None:
        raise ToolMissingError(
            f"qemu-{profile.emulator.qemu} is not installed", hint=apt_command("qemu-user-static")
        )
    command: tuple[str, ...] = (program, "-cpu", profile.emulator.cpu)
    if toolchain.sysroot is None:
        return command
    if not Path(toolchain.sysroot).is_dir():
        raise ToolMissingError(
            f"the C library of {profile.name} is not in {toolchain.sysroot}",
            hint=toolchain.install_command,
        )
    return (*command, "-L", toolchain.sysroot)


def find_qemu(name: str) -> str | None:
    """Returns the path of qemu's user mode emulator for `name` ("aarch64", "arm"), or None."""
    # Debian's qemu-user-static calls it qemu-aarch64-static, qemu-user and others qemu-aarch64.
    return shutil.which(f"qemu-{name}-static") or shutil.which(f"qemu-{name}")


def _wine_command() -> tuple[str, ...]:
    """Wine with a folder of settings of its own, which it fills at the first use."""
    # Debian's wine64 is outside the PATH; newer Wine has one program for all.
    program = shutil.which("wine64") or shutil.which(_DEBIAN_WINE) or shutil.which("wine")
    if program is None:
        raise ToolMissingError("wine is not installed", hint=apt_command("wine64"))
    settings = {
        "WINEPREFIX": str(cache_folder() / "wine"),
        "WINEARCH": "win64",
        "WINEDEBUG": "-all",
        # No offers to install .NET and a browser, and no windows.
        "WINEDLLOVERRIDES": "mscoree,mshtml=",
        "DISPLAY": "",
    }
    words = (f"{name}={value}" for name, value in settings.items())
    return ("env", *words, "sh", "-c", _START_WINE, program)


def apt_command(*packages: str) -> str:
    """Returns the command that installs Debian `packages`, for the present user."""
    return ("" if os.geteuid() == 0 else "sudo ") + f"apt-get install {shlex.join(packages)}"


@functools.lru_cache
def _version_line(command: tuple[str, ...]) -> str:
    result = run_command([*command, "--version"], timeout_s=_TOOL_LIMIT_S, env={"LC_ALL": "C"})
    if not result.ok:
        raise ToolMissingError(
            f"{shlex.join(command)} does not start: {result.last_line()}", hint="edgesdk doctor"
        )
    return result.stdout_text.partition("\n")[0].strip()


def _words(command: tuple[str, ...], root: str) -> tuple[str, ...]:
    return tuple(
        sys.executable if word == "{python}" else word.replace("{root}", root) for word in command
    )


def _first_path(patterns: Sequence[str], *, where: str) -> str:
    """The first of `patterns` that is there, of several the newest version; "" if none is.

    Raises ConfigError for a variable that names no folder: its owner meant it.
    """
    for pattern in patterns:
        name, _, below = pattern.removeprefix("$").partition("/")
        start = os.environ.get(name, "") if pattern.startswith("$") else str(Path.home())
        if not start:
            continue
        if not Path(start).is_dir() and pattern.startswith("$"):
            raise ConfigError(
                f"{name} is {start!r}, which is no folder (toolchain {where!r})",
                hint=f"correct the variable, or: unset {name}",
            )
        found = list(Path(start).glob(below)) if below else [Path(start)]
        if found:
            return str(max(found, key=_version_in_name))
    return ""


def _version_in_name(path: Path) -> list[int]:
    return [int(part) for part in path.name.split(".") if part.isdigit()]


def _failure(result: CommandResult, what: str) -> CompileError:
    lines = [line.strip() for line in result.stderr_text.splitlines()]
    telling = (
        line
        for line in lines
        if any(mark in line for mark in _LINKER_MARKS) and not line.startswith("collect2:")
    )
    reason = next(telling, None) or result.last_line()
    if "No space left" in reason:
        return CompileError(f"cannot {what}: no space left on the disk", hint="free some space")
    return CompileError(
        f"cannot {what}: {reason}", hint=f"see it all with: {shlex.join(result.argv)}"
    )
