"""What differs between the formats of programs and libraries: ELF, PE (Windows), Mach-O (Apple).

Names of files, and the flags that compilers and linkers take for a format whoever made them. What
differs between compilers stands in `toolchains/*.toml`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExportList:
    """The file that tells the linker which symbols a library shows: `flag` + its path gives it.

    `line` has each symbol in the place of "{}"; patterns may end with "*".
    """

    flag: str
    head: str
    line: str
    tail: str

    def text(self, symbols: Sequence[str]) -> str:
        return self.head + "".join(self.line.format(symbol) for symbol in symbols) + self.tail


@dataclass(frozen=True)
class ObjectFormat:
    """A format. In `library`, `program` and `shared_flags`, "{}" stands for the file's name.

    `program` is None, and a library an archive of objects, where only the maker of the system has
    what is needed for linking. `exports` is None where the objects themselves say what is exported.
    `resident_flags` keep a library in memory for good and bind it to its own symbols.
    `launcher_flags` are for programs that start in wmain.
    """

    library: str
    program: str | None
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()
    shared_flags: tuple[str, ...] = ()
    exports: ExportList | None = None
    resident_flags: tuple[str, ...] = ()
    program_flags: tuple[str, ...] = ()
    launcher_flags: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


FORMATS = {
    "elf": ObjectFormat(
        library="lib{}.so",
        program="{}",
        compile_flags=("-fPIC", "-fvisibility=hidden"),
        link_flags=(
            "-Wl,--gc-sections",
            "-Wl,--as-needed",
            "-Wl,-z,noexecstack",
            "-Wl,-z,relro",
            "-Wl,-z,now",
            "-Wl,-z,defs",
        ),
        shared_flags=("-shared", "-Wl,-soname,{}"),
        exports=ExportList(
            flag="-Wl,--version-script=",
            head="{\n  global:\n",
            line="    {};\n",
            tail="  local:\n    *;\n};\n",
        ),
        resident_flags=("-Wl,-z,nodelete", "-Wl,-Bsymbolic"),
        program_flags=("-pie",),
        libraries=("m", "dl", "pthread"),
    ),
    # What is not marked dllexport stays inside; edgert keeps itself in memory (KeepLoaded).
    "pe": ObjectFormat(
        library="{}.dll",
        program="{}.exe",
        compile_flags=(),
        link_flags=(
            "-Wl,--gc-sections",
            "-Wl,--dynamicbase",
            "-Wl,--high-entropy-va",
            "-Wl,--nxcompat",
        ),
        shared_flags=("-shared",),
        launcher_flags=("-municode",),
    ),
    # Position independence and a stack that is not executable need no flag there.
    "macho": ObjectFormat(
        library="lib{}.dylib",
        program="{}",
        compile_flags=("-fPIC", "-fvisibility=hidden"),
        link_flags=("-Wl,-dead_strip",),
        shared_flags=("-shared", "-Wl,-install_name,@rpath/{}"),
    ),
    "macho-archive": ObjectFormat(
        library="lib{}.a",
        program=None,
        compile_flags=("-fPIC", "-fvisibility=hidden"),
    ),
}
