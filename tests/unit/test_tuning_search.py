"""Which candidates the tuners propose, and how the budget is spread."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from edgesdk.errors import UsageError
from edgesdk.schedules import Candidate, KernelSpace
from edgesdk.tuning.options import TUNERS, TuneOptions
from edgesdk.tuning.search import CostModel, TaskSearch, fits
from edgesdk.tuning.tasks import Task
from edgesdk.tuning.trial import canonical

SMALL = KernelSpace(
    "conv", {"a": (1, 2, 4, 8, 16), "b": (1, 2, 4, 8), "c": (0, 1)}, {"a": 2, "b": 1, "c": 0}
)
LARGE = KernelSpace(
    "conv",
    {name: tuple(range(1, 9)) for name in "abcdef"},
    dict.fromkeys("abcdef", 1),
)


def a_task(space: KernelSpace, workload: str = "ab" * 8) -> Task:
    return Task(workload, ("kernel",), 2, None, space, 1000, (10, 10, 10))


def cost_s(candidate: Candidate) -> float:
    """Best where every knob is largest."""
    return 1e-3 / sum(candidate["knobs"].values())


def searched(
    tuner: str,
    space: KernelSpace,
    *,
    seed: int = 0,
    batches: int = 6,
    cost: Callable[[Candidate], float | None] = cost_s,
    suggested: list[Candidate] | None = None,
) -> tuple[list[str], TaskSearch]:
    search = TaskSearch(a_task(space), tuner, seed, suggested=suggested or [])
    model = CostModel(seed)
    asked = []
    for _ in range(batches):
        model.fit([search])
        for candidate in search.propose(8, model):
            asked.append(canonical(candidate))
            search.add(candidate, cost(candidate))
    return asked, search


@pytest.mark.parametrize("tuner", ["evolutionary", "random", "grid"])
@pytest.mark.parametrize("space", [SMALL, LARGE])
def test_nothing_twice_the_default_first_and_only_what_exists(
    tuner: str, space: KernelSpace
) -> None:
    asked, search = searched(tuner, space, batches=5)
    assert len(asked) == 40 == len(set(asked))
    assert asked[0] == canonical(space.candidate(space.default))
    assert set(asked) == search.costs_s.keys()
    assert all(fits(space, candidate(text)) for text in asked)
    assert search.exhausted == (space is SMALL)


def candidate(text: str) -> Candidate:
    import json

    found: Candidate = json.loads(text)
    return found


@pytest.mark.parametrize("tuner", ["evolutionary", "random", "grid"])
@pytest.mark.parametrize("space", [SMALL, LARGE])
def test_a_seed_gives_the_same_candidates_again(tuner: str, space: KernelSpace) -> None:
    first = searched(tuner, space, seed=3, batches=4)[0]
    assert first == searched(tuner, space, seed=3, batches=4)[0]
    assert (first == searched(tuner, space, seed=4, batches=4)[0]) == (tuner == "grid")


def test_the_order_of_tasks_changes_nothing() -> None:
    model = CostModel(0)
    one, other = (TaskSearch(a_task(SMALL, w * 8), "random", 1) for w in ("01", "02"))
    alone = TaskSearch(a_task(SMALL, "02" * 8), "random", 1)
    one.propose(8, model)
    assert other.propose(8, model) == alone.propose(8, model)


def test_a_finished_space_proposes_nothing() -> None:
    asked, search = searched("evolutionary", SMALL, batches=9)
    assert len(asked) == SMALL.size == 40
    assert search.exhausted and search.expected_gain(1.0) == 0.0
    assert search.propose(8, CostModel(0)) == []


def test_the_model_finds_in_few_trials_what_chance_does_not() -> None:
    best = min(cost_s({"knobs": dict.fromkeys("abcdef", 8)}), 1.0)
    learned = searched("evolutionary", LARGE, batches=12)[1].best_s
    drawn = searched("random", LARGE, batches=12)[1].best_s
    assert learned < drawn
    assert learned < 1.1 * best


def test_failures_are_learned_too() -> None:
    def fails_when_large(candidate: Candidate) -> float | None:
        return None if candidate["knobs"]["a"] >= 5 else cost_s(candidate)

    asked, _ = searched("evolutionary", LARGE, batches=15, cost=fails_when_large)
    failed = [fails_when_large(candidate(text)) is None for text in asked]
    assert sum(failed[64:]) < sum(failed[:56]) / 2


def test_what_was_good_elsewhere_comes_right_after_the_default() -> None:
    good = SMALL.candidate({"a": 16, "b": 8, "c": 1})
    for tuner in TUNERS:
        asked, _ = searched(tuner, SMALL, batches=1, suggested=[good])
        assert asked[:2] == [canonical(SMALL.candidate(SMALL.default)), canonical(good)]


def test_replay_ends_with_what_is_known() -> None:
    known = [SMALL.candidate({"a": a, "b": 8, "c": 1}) for a in (16, 8)]
    asked, search = searched("replay", SMALL, batches=3, suggested=known)
    assert asked[1:] == [canonical(c) for c in known]
    assert search.exhausted


def test_the_gain_that_is_expected() -> None:
    search = TaskSearch(a_task(SMALL))
    fresh = search.expected_gain(0.5)
    assert search.expected_gain(0.25) == fresh / 2
    search.stale = 1
    assert search.expected_gain(0.5) == fresh / 2
    search.stale = 0
    search.add(search.default, 2e-3)
    search.add(SMALL.candidate({"a": 1, "b": 1, "c": 1}), 1e-3)
    # Half of its time is gone already.
    assert search.expected_gain(0.5) == pytest.approx(fresh / 2)
    assert (search.default_s, search.best_s) == (2e-3, 1e-3)


def test_a_failed_candidate_is_no_cost() -> None:
    search = TaskSearch(a_task(SMALL))
    search.add(search.default, None)
    assert search.best_s == math.inf
    assert search.default not in search.propose(8, CostModel(0))


@pytest.mark.parametrize(
    "other",
    [
        {"template": "dense", "knobs": {"a": 2, "b": 1, "c": 0}},
        {"template": "conv", "knobs": {"a": 2, "b": 1}},
        {"template": "conv", "knobs": {"a": 2, "b": 1, "c": 0, "d": 0}},
        {"template": "conv", "knobs": {"a": 3, "b": 1, "c": 0}},
        {},
    ],
)
def test_candidates_of_other_templates_do_not_fit(other: Candidate) -> None:
    assert fits(SMALL, SMALL.candidate(SMALL.default))
    assert not fits(SMALL, other)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"trials": 0}, "--trials is 0"),
        ({"minutes": 0}, "--minutes is 0"),
        ({"minutes": math.nan}, "--minutes is nan"),
        ({"repeat": 0}, "--repeat is 0"),
        ({"min_repeat_ms": -1}, "--min-repeat-ms is -1"),
        ({"timeout_s": 0}, "--timeout is 0"),
        ({"build_timeout_s": 0}, "--build-timeout is 0"),
        ({"memory_limit_mib": 0}, "--memory-limit is 0"),
        ({"build_memory_mib": -5}, "--build-memory is -5"),
        ({"threads": -1}, "--threads is -1"),
        ({"min_valid_share": 1.5}, "--min-valid is 1.5"),
        ({"tuner": "ranodm"}, "unknown tuner 'ranodm'"),
    ],
)
def test_options_that_cannot_be_meant(choice: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        TuneOptions(**choice)  # type: ignore[arg-type]
    assert caught.value.hint


def test_what_bounds_the_time() -> None:
    assert TuneOptions().time_limit_s == 600
    assert TuneOptions(minutes=0.5, trials=3).time_limit_s == 30
    assert TuneOptions(trials=3).time_limit_s is None
