"""The SDK's verbs as functions: what `edgesdk ...` does, `edgesdk.compile(...)` and so on do.

Each reads or writes bundles. The command line only parses and prints.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgesdk.bundle import Bundle
from edgesdk.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from edgesdk.deploy.batch import BatchReport
    from edgesdk.deploy.bench import BenchReport
    from edgesdk.deploy.push import RemoteBundle
    from edgesdk.deploy.verify import VerifyReport
    from edgesdk.tuning.devicekey import DeviceKey
    from edgesdk.tuning.options import TuneOptions
    from edgesdk.tuning.session import TuneResult
    from edgesdk.tuning.state import SessionState


def compile(
    model: str | Path | torch.nn.Module,
    *,
    target: str = "local",
    device: str | None = None,
    example_inputs: Sequence[Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | Sequence[Mapping[str, Sequence[int]]] | None = None,
    batches: Sequence[int] = (),
    output: str | Path | None = None,
    precision: str = "fp32",
    verify: bool = True,
    inputs: Mapping[str, np.ndarray] | None = None,
    tuned: bool = True,
    device_key: DeviceKey | None = None,
    records: Path | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Bundle:
    """Compiles a model for a target and returns the bundle that it wrote.

    `model` is a file (ONNX, TFLite, or what torch.export.save wrote), or a PyTorch module with
    `example_inputs`, the arguments that its forward() takes. `device` is asked which board it is
    where `target` is a family of boards ("jetson"); without it, the device that serves the family,
    or the only one there is. `shapes` fixes dimensions that the
    model leaves open: input name -> sizes; or it is a list of such, and the bundle serves each of
    them with one set of weights. `batches` are sizes of the first axis, where the model leaves it
    open: runs may then have any. `output` is the bundle's folder, by default
    `bundles/<model>-<target>`; a bundle that stands there is replaced. With `verify` (always,
    unless the results are checked elsewhere) the outputs are compared with those of ONNX Runtime,
    TFLite or PyTorch, as the model is of one of them, before the bundle is written, on drawn inputs
    and on `inputs` (by the model's own names), if there are some. Where they differ,
    `<output>.mismatch` gets a reproducer. `precision` is a name of `edgesdk.precision`. `tuned`
    lets kernels use what `edgesdk tune` found (in the user's database, or in `records`), best for
    the kind of device `device_key`. `progress` hears each stage's name.

    Raises UsageError (target, shapes, output), DeviceMismatchError and DeviceUnreachableError (a
    family of boards), ModelError and UnsupportedModelError (the model),
    ToolMissingError (a compiler), CompileError, ContractError, VerificationError.
    """
    from edgesdk.bundle.audit import audit_library, check_contract
    from edgesdk.bundle.writer import staged_folder
    from edgesdk.deploy.connected import connected_target
    from edgesdk.precision import find_precision, in_precision
    from edgesdk.profiles import load_target
    from edgesdk.toolchain import load_toolchain

    chosen = find_precision(precision)
    path = _model_file(model, example_inputs)
    profile = in_precision(load_target(connected_target(target, device)), chosen)
    load_toolchain(profile.toolchain).require(profile.machine)

    from edgesdk.assemble import build_id_of, fill, verified
    from edgesdk.compiler import compile_model
    from edgesdk.deploy.run import check_model_inputs
    from edgesdk.frontend.variants import import_variants
    from edgesdk.tuning.lookup import RecordLookup

    progress("importing")
    several = (shapes,) if isinstance(shapes, Mapping) else tuple(shapes or ({},))
    variants = import_variants(path, several, batches)
    imported, *others = variants.models
    given = None
    if inputs is not None:
        given = check_model_inputs(variants.models, inputs)
    destination = Path(output) if output else Path("bundles") / f"{imported.name}-{profile.name}"
    with (
        staged_folder(destination) as staging,
        tempfile.TemporaryDirectory(prefix=".build.", dir=staging.parent) as temporary,
        contextlib.ExitStack() as cleanup,
    ):
        build = Path(temporary)
        lookup = (
            cleanup.enter_context(RecordLookup(profile, device_key, records)) if tuned else None
        )
        compiled = compile_model(
            imported,
            profile,
            build=build,
            others=others,
            lookup=lookup,
            name_build=lambda: build_id_of(variants, profile, precision, lookup),
            progress=progress,
        )
        check_contract(audit_library(compiled.library), profile)
        skipped = dict(lookup.skipped) if lookup is not None else {}
        results = verified(
            variants,
            profile,
            compiled,
            given,
            verify,
            chosen.tolerance,
            lookup,
            destination,
            target,
            progress,
        )
        progress("writing the bundle")
        fill(staging, variants, profile, compiled, precision, results, skipped)
    from edgesdk.bundle import open_bundle

    return open_bundle(destination)


def tune(
    model: str | Path | torch.nn.Module,
    *,
    target: str = "local",
    device: str = "local",
    example_inputs: Sequence[Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    precision: str = "fp32",
    output: str | Path | None = None,
    tracker: str | None = None,
    key: str | None = None,
    report: str | Path | None = None,
    records: str | Path | None = None,
    show: Callable[[SessionState], None] = lambda state: None,
    options: TuneOptions | None = None,
    **choices: Any,
) -> TuneResult:
    """Searches for the fastest code of each layer of a model on a device, and writes a bundle.

    `model`, `example_inputs` and `precision` are those of `compile`. `tracker` ("host:port") and
    `key` name devices behind TVM's RPC tracker, instead of `device`. What is measured is recorded
    at once, in the user's database or in `records`. `report` is an HTML file that is kept up to
    date, by default beside the bundle. `show` hears of every trial. How to search are the fields of
    `edgesdk.tuning.options.TuneOptions`, as arguments (`trials=`, `minutes=`, `seed=`, ...) or as
    `options`.

    Raises what `compile` raises; UsageError for options; TuningError when the device gives no
    usable measurements; DeviceUnreachableError and DeviceError when it is lost for good. The first
    KeyboardInterrupt ends the search only.
    """
    from edgesdk.deploy.connected import connected_target
    from edgesdk.precision import find_precision, in_precision
    from edgesdk.profiles import load_target
    from edgesdk.tuning.options import TuneOptions
    from edgesdk.tuning.place import Board, Place, Tracked
    from edgesdk.tuning.session import tune_model

    if options is not None and choices:
        raise TypeError(f"tune() takes options, or {', '.join(choices)}, not both")
    chosen = options or TuneOptions(**choices)
    if (tracker is None) != (key is None):
        raise UsageError("a tracker and a key belong together", hint="--tracker host:port --key K")
    asked = connected_target(target, device if tracker is None else None)
    profile = in_precision(load_target(asked), find_precision(precision))
    if precision == "fp16":
        raise UsageError(
            "kernels in half precision are not measured",
            hint="`edgesdk compile --precision fp16` uses their default schedules",
        )
    place: Place = Board(device, profile, threads=chosen.threads)
    if tracker is not None and key is not None:
        place = Tracked(tracker, key, profile)
    return tune_model(
        _model_file(model, example_inputs),
        profile=profile,
        target=target,
        place=place,
        shapes=shapes,
        output=Path(output) if output is not None else None,
        options=chosen,
        records_path=Path(records) if records is not None else None,
        report=Path(report) if report is not None else None,
        show=show,
    )


def push(bundle: Bundle | str | Path, *, device: str) -> RemoteBundle:
    """Copies a bundle to a device and makes it the version in use there; older ones are kept.

    Raises UsageError (no such device), BundleError (damaged), DeviceMismatchError before anything
    is copied, DeviceUnreachableError, DeviceError.
    """
    from edgesdk.deploy.push import push_bundle
    from edgesdk.deploy.transport import open_transport
    from edgesdk.devices import get_device

    with open_transport(get_device(device)) as transport:
        return push_bundle(_opened(bundle).path, transport)


def run(
    bundle: Bundle | str | Path,
    inputs: Mapping[str, Any],
    *,
    device: str = "local",
    threads: int | None = None,
) -> dict[str, np.ndarray]:
    """Runs a bundle once on a device and returns its outputs by the model's own names.

    `inputs` maps the model's own input names to arrays of exactly the shape and dtype that the
    bundle's manifest states. On another device than this machine the bundle is pushed first, if it
    is not there. `threads` is the most that are used; by default all CPUs.

    Raises UsageError (inputs, device), BundleError, DeviceMismatchError, DeviceUnreachableError,
    DeviceError.
    """
    from edgesdk.deploy.run import check_inputs, placed_bundle, run_placed

    opened = _opened(bundle)
    check_inputs(opened.manifest, inputs)  # before the way to the device, which may be long
    with placed_bundle(opened, device) as placed:
        return run_placed(placed, inputs, threads=threads).outputs


def run_folder(
    bundle: Bundle | str | Path,
    folder: str | Path,
    output: str | Path,
    *,
    device: str = "local",
    threads: int | None = None,
    progress: Callable[[int, str], None] = lambda done, name: None,
) -> BatchReport:
    """Runs a bundle on every .npy and .npz file of a folder; returns what became of each.

    A .npz file holds the inputs by their names, a .npy file that of a network with one. Results go
    to the folder `output`, NAME.npz for each file NAME, or as lines of JSON to a file that ends in
    .jsonl. Files that cannot be run are in the report's `failed`; they end nothing. `progress`
    hears the number of files done and the next one's name.

    Raises UsageError (folder, output, device), and what `run` raises when the device is lost.
    """
    from edgesdk.deploy.batch import input_files, prepare_output, run_batch
    from edgesdk.deploy.run import placed_bundle

    files = input_files(Path(folder))
    prepare_output(Path(output))
    with placed_bundle(_opened(bundle), device) as placed:
        return run_batch(placed, files, Path(output), threads=threads, progress=progress)


def verify(
    bundle: Bundle | str | Path,
    *,
    device: str = "local",
    model: str | Path | None = None,
    seeds: int = 3,
    progress: Callable[[str], None] = lambda stage: None,
) -> VerifyReport:
    """Checks on a device that a bundle gives the reference's results; returns what was compared.

    Without `model`, the file that it was compiled from, only the golden outputs in the bundle are
    compared; with it, `seeds` drawn inputs too. Raises VerificationError when a result differs,
    and what `run` raises.
    """
    from edgesdk.deploy.run import placed_bundle
    from edgesdk.deploy.verify import verify_placed

    with placed_bundle(_opened(bundle), device) as placed:
        original = Path(model) if model is not None else None
        return verify_placed(placed, model=original, seeds=seeds, progress=progress)


def bench(
    bundle: Bundle | str | Path,
    *,
    device: str = "local",
    repeat: int | None = None,
    warmup: int = 5,
    threads: int | None = None,
    per_layer: bool = False,
    against: Sequence[str] = (),
    model: str | Path | None = None,
    variant: int = 0,
    progress: Callable[[str], None] = lambda stage: None,
) -> BenchReport:
    """Measures a bundle's latency on a device, in ms.

    `repeat` runs are timed (by default as many as fit in 3 s) after `warmup` others. `per_layer`
    times every layer too. `against=["onnxruntime"]` takes turns with ONNX Runtime on this machine
    and needs `model`, the file that the bundle was compiled from. `variant` is the number of the
    shapes that are measured, of those that the bundle serves.

    Raises VerificationError when the measured outputs are wrong, and what `run` raises.
    """
    from edgesdk.deploy.bench import bench_placed
    from edgesdk.deploy.run import placed_bundle

    with placed_bundle(_opened(bundle), device) as placed:
        return bench_placed(
            placed,
            repeat=repeat,
            warmup=warmup,
            threads=threads,
            per_layer=per_layer,
            against=against,
            model=Path(model) if model is not None else None,
            variant=variant,
            progress=progress,
        )


def _model_file(model: str | Path | torch.nn.Module, example_inputs: Sequence[Any] | None) -> Path:
    """The path of a model; a module of PyTorch is exported into a temporary file first."""
    if isinstance(model, str | Path):
        return Path(model)
    from edgesdk.frontend.torch_export import export_module

    return export_module(model, example_inputs)


def _opened(bundle: Bundle | str | Path) -> Bundle:
    from edgesdk.bundle import open_bundle

    return bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
