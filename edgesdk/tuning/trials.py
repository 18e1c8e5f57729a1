"""Makes trials: builds candidates here, measures them on the device, records each as it comes.

A device that goes away is waited for; one that heat or low voltage slows down is given time, and
what was measured meanwhile does not count.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgesdk.errors import DeviceError, DeviceUnreachableError
from edgesdk.precision import PRECISIONS
from edgesdk.profiles import TargetProfile
from edgesdk.schedules import Candidate
from edgesdk.tuning.builder import Builder, BuildRequest, BuildTask
from edgesdk.tuning.devicekey import DeviceKey
from edgesdk.tuning.measure import DeviceState, Measurer, MeasureRequest, TensorArgument
from edgesdk.tuning.options import TuneOptions
from edgesdk.tuning.place import Place
from edgesdk.tuning.records import Records
from edgesdk.tuning.search import TaskSearch
from edgesdk.tuning.tasks import Task, draw_arguments, reference_output
from edgesdk.tuning.trial import DEVICE_ERROR, TrialRecord, target_key

TOLERANCE = 1e-4
# The knobs of such a candidate do not fit together: nothing was built, so nothing has failed.
NO_FIT = "schedule"
# The arguments of several tasks stay on the device, up to this.
ARGUMENTS_LIMIT_BYTES = 256 << 20
# A board that reboots is back within two minutes.
RECONNECT_WAITS_S = (2.0, 5.0, 10.0, 20.0, 30.0, 30.0, 30.0)
DISK_FULL = "No space left on device"
SLOWED_DOWN = "heat or low voltage slowed the device down"
COOL_DOWN_WAIT_S = 20.0
COOL_DOWN_LIMIT_S = 180.0


class DiskFullError(DeviceError):
    """The work folder of the device is full: waiting does not help."""


@dataclass(frozen=True)
class Outcome:
    """What became of one candidate, built and measured or not. `error_kind` is a builder's or the
    device's, "" if it was measured."""

    error_kind: str
    error: str
    samples_s: tuple[float, ...] = ()
    max_relative_error: float = float("inf")
    after: DeviceState = field(default_factory=DeviceState)


class Trials:
    """Trials of one session. `changed` is called after each, and when `note` changes.

    `count` and `measured` leave out those that repeat another or whose knobs did not fit together;
    `errors` and `examples` hold the failed ones by kind.
    """

    def __init__(
        self,
        *,
        place: Place,
        device: DeviceKey,
        session: str,
        records: Records,
        builder: Builder,
        profile: TargetProfile,
        options: TuneOptions,
        folder: Path,
        changed: Callable[[], None],
    ) -> None:
        self._place = place
        self._device = device
        self._session = session
        self._records = records
        self._builder = builder
        self._target = target_key(profile.tvm)
        self._options = options
        self._tolerance = max(TOLERANCE, PRECISIONS[profile.precision].tolerance)
        # A GPU's driver maps gigabytes of addresses that are no memory.
        self._memory_limit = 0 if profile.gpu is not None else options.memory_limit_mib << 20
        self._flush_bytes = 2 * _largest_cache_bytes(profile) if options.flush_cache else 0
        self._folder = folder
        self._changed = changed
        self._measurer: Measurer
        self._arguments: dict[str, tuple[TensorArgument, ...]] = {}
        self._next_number = 0
        self._slowed = False
        self._always_slow = False
        self.count = 0
        self.fitting = 0
        self.measured = 0
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.state = DeviceState()
        self.note = ""

    def connect(self) -> None:
        """Connects to the device, anew if it was connected."""
        self._place.disconnect()
        self._arguments = {}
        self._measurer = self._place.connect()

    def run(
        self,
        search: TaskSearch,
        candidates: list[Candidate],
        *,
        counted: bool = True,
        patient: bool = True,
    ) -> list[Outcome]:
        """Builds and measures candidates of one task, and tells `search` what came of them.

        Without `counted` they repeat trials: they are recorded, no more. Without `patient`, the
        errors of a device that goes away are raised at once.
        """
        outcomes = self._attempt(search, candidates, counted=counted, patient=patient)
        if self._slowed:
            self._cool_down(search)
        return outcomes

    def _attempt(
        self, search: TaskSearch, candidates: list[Candidate], *, counted: bool, patient: bool
    ) -> list[Outcome]:
        requests: dict[int, BuildRequest] = {}
        for candidate in candidates:
            self._next_number += 1
            number = self._next_number
            library = self._folder / f"c{number}.so"
            requests[number] = BuildRequest(number, search.task.workload, candidate, library)
        outcomes: dict[int, Outcome] = {}

        def take(number: int, outcome: Outcome) -> None:
            outcomes[number] = outcome
            self._take(search, requests[number].candidate, outcome, counted=counted)
            requests[number].output.unlink(missing_ok=True)

        def built() -> Iterator[MeasureRequest]:
            for result in self._builder.build(requests.values()):
                if result.error_kind:
                    take(result.number, Outcome(result.error_kind, result.error))
                else:
                    yield self._request(search.task, requests[result.number])

        try:
            self._prepare(search.task)
            for result in self._measurer.measure(built()):
                take(
                    result.candidate,
                    Outcome(
                        result.error_kind,
                        result.error,
                        result.samples_s,
                        result.max_relative_error,
                        result.after,
                    ),
                )
                if result.error_kind == DEVICE_ERROR and DISK_FULL in result.error:
                    raise DiskFullError(
                        f"{self._place.name}: disk full: {result.error}",
                        hint="free some space there; the same command goes on where it stopped",
                    )
        except DiskFullError:
            raise
        except (DeviceError, DeviceUnreachableError) as error:
            if not patient:
                raise
            self._wait_for_device(error)
        lost = Outcome(DEVICE_ERROR, "the connection was lost")
        return [outcomes.get(number, lost) for number in requests]

    def _request(self, task: Task, built: BuildRequest) -> MeasureRequest:
        options = self._options
        return MeasureRequest(
            candidate=built.number,
            library=built.output,
            symbol="candidate",
            arguments=self._arguments[task.workload],
            tolerance=self._tolerance,
            repeat=options.repeat,
            min_repeat_ms=options.min_repeat_ms,
            flush_cache_bytes=self._flush_bytes,
            timeout_s=options.timeout_s,
            memory_limit_bytes=self._memory_limit,
            threads=options.threads,
        )

    def _prepare(self, task: Task) -> None:
        """Brings a task's kernel to the builders, and its arguments and result to the device."""
        known = self._arguments.pop(task.workload, None)
        if known is not None:
            self._arguments[task.workload] = known  # the last one used goes to the end
            return
        self._builder.add_task(BuildTask(task.workload, _as_json(task.function)))
        # Of its own for each task: then no two tasks share data, and dropping is simple.
        inputs = draw_arguments(task, int(task.workload, 16) ^ self._options.seed)
        expected = reference_output(task, inputs)
        arrays = [*inputs[:-1], expected]
        self._make_room(sum(array.nbytes for array in arrays))
        self._arguments[task.workload] = tuple(
            TensorArgument(
                shape=array.shape,
                dtype=str(array.dtype),
                blob=self._measurer.put(array.tobytes()),
                is_output=index == len(arrays) - 1,
            )
            for index, array in enumerate(arrays)
        )

    def _make_room(self, more_bytes: int) -> None:
        def held() -> int:
            return sum(a.size_bytes for group in self._arguments.values() for a in group)

        while self._arguments and held() + more_bytes > ARGUMENTS_LIMIT_BYTES:
            oldest = next(iter(self._arguments))
            for blob in {a.blob for a in self._arguments.pop(oldest)}:
                self._measurer.drop(blob)

    def _take(
        self, search: TaskSearch, candidate: Candidate, outcome: Outcome, *, counted: bool
    ) -> None:
        """Records one trial, and shows it."""
        if outcome.after != DeviceState():
            self.state = outcome.after
        if outcome.after.throttled and not outcome.error_kind and not self._always_slow:
            self._slowed = True
            outcome = Outcome(DEVICE_ERROR, SLOWED_DOWN)
        record = TrialRecord(
            workload=search.task.workload,
            target=self._target,
            device=self._device,
            candidate=candidate,
            samples_s=outcome.samples_s,
            error_kind=outcome.error_kind,
            error=outcome.error,
            session=self._session,
            kernel=search.task.name,
            extra=self._extra(outcome),
        )
        self._records.add(record)
        if not record.ok:
            kind = outcome.error_kind or "impossible time"
            self.errors[kind] += 1
            self.examples.setdefault(kind, outcome.error or f"samples: {outcome.samples_s}")
        if counted:
            self.count += 1
            self.fitting += outcome.error_kind != NO_FIT
            self.measured += record.ok
            if outcome.error_kind != DEVICE_ERROR:
                search.add(candidate, record.cost_s if record.ok else None)
        self._changed()

    def _extra(self, outcome: Outcome) -> dict[str, Any]:
        if outcome.error_kind:
            return {}
        after = outcome.after
        said = {
            "max_relative_error": outcome.max_relative_error,
            "clock_khz": after.clock_khz,
            "temperature_c": after.temperature_c,
            "throttled": after.throttled,
            "flush_cache_bytes": self._flush_bytes or None,
            "threads": self._options.threads or None,
        }
        return {name: value for name, value in said.items() if value is not None}

    def _wait_for_device(self, error: DeviceError | DeviceUnreachableError) -> None:
        """Waits for a device that went away (it reboots, perhaps); raises `error` in the end."""
        self.errors[DEVICE_ERROR] += 1
        self.examples.setdefault(DEVICE_ERROR, error.message)
        self._place.disconnect()
        for wait_s in RECONNECT_WAITS_S:
            self._say(f"the device is gone ({error.message}): trying again in {wait_s:.0f} s")
            time.sleep(wait_s)
            with suppress(DeviceError, DeviceUnreachableError):
                self.connect()
                self._say("")
                return
        raise error

    def _cool_down(self, search: TaskSearch) -> None:
        """Waits until nothing slows the device down. If that does not end, it is measured so."""
        waited_s = 0.0
        while waited_s < COOL_DOWN_LIMIT_S:
            self._say(f"heat or low voltage slows the device down: waiting {COOL_DOWN_WAIT_S:g} s")
            time.sleep(COOL_DOWN_WAIT_S)
            waited_s += COOL_DOWN_WAIT_S
            self._slowed = False
            self._attempt(search, [search.default], counted=False, patient=True)
            if not self._slowed:
                self._say("")
                return
        self._slowed = False
        self._always_slow = True
        self._say("heat or low voltage slows the device down all the time: measured as it is")

    def _say(self, note: str) -> None:
        self.note = note
        self._changed()


def _largest_cache_bytes(profile: TargetProfile) -> int:
    cpu = profile.cpu
    return max(cpu.l1d_kib, cpu.l2_kib, cpu.l3_kib) << 10


def _as_json(function: Any) -> str:
    import tvm

    return str(tvm.ir.save_json(function))
