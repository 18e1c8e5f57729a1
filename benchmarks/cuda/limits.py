"""How near each layer comes to what the GPU can do, from per-layer times that were measured there.

    edgesdk bench BUNDLE --per-layer --json > times.json        (on the machine with the GPU)
    python benchmarks/cuda/limits.py resnet50 times.json --target cuda-sm_90 \\
        --tflops 67 --tbytes 4.8

A layer's floor is the larger of its multiply-adds at the rate `--tflops` and its bytes (all
arguments, once) at the rate `--tbytes`, both of the data sheet. Calls of one kernel are added up,
and the launches of a call. Timed one by one, a launch takes longer than in a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import networks

PRODUCTS = ("conv", "dense", "winograd_products")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", choices=networks.NAMES)
    parser.add_argument("times", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--tflops", type=float, required=True)
    parser.add_argument("--tbytes", type=float, required=True)
    parser.add_argument("--rows", type=int, default=12)
    options = parser.parse_args()
    work = work_of(options.network, options.target, options.precision)
    layers: dict[str, list[float]] = {}
    for layer in json.loads(options.times.read_text(encoding="utf-8"))["layers"]:
        # Later launches of a call (adding up parts of sums, say) do no work of their own.
        first = not layer["kernel"].rpartition("_")[2].isdigit()
        flops, size = work.get(layer["name"], (0.0, 0.0)) if first else (0.0, 0.0)
        sums = layers.setdefault(layer["name"], [0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate((float(first), layer["mean_ms"] * 1e3, flops, size)):
            sums[i] += value
    total = sum(sums[1] for sums in layers.values())
    print("| layer | calls | µs | of all | TFLOP/s | TB/s | of its limit |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    ranked = sorted(layers.items(), key=lambda item: -item[1][1])
    for name, sums in ranked[: options.rows]:
        print(_row(name, sums, total, options))
    rest = [sum(column) for column in zip(*(s for _, s in ranked[options.rows :]), strict=True)]
    if rest:
        print(_row("all others", rest, total, options))
    print(_row("together", [sum(c) for c in zip(*layers.values(), strict=True)], total, options))


def work_of(network: str, target: str, precision: str) -> dict[str, tuple[float, float]]:
    """Kernel -> floating-point operations and bytes of a call."""
    import tvm

    from edgesdk.compiler.lower import lower
    from edgesdk.frontend import import_model
    from edgesdk.precision import find_precision, in_precision
    from edgesdk.profiles import load_target
    from edgesdk.schedules.features import kernel_facts

    profile = in_precision(load_target(target), find_precision(precision))
    with tvm.target.Target(profile.tvm):
        module = lower(import_model(networks.path_of(network)).take_module(), profile)
    work = {}
    for gv, function in module.functions.items():
        if isinstance(function, tvm.tirx.PrimFunc):
            facts = kernel_facts(function)
            twice = 2 if any(word in gv.name_hint for word in PRODUCTS) else 1
            work[gv.name_hint] = (float(twice * facts.iterations), float(facts.size_bytes))
    return work


def _row(name: str, sums: list[float], total: float, options: Any) -> str:
    calls, us, flops, size = sums
    tflops, tbytes = flops / us / 1e6, size / us / 1e6
    share = max(tflops / options.tflops, tbytes / options.tbytes)
    return (
        f"| {name} | {calls:.0f} | {us:.1f} | {us / total:.0%} | {tflops:.1f} | {tbytes:.2f} |"
        f" {share:.0%} |"
    )


if __name__ == "__main__":
    main()
