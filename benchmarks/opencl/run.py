"""Compiles networks for OpenCL and for the CPU of this machine, and prints what both take.

    python benchmarks/opencl/run.py
    python benchmarks/opencl/run.py squeezenet orientation

All times are CPU time of one thread (user and system), so that a busy machine measures the same as
an idle one: PoCL, the OpenCL that runs on CPUs, is held to one thread, and so is the CPU's bundle.
"first" is a model's first opening, when the driver compiles its kernels; "next" is one that finds
them kept. Needs edgesdk, a C++ compiler and an OpenCL driver.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import tvm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks" / "cpu"))

import models  # noqa: E402

import edgesdk  # noqa: E402
from edgesdk.bundle import Bundle  # noqa: E402
from edgesdk.errors import EdgeSdkError  # noqa: E402
from edgesdk.profiles import TargetProfile  # noqa: E402
from edgesdk.schedules import Coverage  # noqa: E402

OPENCL, CPU = "linux-x86_64-opencl", "linux-x86_64"
# Those whose kernels PoCL compiles in less than some minutes.
NAMES = (
    *("squeezenet", "shufflenet", "faces", "orientation", "text-direction", "embedding"),
    *("melspectrogram", "voice", "text-detection", "text-recognition"),
)
_RUNS = 20


@dataclass(frozen=True)
class Row:
    """Seconds of CPU time, `run` of one run; `error` is relative to the largest output."""

    name: str
    error: float
    first_s: float
    next_s: float
    run_s: float
    tvm_run_s: float
    cpu_run_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=NAMES)
    print("| network | largest error | first opening | next | run, OpenCL | run, TVM | run, CPU |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in parser.parse_args().networks:
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = measure(name, Path(folder))
            except EdgeSdkError as error:
                print(f"| {name} | {error.message[:300]} | | | | | |", flush=True)
                continue
        print(
            f"| {name} | {row.error:.1e} | {row.first_s:.1f} s | {1e3 * row.next_s:.0f} ms"
            f" | {1e3 * row.run_s:.1f} ms | {1e3 * row.tvm_run_s:.1f} ms"
            f" | {1e3 * row.cpu_run_s:.2f} ms |",
            flush=True,
        )


def measure(name: str, folder: Path) -> Row:
    """Raises EdgeSdkError where the network is refused or wrong."""
    case = models.prepare(name)
    bundles = {
        target: edgesdk.compile(
            case.model, target=target, shapes=case.shapes, output=folder / target
        )
        for target in (OPENCL, CPU)
    }
    with tvm_schedules():
        bundles["tvm"] = edgesdk.compile(
            case.model, target=OPENCL, shapes=case.shapes, output=folder / "tvm"
        )
    # PoCL keeps what it has compiled, too.
    fresh = {
        "EDGESDK_CACHE_DIR": str(folder / "code"),
        "POCL_CACHE_DIR": str(folder / "pocl"),
        "POCL_MAX_PTHREAD_COUNT": "1",
        "EDGESDK_NUM_THREADS": "1",
    }
    (folder / "pocl").mkdir()
    first = cpu_time(bundles[OPENCL], fresh, runs=1)
    following = cpu_time(bundles[OPENCL], fresh, runs=1)
    many = cpu_time(bundles[OPENCL], fresh, runs=1 + _RUNS)
    cpu_time(bundles["tvm"], fresh, runs=1)  # compiles
    tvm, cpu = (
        [cpu_time(bundles[which], fresh, runs=runs) for runs in (1, 1 + _RUNS)]
        for which in ("tvm", CPU)
    )
    run_s = (many - following) / _RUNS
    error = bundles[OPENCL].manifest.verification.max_relative_error
    assert error is not None
    return Row(
        name,
        error,
        first - run_s,
        following - run_s,
        run_s,
        (tvm[1] - tvm[0]) / _RUNS,
        (cpu[1] - cpu[0]) / _RUNS,
    )


@contextlib.contextmanager
def tvm_schedules() -> Iterator[None]:
    """Compiles as TVM would: plain layouts, and dlight's rules in the order of its own pipeline."""
    from tvm.s_tir import dlight

    compiler = importlib.import_module("edgesdk.compiler")
    lower = importlib.import_module("edgesdk.compiler.lower")
    rules = (
        dlight.gpu.Matmul(),
        dlight.gpu.GEMV(),
        dlight.gpu.Reduction(),
        dlight.gpu.GeneralReduction(),
        dlight.gpu.Fallback(),
    )

    def schedule(
        kernels: dict[str, Any], profile: TargetProfile, **_: object
    ) -> tuple[dict[str, Any], Coverage]:
        module = tvm.IRModule(kernels)
        with tvm.target.Target(profile.tvm):
            scheduled = dlight.ApplyDefaultSchedule(*rules)(module)
        functions = {gv.name_hint: function for gv, function in scheduled.functions.items()}
        return functions, Coverage({"dlight": tuple(functions)})

    with (
        mock.patch.object(compiler, "schedule_kernels", schedule),
        mock.patch.object(lower, "assign_layouts", lambda module, *_, **__: module),
    ):
        yield


def cpu_time(bundle: Bundle, environment: dict[str, str], *, runs: int) -> float:
    """Seconds that the launcher takes for `runs` runs on the bundle's own inputs."""
    inputs = [
        option
        for index, path in enumerate(bundle.manifest.golden_inputs)
        for option in ("--input", f"{index}={bundle.path / path}")
    ]
    process = subprocess.Popen(
        [bundle.launcher, bundle.library, *inputs, "--warmup", "0", "--repeat", str(runs)],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{bundle.launcher} failed")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
