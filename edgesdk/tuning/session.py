"""A tuning session: search on this machine, measurement on the device, nothing lost.

The order of things: compile untuned and see where the time goes; the canary (one candidate all the
way); batches of trials, each recorded as it comes; the best ones measured again beside the default;
and at the end the whole network, tuned and untuned in turns. What is not faster is not shipped.
"""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgesdk.bundle import Bundle
from edgesdk.errors import ModelError
from edgesdk.schedules import Candidate
from edgesdk.tuning.builder import Builder
from edgesdk.tuning.devicekey import DeviceKey
from edgesdk.tuning.lease import device_lease
from edgesdk.tuning.lookup import KEEP_DEFAULT, TUNED_RUNGS, VERDICT
from edgesdk.tuning.options import TuneOptions
from edgesdk.tuning.place import Place
from edgesdk.tuning.progress import Progress
from edgesdk.tuning.records import Records, Where
from edgesdk.tuning.search import CostModel, TaskSearch, fits
from edgesdk.tuning.state import FinalLatency, SessionState
from edgesdk.tuning.tasks import Task, collect_tasks, is_tunable
from edgesdk.tuning.trial import (
    DEVICE_ERROR,
    Session,
    SessionEnd,
    TrialRecord,
    canonical,
    target_key,
    winner,
)
from edgesdk.tuning.trials import NO_FIT, SLOWED_DOWN, Trials

if TYPE_CHECKING:
    from edgesdk.frontend import ImportedModel
    from edgesdk.profiles import TargetProfile
    from edgesdk.toolchain import Toolchain

BATCH = 8
# A task with a smaller share of the network's time is left alone.
NEGLIGIBLE_SHARE = 0.005
# A batch that improves a task by less than this brought nothing.
IMPROVEMENT = 0.01
# When the best that another batch could bring to the network is less than this, the search is flat.
FLAT = 0.0005
# How many of each task's best are measured again at the end, and how often.
FINALISTS = 3
FINAL_ROUNDS = 3
COMPARE_TURNS = 5
# After an interrupt everything must be over in seconds.
INTERRUPTED_TURNS = 1
# With this many trials it is known whether measuring works at all.
ENOUGH_TO_JUDGE = 24
# Records of these say nothing of the candidate: this machine may have been at fault.
TRY_AGAIN = (DEVICE_ERROR, "build")

_FROM = {"device": "", "model": "records of the same board", "cpu": "records of the same CPU"}


@dataclass(frozen=True)
class TuneResult:
    """`bundle` uses the best schedules, or the default ones where those were not beaten.

    `state.phase` is "interrupted" when the session was; then it is the best so far.
    """

    bundle: Bundle
    state: SessionState
    report: Path


class TuningError(ModelError):
    """The session could not measure what it should (exit code 5)."""


def tune_model(
    model: Path,
    *,
    profile: TargetProfile,
    target: str,
    place: Place,
    shapes: Mapping[str, Sequence[int]] | None,
    output: Path | None,
    options: TuneOptions,
    records_path: Path | None = None,
    report: Path | None = None,
    show: Callable[[SessionState], None] = lambda state: None,
) -> TuneResult:
    """Tunes `model` for `profile`, which `target` names, on `place`, and writes a bundle.

    `show` gets the session's state after every trial. Raises what `api.compile` raises, TuningError
    when the canary fails or too few trials could be measured, DeviceUnreachableError and
    DeviceError when the device stays away; all trials so far are in the records then. The first
    KeyboardInterrupt ends the search and writes the bundle of the best so far, a second one all.
    """
    from edgesdk.frontend import import_model
    from edgesdk.toolchain import load_toolchain

    toolchain = load_toolchain(profile.toolchain)
    toolchain.require(profile.machine)
    progress = Progress(
        model=model.name, profile=profile, device=place.name, options=options, show=show
    )
    progress.phase("preparing")
    imported = import_model(model, shapes=shapes)
    output = output or Path("bundles") / f"{imported.name}-{profile.name}"

    def build(folder: Path, *, tuned: bool, device: DeviceKey | None = None) -> Bundle:
        from edgesdk import api

        return api.compile(
            model,
            target=target,
            shapes=shapes,
            precision=profile.precision,
            output=folder,
            tuned=tuned,
            device_key=device,
            records=records_path,
        )

    with (
        device_lease(
            place.name, lambda: progress.note(f"another session has {place.name}: waiting for it")
        ),
        tempfile.TemporaryDirectory(prefix="edgesdk-tune-") as temporary,
        Records.open(records_path) as records,
    ):
        progress.begin()
        progress.records = records
        progress.report = report or output.with_name(f"{output.name}.tuning.html")
        session = _Session(imported, profile, place, options, records, progress)
        return session.run(toolchain, build, output=output, folder=Path(temporary))


class _Session:
    def __init__(
        self,
        model: ImportedModel,
        profile: TargetProfile,
        place: Place,
        options: TuneOptions,
        records: Records,
        progress: Progress,
    ) -> None:
        self.model, self.profile, self.place = model, profile, place
        self.options, self.records, self.progress = options, records, progress
        self.target = target_key(profile.tvm)
        self.cost_model = CostModel(options.seed)
        self.interrupted = False
        # What a candidate replayed by a later release of the templates does not fit any more.
        self.skipped: Counter[str] = Counter()
        self.device: DeviceKey
        self.session: Session
        self.trials: Trials

    @property
    def searches(self) -> dict[str, TaskSearch]:
        return self.progress.searches

    @property
    def shares(self) -> dict[str, float]:
        return self.progress.shares

    # The stages.

    def run(
        self, toolchain: Toolchain, build: Callable[..., Bundle], *, output: Path, folder: Path
    ) -> TuneResult:
        progress = self.progress
        untuned = build(folder / "untuned", tuned=False)
        progress.tasks = collect_tasks(self.model, self.profile)
        self.device, times_ms = self.place.examine(untuned)
        progress.device = self.device
        if times_ms is not None:
            self._share_out(times_ms)
        self._begin()
        ended = False
        try:
            builder = Builder(
                self.profile,
                toolchain,
                timeout_s=self.options.build_timeout_s,
                memory_limit_bytes=self.options.build_memory_mib << 20,
            )
            with builder:
                self.trials = progress.trials = Trials(
                    place=self.place,
                    device=self.device,
                    session=self.session.id,
                    records=self.records,
                    builder=builder,
                    profile=self.profile,
                    options=self.options,
                    folder=folder,
                    changed=progress.update,
                )
                try:
                    self._measure(known_shares=times_ms is not None)
                except KeyboardInterrupt:
                    self.interrupted = True
                    progress.note("interrupted: writing the bundle of the best so far")
                finally:
                    self.place.disconnect()
            bundle = self._ship(untuned, build, output=output, folder=folder)
            end: SessionEnd = "interrupted" if self.interrupted else "finished"
            self.records.end_session(self.session.id, end)
            ended = True
            progress.phase(end)
            assert progress.report is not None
            return TuneResult(bundle, progress.state, progress.report)
        except KeyboardInterrupt:
            self.records.end_session(self.session.id, "interrupted")
            ended = True
            progress.phase("interrupted")
            raise
        finally:
            if not ended:
                self.records.end_session(self.session.id, "failed")
                progress.phase("failed")

    def _measure(self, *, known_shares: bool) -> None:
        self.progress.phase("canary")
        self.trials.connect()
        self._canary()
        if not known_shares:
            self._measure_shares()
        self.progress.phase("tuning")
        self._search()
        self._check_valid_share()
        self.progress.phase("confirming")
        self._confirm()

    def _share_out(self, times_ms: Mapping[str, float]) -> None:
        """Takes in what each kernel takes in one run of the network."""
        total = sum(times_ms.values()) or 1.0
        for task in self.progress.tasks:
            of_task = sum(times_ms.get(name, 0.0) for name in task.names)
            self.shares[task.workload] = of_task / total
            self.progress.baseline_ms[task.workload] = of_task / task.calls

    def _begin(self) -> None:
        """Starts or resumes the session in the records, and takes in what they know."""
        found = None
        if self.options.resume:
            found = self.records.unfinished(self.model.sha256, self.target, self.device)
        self.session = found or Session(
            id=uuid.uuid4().hex[:12],
            model=self.model.name,
            model_sha256=self.model.sha256,
            target=self.target,
            device=self.device.fingerprint,
            options={"seed": self.options.seed, "tuner": self.options.tuner},
        )
        self.records.start_session(self.session)
        self.progress.session_id = self.session.id
        for task in self.progress.tasks:
            share = self.shares.get(task.workload, 1.0)
            if is_tunable(task) and share >= NEGLIGIBLE_SHARE:
                self.searches[task.workload] = self._search_of(task)
        self.progress.skipped_records = dict(self.skipped)
        if found is not None:
            tried = {
                (t.workload, canonical(t.candidate))
                for t in self.records.trials(Where(session=found.id))
                if t.error_kind not in TRY_AGAIN
            }
            self.progress.trials_before = len(tried)
        self.progress.update()

    def _search_of(self, task: Task) -> TaskSearch:
        search = TaskSearch(task, self.options.tuner, self.options.seed)
        known = list(self._fitting(task, Where(task.workload, self.target)))
        own = [t for t in known if t.device == self.device]
        if self.options.resume:
            for trial in own:
                if trial.error_kind not in TRY_AGAIN:
                    search.add(trial.candidate, trial.cost_s if trial.ok else None)
        if self.options.tuner == "replay":
            ranked = sorted((t for t in known if t.ok), key=lambda t: t.cost_s)
            search.suggested = [t.candidate for t in ranked]
        elif not search.costs_s:
            near = self.records.best(
                task.workload,
                self.target,
                self.device,
                accept=lambda candidate: fits(task.space, candidate),
            )
            if near is not None and _FROM[near[1]]:
                search.suggested = [near[0].candidate]
                self.progress.notes[task.workload] = f"starts from {_FROM[near[1]]}"
        return search

    def _fitting(self, task: Task, where: Where) -> list[TrialRecord]:
        """The records of a task whose candidates its template can still make."""
        kept = []
        for trial in self.records.trials(where):
            if fits(task.space, trial.candidate):
                kept.append(trial)
            else:
                self.skipped[f"made by edgesdk {trial.edgesdk}, its knobs no longer exist"] += 1
        return kept

    def _canary(self) -> None:
        """One candidate all the way, so that a broken set-up fails in seconds and says where."""
        if not self.searches:
            return
        search = max(self.searches.values(), key=lambda s: self.shares.get(s.task.workload, 0.0))
        (outcome,) = self.trials.run(search, [search.default], counted=False, patient=False)
        if outcome.error_kind and outcome.error_kind != DEVICE_ERROR:
            raise TuningError(
                f"the canary failed ({outcome.error_kind}): {outcome.error}",
                hint="it is the untuned schedule of the slowest kernel: look at the toolchain with "
                f"`edgesdk doctor --target {self.profile.name}`, then at the device",
            )
        if outcome.error_kind and outcome.error != SLOWED_DOWN:
            raise TuningError(
                f"the canary failed on {self.place.name}: {outcome.error}",
                hint=f"edgesdk devices check {self.place.name}",
            )

    def _measure_shares(self) -> None:
        """Where the network cannot be run as a whole: each kernel's default, once."""
        for search in self.searches.values():
            self.trials.run(search, [search.default], counted=False)
        times_ms: dict[str, float] = {}
        for search in self.searches.values():
            default = search.default
            trials = self._fitting(search.task, self._here(search.task))
            measured = winner(t for t in trials if t.candidate == default)
            if measured is not None:
                search.add(default, measured.cost_s)
                calls = search.task.calls
                times_ms[search.task.names[0]] = measured.cost_s * 1e3 * calls
        self._share_out(times_ms)
        for workload in [w for w in self.searches if self.shares[w] < NEGLIGIBLE_SHARE]:
            del self.searches[workload]

    def _search(self) -> None:
        while self.searches and not self._out_of_budget():
            self.cost_model.fit(list(self.searches.values()))
            gains = {w: s.expected_gain(self.shares[w]) for w, s in self.searches.items()}
            workload = max(gains, key=lambda w: gains[w])
            if gains[workload] < FLAT:
                return
            search = self.searches[workload]
            count = BATCH
            if self.options.trials is not None:
                count = min(count, self.options.trials - self.progress.trials_done)
            before = search.best_s
            self.trials.run(search, search.propose(count, self.cost_model))
            improved = search.best_s < before * (1 - IMPROVEMENT)
            search.stale = 0 if improved else search.stale + 1
            self.progress.write_report()
            if self.trials.fitting >= ENOUGH_TO_JUDGE:
                self._check_valid_share()

    def _confirm(self) -> None:
        """Measures the best of each task again, in turns with the default: luck does not win."""
        for search in self.searches.values():
            finalists = self._finalists(search)
            if finalists == [search.default]:
                continue
            for _ in range(FINAL_ROUNDS):
                self.trials.run(search, finalists, counted=False)
            self._settle(search)
        self.progress.update()

    def _settle(self, search: TaskSearch) -> None:
        """Lets all measurements of a task count, also those that took luck away from the first."""
        trials = self._fitting(search.task, self._here(search.task))
        default = winner(t for t in trials if t.candidate == search.default)
        best = winner(trials)
        if default is not None and best is not None:
            search.default_s, search.best_s = default.cost_s, best.cost_s

    def _finalists(self, search: TaskSearch) -> list[Candidate]:
        ranked = sorted((cost, text) for text, cost in search.costs_s.items() if cost is not None)
        finalists = [json.loads(text) for _, text in ranked[:FINALISTS]]
        if search.default not in finalists:
            finalists.append(search.default)
        return finalists

    def _ship(
        self, untuned: Bundle, build: Callable[..., Bundle], *, output: Path, folder: Path
    ) -> Bundle:
        """Compares the whole network, tuned and untuned, and writes the one that is shipped."""
        if not self.interrupted:
            self.progress.phase("comparing")
        tuned = build(folder / "tuned", tuned=True, device=self.device)
        rungs = tuned.manifest.build["coverage"]["rungs"]
        if TUNED_RUNGS.isdisjoint(rungs):
            # Nothing beat the defaults: both are the same code.
            return build(output, tuned=False)
        turns = INTERRUPTED_TURNS if self.interrupted else COMPARE_TURNS
        final = self.place.compare(untuned, tuned, turns)
        if final is None:
            final = self._summed()
        self.progress.final(final)
        if not final.shipped:
            used = {
                kernel for rung, names in rungs.items() if rung in TUNED_RUNGS for kernel in names
            }
            self._keep_defaults(used)
        return build(output, tuned=final.shipped, device=self.device)

    def _keep_defaults(self, kernels: set[str]) -> None:
        """Records that these kernels' tuned schedules did not help the network: `edgesdk compile`
        keeps the defaults, too, until something newer is measured."""
        for task in self.progress.tasks:
            if kernels.isdisjoint(task.names):
                continue
            default = task.space.candidate(task.space.default)
            trials = self._fitting(task, self._here(task))
            measured = winner(t for t in trials if t.candidate == default)
            if measured is not None:
                extra = {VERDICT: KEEP_DEFAULT}
                self.records.add(replace(measured, created=time.time(), extra=extra))

    def _summed(self) -> FinalLatency:
        """The comparison where only kernels can be run: each checked there, and their sum."""
        untuned_ms = tuned_ms = error = 0.0
        for search in self.searches.values():
            trials = self._fitting(search.task, self._here(search.task))
            default = winner(t for t in trials if t.candidate == search.default)
            best = winner(trials)
            if default is not None and best is not None:
                untuned_ms += search.task.calls * default.cost_s * 1e3
                tuned_ms += search.task.calls * best.cost_s * 1e3
                error = max(error, best.extra.get("max_relative_error", 0.0))
        return FinalLatency(
            (untuned_ms,), (tuned_ms,), error, shipped=tuned_ms <= untuned_ms, summed=True
        )

    # Helpers.

    def _here(self, task: Task) -> Where:
        return Where(task.workload, self.target, self.device.fingerprint)

    def _out_of_budget(self) -> bool:
        limit_s = self.options.time_limit_s
        if limit_s is not None and self.progress.elapsed_s >= limit_s:
            return True
        return self.options.trials is not None and self.progress.trials_done >= self.options.trials

    def _check_valid_share(self) -> None:
        trials = self.trials
        if trials.measured >= self.options.min_valid_share * trials.fitting:
            return
        failed = {k: n for k, n in trials.errors.most_common() if k != NO_FIT}
        kinds = ", ".join(f"{count} {kind}" for kind, count in failed.items())
        examples = "; ".join(f"{kind}: {trials.examples[kind]}" for kind in failed)
        raise TuningError(
            f"only {trials.measured} of {trials.fitting} trials could be measured ({kinds})",
            hint=f"one of each: {examples}",
        )
