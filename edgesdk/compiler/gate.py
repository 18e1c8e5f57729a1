"""The numeric gate: no bundle is written before its results were compared with ONNX Runtime's.

The library runs in its own launcher: on this machine if it is of the same kind, else under
qemu-user with the target's own CPU model, so that an instruction the target lacks shows here and
not there.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgesdk.bundle.manifest import VerificationInfo
from edgesdk.errors import CompileError, ToolMissingError, VerificationError
from edgesdk.numerics import Difference, compare
from edgesdk.proc import CommandTimeout, run_command
from edgesdk.profiles import TargetProfile, machine_of
from edgesdk.toolchain import Toolchain, emulator_command

if TYPE_CHECKING:
    import numpy as np

RUN_LIMIT_S = 1800.0
REFERENCE = "ONNX Runtime, CPU, fp32"


def check_results(
    *,
    library: Path,
    launcher: Path,
    profile: TargetProfile,
    toolchain: Toolchain,
    inputs: Sequence[np.ndarray],
    expected: dict[str, np.ndarray],
    tolerance: float,
) -> VerificationInfo:
    """Runs `library` on `inputs` and compares with `expected` (by output name, in order).

    Returns what was found; `how` is "not run" if this machine has no way to run the target's code.
    Raises VerificationError if a result differs by more than `tolerance` relative to the output's
    largest magnitude, CompileError if the library crashes.
    """
    try:
        prefix = _runner(profile, toolchain)
    except ToolMissingError as error:
        hint = f" ({error.hint})" if error.hint else ""
        return _not_run(tolerance, f"{error.message}{hint}")
    if prefix is None:
        return _not_run(tolerance, f"no emulator for {profile.name} here")
    outputs = run_launcher(prefix, library=library, launcher=launcher, inputs=inputs)
    if len(outputs) != len(expected):
        raise CompileError(f"the library gives {len(outputs)} outputs, should be {len(expected)}")
    differences = [
        compare(name, actual, wanted)
        for actual, (name, wanted) in zip(outputs, expected.items(), strict=True)
    ]
    raise_if_different(differences, tolerance)
    return VerificationInfo(
        how="emulated" if prefix else "native",
        reference=REFERENCE,
        max_relative_error=max((d.max_relative_error for d in differences), default=0.0),
        max_abs_error=max((d.max_abs_error for d in differences), default=0.0),
        tolerance=tolerance,
    )


def raise_if_different(differences: Sequence[Difference], tolerance: float) -> None:
    """Raises VerificationError naming the worst of `differences` if it exceeds `tolerance`."""
    failed = [d for d in differences if not d.within(tolerance)]
    if not failed:
        return
    worst = max(failed, key=lambda d: (bool(d.mismatch), d.max_relative_error))
    what = worst.mismatch or (
        f"differs by {worst.max_relative_error:.2g} of its largest value (allowed {tolerance:g})"
    )
    raise VerificationError(
        f"output {worst.name!r} {what}",
        hint=f"{len(failed)} of {len(differences)} outputs differ from {REFERENCE}",
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
    if profile.emulator is None or not (cpu_fits or profile.emulator.emulates_cpu):
        return None
    return emulator_command(profile, toolchain)


def _not_run(tolerance: float, detail: str) -> VerificationInfo:
    return VerificationInfo("not run", REFERENCE, None, None, tolerance, detail)
