"""Fits the constants of a GPU template's cost formula to what calibrate.py measured.

    python benchmarks/cuda/fit.py timings.json --rounds 1500
    python benchmarks/cuda/fit.py --products tf32 tf32.json fp16.json

Random steps from the present constants; a step is kept if the loss falls: the spread of the
logarithm of estimate over measurement, and, more important, how much slower the tiling of least
cost is than the best one measured. Prints both before and after, and the constants.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edgesdk.profiles import load_target
from edgesdk.schedules.gpu import gemm, tensor_cores

_CYCLES_PER_US = 1980.0  # of an H200 at its highest clock

Layer = tuple[Any, list[dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Fit:
    spread: float  # standard deviation of log(estimate / measurement)
    bias: float  # mean of it
    loss_of_choice: float  # chosen tiling's time over the best one's: geometric mean
    worst_choice: float

    @property
    def loss(self) -> float:
        return 0.5 * self.spread + 0.2 * abs(self.bias) + 2 * math.log(self.loss_of_choice)


def fit_of(layers: list[Layer], gpu: Any, template: Any, constants: Any) -> Fit:
    logs, choices = [], []
    for problem, tilings in layers:
        costs = [template.cost_of(t["knobs"], problem, gpu, constants) for t in tilings]
        times = [t["us"] for t in tilings]
        logs += [math.log(c / _CYCLES_PER_US / t) for c, t in zip(costs, times, strict=True)]
        choices.append(times[costs.index(min(costs))] / min(times))
    return Fit(
        statistics.pstdev(logs),
        statistics.mean(logs),
        statistics.geometric_mean(choices),
        max(choices),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("timings", type=Path, nargs="+")
    parser.add_argument("--products", choices=("fp32", "tf32", "fp16"), default="fp32")
    parser.add_argument("--target", default="cuda-sm_90")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    gpu = load_target(options.target).gpu
    template: Any = gemm if options.products == "fp32" else tensor_cores
    by_layer: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for path in options.timings:
        for result in json.loads(path.read_text(encoding="utf-8")):
            if "us" in result:
                by_layer.setdefault(tuple(result["problem"]), []).append(result)
    layers = [(template.Problem(*key), found) for key, found in by_layer.items()]
    rng = random.Random(options.seed)
    constants = template.FITTED
    best = fit_of(layers, gpu, template, constants)
    print(f"{sum(len(t) for _, t in layers)} tilings of {len(layers)} problems, before: {best}")
    names = [field.name for field in dataclasses.fields(constants)]
    for _ in range(options.rounds):
        changes = {
            name: getattr(constants, name) * math.exp(rng.gauss(0, 0.3))
            for name in rng.sample(names, rng.choice((1, 1, 2, 3)))
        }
        if changes.get("whole_rounds", 0) > 1:
            continue
        tried = dataclasses.replace(constants, **changes)
        found = fit_of(layers, gpu, template, tried)
        if found.loss < best.loss:
            constants, best = tried, found
    print(f"after: {best}\n{constants}")


if __name__ == "__main__":
    main()
