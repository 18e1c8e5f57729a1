"""Checks a bundle where it runs: its golden outputs, and fresh inputs if the model is at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgesdk.deploy.run import PlacedBundle, run_placed
from edgesdk.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from edgesdk.frontend import ImportedModel

DEFAULT_SEEDS = 3


@dataclass(frozen=True)
class Check:
    """One comparison. The errors are the largest over all outputs and elements;
    `max_relative_error` is relative to the reference output's largest magnitude."""

    name: str
    max_abs_error: float
    max_relative_error: float


@dataclass(frozen=True)
class VerifyReport:
    """What was compared, all of it equal within `tolerance`."""

    bundle: str
    target: str
    device: str
    reference: str
    tolerance: float
    checks: tuple[Check, ...]


def verify_placed(
    placed: PlacedBundle,
    *,
    model: Path | None = None,
    seeds: int = DEFAULT_SEEDS,
    progress: Callable[[str], None] = lambda stage: None,
) -> VerifyReport:
    """Runs the bundle's golden inputs on the device and compares there with the golden outputs.

    With `model`, the file that the bundle was compiled from, `seeds` more inputs are drawn and
    compared with ONNX Runtime's results on this machine. Raises VerificationError for the first
    comparison that differs, UsageError when `model` is another model, DeviceError when it fails.
    """
    manifest = placed.bundle.manifest
    imported = None
    if model is not None:
        progress("importing the model")
        imported = import_original(placed, model)
    progress("golden inputs")
    checks = [_golden(placed)]
    if imported is not None:
        checks += _seeds(placed, imported, seeds, progress)
    return VerifyReport(
        bundle=manifest.name,
        target=manifest.target,
        device=placed.transport.name,
        reference=manifest.verification.reference,
        tolerance=manifest.verification.tolerance,
        checks=tuple(checks),
    )


def import_original(placed: PlacedBundle, model: Path) -> ImportedModel:
    """Imports `model`; UsageError when it is not what the bundle was compiled from."""
    from edgesdk.frontend import import_model

    manifest = placed.bundle.manifest
    imported = import_model(model, shapes={t.name: t.shape for t in manifest.inputs})
    if imported.sha256 != manifest.model_sha256:
        raise UsageError(
            f"{model} is not the model that {placed.bundle.path} was compiled from",
            hint="give that file, or compile this one again",
        )
    return imported


def _golden(placed: PlacedBundle) -> Check:
    tolerance = placed.bundle.manifest.verification.tolerance
    launch = placed.launch(["--selftest", placed.path("golden"), "--tolerance", f"{tolerance:g}"])
    found = launch.report["selftest"]
    # JSON has no NaN or infinity: the launcher writes null.
    error, relative = (
        float("inf") if found[key] is None else float(found[key])
        for key in ("max_abs_error", "max_relative_error")
    )
    if launch.differs:
        raise golden_error(placed.transport.name, relative, tolerance)
    return Check("golden inputs", error, relative)


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
) -> list[Check]:
    from edgesdk.compiler.gate import raise_if_different
    from edgesdk.frontend import Reference, draw_inputs
    from edgesdk.numerics import compare

    tolerance = placed.bundle.manifest.verification.tolerance
    reference = Reference(imported.source, imported.shapes)
    checks = []
    # Seed 0 drew the golden inputs.
    for seed in range(1, seeds + 1):
        progress(f"drawn inputs {seed} of {seeds}")
        inputs = draw_inputs(imported.inputs, seed=seed, hints=imported.hints)
        outputs = run_placed(placed, inputs).outputs
        expected = reference.run(inputs)
        differences = [compare(name, array, expected[name]) for name, array in outputs.items()]
        raise_if_different(differences, tolerance)
        checks.append(
            Check(
                f"drawn inputs {seed}",
                max(d.max_abs_error for d in differences),
                max(d.max_relative_error for d in differences),
            )
        )
    return checks
