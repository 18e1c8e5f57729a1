"""What a cost model would gain that chooses decisions without measuring, as Markdown.

    python benchmarks/cost_model/evaluate.py [TRIALS.json]

TRIALS.json is what gather.py wrote. Gradient boosted trees (XGBoost) learn how long a decision
takes relative to the template's default. Each network's kernels are chosen by trees that saw none
of its kernels (leave one model out), among the decisions that were measured; the default stays
unless another decision is predicted to be faster by a margin.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

from edgesdk.profiles import TargetProfile, load_target
from edgesdk.schedules.features import KernelFacts
from edgesdk.schedules.template import Knobs

_SETTINGS = {
    "max_depth": 4,
    "eta": 0.1,
    "subsample": 0.8,
    "colsample_bytree": 0.8,
    "min_child_weight": 3,
    "objective": "reg:absoluteerror",
    "seed": 0,
    "nthread": 1,
}
_ROUNDS = 120
_FEWEST_KERNELS = 12  # a template with fewer is left out
# Predicted time over that of the default, above which the default stays.
_MARGIN = 0.95
_TRIALS = Path(__file__).with_name("trials.json")


@dataclass(frozen=True)
class Kernel:
    """One kernel's trials: `times` are microseconds, `default` indexes the default decision."""

    template: str
    models: dict[str, int]
    features: np.ndarray
    times: np.ndarray
    default: int

    @property
    def goals(self) -> np.ndarray:
        return np.log(self.times / self.times[self.default])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trials", type=Path, nargs="?", default=_TRIALS)
    data = json.loads(parser.parse_args().trials.read_text(encoding="utf-8"))
    profile = load_target(data["provenance"]["target"])
    # As it was when the trials were measured, wherever this runs.
    profile = replace(profile, cpu=replace(profile.cpu, **data["provenance"]["cpu"]))
    by_template: dict[str, list[Kernel]] = defaultdict(list)
    for record in data["kernels"].values():
        kernel = read(record, profile)
        if kernel is not None:
            by_template[kernel.template].append(kernel)
    gains: dict[str, dict[str, tuple[float, ...]]] = {}
    for template, kernels in sorted(by_template.items()):
        if len(kernels) < _FEWEST_KERNELS:
            print(f"{template}: {len(kernels)} kernels are too few", file=sys.stderr)
            continue
        gains[template] = leave_one_out(kernels)
    print(*report(gains), sep="\n")


def read(record: dict[str, Any], profile: TargetProfile) -> Kernel | None:
    """A kernel of the file, None if it has nothing to learn from."""
    facts = {
        key: tuple(map(tuple, value)) if key == "arguments" else value
        for key, value in record["facts"].items()
    }
    facts |= {key: tuple(facts[key]) for key in ("spatial", "reduce")}
    names = record["knobs"]
    decisions = [dict(zip(names, trial[:-1], strict=True)) for trial in record["trials"]]
    default = dict(zip(names, record["default"], strict=True))
    if default not in decisions or len(decisions) < 2:
        return None
    return Kernel(
        template=record["template"],
        models=record["models"],
        features=features(KernelFacts(**facts), decisions, default, profile),
        times=np.array([trial[-1] for trial in record["trials"]]),
        default=decisions.index(default),
    )


def features(
    facts: KernelFacts, decisions: Sequence[Knobs], default: Knobs, profile: TargetProfile
) -> np.ndarray:
    """What the model sees of `decisions`: an array (decisions, features) of float32.

    Of each decision and of the default: the knobs, the register tile's size and loads, what a tile
    reads against the caches; and of the kernel its extents and how its planes of pixels lie in the
    cache. Sizes are logarithms to base 2.
    """
    common = _of_kernel(facts)
    usual = _of_decision(facts, default, profile)
    rows = [
        [*own, *(a - b for a, b in zip(own, usual, strict=True)), *usual, *common]
        for own in (_of_decision(facts, decision, profile) for decision in decisions)
    ]
    return np.array(rows, np.float32)


def _of_kernel(facts: KernelFacts) -> list[float]:
    padded = [1, *facts.spatial[-3:]][-3:]
    terms = math.prod(facts.reduce)
    plane_bytes = 4 * math.prod(facts.arguments[0][2:]) if len(facts.arguments[0]) > 3 else 0
    # Planes a multiple of 4 KiB apart share the sets of the L1 cache.
    alignment = plane_bytes & -plane_bytes
    return [
        *(math.log2(1 + extent) for extent in padded),
        math.log2(1 + terms),
        math.log2(1 + facts.reduce[0]),
        math.log2(1 + facts.reduce[-1]),
        math.log2(1 + math.prod(facts.reduce[1:-1])),
        math.log2(1 + facts.row),
        math.log2(1 + (facts.row and facts.spatial[-2] // facts.row)),
        math.log2(1 + alignment),
        math.log2(1 + facts.size_bytes),
        float(len(facts.arguments)),
        float(len(facts.arguments[0])),
    ]


def _of_decision(facts: KernelFacts, knobs: Knobs, profile: TargetProfile) -> list[float]:
    lanes = facts.spatial[-1]
    terms = math.prod(facts.reduce)
    columns, blocks = knobs.get("columns", 1), knobs.get("blocks", 1)
    rows = knobs.get("rows", 1)
    sums = columns * blocks * rows
    registers = profile.cpu.vector_registers
    l1 = profile.cpu.l1d_kib * 1024
    weight_bytes, pixel_bytes = 4 * lanes * blocks * terms, 4 * columns * terms
    return [
        math.log2(columns),
        math.log2(blocks),
        math.log2(rows),
        float(knobs.get("order", 0)),
        math.log2(1 + knobs.get("unroll", 0)),
        math.log2(sums),
        (sums + blocks + 1) / registers,
        (columns + blocks) / (columns * blocks),
        math.log2((weight_bytes + 1) / l1),
        math.log2((pixel_bytes + 1) / l1),
        math.log2((weight_bytes + pixel_bytes + 1) / l1),
        math.log2(math.prod(facts.spatial[:-1]) / sums),
    ]


def fit(kernels: list[Kernel]) -> xgboost.Booster:
    matrix = xgboost.DMatrix(
        np.concatenate([k.features for k in kernels]), np.concatenate([k.goals for k in kernels])
    )
    return xgboost.train(_SETTINGS, matrix, num_boost_round=_ROUNDS)


def leave_one_out(kernels: list[Kernel]) -> dict[str, tuple[float, ...]]:
    """Network -> microseconds of its kernels: default, chosen, best measured; kernels that became
    slower by more than 2 %, and kernels."""
    result = {}
    for network in sorted({name for k in kernels for name in k.models}):
        others = [k for k in kernels if network not in k.models]
        mine = [k for k in kernels if network in k.models]
        if not others:
            continue
        model = fit(others)
        usual = chosen = best = 0.0
        slower = 0
        for kernel in mine:
            predicted = model.inplace_predict(kernel.features)
            pick = int(predicted.argmin())
            if predicted[pick] >= predicted[kernel.default] + math.log(_MARGIN):
                pick = kernel.default
            calls = kernel.models[network]
            usual += calls * kernel.times[kernel.default]
            chosen += calls * kernel.times[pick]
            best += calls * kernel.times.min()
            slower += bool(kernel.times[pick] > 1.02 * kernel.times[kernel.default])
        result[network] = (usual, chosen, best, slower, len(mine))
    return result


def report(gains: dict[str, dict[str, tuple[float, ...]]]) -> list[str]:
    lines = [
        "| template | network | kernels | slower | default | chosen | best measured |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for template, networks in gains.items():
        for network, (usual, chosen, best, slower, count) in networks.items():
            lines.append(
                f"| {template} | {network} | {count} | {slower} | {usual / 1e3:.3f} ms"
                f" | {chosen / usual:.3f} | {best / usual:.3f} |"
            )
        means = [
            math.exp(float(np.mean([math.log(n[i] / n[0]) for n in networks.values()])))
            for i in (1, 2)
        ]
        lines.append(f"| {template} | geometric mean | | | | **{means[0]:.3f}** | {means[1]:.3f} |")
    return lines


if __name__ == "__main__":
    main()
