"""The SDK's verbs as functions: what `edgesdk ...` does, `edgesdk.compile(...)` and so on do.

Each reads or writes bundles. The command line only parses and prints.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgesdk.bundle import Bundle
from edgesdk.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from edgesdk.bundle.manifest import GpuContract, VerificationInfo
    from edgesdk.compiler import CompiledModel
    from edgesdk.compiler.cuda import Image
    from edgesdk.compiler.gate import Sample
    from edgesdk.deploy.batch import BatchReport
    from edgesdk.deploy.bench import BenchReport
    from edgesdk.deploy.push import RemoteBundle
    from edgesdk.deploy.verify import VerifyReport
    from edgesdk.frontend import ImportedModel
    from edgesdk.profiles import TargetProfile
    from edgesdk.tuning.devicekey import DeviceKey
    from edgesdk.tuning.lookup import RecordLookup
    from edgesdk.tuning.options import TuneOptions
    from edgesdk.tuning.session import TuneResult
    from edgesdk.tuning.state import SessionState


def compile(
    model: str | Path | torch.nn.Module,
    *,
    target: str = "local",
    device: str | None = None,
    example_inputs: Sequence[Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
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
    model leaves open: input name -> sizes. `output` is the bundle's folder, by default
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

    from edgesdk.compiler import compile_model
    from edgesdk.deploy.run import check_inputs
    from edgesdk.frontend import import_model
    from edgesdk.tuning.lookup import RecordLookup

    progress("importing")
    imported = import_model(path, shapes=shapes)
    given = None
    if inputs is not None:
        arrays = check_inputs(imported, inputs)
        given = {t.name: array for t, array in zip(imported.inputs, arrays, strict=True)}
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
            lookup=lookup,
            name_build=lambda: _build_id(imported, profile, precision, lookup),
            progress=progress,
        )
        check_contract(audit_library(compiled.library), profile)
        skipped = dict(lookup.skipped) if lookup is not None else {}
        samples, verification = _verified(
            imported,
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
        _fill(staging, imported, profile, compiled, precision, samples[0], verification, skipped)
    from edgesdk.bundle import open_bundle

    return open_bundle(destination)


def _verified(
    imported: ImportedModel,
    profile: TargetProfile,
    compiled: CompiledModel,
    given: Mapping[str, np.ndarray] | None,
    verify: bool,
    allowed: float,
    lookup: RecordLookup | None,
    destination: Path,
    target: str,
    progress: Callable[[str], None],
) -> tuple[list[Sample], VerificationInfo]:
    """Draws inputs, the golden ones first, and passes the gate."""
    import shlex

    from edgesdk.bundle.manifest import VerificationInfo
    from edgesdk.compiler import gate
    from edgesdk.compiler.diagnose import explain
    from edgesdk.compiler.probe import Probe

    progress("running the reference")
    toolchain = compiled.toolchain
    seeds = gate.choose_seeds(profile, toolchain, imported.flops) if verify else gate.SEEDS[:1]
    samples, tolerance = gate.draw_samples(imported, seeds=seeds, given=given)
    tolerance = max(tolerance, allowed)
    if not verify:
        return samples, VerificationInfo(
            "not run", imported.reference, None, None, tolerance, "switched off by the caller"
        )
    progress(f"comparing results on {len(samples)} sets of inputs")
    try:
        verification = gate.check_results(
            library=compiled.library,
            launcher=compiled.launcher,
            profile=profile,
            toolchain=toolchain,
            samples=samples,
            tolerance=tolerance,
            reference=imported.reference,
        )
    except gate.MismatchError as error:
        progress("results differ: looking for the first layer that does")
        raise explain(
            error,
            model=imported.source,
            probe=Probe(profile, gate.executor(profile, toolchain), lookup, allowed),
            folder=destination.with_name(f"{destination.name}.mismatch"),
            command=lambda words: shlex.join(
                ["edgesdk", "compile", *words, "--target", target, *_precision_words(profile)]
            ),
        ) from error
    return samples, gate.with_remark(verification, imported, samples)


def _precision_words(profile: TargetProfile) -> list[str]:
    return [] if profile.precision == "fp32" else ["--precision", profile.precision]


def _fill(
    staging: Path,
    imported: ImportedModel,
    profile: TargetProfile,
    compiled: CompiledModel,
    precision: str,
    golden: Sample,
    verification: VerificationInfo,
    records_skipped: Mapping[str, int],
) -> None:
    """Writes the bundle's files."""
    from dataclasses import replace

    from edgesdk.bundle.manifest import Manifest, TensorInfo
    from edgesdk.bundle.writer import write_bundle
    from edgesdk.deploy.facts import contract_of

    manifest = Manifest(
        name=imported.name,
        target=profile.name,
        description=profile.description,
        library=f"lib/{compiled.library.name}",
        launcher=f"bin/{compiled.launcher.name}" if compiled.launcher else "",
        contract=replace(contract_of(profile), gpu=_gpu_contract(profile, compiled)),
        inputs=tuple(TensorInfo(t.name, t.shape, t.dtype) for t in imported.inputs),
        outputs=tuple(TensorInfo(t.name, t.shape, t.dtype) for t in imported.outputs),
        golden_inputs=tuple(f"golden/input_{i}.npy" for i in range(len(imported.inputs))),
        golden_outputs=tuple(f"golden/output_{i}.npy" for i in range(len(imported.outputs))),
        verification=verification,
        model_sha256=imported.sha256,
        abi_version=_abi_version(),
        precision=precision,
        weights_bytes=compiled.weights_bytes,
        arena_bytes=compiled.arena_bytes,
        files={},
        tools=_tools(compiled),
        build={
            "id": compiled.build_id,
            "opset": imported.opset,
            "repairs": list(imported.repairs),
            "kernel_calls": compiled.num_kernel_calls,
            "activations_bytes": compiled.activations_bytes,
            "coverage": {
                "rungs": compiled.coverage.rungs,
                "shares": {r: round(share, 4) for r, share in compiled.coverage.shares.items()},
                "problems": compiled.coverage.problems,
            },
            "records_skipped": dict(records_skipped),
            "toolchain": compiled.toolchain.name,
            "tvm_target": profile.tvm,
            "device_code": [_image_report(image) for image in compiled.device_images],
            "device_code_remark": _image_remark(profile, compiled),
        },
    )
    write_bundle(
        staging,
        manifest,
        library=compiled.library,
        launcher=compiled.launcher,
        header=compiled.header,
        golden_inputs=list(golden.inputs.values()),
        golden_outputs=list(golden.expected.values()),
    )


def _gpu_contract(profile: TargetProfile, compiled: CompiledModel) -> GpuContract | None:
    """What the code for the GPU asks of it; None if every kernel is for the CPU."""
    from edgesdk.bundle.audit import version_key
    from edgesdk.bundle.manifest import GpuContract

    if profile.gpu is None or not compiled.device_images:
        return None
    cubins = [image for image in compiled.device_images if image.format == "cubin"]
    ptx = next((image for image in compiled.device_images if image.format == "ptx"), None)
    return GpuContract(
        api=profile.gpu.api,
        architectures=tuple(image.architecture for image in cubins),
        ptx=ptx.architecture if ptx else None,
        cuda=max((image.driver for image in cubins), key=version_key, default=None),
        ptx_cuda=ptx.driver if ptx else None,
    )


def _image_report(image: Image) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "format": image.format,
        "architecture": image.architecture,
        "compiler": image.compiler,
        "driver": image.driver,
        "size_bytes": len(image.data),
        "kernels": [asdict(kernel) for kernel in image.resources],
    }


def _image_remark(profile: TargetProfile, compiled: CompiledModel) -> str | None:
    """What is to be said if the code was made for newer drivers than the target's."""
    from edgesdk.compiler import cuda

    if profile.gpu is None or not compiled.device_images:
        return None
    found = cuda.too_new(profile.gpu)
    if found is None:
        return None
    why, fix = found
    return f"{why} ({fix})" if fix else why


def _build_id(
    imported: ImportedModel,
    profile: TargetProfile,
    precision: str,
    lookup: RecordLookup | None,
) -> str:
    """16 hex digits that change with the model, its shapes, the target, the tools and what tuning
    found."""
    import json

    parts = {
        "model": imported.sha256,
        "shapes": {k: list(v) for k, v in imported.shapes.items()},
        "target": profile.name,
        "tvm": profile.tvm,
        "precision": precision,
        "versions": _versions(),
        "tuned": lookup.used if lookup is not None else {},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {
        name: version(name)
        for name in ("edgesdk", "apache-tvm", "apache-tvm-ffi", "onnx", "onnxruntime")
    }


def _tools(compiled: CompiledModel) -> dict[str, str]:
    return {**_versions(), "compiler": compiled.toolchain.version()}


def _abi_version() -> int:
    """EDGESDK_ABI_VERSION of the public header."""
    import re

    from edgesdk.resources import data_folder

    header = data_folder("device_scripts") / "include" / "edgesdk_model.h"
    found = re.search(r"#define EDGESDK_ABI_VERSION (\d+)u", header.read_text(encoding="utf-8"))
    if found is None:
        raise RuntimeError(f"{header} has no EDGESDK_ABI_VERSION")
    return int(found.group(1))


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

    `model`, `example_inputs` and `precision` are those of `compile`. `tracker` ("host:port") and `key` name
    devices behind TVM's RPC tracker, instead of `device`. What is measured is recorded at once, in
    the user's database or in `records`. `report` is an HTML file that is kept up to date, by
    default beside the bundle. `show` hears of every trial. How to search are the fields of
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
    progress: Callable[[str], None] = lambda stage: None,
) -> BenchReport:
    """Measures a bundle's latency on a device, in ms.

    `repeat` runs are timed (by default as many as fit in 3 s) after `warmup` others. `per_layer`
    times every layer too. `against=["onnxruntime"]` takes turns with ONNX Runtime on this machine
    and needs `model`, the file that the bundle was compiled from.

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
