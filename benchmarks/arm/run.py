"""edgesdk for ARM boards against ONNX Runtime's aarch64 wheel, where no board is at hand.

    python benchmarks/arm/run.py [MODEL ...] [--target rpi4] [--json FILE]

Two things are counted, and neither is a time: the instructions of one run of a network, under the
same emulator with the same counter, one thread; and the cycles that llvm-mca models for the inner
loops of edgesdk's kernels.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "cpu"))

import emulator
import models
from loops import Loop, cycles, disassemble, find_loops
from measure import largest_error
from roofline import PRODUCTS
from table import geometric_mean

from edgesdk.compiler import CompiledModel, compile_model
from edgesdk.errors import EdgeSdkError
from edgesdk.frontend import import_model
from edgesdk.proc import run_command
from edgesdk.profiles import load_target
from edgesdk.tuning.tasks import Task, collect_tasks

MODELS = ("squeezenet", "shufflenet", "orientation", "text-direction", "faces", "embedding")
CORES = ("cortex-a53", "cortex-a72", "cortex-a76")
_RUNS = 2
_KERNELS_SHOWN = 4


def main() -> None:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", default=MODELS)
    parser.add_argument("--target", default="rpi4", help="an aarch64 target profile")
    parser.add_argument("--json", type=Path, help="write all numbers into this file")
    options = parser.parse_args()
    board = emulator.prepare(load_target(options.target).emulator.cpu)
    print_head(board, options.target)
    rows, loops = [], []
    with tempfile.TemporaryDirectory(prefix="edgesdk-bench-") as temporary:
        for name in options.models:
            print(f"{name}", file=sys.stderr)
            folder = Path(temporary) / name
            folder.mkdir()
            try:
                row, found = measure(name, options.target, board, folder)
            except (EdgeSdkError, RuntimeError) as error:
                row, found = {"model": name, "error": " ".join(str(error).split())[:160]}, []
            print(f"  {row}", file=sys.stderr)
            rows.append(row)
            loops += found
            if options.json is not None:  # after every network: it may be interrupted
                content = {"rows": rows, "loops": loops}
                options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    print_instructions(rows)
    print_loops(loops)


def measure(
    name: str, target: str, board: emulator.Emulator, folder: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Counts one network with both engines; returns its row and those of its inner loops."""
    case = models.prepare(name)
    profile = load_target(target)
    tasks = collect_tasks(import_model(case.model), profile)
    compiled = compile_model(
        import_model(case.model), profile, build=folder, name_build=lambda: "benchmark"
    )
    ours, outputs = count_edgesdk(case, compiled, board, folder)
    saved = folder / "ort.npz"
    script = Path(emulator.__file__).with_name("ort_run.py")
    theirs = board.instructions([board.python, script, case.model, case.inputs, saved], _RUNS)
    with np.load(saved) as arrays:
        expected = [arrays[f"arr_{i}"] for i in range(len(arrays.files))]
    # A multiply-add of four lanes is the least that a vector unit of 128 bits can do it with.
    macs = sum(
        task.operations * task.calls for task in tasks if any(w in task.name for w in PRODUCTS)
    )
    row = {
        "model": name,
        "edgesdk": ours,
        "onnxruntime": theirs,
        "multiply_adds": macs,
        "max_relative_error": largest_error(expected, outputs),
    }
    return row, inner_loops(name, tasks, folder / "kernels.o")


def count_edgesdk(
    case: models.Case, compiled: CompiledModel, board: emulator.Emulator, folder: Path
) -> tuple[int, list[np.ndarray]]:
    """Instructions of a run through the launcher, and the outputs."""
    argv: list[str | Path] = [compiled.launcher, compiled.library, "--threads", "1"]
    with np.load(case.inputs) as arrays:
        for index, name in enumerate(case.shapes):
            np.save(folder / f"input_{index}.npy", np.ascontiguousarray(arrays[name]))
            argv += ["--input", f"{name}={folder / f'input_{index}.npy'}"]
    results = folder / "outputs"
    results.mkdir()
    count = board.instructions([*argv, "--output", results, "--repeat"], _RUNS)
    files = sorted(results.glob("output_*.npy"), key=lambda p: int(p.stem.rpartition("_")[2]))
    return count, [np.load(file) for file in files]


def inner_loops(model: str, tasks: list[Task], kernels: Path) -> list[dict[str, Any]]:
    """The widest inner loop of each of the kernels with the most work, with modelled cycles."""
    names = sorted(name for task in tasks for name in task.names)
    widest: dict[str, Loop] = {}
    for loop in find_loops(disassemble(kernels)):
        kernel = kernel_of(loop.function, names)
        if kernel is None:
            continue
        if loop.multiply_adds > (widest[kernel].multiply_adds if kernel in widest else 0):
            widest[kernel] = loop
    work: Counter[str] = Counter()
    for task in tasks:
        work[task.name] = task.operations * task.calls
    total = work.total()
    rows = []
    for name, amount in work.most_common(_KERNELS_SHOWN):
        if name in widest:
            loop = widest[name]
            row: dict[str, Any] = {"model": model, "kernel": name, "share": amount / total}
            row |= {"instructions": len(loop.lines), "stores": loop.stores}
            row["multiply_adds"] = loop.multiply_adds
            rows.append(row | {core: cycles(loop, core) for core in CORES})
    return rows


def kernel_of(symbol: str, names: list[str]) -> str | None:
    """Returns the kernel that a function of the object file belongs to, or None.

    The compiler names the kernel NAME, the third of all in alphabetical order, `k2_NAME` with a
    prefix for what is exported, and a suffix for what runs in threads.
    """
    found = re.match(r"(?:__tvm_ffi_)?k(\d+)_", symbol)
    return names[int(found[1])] if found and int(found[1]) < len(names) else None


def print_head(board: emulator.Emulator, target: str) -> None:
    mca = run_command(["llvm-mca", "--version"], timeout_s=30).stdout_text
    version = re.search(r"LLVM version ([\d.]+)", mca)
    print("# ARM without a board: counts and models, no times\n")
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}, target {target}, {board.version()}", end=" ")
    print(f"as {board.cpu}, llvm-mca {version[1] if version else '?'},", end=" ")
    print(f"{', '.join(emulator.WHEELS)} (aarch64 wheels), 1 thread.\n", flush=True)


def print_instructions(rows: list[dict[str, Any]]) -> None:
    print("## Instructions of one run, in millions\n")
    print("Counted by a TCG plugin under emulation. Not a time: an instruction may take from half")
    print("a cycle to hundreds. `least` is the network's multiply-adds divided by 4, the lanes of")
    print("a 128-bit vector: what an ideal direct kernel without loads or loops would execute.\n")
    print("| model | edgesdk | ONNX Runtime | edgesdk / ORT | least | max error |")
    print("|---|---|---|---|---|---|")
    ratios = []
    for row in rows:
        if "error" in row:
            print(f"| {row['model']} | - | - | - | - | {row['error'].replace('|', '/')} |")
            continue
        ratio = row["edgesdk"] / row["onnxruntime"]
        ratios.append(ratio)
        error = row["max_relative_error"]
        print(
            f"| {row['model']} | {row['edgesdk'] / 1e6:.1f} | {row['onnxruntime'] / 1e6:.1f} | "
            f"{ratio:.2f} | {row['multiply_adds'] / 4e6:.1f} | "
            f"{'outputs cannot be matched' if error is None else f'{error:.0e}'} |"
        )
    if ratios:
        print(f"\nGeometric mean of the ratios: {geometric_mean(ratios):.2f}.\n")


def print_loops(rows: list[dict[str, Any]]) -> None:
    print("## Inner loops of edgesdk's kernels by llvm-mca\n")
    print("Modelled cycles of one iteration of the widest loop of each network's largest kernels;")
    print("share: of the network's multiply-adds; stores in a loop that sums mean that registers")
    print("were too few. The model knows no cache, and LLVM has no model")
    print("of its own for some cores: it takes a related one's.\n")
    cores = " | ".join(CORES)
    print(f"| model | kernel | share | instructions | of them stores | multiply-adds | {cores} |")
    print(f"|---|---|---|---|---|---|{'---|' * len(CORES)}")
    for row in rows:
        timings = " | ".join(
            f"{row[core]:.1f} ({row['multiply_adds'] / row[core]:.1f}/cycle)" for core in CORES
        )
        print(
            f"| {row['model']} | {row['kernel'][:40]} | {row['share']:.0%} | {row['instructions']}"
            f" | {row['stores']} | {row['multiply_adds']} | {timings} |"
        )


if __name__ == "__main__":
    main()
