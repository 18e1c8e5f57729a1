"""What a session shows: its state for the live table, and the report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from edgesdk.tuning.devicekey import DeviceKey
from edgesdk.tuning.options import TuneOptions
from edgesdk.tuning.records import Records, Where
from edgesdk.tuning.search import TaskSearch, fits
from edgesdk.tuning.state import FinalLatency, SessionPhase, SessionState, TaskState
from edgesdk.tuning.tasks import Task, is_tunable
from edgesdk.tuning.trial import TrialRecord, canonical, target_key, winner
from edgesdk.tuning.trials import Trials

if TYPE_CHECKING:
    from edgesdk.profiles import TargetProfile

_ENDS = ("finished", "interrupted", "failed")
_SEARCHING = ("canary", "tuning")


class Progress:
    """Keeps the SessionState of a session up to date and shows it.

    The session fills in `tasks`, `searches` (by workload), `shares` (of the network's time before
    tuning), `baseline_ms` (of one call), `notes` (where a task starts from) and `trials` as it
    learns them.
    """

    def __init__(
        self,
        *,
        model: str,
        profile: TargetProfile,
        device: str,
        options: TuneOptions,
        show: Callable[[SessionState], None],
    ) -> None:
        self._profile = profile
        self._options = options
        self._show = show
        self._note = ""
        self._started = time.monotonic()
        self._search_started = self._started
        self.state = SessionState(
            model=model,
            target=profile.name,
            device=device,
            trial_limit=options.trials,
            time_limit_s=options.time_limit_s,
        )
        self.tasks: list[Task] = []
        self.searches: dict[str, TaskSearch] = {}
        self.shares: dict[str, float] = {}
        self.baseline_ms: dict[str, float] = {}
        self.notes: dict[str, str] = {}
        self.trials: Trials | None = None
        self.report: Path | None = None
        self.records: Records | None = None
        self.device: DeviceKey | None = None
        self.session_id = ""
        self.trials_before = 0
        self.skipped_records: dict[str, int] = {}

    @property
    def trials_done(self) -> int:
        """Of the whole session, before it was resumed too."""
        return self.trials_before + (self.trials.count if self.trials is not None else 0)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def begin(self) -> None:
        """Counts time from here, without what was waited for another session."""
        self._started = time.monotonic()
        self._note = ""

    def phase(self, phase: SessionPhase) -> None:
        """Begins another phase; the report is written at the ends."""
        if phase == "tuning":
            self._search_started = time.monotonic()
        self._note = ""
        self.state = replace(self.state, phase=phase)
        self.update()
        if phase in _ENDS:
            self.write_report()

    def note(self, note: str) -> None:
        """Shows what the session waits for, until the next phase."""
        self._note = note
        self.update()

    def final(self, final: FinalLatency | None) -> None:
        """Takes in what came of the comparison."""
        self.state = replace(self.state, final=final)
        self.update()

    def update(self) -> None:
        """Shows where the session stands now."""
        tasks = tuple(self._task(task) for task in self.tasks)
        baseline = sum((t.baseline_ms or 0.0) * t.calls for t in tasks)
        best = sum((t.best_ms or t.baseline_ms or 0.0) * t.calls for t in tasks)
        trials = self.trials
        rate = self.state.trials_per_s
        if trials is not None and self.state.phase == "tuning":
            rate = trials.count / max(1e-3, time.monotonic() - self._search_started)
        self.state = replace(
            self.state,
            tasks=tasks,
            trials=self.trials_done,
            elapsed_s=self.elapsed_s,
            trials_per_s=rate,
            eta_s=self._eta_s(rate),
            baseline_latency_ms=baseline or None,
            latency_ms=best or None,
            temperature_c=trials.state.temperature_c if trials else None,
            throttled=trials.state.throttled if trials else None,
            errors=dict(trials.errors) if trials else {},
            note=(trials.note if trials else "") or self._note,
        )
        self._show(self.state)

    def _eta_s(self, rate: float) -> float | None:
        if self.state.phase not in _SEARCHING:
            return None
        limits = []
        if self.state.time_limit_s is not None:
            limits.append(self.state.time_limit_s - self.elapsed_s)
        if self.state.trial_limit is not None and rate > 0:
            limits.append((self.state.trial_limit - self.trials_done) / rate)
        return max(0.0, min(limits)) if limits else None

    def _task(self, task: Task) -> TaskState:
        workload = task.workload
        search = self.searches.get(workload)
        state = TaskState(
            name=task.name,
            workload=workload,
            calls=task.calls,
            share=self.shares.get(workload, 0.0),
            baseline_ms=self.baseline_ms.get(workload),
            note=self.notes.get(workload, ""),
        )
        if search is None:
            if self.state.phase == "preparing":
                return state
            why = "nothing to choose" if not is_tunable(task) else "negligible share of the time"
            return replace(state, phase="skipped", note=why)
        over = search.exhausted or self.state.phase not in ("preparing", *_SEARCHING)
        state = replace(
            state,
            phase="done" if over else "tuning" if search.costs_s else "waiting",
            trials=len(search.costs_s),
        )
        if search.best_s == math.inf:
            return state
        # As the agent measures it, like the best, once it has.
        default_s = search.default_s
        return replace(
            state,
            baseline_ms=default_s * 1e3 if default_s < math.inf else state.baseline_ms,
            best_ms=search.best_s * 1e3,
            gflops=2 * task.operations / search.best_s / 1e9,
        )

    # The report.

    def write_report(self) -> None:
        """Writes the report as things stand."""
        if self.report is None or self.records is None or self.device is None:
            return
        from edgesdk.tuning.report import write_report

        winners: dict[str, TrialRecord | None] = {}
        for workload, search in self.searches.items():
            where = Where(workload, target_key(self._profile.tvm), self.device.fingerprint)
            known = (t for t in self.records.trials(where) if fits(search.task.space, t.candidate))
            winners[workload] = winner(known)
        tasks = tuple(self._with_schedule(t, winners.get(t.workload)) for t in self.state.tasks)
        trials = list(self.records.trials(Where(session=self.session_id)))
        self.report.parent.mkdir(parents=True, exist_ok=True)
        write_report(self.report, replace(self.state, tasks=tasks), trials, self._environment())

    def _with_schedule(self, state: TaskState, won: TrialRecord | None) -> TaskState:
        if won is None:
            return state
        state = replace(state, candidate=canonical(won.candidate))
        if self.state.phase not in _ENDS:
            return state
        from edgesdk.schedules import apply_candidate

        task = self.searches[state.workload].task
        try:
            script = apply_candidate(task.function, self._profile, won.candidate).script()
        except Exception as error:  # TVM raises many types; a report must not end a session
            script = f"# cannot be shown: {type(error).__name__}"
        return replace(state, schedule=str(script))

    def _environment(self) -> Mapping[str, Mapping[str, str]]:
        assert self.device is not None and self.records is not None
        options, device = self._options, self.device
        names = ("edgesdk", "apache-tvm", "apache-tvm-ffi", "xgboost")
        skipped = {
            f"skipped: {reason}": str(count) for reason, count in self.skipped_records.items()
        }
        return {
            "Versions": {name: version(name) for name in names},
            "Device": {
                "name": self.state.device,
                "is": device.title,
                "CPU": device.cpu or "unknown",
                "cores": str(device.cores or "unknown"),
                "architecture": device.isa,
            },
            "Target": {name: str(value) for name, value in self._profile.tvm.items()},
            "Options": {
                "tuner": options.tuner,
                "seed": str(options.seed),
                "repeat": str(options.repeat),
                "min-repeat-ms": f"{options.min_repeat_ms:g}",
                "threads": str(options.threads or "all"),
                "flush-cache": "yes" if options.flush_cache else "no",
            },
            "Records": {"database": str(self.records.path), "session": self.session_id, **skipped},
        }
