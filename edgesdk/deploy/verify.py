"""Checks a bundle where it runs: its golden outputs, and fresh inputs if the model is at hand."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgesdk.deploy.run import PlacedBundle, run_placed
from edgesdk.errors import UsageError, VerificationError

if TYPE_CHECKING:
    import numpy as np

    from edgesdk.bundle.manifest import Variant
    from edgesdk.frontend import ImportedModel

DEFAULT_SEEDS = 3


@dataclass(frozen=True)
class Check:
    """One comparison. The errors are the largest over all outputs and elements, `cosine` the
    smallest over all outputs; `max_relative_error` is relative to the reference output's largest
    magnitude. The launcher, which compares the golden outputs, measures no cosine."""

    name: str
    max_abs_error: float
    max_relative_error: float
    cosine: float | None


@dataclass(frozen=True)
class LayerCheck:
    """What a layer computes on the device, compared with the reference's `tensor`.

    `layer` is the name of the model's node; the errors are those of `Check`, within `tolerance` if
    `ok`. `mismatch` says what cannot be measured.
    """

    layer: str
    operator: str
    tensor: str
    max_abs_error: float
    max_relative_error: float
    cosine: float
    tolerance: float
    ok: bool
    mismatch: str


@dataclass(frozen=True)
class VerifyReport:
    """What was compared, all of it equal within `tolerance`; `layers` within their own."""

    bundle: str
    target: str
    device: str
    reference: str
    tolerance: float
    checks: tuple[Check, ...]
    layers: tuple[LayerCheck, ...] = ()


def verify_placed(
    placed: PlacedBundle,
    *,
    model: Path | None = None,
    seeds: int = DEFAULT_SEEDS,
    progress: Callable[[str], None] = lambda stage: None,
) -> VerifyReport:
    """Runs the bundle's golden inputs on the device and compares there with the golden outputs.

    With `model`, the file that the bundle was compiled from, `seeds` more inputs are drawn and
    compared with the reference's results on this machine. Raises VerificationError for the first
    comparison that differs, UsageError when `model` is another model, DeviceError when it fails.
    """
    manifest = placed.bundle.manifest
    imported = None
    if model is not None:
        progress("importing the model")
        imported = import_original(placed, model)
    progress("golden inputs")
    checks = [_golden(placed, variant) for variant in manifest.variants]
    if imported is not None and model is not None:
        checks += _seeds(placed, imported, seeds, progress)
        for variant in manifest.other_variants:
            other = import_original(placed, model, variant)
            checks += _seeds(placed, other, seeds, progress, suffix=f" {variant.text}")
    return VerifyReport(
        bundle=manifest.name,
        target=manifest.target,
        device=placed.transport.name,
        reference=manifest.verification.reference,
        tolerance=manifest.verification.tolerance,
        checks=tuple(checks),
    )


def verify_layers(
    placed: PlacedBundle,
    model: Path,
    *,
    progress: Callable[[str], None] = lambda stage: None,
) -> tuple[LayerCheck, ...]:
    """Compares every layer's result on the device with ONNX Runtime's, on the golden inputs.

    The network is compiled again, here, with all of them as outputs, and run in a folder of its own
    on the device: its kernels are fused less than those of the bundle. Raises UsageError when
    `model` is another model or the target's profile is not at hand, what `compile_model` raises,
    and DeviceError when it fails. A layer that differs is no error here: see `LayerCheck.ok`.
    """
    from edgesdk.compiler.diagnose import compare_layers
    from edgesdk.compiler.probe import Probe
    from edgesdk.deploy.run import golden_inputs
    from edgesdk.precision import find_precision, in_precision
    from edgesdk.profiles import load_target
    from edgesdk.tuning.lookup import RecordLookup

    manifest = placed.bundle.manifest
    precision = find_precision(manifest.precision)
    profile = in_precision(load_target(manifest.target), precision)
    progress("importing the model")
    source = import_original(placed, model).source

    def execute(
        library: Path, launcher: Path, inputs: Sequence[np.ndarray], count: int
    ) -> list[np.ndarray]:
        progress(f"running on {placed.transport.name}")
        return _run_library(placed, library, launcher, inputs, count)

    with RecordLookup(profile, None) as lookup:
        probe = Probe(profile, execute, lookup, precision.tolerance)
        results = compare_layers(source, golden_inputs(placed.bundle), probe, progress)
    return tuple(
        LayerCheck(
            layer=result.layer.name,
            operator=result.layer.operator,
            tensor=result.difference.name,
            max_abs_error=result.difference.max_abs_error,
            max_relative_error=result.difference.max_relative_error,
            cosine=result.difference.cosine,
            tolerance=result.tolerance,
            ok=result.ok,
            mismatch=result.difference.mismatch,
        )
        for result in results
    )


def layers_error(device: str, layers: Sequence[LayerCheck]) -> VerificationError | None:
    """The error for `layers` of which some are not ok; None if all are."""
    wrong = [layer for layer in layers if not layer.ok]
    if not wrong:
        return None
    first = wrong[0]
    what = first.mismatch or (
        f"differs by {first.max_relative_error:.2g} of its largest value"
        f" (allowed {first.tolerance:g})"
    )
    return VerificationError(
        f"{device}: {len(wrong)} of {len(layers)} results differ, first that of the layer"
        f" {first.layer!r} ({first.operator}): {first.tensor!r} {what}",
        hint="the same with --device local, to see whether it is the device or the code",
        layers=tuple(asdict(layer) for layer in layers),
    )


def _run_library(
    placed: PlacedBundle,
    library: Path,
    launcher: Path,
    inputs: Sequence[np.ndarray],
    count: int,
) -> list[np.ndarray]:
    """Runs a library that is in no bundle once, in a folder of its own on the device."""
    import numpy as np

    manifest = placed.bundle.manifest
    with tempfile.TemporaryDirectory(prefix="edgesdk-") as temporary, placed.run_folder() as there:
        here = Path(temporary)
        run = PlacedBundle(
            placed.bundle, placed.transport, there, on_this_machine=placed.on_this_machine
        )
        placed.transport.upload(library, run.path(manifest.library))
        placed.transport.upload(launcher, run.path(manifest.launcher), executable=True)
        options = ["--output", there]
        for index, array in enumerate(inputs):
            name = f"input_{index}.npy"
            np.save(here / name, np.asarray(array, order="C"))
            placed.transport.upload(here / name, run.path(name))
            options += ["--input", f"{index}={run.path(name)}"]
        run.launch(options)
        outputs = []
        for index in range(count):
            name = f"output_{index}.npy"
            placed.transport.download(run.path(name), here / name)
            outputs.append(np.load(here / name))
    return outputs


def import_original(
    placed: PlacedBundle, model: Path, variant: Variant | None = None
) -> ImportedModel:
    """Imports `model` with the shapes of `variant`, by default the bundle's first; UsageError when
    it is not what the bundle was compiled from."""
    from edgesdk.frontend import import_model

    manifest = placed.bundle.manifest
    inputs = variant.inputs if variant is not None else manifest.inputs
    imported = import_model(model, shapes={t.name: t.shape for t in inputs})
    if imported.sha256 != manifest.model_sha256:
        raise UsageError(
            f"{model} is not the model that {placed.bundle.path} was compiled from",
            hint="give that file, or compile this one again",
        )
    return imported


def _golden(placed: PlacedBundle, variant: Variant) -> Check:
    tolerance = variant.verification.tolerance
    folder = placed.path(variant.golden)
    launch = placed.launch(["--selftest", folder, "--tolerance", f"{tolerance:g}"])
    found = launch.report["selftest"]
    # JSON has no NaN or infinity: the launcher writes null.
    error, relative = (
        float("inf") if found[key] is None else float(found[key])
        for key in ("max_abs_error", "max_relative_error")
    )
    if launch.differs:
        raise golden_error(placed.transport.name, relative, tolerance)
    suffix = f" {variant.text}" if placed.bundle.manifest.other_variants else ""
    return Check(f"golden inputs{suffix}", error, relative, None)


def golden_error(device: str, relative: float, tolerance: float) -> VerificationError:
    """The error for golden outputs that the device does not reproduce."""
    return VerificationError(
        f"{device}: the golden outputs differ by {relative:.2g} of their largest value"
        f" (allowed {tolerance:g})",
        hint="edgesdk verify with --device local, to see whether it is the device or the bundle",
    )


def _seeds(
    placed: PlacedBundle,
    imported: ImportedModel,
    seeds: int,
    progress: Callable[[str], None],
    *,
    suffix: str = "",
) -> list[Check]:
    from edgesdk.compiler.gate import Sample, raise_if_different
    from edgesdk.frontend import Reference, draw_inputs
    from edgesdk.numerics import compare

    tolerance = placed.bundle.manifest.verification.tolerance
    reference = Reference(imported.source, imported.shapes)
    checks = []
    # Seed 0 drew the golden inputs.
    for seed in range(1, seeds + 1):
        progress(f"drawn inputs {seed} of {seeds}{suffix}")
        inputs = draw_inputs(imported.inputs, seed=seed, hints=imported.hints)
        outputs = run_placed(placed, inputs).outputs
        expected = reference.run(inputs)
        differences = [compare(name, array, expected[name]) for name, array in outputs.items()]
        raise_if_different(differences, tolerance, Sample(seed, inputs, expected))
        checks.append(
            Check(
                f"drawn inputs {seed}{suffix}",
                max(d.max_abs_error for d in differences),
                max(d.max_relative_error for d in differences),
                min(d.cosine for d in differences),
            )
        )
    return checks
