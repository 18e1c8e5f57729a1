"""Which candidates to try next: a learned cost model ranks those that were not tried yet.

The method is AutoTVM's (Chen et al., "Learning to Optimize Tensor Programs", 2018): gradient
boosted trees on the knobs and the shape of the kernel predict relative speed; each batch takes the
best predicted ones, some at random. All kernels of a template share one model, so that what was
learned on one layer serves the next.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgesdk.schedules import Candidate
from edgesdk.tuning.tasks import Task

if TYPE_CHECKING:
    import numpy as np

# Of each batch, the share that is drawn at random whatever the model says.
EXPLORE = 0.25
# Trials of a template before the model is trusted.
MIN_TRAINING = 8
_MAX_POOL = 2048
_MAX_EXTENTS = 8


def canonical(candidate: Candidate) -> str:
    """The candidate as text that is equal for equal candidates."""
    return json.dumps(candidate, sort_keys=True, separators=(",", ":"))


@dataclass
class TaskSearch:
    """The state of one task's search. `costs_s` maps canonical candidates to their cost in seconds,
    None for those that failed."""

    task: Task
    costs_s: dict[str, float | None] = field(default_factory=dict)
    best_s: float = math.inf
    default_s: float = math.inf
    stale: int = 0  # batches in a row without an improvement worth having

    @property
    def exhausted(self) -> bool:
        return len(self.costs_s) >= self.task.space.size

    def add(self, candidate: Candidate, cost_s: float | None) -> None:
        """Takes in a trial's result."""
        self.costs_s[canonical(candidate)] = cost_s
        if cost_s is None:
            return
        if candidate == self.task.space.candidate(self.task.space.default):
            self.default_s = min(self.default_s, cost_s)
        self.best_s = min(self.best_s, cost_s)

    def expected_gain(self, share: float) -> float:
        """The share of the model's time that another batch may save: large while nothing is known,
        smaller with every batch that brought nothing."""
        return 0.0 if self.exhausted else share * 0.3 * 0.5**self.stale

    def propose(self, count: int, model: CostModel, draw: random.Random) -> list[Candidate]:
        """Up to `count` candidates that were not tried: the default first, then the best predicted
        and some at random."""
        space = self.task.space
        default = space.candidate(space.default)
        chosen = [] if canonical(default) in self.costs_s else [default]
        pool = [c for c in self._pool(draw) if c not in chosen]
        draw.shuffle(pool)
        explore = max(1, round(EXPLORE * count))
        scores = model.predict(self.task, pool)
        if scores is not None:
            ranked = sorted(range(len(pool)), key=lambda i: -scores[i])
            guided = [pool[i] for i in ranked[: max(0, count - explore - len(chosen))]]
            chosen += guided
            pool = [c for c in pool if c not in guided]
        return (chosen + pool)[:count]

    def _pool(self, draw: random.Random) -> list[Candidate]:
        """The candidates that were not tried; a random part of them if they are very many."""
        space = self.task.space
        names = list(space.knobs)
        if space.size <= _MAX_POOL:
            decisions: Any = itertools.product(*space.knobs.values())
        else:
            decisions = {
                tuple(draw.choice(values) for values in space.knobs.values())
                for _ in range(_MAX_POOL)
            }
        candidates = [
            space.candidate(dict(zip(names, values, strict=True))) for values in sorted(decisions)
        ]
        return [c for c in candidates if canonical(c) not in self.costs_s]


class CostModel:
    """Predicts how fast a candidate is relative to the best of its task (1: as fast)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._models: dict[str, Any] = {}

    def fit(self, searches: list[TaskSearch]) -> None:
        """Learns from all trials so far, one model for each template."""
        import numpy as np
        import xgboost

        rows: dict[str, list[list[float]]] = {}
        speeds: dict[str, list[float]] = {}
        for search in searches:
            template = search.task.space.template
            for text, cost_s in search.costs_s.items():
                speed = search.best_s / cost_s if cost_s else 0.0
                rows.setdefault(template, []).append(features(search.task, json.loads(text)))
                speeds.setdefault(template, []).append(speed)
        for template, data in rows.items():
            if len(data) < MIN_TRAINING:
                continue
            settings = {
                "max_depth": 6,
                "eta": 0.2,
                "objective": "reg:squarederror",
                "seed": self._seed,
                "nthread": 1,
                "verbosity": 0,
            }
            matrix = xgboost.DMatrix(np.array(data, np.float32), np.array(speeds[template]))
            self._models[template] = xgboost.train(settings, matrix, num_boost_round=60)

    def predict(self, task: Task, candidates: list[Candidate]) -> np.ndarray | None:
        """Relative speeds, or None before enough trials of the template are known."""
        import numpy as np
        import xgboost

        model = self._models.get(task.space.template)
        if model is None or not candidates:
            return None
        rows = np.array([features(task, c) for c in candidates], np.float32)
        predicted: np.ndarray = model.predict(xgboost.DMatrix(rows))
        return predicted


def features(task: Task, candidate: Candidate) -> list[float]:
    """The knobs, their product, and the extents of the kernel's loops, as logarithms."""
    knobs = [candidate["knobs"][name] for name in sorted(task.space.knobs)]
    product = 1.0
    for knob in knobs:
        product *= max(1, knob)
    extents = [*task.extents, *([1] * _MAX_EXTENTS)][:_MAX_EXTENTS]
    return [math.log2(1 + v) for v in (*knobs, product, *extents)]
