"""Runs a bundle over a folder of inputs: the device is reached and the bundle pushed once.

Each `.npz` file (arrays by the inputs' names) or `.npy` file (for networks with one input) is one
run. A file that cannot be run is told and passed by; the others go on.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from edgesdk.bundle.manifest import Manifest
from edgesdk.console import finite
from edgesdk.deploy.run import PlacedBundle, load_array, run_in_folder
from edgesdk.errors import DeviceError, EdgeSdkError, UsageError

if TYPE_CHECKING:
    import numpy as np

JSON_LINES = ".jsonl"
_KINDS = (".npy", ".npz")


@dataclass(frozen=True)
class BatchFailure:
    """An input file that gave no results, and why."""

    file: str
    message: str
    exit_code: int


@dataclass(frozen=True)
class BatchReport:
    """What a folder of inputs came to.

    `output` is the folder or file with the results of the `done` files; `latencies_ms` has one
    entry for each of them.
    """

    bundle: str
    device: str
    output: Path
    done: int
    failed: tuple[BatchFailure, ...]
    latencies_ms: tuple[float, ...] = field(repr=False)


def run_batch(
    placed: PlacedBundle,
    files: Sequence[Path],
    output: Path,
    *,
    threads: int | None = None,
    progress: Callable[[int, str], None] = lambda done, name: None,
    failed: Callable[[BatchFailure], None] = lambda failure: None,
) -> BatchReport:
    """Runs the network on each of `files` and writes the results to `output`.

    `output` is a folder, which gets NAME.npz for NAME.npy or NAME.npz, outputs by the model's own
    names; or a file ending in .jsonl, which gets a line for each input: `{"input": "NAME.npy",
    "outputs": {name: values}}`, or `"error"` instead of the outputs. `progress` hears the number of
    files done and the next one, `failed` each failure at once.

    Raises UsageError when `output` cannot be written, DeviceUnreachableError when the device is
    lost: what was done until then is written.
    """
    manifest = placed.bundle.manifest
    failures: list[BatchFailure] = []
    latencies: list[float] = []
    with ExitStack() as cleanup:
        lines = cleanup.enter_context(_opened(output)) if output.suffix == JSON_LINES else None
        there = cleanup.enter_context(placed.run_folder())
        here = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="edgesdk-")))
        for index, file in enumerate(files):
            progress(index, file.name)
            line: dict[str, Any] = {"input": file.name}
            try:
                inputs = read_inputs(file, manifest)
                result = run_in_folder(placed, inputs, here, there, threads=threads)
            except (UsageError, DeviceError) as error:
                failures.append(BatchFailure(file.name, error.message, error.exit_code))
                failed(failures[-1])
                line["error"] = error.message
            else:
                latencies.append(float(result.report["latency_ms"][0]))
                line["outputs"] = result.outputs
                if lines is None:
                    _save(output / f"{file.stem}.npz", result.outputs)
            if lines is not None:
                _write_line(lines, line, output)
        progress(len(files), "")
    return BatchReport(
        bundle=manifest.name,
        device=placed.transport.name,
        output=output,
        done=len(latencies),
        failed=tuple(failures),
        latencies_ms=tuple(latencies),
    )


def input_files(folder: Path) -> list[Path]:
    """Returns the .npy and .npz files of `folder` by name; other files are none of ours.

    Raises UsageError when there are none, or when two of them would have the same result.
    """
    try:
        files = sorted(f for f in folder.iterdir() if f.suffix in _KINDS and f.is_file())
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be read: {error.strerror}", hint="give a folder of .npy or .npz files"
        ) from error
    if not files:
        raise UsageError(f"{folder} has no .npy or .npz files", hint="write some with numpy.save")
    stems = [file.stem for file in files]
    for stem in stems:
        if stems.count(stem) > 1:
            raise UsageError(
                f"{folder} has {stem}.npy and {stem}.npz, whose results would have one name",
                hint="rename one of them",
            )
    return files


def prepare_output(output: Path) -> None:
    """Makes the folder for the results, before anything else is done. Raises UsageError."""
    folder = output.parent if output.suffix == JSON_LINES else output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error


def failure_error(report: BatchReport, total: int) -> EdgeSdkError | None:
    """Returns the error that a batch ends with, of the kind of its first failure, or None."""
    if not report.failed:
        return None
    first = report.failed[0]
    kind = DeviceError if first.exit_code == DeviceError.exit_code else UsageError
    return kind(
        f"{len(report.failed)} of {total} inputs failed, first {first.file}: {first.message}",
        hint=f"the results of the others are in {report.output}",
    )


def read_inputs(file: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """Returns the arrays in `file` by the inputs' names. Raises UsageError when it is no such file.

    Shapes and types are not looked at: see `check_inputs`.
    """
    import numpy as np

    names = [tensor.name for tensor in manifest.inputs]
    if file.suffix == ".npy":
        if len(names) != 1:
            raise UsageError(
                f"{manifest.name} has {len(names)} inputs, and a .npy file holds one",
                hint=f"write a .npz file with {', '.join(names)}",
            )
        return {names[0]: load_array(file)}
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise UsageError(
            f"{file} is not a .npz file of numbers", hint="write one with numpy.savez"
        ) from error


def _opened(output: Path) -> TextIO:
    try:
        return output.open("w", encoding="utf-8")
    except OSError as error:
        raise _cannot_write(output, error) from error


def _save(path: Path, outputs: dict[str, np.ndarray]) -> None:
    """Writes under another name first: whoever finds a result finds it whole."""
    import numpy as np

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        # Not savez: names of tensors may be those of its own arguments.
        with zipfile.ZipFile(partial, "w") as archive:
            for name, array in outputs.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        partial.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        partial.unlink(missing_ok=True)


def _write_line(lines: TextIO, line: dict[str, Any], output: Path) -> None:
    if "outputs" in line:
        line["outputs"] = {name: array.tolist() for name, array in line["outputs"].items()}
    try:
        lines.write(json.dumps(finite(line), ensure_ascii=False, allow_nan=False) + "\n")
        lines.flush()
    except OSError as error:
        raise _cannot_write(output, error) from error


def _cannot_write(path: Path, error: OSError) -> EdgeSdkError:
    return UsageError(f"cannot write {path}: {error.strerror}", hint="give another --output")
