"""edgert and the generated code into one shared library, and the programs beside it.

edgert's objects, the launcher and the measuring agent do not depend on the model: they are built
once per toolchain and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgesdk.resources import cache_folder, data_folder
from edgesdk.toolchain import Toolchain

_CXX_FLAGS = (
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-Wextra",
    "-Werror",
    "-Wno-missing-field-initializers",
)
_DEFINES = {"EDGESDK_BUILDING_LIBRARY": ""}
# What candidates need of edgert, the agent has; the rest of edgert runs whole models.
_AGENT_LAUNCHER = ("npy", "system_posix")
_AGENT_EDGERT = ("executor", "platform", "thread_pool", "tvm_symbols")


def include_folders() -> tuple[Path, ...]:
    """Folders with edgert's headers, the public header, and the two foreign ones."""
    scripts = data_folder("device_scripts")
    return (scripts / "include", scripts / "edgert", *_tvm_ffi_includes())


def link_library(
    *,
    objects: Sequence[Path],
    model_source: Path,
    toolchain: Toolchain,
    output: Path,
    exported: Sequence[str],
    build: Path,
) -> None:
    """Compiles `model_source` and links it with `objects` and edgert into the library `output`.

    `exported` names the model's own opening function; `build` is a folder for intermediate files.
    """
    model_object = build / "model.o"
    toolchain.compile_object(
        model_source, model_object, include=include_folders(), defines=_DEFINES, flags=_CXX_FLAGS
    )
    toolchain.link_shared(
        [model_object, *objects, *edgert_objects(toolchain)],
        output,
        soname=output.name,
        exported=("edgesdk_get_api", "edgesdk_model_*", *exported),
        # The pool's threads run this library's code until the process ends.
        flags=toolchain.object_format.resident_flags,
    )


def edgert_objects(toolchain: Toolchain) -> list[Path]:
    """Returns edgert's object files for `toolchain`, from the cache or freshly built."""
    folder = data_folder("device_scripts") / "edgert"
    return [_cached_object(source, toolchain) for source in sorted(folder.glob("*.cc"))]


def launcher(toolchain: Toolchain) -> Path | None:
    """Returns the launcher executable for `toolchain`, from the cache or freshly built.

    None where this machine cannot link programs for the target.
    """
    if toolchain.object_format.program is None:
        return None
    folder = data_folder("device_scripts") / "launcher"
    flags = toolchain.object_format.launcher_flags
    return _cached_program("edgesdk-run", sorted(folder.glob("*.cc")), toolchain, flags=flags)


def agent(toolchain: Toolchain) -> Path:
    """Returns the measuring agent's executable for `toolchain`, from the cache or freshly built."""
    scripts = data_folder("device_scripts")
    sources = [
        *sorted((scripts / "agent").glob("*.cc")),
        *(scripts / "launcher" / f"{name}.cc" for name in _AGENT_LAUNCHER),
        *(scripts / "edgert" / f"{name}.cc" for name in _AGENT_EDGERT),
    ]
    # Candidates call functions of the program that loads them.
    return _cached_program("edgesdk-agent", sources, toolchain, flags=("-rdynamic",))


def _cached_program(
    name: str, sources: Sequence[Path], toolchain: Toolchain, *, flags: Sequence[str] = ()
) -> Path:
    objects = [_cached_object(source, toolchain) for source in sources]
    path = objects[0].parent / (toolchain.object_format.program or "{}").format(name)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
            fresh = Path(temporary) / path.name
            toolchain.link_executable(objects, fresh, flags=flags)
            toolchain.strip(fresh)
            fresh.replace(path)
    return path


def _cached_object(source: Path, toolchain: Toolchain) -> Path:
    folder = cache_folder() / "objects" / _cache_key(toolchain)
    path = folder / f"{source.parent.name}-{source.stem}.o"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Two compilations at once may both build it; each replaces it as a whole.
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            fresh = Path(temporary) / path.name
            toolchain.compile_object(
                source, fresh, include=include_folders(), defines=_DEFINES, flags=_CXX_FLAGS
            )
            fresh.replace(path)
    return path


def _cache_key(toolchain: Toolchain) -> str:
    digest = hashlib.sha256(toolchain.fingerprint().encode())
    digest.update(" ".join(_CXX_FLAGS).encode())
    scripts = data_folder("device_scripts")
    for path in sorted(scripts.rglob("*")):
        if path.suffix in (".h", ".cc"):
            digest.update(path.relative_to(scripts).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _tvm_ffi_includes() -> tuple[Path, ...]:
    import importlib.util

    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package apache-tvm-ffi is not installed")
    return (Path(spec.origin).parent / "include",)
