"""Tuning as Markdown: trials a minute beside TVM's own tuner, overhead, latency against trials.

    .venv/bin/python benchmarks/tuning.py [TRIALS] > benchmarks/TUNING.md

Both tuners get the same network, machine, number of trials and batch size, and start with nothing.
The network is SqueezeNet 1.0 of the `onnx` package with random weights. Nothing here is a test.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import onnx

import edgesdk
from edgesdk.host import detect_host
from edgesdk.profiles import load_target
from edgesdk.tuning.session import BATCH
from edgesdk.tuning.state import SessionState

sys.path.append(str(Path(__file__).resolve().parent / "cpu"))
from models import random_light_model  # the one recipe for random weights

OVERHEAD_TRIALS = 60


def main(trials: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = squeezenet(folder)
        print("# Tuning\n")
        names = ("edgesdk", "apache-tvm", "apache-tvm-ffi", "xgboost")
        print(
            f"{detect_host().cpu_name}, {platform.platform()}, Python {platform.python_version()};"
        )
        print(", ".join(f"{name} {version(name)}" for name in names) + ".")
        print(f"SqueezeNet 1.0, {trials} trials in batches of {BATCH}.\n")
        ours = run_ours(model, folder, trials)
        with contextlib.redirect_stdout(sys.stderr):  # its log
            stock_s = run_stock(model, folder, trials)
        print("## Trials a minute, from the start of the command to the last trial\n")
        print("| tuner | seconds | trials a minute |\n| --- | ---: | ---: |")
        for name, seconds in (("edgesdk tune", ours.search_s), ("MetaSchedule", stock_s)):
            print(f"| {name} | {seconds:.0f} | {60 * trials / seconds:.1f} |")
        print(f"\nRatio: {stock_s / ours.search_s:.1f} (aim: 4 or more).\n")
        print("## Latency against trials\n")
        print("Estimated from the kernels while searching; the last line is the whole network.\n")
        print("| trials | latency |\n| ---: | ---: |")
        for count, latency_ms in ours.history:
            print(f"| {count} | {latency_ms:.2f} ms |")
        final = ours.final
        if final is None:
            print("\nNo candidate beat the default schedules for good: nothing to ship.\n")
        else:
            print(
                f"\nUntuned {statistics.median(final.untuned_ms):.2f} ms,"
                f" tuned {statistics.median(final.tuned_ms):.2f} ms: {final.gain:.2f} times"
                f" ({'shipped' if final.shipped else 'not shipped'}).\n"
            )
        print_overhead(folder)


def squeezenet(folder: Path) -> Path:
    """The architecture from the `onnx` package, with random weights."""
    path = folder / "squeezenet.onnx"
    onnx.save(random_light_model("squeezenet"), path)
    return path


class Ours:
    """What a session of edgesdk showed."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.search_s = 0.0
        self.history: list[tuple[int, float]] = []
        self.final = None

    def show(self, state: SessionState) -> None:
        if state.phase == "tuning":
            self.search_s = time.monotonic() - self.started
            if state.latency_ms and (
                not self.history or state.trials >= self.history[-1][0] + BATCH
            ):
                self.history.append((state.trials, state.latency_ms))


def run_ours(model: Path, folder: Path, trials: int) -> Ours:
    ours = Ours()
    result = edgesdk.tune(
        model,
        output=folder / "out",
        records=folder / "records.db",
        trials=trials,
        show=ours.show,
    )
    ours.final = result.state.final
    return ours


def run_stock(model: Path, folder: Path, trials: int) -> float:
    """Seconds that MetaSchedule takes with its defaults for the same network, as TVM lowers it."""
    import tvm
    from tvm import relax
    from tvm.s_tir import meta_schedule

    from edgesdk.frontend import import_model

    target = tvm.target.Target(load_target("local").tvm)
    module = import_model(model).module
    started = time.monotonic()
    with target:
        passes = [
            relax.transform.LegalizeOps(),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
        ]
        module = tvm.transform.Sequential(passes)(module)
        meta_schedule.relax_integration.tune_relax(
            module,
            {},
            target,
            str(folder / "stock"),
            max_trials_global=trials,
            num_trials_per_iter=BATCH,
            seed=0,
        )
    return time.monotonic() - started


def print_overhead(folder: Path) -> None:
    """CPU time of this machine's side for a trial, besides its build: over a local connection."""
    from edgesdk.deploy.transport import open_transport
    from edgesdk.devices import get_device
    from edgesdk.schedules import kernel_space
    from edgesdk.toolchain import load_toolchain
    from edgesdk.tuning.agent import Agent
    from edgesdk.tuning.builder import Builder, BuildRequest, BuildTask
    from edgesdk.tuning.measure import MeasureRequest, TensorArgument
    from edgesdk.tuning.tasks import collect_tasks, draw_arguments, reference_output

    profile = load_target("local")
    imported = edgesdk.frontend.import_model(folder / "squeezenet.onnx")
    task = min(
        (t for t in collect_tasks(imported, profile) if t.space.size > 1),
        key=lambda t: t.operations,
    )
    arguments = draw_arguments(task, 0)
    arrays = [*arguments[:-1], reference_output(task, arguments)]
    library = folder / "candidate.so"
    space = kernel_space(task.function, profile)
    import tvm

    with Builder(profile, load_toolchain(profile.toolchain)) as builder:
        builder.add_task(BuildTask(task.workload, tvm.ir.save_json(task.function)))
        request = BuildRequest(0, task.workload, space.candidate(space.default), library)
        assert not next(iter(builder.build([request]))).error_kind
    with open_transport(get_device("local")) as transport, Agent(transport, profile) as agent:
        tensors = tuple(
            TensorArgument(a.shape, str(a.dtype), agent.put(a.tobytes()), i == len(arrays) - 1)
            for i, a in enumerate(arrays)
        )
        requests = [
            MeasureRequest(
                candidate=number,
                library=library,
                symbol="candidate",
                arguments=tensors,
                tolerance=1e-4,
                number=1,
                repeat=1,
                min_repeat_ms=0.0,
            )
            for number in range(OVERHEAD_TRIALS)
        ]
        wall, cpu = time.perf_counter(), time.process_time()
        results = list(agent.measure(requests))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert all(result.ok for result in results)
    print("## Overhead of a trial besides its build and its samples\n")
    print("One sample of one call, so nearly all of the time is overhead (aim: 20 ms over SSH).\n")
    print("| | per trial |\n| --- | ---: |")
    print(f"| from the request to the next one | {wall / OVERHEAD_TRIALS * 1e3:.1f} ms |")
    print(f"| CPU time of this side | {cpu / OVERHEAD_TRIALS * 1e3:.2f} ms |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
