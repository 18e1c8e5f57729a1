"""How near each layer comes to what this machine can do: the roofline, one thread.

A kernel's floor is the larger of its operations at the peak rate of multiply-adds and its bytes
(all arguments, once) at the rate of reading memory; both rates are measured here (peak.c). A layer
whose data fit into a cache may be above the floor of its bytes: then the share is over 100 %.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgesdk.proc import run_command

if TYPE_CHECKING:
    from models import Case

    import edgesdk

_PEAK_SOURCE = Path(__file__).with_name("peak.c")
_LIMIT_S = 300.0
# A kernel whose largest block multiplies and adds: two operations an iteration, else one.
PRODUCTS = ("conv", "dense", "matmul", "gemm", "winograd")
_SHOWN = 8
_REPEAT = 25


@dataclass(frozen=True)
class Peak:
    """What one thread of this machine does at most."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Layer:
    """A kernel's calls in one run, all together: seconds, floating-point operations, bytes."""

    name: str
    calls: int
    time_s: float
    flops: float
    size_bytes: float

    def floor_s(self, peak: Peak) -> float:
        return max(self.flops / peak.flops_per_s, self.size_bytes / peak.bytes_per_s)

    def bound(self, peak: Peak) -> str:
        compute = self.flops / peak.flops_per_s
        return "compute" if compute >= self.size_bytes / peak.bytes_per_s else "memory"


@cache
def measured_peak(folder: Path) -> Peak:
    """Builds and runs peak.c. Raises RuntimeError when there is no compiler."""
    program = folder / "peak"
    result = run_command(
        ["gcc", "-O3", "-march=native", "-o", program, _PEAK_SOURCE], timeout_s=_LIMIT_S
    )
    if result.ok:
        result = run_command([program], timeout_s=_LIMIT_S)
    if not result.ok:
        raise RuntimeError(f"peak.c: {result.last_line()}")
    flops, size = result.stdout_text.split()
    return Peak(float(flops), float(size))


def layers_of(case: Case, bundle: edgesdk.Bundle) -> list[Layer]:
    """Times every layer of a bundle, one thread, and counts what its kernel has to do.

    A layer has wall-clock time only, and another program can only lengthen it: so the smallest of
    single runs is taken, each in a process of its own.
    """
    from edgesdk.deploy.run import placed_bundle
    from edgesdk.frontend import import_model
    from edgesdk.profiles import load_target
    from edgesdk.tuning.tasks import collect_tasks

    time_ms: dict[str, float] = {}
    with placed_bundle(bundle, "local") as placed:
        command = ["--selftest", placed.path("golden"), "--threads", "1", "--per-layer"]
        for _ in range(_REPEAT):
            sums: dict[str, float] = defaultdict(float)
            for layer in placed.launch([*command, "--warmup", "2"]).report["layers"]:
                sums[layer["name"]] += layer["mean_ms"]
            for name, value in sums.items():
                time_ms[name] = min(value, time_ms.get(name, value))
    layers = []
    for task in collect_tasks(import_model(case.model), load_target("local")):
        per_iteration = 2 if any(word in task.name for word in PRODUCTS) else 1
        size = sum(
            int(np.prod([int(d) for d in p.ty.shape])) * np.dtype(str(p.ty.dtype)).itemsize
            for p in task.function.params
        )
        spent = sum(time_ms.get(name, 0.0) for name in task.names)
        if spent > 0:
            work = float(task.operations * per_iteration * task.calls)
            layers.append(Layer(task.name, task.calls, spent / 1e3, work, float(size * task.calls)))
    return sorted(layers, key=lambda layer: -layer.time_s)


def table(case: Case, bundle: edgesdk.Bundle, folder: Path) -> list[str]:
    """Lines of Markdown: the layers that take the most time, and the network as a whole."""
    peak = measured_peak(folder.parent)
    layers = layers_of(case, bundle)
    total_s = sum(layer.time_s for layer in layers)
    flops = sum(layer.flops for layer in layers)
    lines = [
        f"### {case.name}: where the time goes ({bundle.path.name}, 1 thread)\n",
        f"{1e3 * total_s:.2f} ms in {len(layers)} kernels, {flops / 1e9:.2f} GFLOP, "
        f"{flops / total_s / 1e9:.0f} GFLOP/s, "
        f"{flops / total_s / peak.flops_per_s:.0%} of the peak. Measured: "
        f"{peak.flops_per_s / 1e9:.0f} GFLOP/s, {peak.bytes_per_s / 1e9:.1f} GB/s.\n",
        "| kernel | calls | share of time | GFLOP/s | of peak | GB/s | bound | of roofline |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for layer in layers[:_SHOWN]:
        rate, moved = layer.flops / layer.time_s, layer.size_bytes / layer.time_s
        lines.append(
            f"| {layer.name[:48]} | {layer.calls} | {layer.time_s / total_s:.0%} | "
            f"{rate / 1e9:.1f} | {rate / peak.flops_per_s:.0%} | {moved / 1e9:.1f} | "
            f"{layer.bound(peak)} | {layer.floor_s(peak) / layer.time_s:.0%} |"
        )
    return [*lines, ""]
