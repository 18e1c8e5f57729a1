"""edgesdk against the other runtimes on this machine's CPU, as Markdown (stdout) and JSON.

    python benchmarks/cpu/run.py [MODEL ...] [--threads 1,2] [--engines ...] [--roofline]
    python benchmarks/cpu/run.py --int8 [MODEL ...] ...     the models quantised, beside fp32

Same machine, threads and inputs; engines take turns, each in a process of its own, and each one's
outputs are compared with ONNX Runtime's. The engines are installed into the cache folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import models
import roofline
from engine_venv import engine_python
from measure import REFERENCE, Runner, measure
from table import summary, table

import edgesdk
from edgesdk.errors import EdgeSdkError
from edgesdk.host import detect_host
from edgesdk.tuning.records import records_path

ENGINES = ("onnxruntime", "openvino", "mnn", "ncnn", "litert", "iree")
UNTUNED, TUNED = "edgesdk", "edgesdk tuned"
# In the table of quantised models: the same model in floats.
IN_FLOATS = " fp32"


def main() -> None:
    options = parse(sys.argv[1:])
    print_head(options)
    rows: list[dict[str, Any]] = []
    layers: list[str] = []
    load = []
    with tempfile.TemporaryDirectory(prefix="edgesdk-bench-") as temporary:
        for name in options.models:
            load.append(os.getloadavg()[0])
            folder = Path(temporary) / name
            folder.mkdir()
            print(f"{name}: preparing", file=sys.stderr, flush=True)
            original = models.prepare(name)
            case = models.quantised(original) if options.int8 else original
            bundles, errors = compile_bundles(case, folder)
            if options.int8:
                (folder / "fp32").mkdir()
                floats, _ = compile_bundles(original, folder / "fp32")
                bundles |= {f"{label}{IN_FLOATS}": b for label, b in floats.items()}
            for threads in options.threads:
                beside = original if options.int8 else None
                new = measure_case(case, bundles, errors, threads, folder, options, beside)
                rows += [{"model": name, "threads": threads, **row} for row in new]
                for row in new:
                    print(f"  {threads} {row}", file=sys.stderr)
                write_json(rows, load, options)
            if options.roofline and UNTUNED in bundles:
                best = bundles.get(TUNED, bundles[UNTUNED])
                layers += roofline.table(case, best, folder)
    load.append(os.getloadavg()[0])
    report(rows, layers, load, options)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    every = (*models.LIGHT, *models.REAL)
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(every)}")
    parser.add_argument("--threads", default="1,2", help="numbers, separated by commas")
    parser.add_argument("--engines", default=",".join(ENGINES), help="of those that are compared")
    parser.add_argument("--rounds", type=int, default=9, help="turns that each engine gets")
    parser.add_argument("--budget-s", type=float, default=60, help="seconds of turns a model")
    parser.add_argument("--clock", choices=("cpu", "wall"), help="what the ratios compare")
    parser.add_argument("--json", type=Path, help="write all numbers into this file")
    parser.add_argument("--int8", action="store_true", help="the models quantised, beside fp32")
    parser.add_argument("--roofline", action="store_true", help="also each layer's share of peak")
    options = parser.parse_args(arguments)
    options.models = options.models or list(every)
    unknown = set(options.models) - set(every)
    options.threads = [int(text) for text in options.threads.split(",")]
    options.engines = list(dict.fromkeys([REFERENCE, *options.engines.split(",")]))
    unknown |= set(options.engines) - set(ENGINES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return options


def compile_bundles(
    case: models.Case, folder: Path
) -> tuple[dict[str, edgesdk.Bundle], dict[str, str]]:
    """Compiles the network for this machine without and, if records apply, with tuning records.

    Returns the bundles and, for those that there are not, the reason.
    """
    bundles: dict[str, edgesdk.Bundle] = {}
    errors: dict[str, str] = {}
    for label in (UNTUNED, TUNED) if records_path(None).exists() else (UNTUNED,):
        print(f"  {label}: compiling", file=sys.stderr)
        try:
            bundle = edgesdk.compile(
                case.model,
                target="local",
                tuned=label == TUNED,
                output=folder / label.replace(" ", "-"),
            )
        except EdgeSdkError as error:
            errors[label] = error.message
            continue
        rungs = bundle.manifest.build["coverage"]["rungs"]
        if label == UNTUNED or any(rung.startswith("tuned") for rung in rungs):
            bundles[label] = bundle
    return bundles, errors


def measure_case(
    case: models.Case,
    bundles: dict[str, edgesdk.Bundle],
    errors: dict[str, str],
    threads: int,
    folder: Path,
    options: argparse.Namespace,
    in_floats: models.Case | None = None,
) -> list[dict[str, Any]]:
    """One row for each engine, and with `in_floats` one for ONNX Runtime on that, too."""
    files = {label: ("edgesdk", bundle.library.resolve()) for label, bundle in bundles.items()}
    for engine in options.engines:
        if engine != "litert":
            files[engine] = (engine, case.model)
        elif case.tflite is not None:
            files[engine] = (engine, case.tflite)
        else:
            errors = {**errors, engine: "no .tflite file of this network"}
    if in_floats is not None:
        files[f"{REFERENCE}{IN_FLOATS}"] = (REFERENCE, in_floats.model)
    with contextlib.ExitStack() as stack:
        runners = {}
        for label, (engine, file) in files.items():
            try:
                python = engine_python(engine)
            except RuntimeError as error:
                errors = {**errors, label: str(error)}
                continue
            job = folder / f"{label.replace(' ', '-')}.json"
            content = {"model": str(file), "inputs": str(case.inputs), "threads": threads}
            job.write_text(json.dumps({**content, "shapes": case.shapes}), encoding="utf-8")
            runners[label] = stack.enter_context(Runner(python, engine, job))
        results = measure(runners, rounds=options.rounds, folder=folder, budget_s=options.budget_s)
    failed = [{"engine": label, "error": text} for label, text in errors.items()]
    blank = {"version": "", "max_relative_error": None}
    return [result.summary() for result in results] + [{**blank, **row} for row in failed]


def print_head(options: argparse.Namespace) -> None:
    import psutil

    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    print(f"# Runtimes on the CPU, {'int8' if options.int8 else 'fp32'}, batch 1\n")
    print(f"{now}. {detect_host().cpu_name}, {psutil.cpu_count()} CPUs,", end=" ")
    print(f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.system()}.\n", flush=True)


def report(
    rows: list[dict[str, Any]], layers: list[str], load: list[float], options: argparse.Namespace
) -> None:
    versions = {row["engine"]: row["version"] for row in rows if row["version"]}
    for own in versions.keys() & {UNTUNED, TUNED}:
        versions[own] = f"{version('edgesdk')} (TVM {version('apache-tvm')})"
    print("Versions: " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".\n")
    print(f"Load average between the networks: {min(load):.1f} to {max(load):.1f}.", end=" ")
    print("CPU ms is the CPU time of all threads, user and system, of one run: what another")
    print("program on the machine takes away is not in it, but spinning threads are. Percentiles")
    print("are over turns for CPU time and over single runs for wall-clock time.\n")
    for threads in options.threads:
        # With more threads CPU time counts waiting threads that spin; then only the clock is fair.
        clock = options.clock or ("cpu" if threads == 1 else "wall")
        some = [row for row in rows if row["threads"] == threads]
        print(f"## {threads} thread{'s' if threads > 1 else ''}\n")
        print(f"Ratios compare {clock} time: below 1 is faster.\n")
        print("\n".join([*summary(some, f"{clock}_ms"), "", *table(some, f"{clock}_ms"), ""]))
    if layers:
        print("\n".join(layers))
    write_json(rows, load, options)


def write_json(rows: list[dict[str, Any]], load: list[float], options: argparse.Namespace) -> None:
    """Written after every network: an interrupted run keeps what it has measured."""
    if options.json is not None:
        content = {"rows": rows, "load_average": load}
        options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
