"""A tuning session: search on this machine, measurement on the device, nothing lost.

The order of things: compile untuned and see where the time goes; the canary (one candidate all the
way); batches of trials, each recorded as it comes; the best ones measured again beside the default;
and at the end the whole network, tuned and untuned in turns. What is not faster is not shipped.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgesdk.bundle import Bundle
from edgesdk.errors import DeviceError, DeviceUnreachableError, ModelError, UsageError
from edgesdk.schedules import Candidate
from edgesdk.tuning.builder import Builder, BuildRequest, BuildTask
from edgesdk.tuning.devicekey import DeviceKey, device_key
from edgesdk.tuning.measure import DeviceState, Measurer, MeasureRequest, TensorArgument
from edgesdk.tuning.records import Records, Where
from edgesdk.tuning.search import CostModel, TaskSearch
from edgesdk.tuning.state import FinalLatency, SessionState, TaskState
from edgesdk.tuning.tasks import Task, collect_tasks, draw_arguments, is_tunable, reference_output
from edgesdk.tuning.trial import DEVICE_ERROR, Session, TrialRecord, canonical, target_key, winner

if TYPE_CHECKING:
    from edgesdk.deploy.transport.base import Transport
    from edgesdk.profiles import TargetProfile

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
TOLERANCE = 1e-4
COMPARE_TURNS = 5
RECONNECTS = 3
RECONNECT_WAIT_S = 10.0
DEFAULT_MINUTES = 10.0


@dataclass(frozen=True)
class TuneOptions:
    """`trials` and `minutes` bound the search (None: no bound of that kind). `min_valid_share` is
    the share of trials that must be measured, or the session fails."""

    trials: int | None = None
    minutes: float | None = None
    seed: int = 0
    resume: bool = True
    min_valid_share: float = 0.5
    repeat: int = 5
    min_repeat_ms: float = 20.0
    timeout_s: float = 20.0
    memory_limit_bytes: int = 1 << 30
    flush_cache_bytes: int = 0
    threads: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of one candidate, built and measured or not. `error_kind` is a builder's or the
    device's, "" if it was measured."""

    error_kind: str
    error: str
    samples_s: tuple[float, ...] = ()
    max_relative_error: float = float("inf")
    after: DeviceState = field(default_factory=DeviceState)


@dataclass(frozen=True)
class TuneResult:
    """`bundle` uses the best schedules, or the default ones where those were not beaten."""

    bundle: Bundle
    state: SessionState
    report: Path


class TuningError(ModelError):
    """The session could not measure what it should (exit code 5)."""


def tune_model(
    model: Path,
    *,
    profile: TargetProfile,
    device: str,
    shapes: Mapping[str, Sequence[int]] | None,
    output: Path | None,
    options: TuneOptions,
    records_path: Path | None = None,
    report: Path | None = None,
    show: Callable[[SessionState], None] = lambda state: None,
) -> TuneResult:
    """Tunes `model` for `profile` on `device` and writes a bundle that uses what was found.

    `show` gets the session's state after every trial. Raises what `api.compile` raises, TuningError
    when the canary fails or too few trials could be measured, DeviceUnreachableError and
    DeviceError when the device stays away; all trials so far are in the records then.
    """
    with tempfile.TemporaryDirectory(prefix="edgesdk-tune-") as temporary:
        session = _Session(
            model=model,
            profile=profile,
            device=device,
            shapes=shapes,
            output=output,
            options=options,
            records_path=records_path,
            report=report,
            show=show,
            folder=Path(temporary),
        )
        return session.run()


class _Session:
    def __init__(
        self,
        *,
        model: Path,
        profile: TargetProfile,
        device: str,
        shapes: Mapping[str, Sequence[int]] | None,
        output: Path | None,
        options: TuneOptions,
        records_path: Path | None,
        report: Path | None,
        show: Callable[[SessionState], None],
        folder: Path,
    ) -> None:
        if options.trials is None and options.minutes is None:
            options = replace(options, minutes=DEFAULT_MINUTES)
        self.model, self.profile, self.device_name = model, profile, device
        self.shapes, self.output, self.options = shapes, output, options
        self.records_path, self.report_path = records_path, report
        self._show, self.folder = show, folder
        self.draw = random.Random(options.seed)
        self.cost_model = CostModel(options.seed)
        self.target = target_key(profile.tvm)
        self.started = time.monotonic()
        self.trials = 0
        self.measured = 0
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.blobs: dict[str, tuple[TensorArgument, ...]] = {}
        self.next_number = 0
        self.state = SessionState(
            model=model.name,
            target=profile.name,
            device=device,
            trial_limit=options.trials,
            time_limit_s=None if options.minutes is None else options.minutes * 60,
        )
        # Set while running:
        self.records: Records
        self.key: DeviceKey
        self.session: Session
        self.tasks: list[Task] = []
        self.searches: dict[str, TaskSearch] = {}
        self.shares: dict[str, float] = {}
        self.baseline_ms: dict[str, float] = {}
        self.agent: Measurer
        self.transport: Transport
        self.builder: Builder

    # The stages.

    def run(self) -> TuneResult:
        from edgesdk import api
        from edgesdk.deploy.run import placed_bundle
        from edgesdk.frontend import import_model
        from edgesdk.toolchain import load_toolchain

        toolchain = load_toolchain(self.profile.toolchain)
        toolchain.require(self.profile.machine)
        self._phase("preparing")
        imported = import_model(self.model, shapes=self.shapes)
        name = f"{imported.name}-{self.profile.name}"
        self.output = self.output or Path("bundles") / name
        if self.report_path is None:
            self.report_path = self.output.with_name(f"{self.output.name}.tuning.html")
        untuned = api.compile(
            self.model,
            target=self.profile.name,
            shapes=self.shapes,
            output=self.folder / "untuned",
            tuned=False,
        )
        self.tasks = collect_tasks(imported, self.profile)
        with Records.open(self.records_path) as self.records:
            with placed_bundle(untuned, self.device_name) as placed:
                from edgesdk.deploy.facts import read_facts

                self.key = device_key(read_facts(placed.transport))
                self._profile_layers(placed)
            self._begin(imported.name, imported.sha256)
            ended = False
            try:
                with Builder(self.profile, toolchain) as self.builder:
                    self._connect()
                    try:
                        self._canary()
                        self._search()
                        self._confirm()
                    finally:
                        self._disconnect()
                self._check_valid_share()
                bundle = self._compare(untuned)
                self.records.end_session(self.session.id, "finished")
                ended = True
                self._phase("finished")
                return TuneResult(bundle, self.state, self.report_path)
            except KeyboardInterrupt:
                self.records.end_session(self.session.id, "interrupted")
                ended = True
                self._phase("interrupted")
                raise
            finally:
                if not ended:
                    self.records.end_session(self.session.id, "failed")
                    self._phase("failed")

    def _profile_layers(self, placed: Any) -> None:
        """Measures where the untuned network spends its time on the device."""
        launch = placed.launch(
            [
                "--selftest",
                placed.path("golden"),
                "--tolerance",
                repr(placed.bundle.manifest.verification.tolerance),
                "--warmup",
                "2",
                "--repeat",
                "5",
                "--per-layer",
            ]
        )
        if launch.differs:
            raise TuningError(
                f"the untuned network gives wrong results on {self.device_name}",
                hint=f"edgesdk verify BUNDLE --device {self.device_name}",
            )
        time_ms: Counter[str] = Counter()
        for layer in launch.report["layers"]:
            time_ms[layer["name"]] += layer["mean_ms"]
        total = sum(time_ms.values()) or 1.0
        for task in self.tasks:
            of_task = sum(time_ms[name] for name in task.names)
            self.shares[task.workload] = of_task / total
            self.baseline_ms[task.workload] = of_task / task.calls

    def _begin(self, name: str, sha256: str) -> None:
        """Starts or resumes the session in the records, and takes in what they know."""
        found = (
            self.records.unfinished(sha256, self.target, self.key) if self.options.resume else None
        )
        self.session = found or Session(
            id=uuid.uuid4().hex[:12],
            model=name,
            model_sha256=sha256,
            target=self.target,
            device=self.key.fingerprint,
            options={"seed": self.options.seed},
        )
        self.records.start_session(self.session)
        for task in self.tasks:
            if not is_tunable(task) or self.shares[task.workload] < NEGLIGIBLE_SHARE:
                continue
            search = TaskSearch(task)
            if self.options.resume:
                for trial in self._trials_of(task):
                    if trial.error_kind != DEVICE_ERROR:
                        search.add(trial.candidate, trial.cost_s if trial.ok else None)
            self.searches[task.workload] = search
        self._phase("preparing")

    def _canary(self) -> None:
        """One candidate all the way, so that a broken set-up fails in seconds and says where."""
        self._phase("canary")
        if not self.searches:
            return
        search = max(self.searches.values(), key=lambda s: self.shares[s.task.workload])
        default = search.task.space.candidate(search.task.space.default)
        results = self._measure(search, [default])
        if results[0].error_kind:
            raise TuningError(
                f"the canary failed ({results[0].error_kind}): {results[0].error}",
                hint="it is the untuned schedule of the slowest kernel: check the device first, "
                f"`edgesdk devices check {self.device_name}`",
            )

    def _search(self) -> None:
        self._phase("tuning")
        while self.searches and not self._out_of_budget():
            self.cost_model.fit(list(self.searches.values()))
            gains = {w: s.expected_gain(self.shares[w]) for w, s in self.searches.items()}
            workload = max(gains, key=lambda w: gains[w])
            if gains[workload] < FLAT:
                return
            search = self.searches[workload]
            count = BATCH
            if self.options.trials is not None:
                count = min(count, self.options.trials - self.trials)
            candidates = search.propose(count, self.cost_model, self.draw)
            before = search.best_s
            self._measure(search, candidates)
            improved = search.best_s < before * (1 - IMPROVEMENT)
            search.stale = 0 if improved else search.stale + 1
            self._write_report()

    def _confirm(self) -> None:
        """Measures the best of each task again, in turns with the default: luck does not win."""
        self._phase("confirming")
        for search in self.searches.values():
            task = search.task
            default = task.space.candidate(task.space.default)
            ranked = sorted(
                (cost, text) for text, cost in search.costs_s.items() if cost is not None
            )
            if not ranked:
                continue
            finalists = [json.loads(text) for _, text in ranked[:FINALISTS]]
            if finalists == [default]:
                continue
            if default not in finalists:
                finalists.append(default)
            for _ in range(FINAL_ROUNDS):
                self._measure(search, finalists, again=True)

    def _compare(self, untuned: Bundle) -> Bundle:
        """The whole network, tuned and untuned in turns on the device; returns what is shipped."""
        from edgesdk import api
        from edgesdk.deploy.run import placed_bundle

        self._phase("comparing")

        def compiled(output: Path, *, tuned: bool) -> Bundle:
            return api.compile(
                self.model,
                target=self.profile.name,
                shapes=self.shapes,
                output=output,
                tuned=tuned,
                device_key=self.key,
                records=self.records_path,
            )

        tuned = compiled(self.folder / "tuned", tuned=True)
        with (
            placed_bundle(untuned, self.device_name) as before,
            placed_bundle(tuned, self.device_name) as after,
        ):
            untuned_ms: list[float] = []
            tuned_ms: list[float] = []
            error, differs = 0.0, False
            for _ in range(COMPARE_TURNS):
                untuned_ms += self._latencies(before)[0]
                values, relative, wrong = self._latencies(after)
                tuned_ms += values
                error = max(error, relative)
                differs = differs or wrong
        final = FinalLatency(tuple(untuned_ms), tuple(tuned_ms), error, shipped=True)
        shipped = not differs and final.gain >= 1.0
        self.state = replace(self.state, final=replace(final, shipped=shipped))
        self._write_report()
        assert self.output is not None
        return compiled(self.output, tuned=shipped)

    def _latencies(self, placed: Any) -> tuple[list[float], float, bool]:
        tolerance = placed.bundle.manifest.verification.tolerance
        options = ["--selftest", placed.path("golden"), "--tolerance", repr(tolerance)]
        launch = placed.launch([*options, "--warmup", "3", "--repeat", "10"])
        error = launch.report["selftest"]["max_relative_error"]
        return list(launch.report["latency_ms"]), float(error or 0.0), launch.differs

    # Building and measuring.

    def _measure(
        self, search: TaskSearch, candidates: list[Candidate], *, again: bool = False
    ) -> list[Outcome]:
        """Builds and measures candidates of one task; each is recorded as its result comes."""
        task = search.task
        self._prepare(task)
        by_number: dict[int, Candidate] = {}
        requests = []
        for candidate in candidates:
            number = self.next_number
            self.next_number += 1
            by_number[number] = candidate
            library = self.folder / f"c{number}.so"
            requests.append(BuildRequest(number, task.workload, candidate, library))
        outcomes: dict[int, Outcome] = {}

        def built() -> Iterator[MeasureRequest]:
            for result in self.builder.build(requests):
                if result.error_kind:
                    outcome = Outcome(result.error_kind, result.error)
                    outcomes[result.number] = outcome
                    self._take(search, by_number[result.number], outcome, again=again)
                    continue
                yield self._request(task, result.number)

        try:
            for result in self.agent.measure(built()):
                outcome = Outcome(
                    result.error_kind,
                    result.error,
                    result.samples_s,
                    result.max_relative_error,
                    result.after,
                )
                outcomes[result.candidate] = outcome
                self._take(search, by_number[result.candidate], outcome, again=again)
                (self.folder / f"c{result.candidate}.so").unlink(missing_ok=True)
        except (DeviceError, DeviceUnreachableError) as error:
            self._lost_device(error)
        lost = Outcome(DEVICE_ERROR, "the connection was lost")
        return [outcomes.get(number, lost) for number in by_number]

    def _request(self, task: Task, number: int) -> MeasureRequest:
        options = self.options
        return MeasureRequest(
            candidate=number,
            library=self.folder / f"c{number}.so",
            symbol="candidate",
            arguments=self.blobs[task.workload],
            tolerance=TOLERANCE,
            repeat=options.repeat,
            min_repeat_ms=options.min_repeat_ms,
            flush_cache_bytes=options.flush_cache_bytes,
            timeout_s=options.timeout_s,
            memory_limit_bytes=options.memory_limit_bytes,
            threads=options.threads,
        )

    def _prepare(self, task: Task) -> None:
        """Brings a task's arguments and expected result to the device, once per connection."""
        self.builder.add_task(BuildTask(task.workload, _as_json(task.function)))
        if task.workload in self.blobs:
            return
        arguments = draw_arguments(task, self.options.seed)
        expected = reference_output(task, arguments)
        arrays = [*arguments[:-1], expected]
        self.blobs[task.workload] = tuple(
            TensorArgument(
                shape=array.shape,
                dtype=str(array.dtype),
                blob=self.agent.put(array.tobytes()),
                is_output=index == len(arrays) - 1,
            )
            for index, array in enumerate(arrays)
        )

    def _take(
        self, search: TaskSearch, candidate: Candidate, result: Outcome, *, again: bool
    ) -> None:
        """Records one trial, and shows it."""
        self.records.add(
            TrialRecord(
                workload=search.task.workload,
                target=self.target,
                device=self.key,
                candidate=candidate,
                samples_s=result.samples_s,
                error_kind=result.error_kind,
                error=result.error,
                session=self.session.id,
                kernel=search.task.name,
                extra={"max_relative_error": result.max_relative_error}
                if not result.error_kind
                else {},
            )
        )
        self.trials += not again
        if result.error_kind:
            self.errors[result.error_kind] += 1
            self.examples.setdefault(result.error_kind, result.error)
        else:
            self.measured += not again
        if result.error_kind != DEVICE_ERROR and not again:
            cost = _median(result.samples_s) if not result.error_kind else None
            search.add(candidate, cost)
        self.state = replace(
            self.state,
            temperature_c=result.after.temperature_c,
            throttled=result.after.throttled,
        )
        self._update()

    def _connect(self) -> None:
        from edgesdk.deploy.transport import open_transport
        from edgesdk.devices import get_device
        from edgesdk.tuning.agent import Agent

        self.transport = open_transport(get_device(self.device_name))
        try:
            self.agent = Agent(self.transport, self.profile)
        except BaseException:
            self.transport.close()
            raise
        self.blobs = {}

    def _disconnect(self) -> None:
        try:
            self.agent.close()
        finally:
            self.transport.close()

    def _lost_device(self, error: DeviceError | DeviceUnreachableError) -> None:
        """Waits for a device that went away (it reboots, perhaps); raises `error` in the end."""
        self.errors[DEVICE_ERROR] += 1
        self.examples.setdefault(DEVICE_ERROR, error.message)
        for _ in range(RECONNECTS):
            with suppress(DeviceError, DeviceUnreachableError):
                self._disconnect()
            time.sleep(RECONNECT_WAIT_S)
            try:
                self._connect()
            except (DeviceError, DeviceUnreachableError):
                continue
            return
        raise error

    # Budget, state and report.

    def _out_of_budget(self) -> bool:
        elapsed_s = time.monotonic() - self.started
        if self.options.minutes is not None and elapsed_s >= self.options.minutes * 60:
            return True
        return self.options.trials is not None and self.trials >= self.options.trials

    def _check_valid_share(self) -> None:
        total = self.trials
        if total == 0 or self.measured / total >= self.options.min_valid_share:
            return
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.errors.most_common())
        examples = "; ".join(f"{kind}: {text}" for kind, text in self.examples.items())
        raise TuningError(
            f"only {self.measured} of {total} trials could be measured ({kinds})",
            hint=f"one of each: {examples}",
        )

    def _trials_of(self, task: Task) -> list[TrialRecord]:
        where = Where(task.workload, self.target, self.key.fingerprint)
        return list(self.records.trials(where))

    def _phase(self, phase: Any) -> None:
        self.state = replace(self.state, phase=phase)
        self._update()
        if phase in ("finished", "interrupted", "failed"):
            self._write_report()

    def _update(self) -> None:
        elapsed_s = time.monotonic() - self.started
        tasks = tuple(self._task_state(task) for task in self.tasks)
        rate = self.trials / elapsed_s if elapsed_s > 0 else 0.0
        eta_s = None
        if self.options.minutes is not None:
            eta_s = max(0.0, self.options.minutes * 60 - elapsed_s)
        elif self.options.trials is not None and rate > 0:
            eta_s = (self.options.trials - self.trials) / rate
        baseline = sum(self.baseline_ms.get(t.workload, 0.0) * t.calls for t in tasks)
        best = sum((t.best_ms or self.baseline_ms.get(t.workload, 0.0)) * t.calls for t in tasks)
        self.state = replace(
            self.state,
            tasks=tasks,
            trials=self.trials,
            elapsed_s=elapsed_s,
            trials_per_s=rate,
            eta_s=eta_s,
            baseline_latency_ms=baseline or None,
            latency_ms=best or None,
            errors=dict(self.errors),
        )
        self._show(self.state)

    def _task_state(self, task: Task) -> TaskState:
        workload = task.workload
        search = self.searches.get(workload)
        state = TaskState(
            name=task.name,
            workload=workload,
            calls=task.calls,
            share=self.shares.get(workload, 0.0),
            baseline_ms=self.baseline_ms.get(workload),
        )
        if search is None:
            return replace(state, phase="skipped", note=self._why_skipped(task))
        if search.best_s == float("inf"):
            return state
        default_s = search.default_s if search.default_s < float("inf") else None
        return replace(
            state,
            phase="done" if search.exhausted else "tuning",
            trials=len(search.costs_s),
            # Measured by the agent, as the best is, where that was done.
            baseline_ms=default_s * 1e3 if default_s else state.baseline_ms,
            best_ms=search.best_s * 1e3,
            gflops=2 * task.operations / search.best_s / 1e9,
        )

    def _why_skipped(self, task: Task) -> str:
        if not is_tunable(task):
            return "nothing to choose"
        return "negligible share of the time"

    def _write_report(self) -> None:
        if self.report_path is None:
            return
        from edgesdk.tuning.report import write_report

        trials = {
            task.workload: self._trials_of(task)
            for task in self.tasks
            if task.workload in self.searches
        }
        tasks = tuple(
            replace(state, schedule=self._schedule_text(state.workload, trials.get(state.workload)))
            for state in self.state.tasks
        )
        every = [trial for group in trials.values() for trial in group]
        every.sort(key=lambda trial: trial.created)
        self.report_path.parent.mkdir(parents=True, exist_ok=True)
        write_report(self.report_path, replace(self.state, tasks=tasks), every, self._environment())

    def _schedule_text(self, workload: str, trials: list[TrialRecord] | None) -> str:
        """The best schedule so far as TVMScript, once the search is over."""
        if self.state.phase not in ("finished", "comparing") or not trials:
            return ""
        from edgesdk.schedules import apply_candidate

        won = winner(trials)
        if won is None:
            return ""
        task = self.searches[workload].task
        try:
            return str(apply_candidate(task.function, self.profile, won.candidate).script())
        except Exception as error:  # of an older edgesdk: counted as a problem by compile
            return f"{canonical(won.candidate)} no longer applies: {type(error).__name__}"

    def _environment(self) -> dict[str, dict[str, str]]:
        from importlib.metadata import version

        names = ("edgesdk", "apache-tvm", "apache-tvm-ffi", "xgboost")
        known = hasattr(self, "key")
        return {
            "Versions": {name: version(name) for name in names},
            "Device": {
                "name": self.device_name,
                "is": self.key.title if known else "not reached yet",
                "CPU": self.key.cpu if known else "",
                "cores": str(self.key.cores) if known else "",
            },
            "Target": {name: str(value) for name, value in self.profile.tvm.items()},
            "Options": {
                "seed": str(self.options.seed),
                "repeat": str(self.options.repeat),
                "min-repeat-ms": f"{self.options.min_repeat_ms:g}",
                "threads": str(self.options.threads or "all"),
            },
        }


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _as_json(function: Any) -> str:
    import tvm

    return str(tvm.ir.save_json(function))


def check_options(options: TuneOptions) -> None:
    """Raises UsageError for numbers that cannot be meant."""
    if options.trials is not None and options.trials < 1:
        raise UsageError(f"--trials is {options.trials}", hint="give at least 1")
    if options.minutes is not None and options.minutes <= 0:
        raise UsageError(f"--minutes is {options.minutes}", hint="give more than 0")
