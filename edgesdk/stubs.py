"""What a toolchain brings along for a system whose libraries are not on this machine.

A linker needs of a shared library its name and its symbols' names. So where only the device has the
library, a list of symbols makes one that does nothing and is linked against in its place. The list
is all that a linked file can use: what is not in it is a linker's error here, instead of a loader's
there.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from edgesdk.resources import cache_folder
from edgesdk.toolchain import Toolchain

# The compiler knows many of the names, with other types; nothing is called.
_FLAGS = ("-w", "-ffreestanding", "-fno-builtin", "-fvisibility=default")


def stub_libraries(toolchain: Toolchain) -> list[Path]:
    """Returns the libraries for `toolchain.stubs`, from the cache or freshly made.

    Raises ToolMissingError or CompileError.
    """
    bare = replace(toolchain, stubs=(), start=None)
    folder = _folder(toolchain)
    libraries = []
    for name in toolchain.stubs:
        library = folder / Path(name).stem
        libraries.append(library)
        if library.exists():
            continue
        with tempfile.TemporaryDirectory(dir=folder) as build:
            source = Path(build) / "stub.c"
            source.write_text(_source(symbols_of(toolchain.folder / name)), encoding="utf-8")
            stub = bare.compile_object(source, Path(build) / "stub.o", flags=_FLAGS)
            fresh = Path(build) / library.name
            bare.link_shared([stub], fresh, soname=library.name, libraries=())
            fresh.replace(library)
    return libraries


def start_object(toolchain: Toolchain) -> Path:
    """Returns the object of `toolchain.start`, from the cache or freshly compiled.

    Raises ToolMissingError or CompileError.
    """
    path = _folder(toolchain) / "start.o"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as build:
            fresh = toolchain.compile_object(
                toolchain.folder / str(toolchain.start), Path(build) / path.name
            )
            fresh.replace(path)
    return path


def symbols_of(path: Path) -> dict[str, str]:
    """Reads a list of symbols: a name in each line, behind it "variable" if it is one, and "#"."""
    lines = (line.partition("#")[0].split() for line in path.read_text("utf-8").splitlines())
    return {words[0]: "".join(words[1:]) for words in lines if words}


def _source(names: dict[str, str]) -> str:
    texts = (
        "void *{};\n" if kind == "variable" else "void {}(void) {{}}\n" for kind in names.values()
    )
    return "".join(text.format(name) for text, name in zip(texts, names, strict=True))


def _folder(toolchain: Toolchain) -> Path:
    folder = cache_folder() / "stubs" / toolchain.fingerprint()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
