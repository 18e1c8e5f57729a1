"""Runs a bundle on a device through its launcher: what run, verify and bench stand on.

`placed_bundle` brings a bundle to where it runs, `PlacedBundle.launch` starts its launcher there,
and `run_placed` gives it arrays and fetches the results.
"""

from __future__ import annotations

import json
import posixpath
import secrets
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgesdk.bundle import Bundle, check_files
from edgesdk.bundle.manifest import Manifest, TensorInfo
from edgesdk.deploy.facts import check_device, read_facts
from edgesdk.deploy.push import push_bundle
from edgesdk.deploy.transport import open_transport
from edgesdk.devices import get_device
from edgesdk.errors import BundleError, DeviceError, DeviceUnreachableError, UsageError
from edgesdk.proc import CommandResult
from edgesdk.rows import Piece, run_in_pieces
from edgesdk.settings import suggestion

if TYPE_CHECKING:
    import numpy as np

    from edgesdk.deploy.transport.base import Transport
    from edgesdk.frontend import ImportedModel

# The slowest thing that is sane: a large network, many times, on an emulated board.
LAUNCH_LIMIT_S = 3600.0
_SMALL_LIMIT_S = 60.0

# The launcher's exit codes (device_scripts/launcher/main.cc), and a shell's.
_USAGE, _DIFFERS = 2, 8
_CANNOT_START = (126, 127)

_ELSEWHERE = "edgesdk verify BUNDLE --device D, to see whether another device does so too"

# What ended the launcher -> the reason, and what to do. {name} is the device.
_SIGNALS = {
    signal.SIGKILL: ("was killed: out of memory?", "edgesdk devices check {name}"),
    signal.SIGILL: (
        "hit an illegal instruction: the CPU lacks something that the target promises",
        "edgesdk devices check {name}, then compile for a target that fits",
    ),
    signal.SIGSEGV: ("crashed (segmentation fault)", _ELSEWHERE),
    signal.SIGBUS: (
        "crashed (bus error): a file that shrank, or memory that cannot be read",
        "edgesdk push BUNDLE --device {name}",
    ),
    signal.SIGABRT: ("aborted", _ELSEWHERE),
}


@dataclass(frozen=True)
class Launch:
    """What the launcher said: its JSON report, and whether a self-test differed."""

    report: Mapping[str, Any]
    differs: bool


@dataclass(frozen=True)
class RunResult:
    """`outputs` by the model's own names, in its order; `report` is the launcher's."""

    outputs: dict[str, np.ndarray]
    report: Mapping[str, Any]


class PlacedBundle:
    """A bundle in `folder` on a device, and the open connection to it."""

    def __init__(
        self, bundle: Bundle, transport: Transport, folder: str, *, on_this_machine: bool
    ) -> None:
        self.bundle = bundle
        self.transport = transport
        self.folder = folder
        self.on_this_machine = on_this_machine

    def path(self, name: str) -> str:
        """Returns the absolute path on the device of the bundle's file or folder `name`."""
        return posixpath.join(self.folder, name)

    def launch(self, options: Sequence[str]) -> Launch:
        """Starts the launcher with `options`.

        Raises DeviceError when it fails or crashes, DeviceUnreachableError when the connection
        goes. A self-test that differs is no error here: see `Launch.differs`.
        """
        manifest = self.bundle.manifest
        argv = [self.path(manifest.launcher), self.path(manifest.library), *options, "--json"]
        result = self.transport.run(argv, timeout_s=LAUNCH_LIMIT_S)
        if result.returncode not in (0, _DIFFERS):
            raise _launch_error(self.transport.name, result)
        try:
            report = json.loads(result.stdout)
        except ValueError as error:
            raise DeviceError(
                f"{self.transport.name}: the launcher's report cannot be read: {error}",
                hint=f"edgesdk push BUNDLE --device {self.transport.name}",
            ) from error
        return Launch(report, differs=result.returncode == _DIFFERS)

    @contextmanager
    def run_folder(self) -> Iterator[str]:
        """Makes a fresh folder on the device; it is removed at the end, whatever happens."""
        folder = posixpath.join(self.transport.work_dir, "runs", secrets.token_hex(8))
        made = self.transport.run(["mkdir", "-p", folder], timeout_s=_SMALL_LIMIT_S)
        if not made.ok:
            raise DeviceError(
                f"{self.transport.name}: cannot make {folder}: {made.last_line()}",
                hint="set another work-dir for the device in devices.toml",
            )
        try:
            yield folder
        finally:
            # When the connection is lost, that is what the user must hear of.
            with suppress(DeviceError, DeviceUnreachableError):
                self.transport.run(["rm", "-rf", folder], timeout_s=_SMALL_LIMIT_S)


@contextmanager
def placed_bundle(bundle: Bundle, device_name: str) -> Iterator[PlacedBundle]:
    """Connects to the device, checks that the bundle suits it, and brings it there if needed.

    On this machine the bundle runs where it is. Raises UsageError for an unknown device,
    DeviceUnreachableError, DeviceMismatchError before anything is copied, DeviceError.
    """
    device = get_device(device_name)
    here = device.transport == "local"
    with open_transport(device) as transport:
        if here:
            check_files(bundle)
            check_device(bundle.manifest.contract, read_facts(transport), name=device.name)
            folder = str(bundle.path.absolute())
        else:
            folder = push_bundle(bundle.path, transport).folder
        yield PlacedBundle(bundle, transport, folder, on_this_machine=here)


def run_placed(
    placed: PlacedBundle, inputs: Mapping[str, Any], *, threads: int | None = None
) -> RunResult:
    """Runs the network once on `inputs`, arrays by the model's own names.

    Raises UsageError when they are not what `check_inputs` wants, else as `PlacedBundle.launch`.
    """
    check_inputs(placed.bundle.manifest, inputs)  # before anything is made on the device
    with tempfile.TemporaryDirectory(prefix="edgesdk-") as temporary, placed.run_folder() as there:
        return run_in_folder(placed, inputs, Path(temporary), there, threads=threads)


def run_in_folder(
    placed: PlacedBundle,
    inputs: Mapping[str, Any],
    here: Path,
    there: str,
    *,
    threads: int | None = None,
) -> RunResult:
    """As `run_placed`, with the files in the folders `here`, on this machine, and `there`.

    Files of a run before are written over.
    """
    manifest = placed.bundle.manifest
    arrays = check_inputs(manifest, inputs)
    if manifest.batch is None or fitting_variant(manifest, arrays) is not None:
        return _run_once(placed, arrays, here, there, threads)
    reports: list[Mapping[str, Any]] = []

    def run(piece: Piece, some: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        result = _run_once(placed, some, here, there, threads)
        reports.append(result.report)
        return result.outputs

    outputs = run_in_pieces(arrays, manifest.batch.inputs, manifest.batch.sizes, run)
    latency_ms = sum(float(report["latency_ms"][0]) for report in reports)
    return RunResult(outputs, {**reports[0], "latency_ms": [latency_ms], "runs": len(reports)})


def _run_once(
    placed: PlacedBundle,
    arrays: Mapping[str, np.ndarray],
    here: Path,
    there: str,
    threads: int | None,
) -> RunResult:
    """One run of the launcher, which picks the variant by the shapes of its files."""
    import numpy as np

    manifest = placed.bundle.manifest
    options = ["--output", there]
    for index, tensor in enumerate(manifest.inputs):
        name = f"input_{index}.npy"
        np.save(here / name, arrays[tensor.name])
        placed.transport.upload(here / name, posixpath.join(there, name))
        options += ["--input", f"{index}={posixpath.join(there, name)}"]
    if threads is not None:
        options += ["--threads", str(threads)]
    report = placed.launch(options).report
    outputs = {}
    for index, tensor in enumerate(manifest.outputs):
        name = f"output_{index}.npy"
        placed.transport.download(posixpath.join(there, name), here / name)
        outputs[tensor.name] = np.load(here / name)
    return RunResult(outputs, report)


def check_inputs(manifest: Manifest, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns `inputs` as arrays by name, in the model's order.

    Raises UsageError when one is missing or unknown, or has another dtype than expected, or when
    they are of shapes that the bundle does not serve: nothing is converted silently.
    """
    variants = [variant.inputs for variant in manifest.variants]
    batch = manifest.batch.inputs if manifest.batch is not None else ()
    return _checked(manifest.name, variants, inputs, batch)


def check_model_inputs(
    models: Sequence[ImportedModel], inputs: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The same for a model that was imported with one or several sets of shapes."""
    variants = [
        tuple(TensorInfo(t.name, t.shape, t.dtype) for t in model.inputs) for model in models
    ]
    return _checked(models[0].name, variants, inputs, ())


def fitting_variant(manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> int | None:
    """Returns the number of the variant whose shapes `arrays` have; None if there is none."""
    for number, variant in enumerate(manifest.variants):
        if all(arrays[t.name].shape == t.shape for t in variant.inputs):
            return number
    return None


def _checked(
    model: str,
    variants: Sequence[Sequence[TensorInfo]],
    inputs: Mapping[str, Any],
    batch: Sequence[str],
) -> dict[str, np.ndarray]:
    import numpy as np

    tensors = variants[0]
    names = [tensor.name for tensor in tensors]
    for given in inputs:
        if given not in names:
            raise UsageError(
                f"{model} has no input {given!r}",
                hint=suggestion(given, names, otherwise=f"its inputs: {', '.join(names)}"),
            )
    arrays = {}
    for tensor in tensors:
        expected = f"{tensor.dtype} {shape_text(tensor.shape)}"
        if tensor.name not in inputs:
            raise UsageError(
                f"the input {tensor.name!r} is missing", hint=f"give {tensor.name!r} as {expected}"
            )
        array = np.asarray(inputs[tensor.name])
        fits = len(variants) > 1 or bool(batch) or array.shape == tensor.shape
        if not fits or array.dtype.name != tensor.dtype:
            raise UsageError(
                f"the input {tensor.name!r} is {array.dtype.name} {shape_text(array.shape)},"
                f" not {expected}",
                hint=f"convert it with .astype({tensor.dtype!r})"
                if fits
                else f"give an array of the shape {list(tensor.shape)}",
            )
        # The launcher reads the device's byte order only, which is little-endian everywhere.
        arrays[tensor.name] = np.asarray(
            array, dtype=np.dtype(tensor.dtype).newbyteorder("<"), order="C"
        )
    _check_shapes(variants, arrays, batch)
    return arrays


def _check_shapes(
    variants: Sequence[Sequence[TensorInfo]],
    arrays: Mapping[str, np.ndarray],
    batch: Sequence[str],
) -> None:
    """Raises UsageError when `arrays` have the shapes of no variant and are no batch of rows."""
    given = {name: array.shape for name, array in arrays.items()}
    if any(all(given[t.name] == t.shape for t in tensors) for tensors in variants):
        return
    rows = {given[name][:1] for name in batch}
    counted = len(rows) == 1 and rows.isdisjoint({(), (0,)})
    # Of a batch all but the number of rows must be right.
    if counted and all(
        given[t.name][1:] == t.shape[1:] if t.name in batch else given[t.name] == t.shape
        for t in variants[0]
    ):
        return
    known = ", ".join(
        " ".join(f"{t.name}={shape_text(t.shape)}" for t in tensors) for tensors in variants
    )
    raise UsageError(
        "no shape that was compiled fits"
        f" {' '.join(f'{name}={shape_text(shape)}' for name, shape in given.items())}",
        hint=f"compiled are {known}{', and other numbers of rows' if batch else ''}",
    )


def load_array(file: Path | str) -> np.ndarray:
    """Returns the array in a .npy file. Raises UsageError when there is none, or no such file."""
    import numpy as np

    try:
        array = np.load(file, allow_pickle=False)
    except FileNotFoundError:
        raise UsageError(f"there is no file {file}", hint="give a .npy file") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError):
        array = None
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{file} is not a .npy file of numbers", hint="write one with numpy.save")
    return array


def golden_inputs(bundle: Bundle, variant: int = 0) -> dict[str, np.ndarray]:
    """Returns the inputs that the bundle carries for a variant, by the model's own names.

    Raises BundleError when one cannot be read.
    """
    import numpy as np

    arrays = {}
    chosen = bundle.manifest.variants[variant]
    for tensor, file in zip(chosen.inputs, chosen.golden_inputs, strict=True):
        try:
            arrays[tensor.name] = np.load(bundle.path / file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise BundleError(
                f"{bundle.path / file} cannot be read: {error}", hint="compile it again"
            ) from error
    return arrays


def shape_text(shape: Sequence[int]) -> str:
    """Returns a shape as people type it: "1x3x224x224", or "scalar"."""
    return "x".join(map(str, shape)) or "scalar"


def _launch_error(device: str, result: CommandResult) -> Exception:
    code, said = result.returncode, result.last_line().removeprefix("edgesdk-run: ")
    if code < 0:
        try:
            number = signal.Signals(-code)
        except ValueError:
            return DeviceError(f"{device}: the network was ended by signal {-code}")
        why, hint = _SIGNALS.get(number, (f"was ended by {number.name}", None))
        return DeviceError(
            f"{device}: the network {why}", hint=hint.format(name=device) if hint else None
        )
    if code == _USAGE:
        return UsageError(
            f"{device}: the launcher refuses its arguments: {said}",
            hint="library and launcher must come from this edgesdk: compile the model again",
        )
    if code in _CANNOT_START:
        return DeviceError(
            f"{device}: the launcher does not start: {said}",
            hint=f"edgesdk devices check {device}",
        )
    return DeviceError(f"{device}: {said}", hint=f"edgesdk devices check {device}")
