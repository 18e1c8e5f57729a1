"""The numeric gate: no bundle is written before its results were compared with ONNX Runtime's.

The library runs in its own launcher: on this machine if it is of the same kind, else under
qemu-user with the target's own CPU model, so that an instruction the target lacks shows here and
not there.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgesdk.bundle.manifest import VerificationInfo
from edgesdk.errors import CompileError, ToolMissingError, VerificationError
from edgesdk.numerics import QUANTISED_TOLERANCE, Difference, compare, tolerance_of
from edgesdk.proc import CommandTimeout, run_command
from edgesdk.profiles import TargetProfile, machine_of
from edgesdk.toolchain import Toolchain, emulator_command

if TYPE_CHECKING:
    import numpy as np

    from edgesdk.compiler.probe import Execute
    from edgesdk.frontend import ImportedModel

RUN_LIMIT_S = 1800.0
# The first seed draws the golden inputs, too.
SEEDS = (0, 1, 2)
# How many operations (`ImportedModel.flops`) emulated runs may take together: some seconds.
EMULATED_FLOPS = 10**9


@dataclass(frozen=True)
class Sample:
    """One set of inputs, and what the reference computes from them; both by the model's names.

    `seed` is what drew them, None for inputs that the user gave.
    """

    seed: int | None
    inputs: Mapping[str, np.ndarray]
    expected: Mapping[str, np.ndarray]

    @property
    def label(self) -> str:
        return "the given inputs" if self.seed is None else f"inputs drawn from seed {self.seed}"


class MismatchError(VerificationError):
    """A result differs from the reference's: the output `difference.name`, on `sample`."""

    def __init__(self, difference: Difference, sample: Sample, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.difference = difference
        self.sample = sample


def draw_samples(
    model: ImportedModel,
    *,
    seeds: Sequence[int],
    given: Mapping[str, np.ndarray] | None = None,
) -> tuple[list[Sample], float]:
    """Returns inputs with the reference's results, and the difference to them that is allowed.

    The tolerance is relative to an output's largest magnitude, see `numerics.tolerance_of`. Raises
    UsageError when `given` does not fit the model, ModelError when ONNX Runtime refuses it.
    """
    from edgesdk.frontend import Reference, draw_inputs

    sets: list[tuple[int | None, Mapping[str, np.ndarray]]] = [
        (seed, draw_inputs(model.inputs, seed=seed, hints=model.hints)) for seed in seeds
    ]
    if given is not None:
        sets.append((None, given))
    names = [o.name for o in model.outputs]
    reference = Reference(model.source, model.shapes)
    samples = []
    for seed, inputs in sets:
        results = reference.run(inputs)
        samples.append(Sample(seed, inputs, {name: results[name] for name in names}))
    del reference  # it holds the weights
    if model.quantised:
        return samples, QUANTISED_TOLERANCE
    other = Reference(model.source, model.shapes, optimise=False)
    return samples, max(tolerance_of(s.expected, other.run(s.inputs)) for s in samples)


def choose_seeds(
    profile: TargetProfile, toolchain: Toolchain, flops: int | None
) -> tuple[int, ...]:
    """Returns the seeds that the results are checked with, by what a run costs.

    Native runs are cheap; emulated ones, some hundred times slower, get as many as fit into
    EMULATED_FLOPS, and always one.
    """
    try:
        prefix = _runner(profile, toolchain)
    except ToolMissingError:
        prefix = None
    if prefix is None:
        return SEEDS[:1]
    if not prefix:
        return SEEDS
    return SEEDS[: max(1, EMULATED_FLOPS // flops)] if flops else SEEDS[:1]


def check_results(
    *,
    library: Path,
    launcher: Path | None,
    profile: TargetProfile,
    toolchain: Toolchain,
    samples: Sequence[Sample],
    tolerance: float,
    reference: str,
) -> VerificationInfo:
    """Runs `library` on every sample, whose inputs and outputs are in the library's order.

    `reference` is what computed the samples' results (`ImportedModel.reference`). Returns what was
    found; `how` is "not run" if this machine has no way to run the target's code.
    Raises MismatchError if a result differs by more than `tolerance` relative to the output's
    largest magnitude, CompileError if the library crashes.
    """
    try:
        prefix = _runner(profile, toolchain)
    except ToolMissingError as error:
        hint = f" ({error.hint})" if error.hint else ""
        return _not_run(reference, tolerance, f"{error.message}{hint}")
    if prefix is None or launcher is None:
        return _not_run(reference, tolerance, f"no emulator for {profile.name} here")
    found: list[Difference] = []
    for sample in samples:
        inputs = list(sample.inputs.values())
        outputs = run_launcher(prefix, library=library, launcher=launcher, inputs=inputs)
        if len(outputs) != len(sample.expected):
            wanted = len(sample.expected)
            raise CompileError(f"the library gives {len(outputs)} outputs, should be {wanted}")
        differences = [
            compare(name, actual, wanted)
            for actual, (name, wanted) in zip(outputs, sample.expected.items(), strict=True)
        ]
        raise_if_different(differences, tolerance, sample)
        found += differences
    return VerificationInfo(
        how="emulated" if prefix else "native",
        reference=reference,
        max_relative_error=max((d.max_relative_error for d in found), default=0.0),
        max_abs_error=max((d.max_abs_error for d in found), default=0.0),
        tolerance=tolerance,
        min_cosine=min((d.cosine for d in found), default=1.0),
        seeds=tuple(s.seed for s in samples if s.seed is not None),
        given_inputs=any(s.seed is None for s in samples),
    )


def executor(profile: TargetProfile, toolchain: Toolchain) -> Execute:
    """Returns what runs a library of `profile` on this machine.

    Raises ToolMissingError where `check_results` would not run it.
    """
    prefix = _runner(profile, toolchain)
    if prefix is None:
        raise ToolMissingError(f"no emulator for {profile.name} here")

    def execute(
        library: Path, launcher: Path, inputs: Sequence[np.ndarray], count: int
    ) -> list[np.ndarray]:
        outputs = run_launcher(prefix, library=library, launcher=launcher, inputs=inputs)
        if len(outputs) != count:
            raise CompileError(f"the library gives {len(outputs)} outputs, should be {count}")
        return outputs

    return execute


def with_remark(
    verification: VerificationInfo, model: ImportedModel, samples: Sequence[Sample]
) -> VerificationInfo:
    """Adds to `detail` in which layer NaN or infinity begin, if the reference gives some, too."""
    import numpy as np

    from edgesdk.compiler.diagnose import nonfinite_origin

    for sample in samples:
        for name, array in sample.expected.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                layer = nonfinite_origin(model.source, sample.inputs)
                where = f" They begin in the layer {layer}." if layer else ""
                return replace(
                    verification,
                    detail=f"{name!r} has NaN or infinity, in the reference, too, on"
                    f" {sample.label}.{where}",
                )
    return verification


def raise_if_different(differences: Sequence[Difference], tolerance: float, sample: Sample) -> None:
    """Raises MismatchError naming the worst of `differences` if it exceeds `tolerance`."""
    failed = [d for d in differences if not d.within(tolerance)]
    if not failed:
        return
    worst = max(failed, key=lambda d: (bool(d.mismatch), d.max_relative_error))
    raise MismatchError(
        worst,
        sample,
        f"output {worst.name!r} {worst.describe(tolerance)}",
        hint=f"{len(failed)} of {len(differences)} outputs differ from the reference's"
        f" on {sample.label}",
    )


def run_launcher(
    prefix: Sequence[str], *, library: Path, launcher: Path, inputs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Runs `library` once on `inputs` (in order) and returns its outputs. Raises CompileError."""
    import numpy as np

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        argv = [*prefix, str(launcher), str(library), "--output", str(folder)]
        for index, array in enumerate(inputs):
            try:
                np.save(folder / f"input_{index}.npy", np.asarray(array, order="C"))
            except OSError as error:
                raise CompileError(
                    f"cannot write an input of the check to {folder.parent}: {error}",
                    hint="free some space there, or set TMPDIR to another folder",
                ) from error
            argv += ["--input", f"{index}={folder / f'input_{index}.npy'}"]
        try:
            result = run_command(argv, timeout_s=RUN_LIMIT_S)
        except CommandTimeout as error:
            raise CompileError(f"checking the results took too long: {error.message}") from error
        if result.returncode < 0:
            raise CompileError(f"the compiled network crashed (signal {-result.returncode})")
        if not result.ok:
            raise CompileError(f"the compiled network failed: {result.last_line()}")
        count = len(list(folder.glob("output_*.npy")))
        return [np.load(folder / f"output_{i}.npy") for i in range(count)]


def _runner(profile: TargetProfile, toolchain: Toolchain) -> tuple[str, ...] | None:
    """What to put before a command; None if the target's code cannot run here."""
    if profile.gpu is not None:
        from edgesdk.host import require_gpu

        require_gpu(profile.gpu)
    cpu_fits = False
    if profile.machine == machine_of(platform.machine()):
        from edgesdk.host import detect_host
        from edgesdk.profiles import missing_cpu_features

        host = detect_host()
        cpu_fits = not missing_cpu_features(profile.contract.cpu_features, host.cpu_features)
        if cpu_fits and profile.contract.os == host.contract.os:
            return ()
    if profile.gpu is not None:
        raise ToolMissingError(
            "no GPU can be reached from an emulator",
            hint="`edgesdk verify BUNDLE --device D` checks it there",
        )
    if profile.emulator is None or not (cpu_fits or profile.emulator.emulates_cpu):
        return None
    return emulator_command(profile, toolchain)


def _not_run(reference: str, tolerance: float, detail: str) -> VerificationInfo:
    return VerificationInfo("not run", reference, None, None, tolerance, detail)
