"""Measures edgesdk beside PyTorch on the NVIDIA GPU of this machine, and prints Markdown.

    python benchmarks/cuda/run.py --target cuda-sm_90
    python benchmarks/cuda/run.py --target cuda-sm_90 --tune-minutes 2 resnet50

Both keep inputs and outputs in the GPU's memory and replay a CUDA graph: edgesdk in
examples/cuda_cpp, which is built here, PyTorch in torch_graph.py. Needs edgesdk, g++, and a Python
with torch and torchvision (`--torch-python`).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import networks  # noqa: E402

TORCH_NAMES = {
    "resnet50": "resnet50",
    "resnet18": "resnet18",
    "mobilenet_v2": "mobilenet_v2",
    "squeezenet": "squeezenet1_0",
}
_ROUNDS = 5
_LIMIT_S = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(networks.NAMES))
    parser.add_argument("--target", required=True)
    parser.add_argument("--tune-minutes", type=float, default=0.0)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "tf32", "fp16"])
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--output", type=Path, help="write all turns as JSON")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    rows, turns = [], {}
    for name in options.networks:
        model = networks.path_of(name)
        programs = {
            f"edgesdk {precision}": _program(
                ["compile", str(model), "--precision", precision],
                options.target,
                work / f"{name}-{precision}",
            )
            for precision in options.precisions
        }
        if options.tune_minutes:
            minutes = str(options.tune_minutes)
            programs["edgesdk fp32 tuned"] = _program(
                ["tune", str(model), "--device", "local", "--minutes", minutes],
                options.target,
                work / f"{name}-tuned",
            )
        torch = {
            mode: [options.torch_python, str(ROOT / "benchmarks/cuda/torch_graph.py"), mode]
            for mode in ("fp32", "tf32", "fp16 compiled")
        }
        found: dict[str, list[float]] = {}
        for _ in range(_ROUNDS):
            for engine, program in programs.items():
                found.setdefault(engine, []).append(_latency_us(program))
        # PyTorch starts in some seconds: its turns follow each other in one process.
        for mode, command in torch.items():
            result = _run([*command, TORCH_NAMES[name], str(_ROUNDS)])
            found[f"PyTorch {mode}"] = json.loads(result.splitlines()[-1])
        turns[name] = found
        rows.append((name, {engine: statistics.median(us) for engine, us in found.items()}))
        print(name, {k: f"{v:.1f}" for k, v in rows[-1][1].items()}, file=sys.stderr, flush=True)
    if options.output:
        options.output.write_text(json.dumps(turns), encoding="utf-8")
    print(_table(rows, turns))
    shutil.rmtree(work)


def _program(what: list[str], target: str, bundle: Path) -> Path:
    """Makes a bundle by the command `what`, and builds the example program for it."""
    command = [sys.executable, "-c", "from edgesdk.cli import main; main()"]
    _run([*command, *what, "--target", target, "-o", str(bundle)])
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    error = manifest["verification"]["max_relative_error"]
    print(f"{bundle.name}: largest error {error:.2g} relative", file=sys.stderr, flush=True)
    name = manifest["name"]
    library = next((bundle / "lib").glob("*.so"))
    program = bundle / "gpu_latency"
    _run(
        [
            "g++", "-O2", "-std=c++17", str(ROOT / "examples/cuda_cpp/main.cc"),
            f"-I{bundle / 'include'}", f'-DNETWORK_HEADER="{name}.h"',
            f"-DNETWORK_OPEN=edgesdk_open_{name}", str(library), f"-Wl,-rpath,{library.parent}",
            "-o", str(program),
        ]
    )  # fmt: skip
    return program


def _latency_us(program: Path) -> float:
    """The median of 1000 runs with inputs and outputs on the GPU."""
    text = _run([str(program), "--on-gpu"])
    match = re.search(r"median ([\d.]+) us", text)
    if match is None:
        raise SystemExit(f"unexpected output of {program}: {text[-300:]}")
    return float(match[1])


def _run(argv: list[str]) -> str:
    result = subprocess.run(argv, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if result.returncode:
        raise SystemExit(f"{argv[:4]} failed:\n{result.stdout[-1000:]}\n{result.stderr[-2000:]}")
    return result.stdout


def _table(rows: list, turns: dict) -> str:
    engines = list(rows[0][1])
    lines = [
        "| network | "
        + " | ".join(f"{e}, µs" for e in engines)
        + " | edgesdk is faster than fp32 |",
        "|---|" + "---:|" * (len(engines) + 1),
    ]
    ratios = []
    for name, medians in rows:
        best = min(v for e, v in medians.items() if e.startswith("edgesdk fp32"))
        ratios.append(medians["PyTorch fp32"] / best)
        spread = {e: f"{min(turns[name][e]):.0f} to {max(turns[name][e]):.0f}" for e in engines}
        cells = " | ".join(f"{medians[e]:.0f} ({spread[e]})" for e in engines)
        lines.append(f"| {name} | {cells} | {ratios[-1]:.2f} |")
    lines.append(f"\nGeometric mean of the last column: {statistics.geometric_mean(ratios):.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
