"""Which candidates to try next.

`evolutionary` (the default) is AutoTVM's method (Chen et al., "Learning to Optimize Tensor
Programs", 2018): gradient boosted trees on the knobs and the shape of the kernel predict relative
speed; each batch takes the best predicted ones, some at random. All kernels of a template share one
model, so that what was learned on one layer serves the next. Where a space is too large to rank as
a whole, a population evolves: the best so far are crossed and mutated, and the model selects.

`random` draws, `grid` goes through all in order, `replay` measures what the records hold of other
devices and sessions. Every tuner begins with the default, which the others are compared with.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgesdk.schedules import Candidate, KernelSpace
from edgesdk.tuning.tasks import Task
from edgesdk.tuning.trial import canonical

if TYPE_CHECKING:
    import numpy as np

# Of each batch, the share that is drawn at random whatever the model says.
EXPLORE = 0.25
# Trials of a template before the model is trusted.
MIN_TRAINING = 8
# What another batch may save of a kernel's time while nothing speaks against it, and what is left
# of that hope after each batch that brought nothing.
HOPE = 0.3
DISAPPOINTMENT = 0.5
# Spaces up to this size are ranked as a whole.
_MAX_POOL = 2048
_MAX_DRAWN = 16 * _MAX_POOL  # of which some do not fit
_GENERATIONS = 4
_PARENTS = 64
_MAX_EXTENTS = 8


@dataclass
class TaskSearch:
    """The state of one task's search, which `tuner` and `seed` decide.

    `costs_s` maps canonical candidates to their cost in seconds, None for those that failed.
    `suggested` are candidates that were good elsewhere; they come right after the default.
    """

    task: Task
    tuner: str = "evolutionary"
    seed: int = 0
    suggested: list[Candidate] = field(default_factory=list)
    costs_s: dict[str, float | None] = field(default_factory=dict)
    best_s: float = math.inf
    default_s: float = math.inf
    stale: int = 0  # batches in a row without an improvement worth having

    def __post_init__(self) -> None:
        # Of its own, so that in which order tasks are searched changes nothing.
        self._draw = random.Random(f"{self.seed}/{self.task.workload}")

    @property
    def default(self) -> Candidate:
        """What an untuned build uses."""
        return self.task.space.candidate(self.task.space.default)

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing left to try."""
        if self.tuner == "replay":
            return not self._first()
        return next(self._all(), None) is None

    def add(self, candidate: Candidate, cost_s: float | None) -> None:
        """Takes in a trial's result: seconds per call, or None if it failed."""
        self.costs_s[canonical(candidate)] = cost_s
        if cost_s is None:
            return
        if candidate == self.default:
            self.default_s = min(self.default_s, cost_s)
        self.best_s = min(self.best_s, cost_s)

    def expected_gain(self, share: float) -> float:
        """The part of the model's time that another batch may save.

        `share` is the task's part of that time before tuning.
        """
        if self.exhausted:
            return 0.0
        left = self.best_s / self.default_s if self.default_s < math.inf else 1.0
        return share * left * HOPE * DISAPPOINTMENT**self.stale

    def propose(self, count: int, model: CostModel) -> list[Candidate]:
        """Up to `count` candidates that were not tried."""
        chosen = self._first()[:count]
        if self.tuner == "replay":
            return chosen
        if self.tuner == "grid":
            rest: Iterator[Candidate] = self._all()
        elif self.tuner == "random":
            rest = iter(self._pool())
        else:
            rest = iter(self._ranked(count - len(chosen), model))
        known = {canonical(c) for c in chosen}
        chosen += itertools.islice((c for c in rest if canonical(c) not in known), count)
        return chosen[:count]

    def _first(self) -> list[Candidate]:
        wanted = {canonical(c): c for c in (self.default, *self.suggested)}
        return [c for text, c in wanted.items() if text not in self.costs_s]

    def _ranked(self, count: int, model: CostModel) -> list[Candidate]:
        """The best predicted ones, then random ones; random ones only while nothing is learned."""
        pool = self._pool()
        if not model.knows(self.task):
            return pool
        explore = max(1, round(EXPLORE * count))
        population = pool
        if self.task.space.size > _MAX_POOL:
            population = self._evolve(pool, model)
        guided = _best(population, model.predict(self.task, population), count - explore)
        return guided + [c for c in pool if c not in guided]

    def _evolve(self, population: list[Candidate], model: CostModel) -> list[Candidate]:
        space = self.task.space
        measured = sorted((s, text) for text, s in self.costs_s.items() if s is not None)
        elite = [json.loads(text) for _, text in measured[:_PARENTS]]
        for _ in range(_GENERATIONS):
            scores = model.predict(self.task, population)
            parents = elite + _best(population, scores, _PARENTS)
            children = {canonical(c): c for c in parents}
            wanted = len(parents) + _MAX_POOL // _GENERATIONS
            for _ in range(_MAX_POOL):  # many are alike or do not fit
                if len(children) >= wanted:
                    break
                one, other = self._draw.choice(parents), self._draw.choice(parents)
                knobs = {
                    name: self._draw.choice((one, other))["knobs"][name] for name in space.knobs
                }
                mutated = self._draw.choice(sorted(space.knobs))
                knobs[mutated] = self._draw.choice(space.knobs[mutated])
                if space.allows(knobs):
                    child = space.candidate(knobs)
                    children[canonical(child)] = child
            population = [c for text, c in children.items() if text not in self.costs_s]
        return population

    def _pool(self) -> list[Candidate]:
        """Candidates that were not tried and may fit, shuffled; some of them if there are many."""
        space = self.task.space
        if space.size <= _MAX_POOL:
            pool = list(self._all())
        else:
            drawn = (
                {k: self._draw.choice(v) for k, v in space.knobs.items()} for _ in range(_MAX_DRAWN)
            )
            allowed = itertools.islice(filter(space.allows, drawn), _MAX_POOL)
            unique = {canonical(c): c for c in map(space.candidate, allowed)}
            pool = [c for text, c in unique.items() if text not in self.costs_s]
        self._draw.shuffle(pool)
        return pool

    def _all(self) -> Iterator[Candidate]:
        knobs = self.task.space.knobs
        for values in itertools.product(*knobs.values()):
            decision = dict(zip(knobs, values, strict=True))
            candidate = self.task.space.candidate(decision)
            if canonical(candidate) not in self.costs_s and self.task.space.allows(decision):
                yield candidate


def fits(space: KernelSpace, candidate: Candidate) -> bool:
    """Whether `candidate` is one of `space`: those of older templates may not be."""
    knobs = candidate.get("knobs", {})
    return (
        candidate.get("template") == space.template
        and knobs.keys() == space.knobs.keys()
        and all(value in space.knobs[name] for name, value in knobs.items())
    )


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
            if len(data) < MIN_TRAINING or len({len(row) for row in data}) != 1:
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

    def knows(self, task: Task) -> bool:
        """Whether enough trials of the task's template were learned."""
        return task.space.template in self._models

    def predict(self, task: Task, candidates: list[Candidate]) -> np.ndarray:
        """Relative speeds, shape (candidates,); `knows(task)` must hold."""
        import numpy as np
        import xgboost

        if not candidates:
            return np.zeros(0)
        rows = np.array([features(task, c) for c in candidates], np.float32)
        predicted: np.ndarray = self._models[task.space.template].predict(xgboost.DMatrix(rows))
        return predicted


def features(task: Task, candidate: Candidate) -> list[float]:
    """The knobs, their product, and the extents of the kernel's loops, as logarithms."""
    knobs = [candidate["knobs"][name] for name in sorted(task.space.knobs)]
    product = 1.0
    for knob in knobs:
        product *= max(1, knob)
    extents = [*task.extents, *([1] * _MAX_EXTENTS)][:_MAX_EXTENTS]
    return [math.log2(1 + v) for v in (*knobs, product, *extents)]


def _best(candidates: list[Candidate], scores: np.ndarray, count: int) -> list[Candidate]:
    ranked = sorted(range(len(candidates)), key=lambda i: -scores[i])
    return [candidates[i] for i in ranked[: max(0, count)]]
