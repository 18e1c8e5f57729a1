"""Measures decisions for the kernels of real networks on this machine: what a cost model may learn.

    python benchmarks/cost_model/gather.py OUT.json [MODEL ...] [--candidates 20] [--target local]

Each kernel is measured once, with its default decision and others drawn at random. A decision's
cost is the CPU time of one thread, the minimum of several turns that all decisions of the kernel
take one after the other: what another program takes away is not in it. A kernel that is in
OUT.json already, with the same default, is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before TVM is loaded: its thread pool must not help.
os.environ["TVM_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).resolve().parents[1] / "cpu"))

import models

from edgesdk.compiler import codegen
from edgesdk.errors import EdgeSdkError
from edgesdk.frontend import import_model
from edgesdk.host import detect_host
from edgesdk.proc import run_command
from edgesdk.profiles import TargetProfile, load_target
from edgesdk.schedules import apply_candidate
from edgesdk.schedules.features import kernel_facts
from edgesdk.tuning.tasks import Task, collect_tasks, draw_arguments, is_tunable

# Kernels with fewer innermost iterations are left out: calls cost more than they do.
_SMALLEST = 20_000
_TURNS = 4
_TURN_S = 0.003
_TASK_LIMIT_S = 240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--candidates", type=int, default=20)
    parser.add_argument("--target", default="local")
    options = parser.parse_args()
    profile = load_target(options.target)
    data = read(options.output, profile, options.target)
    for name in options.models or (*models.REAL, *models.LIGHT):
        path = models.prepare(name).model
        try:
            tasks = collect_tasks(import_model(path), profile)
        except EdgeSdkError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        # Calls of an earlier run with this file are counted anew.
        for kernel in data["kernels"].values():
            kernel["models"].pop(name, None)
        for task in tasks:
            if not is_tunable(task) or task.operations < _SMALLEST:
                continue
            facts = kernel_facts(task.function)
            # What follows the sums (bias, activation) is much the same for all.
            key = f"{task.space.template} {facts.spatial} {facts.reduce} {facts.row}"
            kernel = data["kernels"].get(key, {"models": {}, "facts": asdict(facts)})
            # Measured again where the default decision is another one now.
            if kernel.get("default") != [task.space.default[k] for k in sorted(task.space.knobs)]:
                started = time.monotonic()
                try:
                    kernel |= {"name": task.name, **measured(task, profile, options.candidates)}
                except RuntimeError as error:
                    print(f"{name} {task.name}: {error}", file=sys.stderr)
                    continue
                spent = f"{time.monotonic() - started:.0f} s"
                print(f"{name} {task.name[:60]}: {len(kernel['trials'])} in {spent}", flush=True)
            kernel["models"][name] = kernel["models"].get(name, 0) + task.calls
            data["kernels"][key] = kernel
            write(options.output, data)
        write(options.output, data)


def read(path: Path, profile: TargetProfile, target: str) -> dict[str, Any]:
    if path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    provenance = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{detect_host().cpu_name}, {platform.system()}",
        "command": " ".join(["python", *sys.argv]),
        "target": target,
        "tvm": version("apache-tvm"),
        "edgesdk": version("edgesdk"),
        "cost": "microseconds of CPU time of one thread, minimum of several turns",
        "cpu": asdict(profile.cpu),
    }
    return {"provenance": provenance, "kernels": {}}


def write(path: Path, data: dict[str, Any]) -> None:
    partial = path.with_suffix(".part")
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data["kernels"].items()]
    head = json.dumps(data["provenance"])
    body = ",\n".join(lines)
    partial.write_text(f'{{"provenance": {head},\n"kernels": {{\n{body}\n}}}}\n', encoding="utf-8")
    partial.replace(path)


def measured(task: Task, profile: TargetProfile, count: int) -> dict[str, Any]:
    """{"template", "default", "knobs" (their names), "trials": [[values ..., microseconds], ...]}.

    Raises RuntimeError if the process that measures fails or takes too long.
    """
    names = sorted(task.space.knobs)
    decisions = drawn(task, profile, count)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_measure, args=(task, profile, decisions, queue.put))
    process.start()
    process.join(_TASK_LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
        raise RuntimeError(f"not measured within {_TASK_LIMIT_S} s")
    if process.exitcode != 0:
        raise RuntimeError(f"measuring ended with exit code {process.exitcode}")
    times = queue.get()
    trials = [
        [*(d[k] for k in names), round(times[i] * 1e6, 3)]
        for i, d in enumerate(decisions)
        if i in times
    ]
    template = task.space.template
    default = [task.space.default[k] for k in names]
    return {"template": template, "default": default, "knobs": names, "trials": trials}


def drawn(task: Task, profile: TargetProfile, count: int) -> list[dict[str, int]]:
    """The default first, then others at random; of four three that fill registers and fit them."""
    space, draw = task.space, random.Random(task.workload)
    every = [
        dict(zip(space.knobs, values, strict=True))
        for values in itertools.product(*space.knobs.values())
    ]
    draw.shuffle(every)
    registers = profile.cpu.vector_registers

    def plausible(decision: dict[str, int]) -> bool:
        sums = decision.get("columns", 1) * decision.get("blocks", 1)
        return registers // 4 <= sums <= registers + 2

    good = [d for d in every if plausible(d) and d != space.default][: count * 3 // 4]
    rest = [d for d in every if d not in good and d != space.default]
    return [space.default, *good, *rest][:count]


def _measure(task: Task, profile: TargetProfile, decisions: list[dict[str, int]], put: Any) -> None:
    import tvm

    functions = {}
    for index, knobs in enumerate(decisions):
        try:
            scheduled = apply_candidate(task.function, profile, task.space.candidate(knobs))
        except Exception as error:  # TVM raises many types
            print(f"{task.name} {knobs}: {codegen.last_words(error)}", file=sys.stderr)
            continue
        functions[f"k{index}"] = scheduled
    with tempfile.TemporaryDirectory() as folder:
        objects, library = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        codegen.write_object(functions, tvm.target.Target(profile.tvm), objects)
        linked = run_command(["cc", "-shared", "-o", library, objects], timeout_s=60)
        assert linked.ok, linked.stderr_text
        built = tvm.runtime.load_module(str(library))
    arguments = [tvm.runtime.tensor(a) for a in draw_arguments(task, 0)]
    calls, best, numbers = {}, {}, {}
    for name in functions:
        index = int(name[1:])
        calls[index] = built[name]
        calls[index](*arguments)
        start = time.thread_time()
        calls[index](*arguments)
        numbers[index] = max(1, int(_TURN_S / max(1e-7, time.thread_time() - start)))
    for _ in range(_TURNS):
        for index, call in calls.items():
            number = numbers[index]
            start = time.thread_time()
            for _ in range(number):
                call(*arguments)
            spent = (time.thread_time() - start) / number
            best[index] = min(spent, best.get(index, spent))
    put(best)
    os._exit(0)


if __name__ == "__main__":
    main()
