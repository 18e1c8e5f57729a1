"""Writes a bundle's folder. Nothing appears under its final name before it is complete."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from edgesdk.bundle import Bundle, file_sha256
from edgesdk.bundle.faces import readme_parts, write_faces
from edgesdk.bundle.manifest import MANIFEST_NAME, FileInfo, Manifest, TensorInfo
from edgesdk.bundle.pe import link_files
from edgesdk.errors import CompileError, UsageError
from edgesdk.resources import data_folder

if TYPE_CHECKING:
    import numpy as np

CHECKSUMS_NAME = "SHA256SUMS"


@contextlib.contextmanager
def staged_folder(output: Path) -> Iterator[Path]:
    """Yields a fresh folder that takes the place of `output` if the block succeeds.

    An older bundle at `output` is replaced as a whole. Raises UsageError if something that is no
    bundle stands there, and CompileError if the disk is full or read-only.
    """
    given, output = output, output.absolute()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with _locked(output.parent):
            _check_replaceable(given)
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise CompileError(
            f"cannot write to {output.parent}: {error.strerror or error}",
            hint="choose another folder with -o",
        ) from error
    try:
        staging.chmod(0o755)
        yield staging
        with _locked(output.parent):
            _swap(staging, output)
    except OSError as error:
        raise CompileError(
            f"cannot write {_place(error, output)}: {error.strerror or error}",
            hint="free some space, or choose another folder with -o",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_bundle(
    folder: Path,
    manifest: Manifest,
    *,
    library: Path,
    launcher: Path | None,
    header: str,
    golden: Sequence[tuple[Sequence[np.ndarray], Sequence[np.ndarray]]],
) -> Bundle:
    """Fills `folder` and completes `manifest` with the hashes. Returns the bundle in `folder`.

    `golden` has inputs and outputs for each variant, in the manifest's order.
    """
    import dataclasses

    import numpy as np

    for name in ("lib", "include", "golden", f"lib/cmake/{manifest.name}"):
        (folder / name).mkdir(parents=True)
    shutil.move(library, folder / manifest.library)
    if manifest.contract.os == "windows":
        for name, data in link_files(folder / manifest.library).items():
            (folder / manifest.library).with_name(name).write_bytes(data)
    if launcher is not None:
        (folder / "bin").mkdir()
        shutil.copyfile(launcher, folder / manifest.launcher)
        (folder / manifest.launcher).chmod(0o755)
    public = data_folder("device_scripts") / "include" / "edgesdk_model.h"
    shutil.copyfile(public, folder / "include" / public.name)
    (folder / "include" / f"{manifest.name}.h").write_text(header, encoding="utf-8")
    write_faces(folder, manifest)
    for variant, (inputs, outputs) in zip(manifest.variants, golden, strict=True):
        (folder / variant.golden).mkdir(exist_ok=True)
        for names, arrays in (
            (variant.golden_inputs, inputs),
            (variant.golden_outputs, outputs),
        ):
            for name, array in zip(names, arrays, strict=True):
                # Not ascontiguousarray: it turns a scalar into one dimension.
                np.save(folder / name, np.asarray(array, order="C"))
    # CMake looks for NAMEConfig.cmake as it is written, but for name-config.cmake in lower case.
    cmake = folder / "lib/cmake" / manifest.name / f"{manifest.name}Config.cmake"
    cmake.write_text(_cmake_config(manifest), encoding="utf-8")
    (folder / "README.md").write_text(_readme(manifest), encoding="utf-8")
    files = {
        path.relative_to(folder).as_posix(): FileInfo(file_sha256(path), path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = dataclasses.replace(manifest, files=files)
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    sums = {name: info.sha256 for name, info in files.items()}
    sums[MANIFEST_NAME] = file_sha256(folder / MANIFEST_NAME)
    (folder / CHECKSUMS_NAME).write_text(
        "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())), encoding="utf-8"
    )
    return Bundle(folder, manifest)


def _check_replaceable(output: Path) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST_NAME).is_file():
        raise UsageError(
            f"{output} exists and is not a bundle",
            hint="choose another folder with -o, or remove it",
        )


def _place(error: OSError, output: Path) -> str:
    """What could not be written: the bundle, or (a cache, say) a file somewhere else."""
    inside = not isinstance(error.filename, str) or Path(error.filename).is_relative_to(
        output.parent
    )
    return f"the bundle {output}" if inside else str(error.filename)


def _swap(staging: Path, output: Path) -> None:
    """Puts `staging` at `output`; what was there goes only after the new one stands."""
    _check_replaceable(output)  # it is long since the first look
    if not output.exists():
        staging.rename(output)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{output.name}.old.", dir=output.parent))
    try:
        output.rename(old / "bundle")
        try:
            staging.rename(output)
        except OSError:
            (old / "bundle").rename(output)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other compilations from swapping bundles in `folder` during the block."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems lock no folders. Without the lock the slower of two compilations
        # that end in the same instant fails, but no bundle is ever mixed.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


_CMAKE = Template("""\
# find_package($name CONFIG) with CMAKE_PREFIX_PATH set to this bundle gives the target
# $name::$name.
get_filename_component(_edgesdk_bundle "$${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET $name::$name)
  add_library($name::$name $kind IMPORTED)
  set_target_properties($name::$name PROPERTIES
    IMPORTED_LOCATION "$${_edgesdk_bundle}/$library"
    $link_by
    INTERFACE_INCLUDE_DIRECTORIES "$${_edgesdk_bundle}/include")
endif()
set(${name}_GOLDEN_DIR "$${_edgesdk_bundle}/golden")
unset(_edgesdk_bundle)
""")


def _cmake_config(manifest: Manifest) -> str:
    file = Path(manifest.library)
    # The name that a program linked with it will ask for.
    soname = f"@rpath/{file.name}" if manifest.contract.os == "macos" else file.name
    link_by = f'IMPORTED_SONAME "{soname}"'
    if manifest.contract.os == "windows":
        link_by = f'IMPORTED_IMPLIB "${{_edgesdk_bundle}}/{file.with_suffix(".lib").as_posix()}"'
    kind = "SHARED"
    if file.suffix == ".a":
        kind, link_by = "STATIC", 'IMPORTED_LINK_INTERFACE_LANGUAGES "C"'
    return _CMAKE.substitute(
        name=manifest.name, library=manifest.library, kind=kind, link_by=link_by
    )


_TRY_IT = Template("""\
## Try it

Copy the folder to the device, then there:

    $run --selftest golden
    $run --selftest golden --warmup 5 --repeat 50

The first compares the device's results with the reference's, the second measures the latency.
`--help` shows how to run it on your own .npy files.
""")

_LINK_IT = """\
## Link it

The library is an archive of objects, for Xcode to link into your app. `golden/` has inputs and the
results that they should give.
"""

_README = Template("""\
# $name for $target

$description

This folder is complete: the network, its weights and its runtime are in one library that needs
nothing but the C library.

$try_it
## Use it in your program

With CMake:

    find_package($name CONFIG REQUIRED)              # -DCMAKE_PREFIX_PATH=<this folder>
    target_link_libraries(app PRIVATE $name::$name)

C++17; `include/edgesdk_model.hpp` documents the class, `include/$name.hpp` has this network's:

```cpp
#include <$name.hpp>

edgesdk_$name::Model model;
if (!model) return fail(model.error());
$cpp_lines
```

C; `include/edgesdk_model.h` documents the interface, `include/$name.h` declares this network:

```c
#include <$name.h>

edgesdk_model* model = NULL;
if (edgesdk_open_$name(EDGESDK_ABI_VERSION, NULL, &model) != EDGESDK_OK) return 1;
edgesdk_model_set_input(model, 0, data, size_bytes);
edgesdk_model_run(model);
const void* result = NULL;
edgesdk_model_get_output(model, 0, &result, NULL);
edgesdk_model_close(model);
```
$loading
## What it takes and gives

$ports

## What the device must have

$contract

`EDGESDK_NUM_THREADS` sets the number of threads; by default it uses every CPU that the process may.
`sha256sum -c SHA256SUMS` checks that nothing was damaged on the way.
""")


def _readme(manifest: Manifest) -> str:
    lines = []
    for kind, tensors in (("input", manifest.inputs), ("output", manifest.outputs)):
        lines += [f"- {kind} {i}: {_describe(t)}" for i, t in enumerate(tensors)]
    lines += _other_shapes(manifest)
    contract = manifest.contract
    needs = [f"- {contract.os}, processor {' or '.join(contract.machine)}"]
    if contract.libc:
        needs.append(f"- {contract.libc} {contract.libc_version or ''} or newer".replace("  ", " "))
    if contract.cpu_features:
        needs.append(f"- CPU features: {', '.join(contract.cpu_features)}")
    return _README.substitute(
        name=manifest.name,
        target=manifest.target,
        description=manifest.description,
        try_it=_TRY_IT.substitute(run=_command(manifest)) if manifest.launcher else _LINK_IT,
        ports="\n".join(lines),
        contract="\n".join(needs),
        **readme_parts(manifest),
    )


def _other_shapes(manifest: Manifest) -> list[str]:
    if not manifest.other_variants:
        return []
    return [
        "",
        "These are the shapes of variant 0. The library serves others, which programs select with",
        "`edgesdk_model_select_variant`; the launcher takes the one that its files have:",
        "",
        *(
            f"- variant {number}: {variant.text}, golden files in `{variant.golden}/`"
            for number, variant in enumerate(manifest.variants)
            if number > 0
        ),
    ]


def _command(manifest: Manifest) -> str:
    """How the launcher is started from the bundle's folder."""
    command = f"./{manifest.launcher} {manifest.library}"
    return command.replace("/", "\\") if manifest.contract.os == "windows" else command


def _describe(tensor: TensorInfo) -> str:
    shape = " x ".join(str(d) for d in tensor.shape) or "scalar"
    return f"`{tensor.name}`, {tensor.dtype}, {shape}"
