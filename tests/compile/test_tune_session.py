"""Sessions on a device whose times are made up: what is measured, kept, shipped and refused."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuning_place import KEY, FakeBuilder, FakePlace, made_up_s, save_network

from edgesdk import api
from edgesdk.errors import DeviceError, EdgeSdkError
from edgesdk.profiles import load_target
from edgesdk.tuning import session, trials
from edgesdk.tuning.measure import ErrorKind
from edgesdk.tuning.options import TuneOptions
from edgesdk.tuning.records import Records, Where
from edgesdk.tuning.session import TuneResult, TuningError, tune_model
from edgesdk.tuning.state import FinalLatency, SessionState
from edgesdk.tuning.trial import TrialRecord

FASTER = FinalLatency((2.0,), (1.0,), 1e-6, shipped=True)


class Desk:
    """A folder with a network, records of its own, and a way to tune it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = save_network(folder / "net.onnx")
        self.database = folder / "records.db"
        self.states: list[SessionState] = []

    def tune(self, place: FakePlace, model: Path | None = None, **choices: Any) -> TuneResult:
        self.states = []
        return tune_model(
            model or self.network,
            profile=load_target("local"),
            target="local",
            place=place,
            shapes=None,
            output=self.folder / "bundle",
            options=TuneOptions(**choices),
            records_path=self.database,
            show=self.states.append,
        )

    def records(self, where: Where | None = None) -> list[TrialRecord]:
        with Records.open(self.database) as records:
            return list(records.trials(where))

    def sessions(self) -> list[str]:
        with Records.open(self.database) as records:
            return [s.state for s in records.sessions()]

    @property
    def report(self) -> str:
        return (self.folder / "bundle.tuning.html").read_text(encoding="utf-8")

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(s.note for s in self.states if s.note))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(session, "Builder", FakeBuilder)
    monkeypatch.setattr(trials, "RECONNECT_WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(trials, "COOL_DOWN_WAIT_S", 0.01)
    monkeypatch.setattr(trials, "COOL_DOWN_LIMIT_S", 0.03)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return Desk(tmp_path)


def rungs(result: TuneResult) -> dict[str, list[str]]:
    found: dict[str, list[str]] = result.bundle.manifest.build["coverage"]["rungs"]
    return found


def fails(*numbers: int, kind: ErrorKind = "crash") -> Callable[[int], ErrorKind]:
    return lambda number: kind if number in numbers else ""


def test_a_session_and_a_second_one_that_measures_nothing_twice(desk: Desk) -> None:
    first = FakePlace(final=FASTER)
    result = desk.tune(first, trials=20)
    assert result.state.trials == 20 and result.state.phase == "finished"
    assert "tuned" in rungs(result)
    assert not first.open
    assert desk.sessions() == ["finished"]
    assert {s.phase for s in desk.states} >= {"canary", "tuning", "confirming", "comparing"}
    assert all(task.name in desk.report for task in result.state.tasks)
    assert "def main(" in desk.report or "prim_func" in desk.report
    searching: list[tuple[str, str]] = []

    def answer(number: int) -> ErrorKind:
        if desk.states[-1].phase == "tuning":
            searching.append(second.asked[-1])
        return ""

    second = FakePlace(final=FASTER, answer=answer)
    again = desk.tune(second, trials=20)
    assert again.state.trials == 20
    # Canary and confirmation repeat some on purpose; the search itself asks for new ones only.
    assert len(searching) == 20 == len(set(searching))
    assert not set(searching) & set(first.asked)
    assert desk.sessions() == ["finished", "finished"]


def test_the_budget_goes_where_time_is_spent(desk: Desk) -> None:
    result = desk.tune(FakePlace(final=FASTER), trials=24)
    tried = {t.name: t.trials for t in result.state.tasks if t.phase != "skipped"}
    assert len(tried) == 2 and all(n >= 8 for n in tried.values())


def test_the_same_seed_asks_the_same(desk: Desk) -> None:
    asked = []
    for number, seed in enumerate((5, 5, 6)):
        desk.database = desk.folder / f"{number}.db"
        place = FakePlace(final=FASTER)
        desk.tune(place, trials=16, seed=seed)
        asked.append([text for _, text in place.asked])
    assert asked[0] == asked[1] != asked[2]


@pytest.mark.parametrize(
    ("final", "said"),
    [
        (FinalLatency((1.0,), (1.2,), 0.0, shipped=False), "not faster"),
        (FinalLatency((1.2,), (1.0,), 0.5, shipped=False, wrong=True), "wrong results"),
    ],
)
def test_what_makes_the_network_slower_or_wrong_is_not_shipped(
    desk: Desk, final: FinalLatency, said: str
) -> None:
    result = desk.tune(FakePlace(final=final), trials=16)
    assert not any(rung.startswith("tuned") for rung in rungs(result))
    assert said in desk.report
    # Nor by a later compilation, which knows the records only; but a later session may find better.
    later = api.compile(desk.network, output=desk.folder / "later", records=desk.database)
    assert not any(rung.startswith("tuned") for rung in later.manifest.build["coverage"]["rungs"])
    assert "tuned" in rungs(desk.tune(FakePlace(final=FASTER), trials=8))


def test_nothing_beats_the_default(desk: Desk) -> None:
    result = desk.tune(FakePlace(time_s=lambda text: 1e-6), trials=16)
    assert result.state.final is None
    assert not any(rung.startswith("tuned") for rung in rungs(result))


def test_where_only_kernels_can_run_their_sum_decides(desk: Desk) -> None:
    result = desk.tune(FakePlace(final=None), trials=24)
    final = result.state.final
    assert final is not None and final.summed and final.shipped and final.gain > 1
    assert "sum over the kernels" in desk.report
    assert "tuned" in rungs(result)


def test_a_candidate_that_crashes_costs_itself_only(desk: Desk) -> None:
    result = desk.tune(FakePlace(final=FASTER, answer=fails(5, 6)), trials=16)
    assert result.state.errors == {"crash": 2}
    assert [r.error_kind for r in desk.records() if r.error_kind] == ["crash", "crash"]
    assert "crash" in desk.report


def test_a_candidate_that_reports_no_time_does_not_win(desk: Desk) -> None:
    place = FakePlace(final=FASTER, time_s=lambda text: 0.0 if len(place.asked) == 6 else 1e-6)
    result = desk.tune(place, trials=16)
    assert result.state.errors == {"impossible time": 1}
    assert result.state.final is None
    assert "impossible time" in desk.report


def test_luck_does_not_win(desk: Desk) -> None:
    lucky: list[str] = []

    def time_s(text: str) -> float:
        if len(place.asked) == 6:
            lucky.append(text)
            return 1e-8
        return 5e-6 if text in lucky else made_up_s(text)

    place = FakePlace(final=FASTER, time_s=time_s)
    result = desk.tune(place, trials=16)
    assert place.asked.count(place.asked[5]) == 1 + session.FINAL_ROUNDS
    assert all(task.best_ms is None or task.best_ms >= 1e-3 for task in result.state.tasks)
    winners = re.findall(r"<code>(\{.*?\})</code>", desk.report)
    assert winners and html.escape(lucky[0]) not in winners


def test_too_few_valid_trials_are_an_error_with_an_example_of_each(desk: Desk) -> None:
    place = FakePlace(answer=lambda n: "" if n < 4 else "wrong" if n % 3 else "timeout")
    with pytest.raises(TuningError, match=r"only \d+ of 24 trials could be .*wrong.*timeout") as e:
        desk.tune(place, trials=100)
    assert e.value.exit_code == 5
    assert e.value.hint is not None and "wrong: wrong" in e.value.hint
    # It is known after a few, not after all.
    assert len(place.asked) < 40
    assert desk.sessions() == ["failed"]
    assert "Failures" in desk.report
    # Half is what must work unless the user says otherwise.
    result = desk.tune(FakePlace(final=FASTER), trials=30, min_valid_share=0.0)
    assert result.state.phase == "finished"


@pytest.mark.parametrize("kind", ["load", "crash", "wrong", "device"])
def test_the_canary(desk: Desk, kind: ErrorKind) -> None:
    place = FakePlace(answer=fails(0, kind=kind))
    with pytest.raises(TuningError, match="the canary failed") as caught:
        desk.tune(place, trials=16)
    assert len(place.asked) == 1 and not place.open
    assert caught.value.hint


def test_a_device_that_comes_back(desk: Desk) -> None:
    def answer(number: int) -> ErrorKind:
        if number == 10:
            raise DeviceError("the board rebooted")
        return ""

    place = FakePlace(final=FASTER, answer=answer)
    result = desk.tune(place, trials=16)
    assert place.connections == 2
    assert result.state.trials == 16 and result.state.errors == {"device": 1}
    assert any("the board rebooted" in note for note in desk.notes)
    assert desk.states[-1].note == ""


def test_a_device_that_stays_away(desk: Desk) -> None:
    def answer(number: int) -> ErrorKind:
        if number == 10:
            place.connect = gone  # type: ignore[method-assign]
            raise DeviceError("no route")
        return ""

    def gone() -> Any:
        raise DeviceError("still no route")

    place = FakePlace(answer=answer)
    with pytest.raises(EdgeSdkError, match="no route"):
        desk.tune(place, trials=16)
    before = len(desk.records())
    assert before >= 8 and desk.sessions() == ["failed"]
    # All that was measured counts, and the session goes on.
    place = FakePlace(final=FASTER)
    result = desk.tune(place, trials=16)
    assert result.state.trials == 16 and desk.sessions() == ["finished"]


def test_a_canary_does_not_wait_for_a_device(desk: Desk) -> None:
    def answer(number: int) -> ErrorKind:
        raise DeviceError("no route")

    place = FakePlace(answer=answer)
    with pytest.raises(DeviceError, match="no route") as caught:
        desk.tune(place, trials=16)
    assert place.connections == 1 and caught.value.exit_code == 7


def test_heat_is_waited_for_and_what_it_spoiled_does_not_count(desk: Desk) -> None:
    place = FakePlace(final=FASTER, throttled=lambda n: 6 <= n < 10)
    result = desk.tune(place, trials=24)
    spoiled = [r for r in desk.records() if r.error == trials.SLOWED_DOWN]
    assert 1 <= len(spoiled) <= 8
    assert any("slows the device down: waiting" in note for note in desk.notes)
    assert result.state.phase == "finished" and result.state.temperature_c == 50.0


def test_a_board_that_is_always_slowed_down_is_tuned_as_it_is(desk: Desk) -> None:
    result = desk.tune(FakePlace(final=FASTER, throttled=lambda n: True), trials=24)
    assert result.state.phase == "finished" and "tuned" in rungs(result)
    assert any("all the time" in note for note in desk.notes)


def test_an_interrupt_writes_the_bundle_of_the_best_so_far(desk: Desk) -> None:
    def answer(number: int) -> ErrorKind:
        if number == 14:
            raise KeyboardInterrupt
        return ""

    place = FakePlace(final=FASTER, answer=answer)
    result = desk.tune(place, trials=500)
    assert result.state.phase == "interrupted" and not place.open
    assert "tuned" in rungs(result)
    assert desk.sessions() == ["interrupted"]
    done = result.state.trials
    # Resumed, its trials count: the same command ends where it would have ended.
    again = FakePlace(final=FASTER)
    result = desk.tune(again, trials=done + 4)
    assert result.state.trials == done + 4
    assert desk.sessions() == ["finished"]


def test_records_of_one_network_serve_the_same_layer_of_another(desk: Desk) -> None:
    desk.tune(FakePlace(final=FASTER), trials=32)
    other = save_network(desk.folder / "other.onnx", channels=(16, 32, 8))
    from edgesdk import api

    bundle = api.compile(other, output=desk.folder / "other", device_key=KEY, records=desk.database)
    assert bundle.manifest.build["coverage"]["rungs"].get("tuned")


def test_another_device_starts_from_what_was_good_here(desk: Desk) -> None:
    desk.tune(FakePlace(final=FASTER), trials=32)
    place = FakePlace(final=FASTER, key=replace(KEY, cores=8))
    result = desk.tune(place, trials=16)
    notes = {t.note for t in result.state.tasks}
    assert "starts from records of the same board" in notes
    replayed = FakePlace(final=FASTER, key=replace(KEY, cores=4))
    assert desk.tune(replayed, tuner="replay", trials=500).state.trials < 500


def test_records_that_no_longer_fit_are_counted_not_fatal(desk: Desk) -> None:
    desk.tune(FakePlace(final=FASTER), trials=16)
    old = desk.records()[0]
    strange = {"template": old.candidate["template"], "knobs": {"gone": 3}}
    with Records.open(desk.database) as records:
        for cost in (1e-12, 1e-8):
            records.add(replace(old, candidate=strange, samples_s=(cost,), edgesdk="0.0.9"))
    result = desk.tune(FakePlace(final=FASTER), trials=8)
    assert result.state.phase == "finished"
    assert "made by edgesdk 0.0.9, its knobs no longer exist" in desk.report
    assert not result.bundle.manifest.build["coverage"]["problems"]
    assert result.bundle.manifest.build["records_skipped"] == {
        "made by edgesdk 0.0.9, its knobs no longer exist": 2
    }


def test_two_sessions_on_one_device_take_turns(desk: Desk) -> None:
    import threading

    from edgesdk.tuning.lease import device_lease

    waiting = threading.Event()
    held = device_lease("fake", lambda: None)
    held.__enter__()

    def let_go() -> None:
        assert waiting.wait(60)
        held.__exit__(None, None, None)

    def show(state: SessionState) -> None:
        if "another session has fake" in state.note:
            waiting.set()

    thread = threading.Thread(target=let_go)
    thread.start()
    tune_model(
        desk.network,
        profile=load_target("local"),
        target="local",
        place=FakePlace(final=FASTER),
        shapes=None,
        output=desk.folder / "bundle",
        options=TuneOptions(trials=8),
        records_path=desk.database,
        show=show,
    )
    thread.join()
    assert waiting.is_set()
