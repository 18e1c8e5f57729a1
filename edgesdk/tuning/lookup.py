"""Which tuned candidate a kernel gets when a model is compiled: the top rungs of the ladder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import Candidate, KernelSpace, kernel_space, workload_of
from edgesdk.tuning.devicekey import DeviceKey
from edgesdk.tuning.records import Records, Where, records_path
from edgesdk.tuning.search import fits
from edgesdk.tuning.trial import TrialRecord, target_key, winner

# A tuned candidate must beat the template's default by this much, or it is noise.
WORTH_HAVING = 0.02

_RUNGS = {
    "device": "tuned",
    "model": "tuned (same model of device)",
    "cpu": "tuned (same CPU)",
    "target": "tuned (another device of this target)",
}
TUNED_RUNGS = frozenset(_RUNGS.values())

# What a session writes into `extra` of a kernel's default when the network as a whole was not
# faster, or wrong, with the tuned schedules.
VERDICT, KEEP_DEFAULT = "verdict", "keep the default"


class RecordLookup:
    """Looks candidates up in the records for one target and, if known, one kind of device.

    Use it as a context manager. `used` holds the candidates it gave, by workload; `skipped` counts
    the records that no longer fit the templates, by reason.
    """

    def __init__(
        self, profile: TargetProfile, device: DeviceKey | None, path: Path | None = None
    ) -> None:
        self._profile = profile
        self._target = target_key(profile.tvm)
        self._device = device
        path = records_path(path)
        self._records = Records.open(path, read_only=True) if path.exists() else None
        self.used: dict[str, Candidate] = {}
        self.skipped: Counter[str] = Counter()

    def __enter__(self) -> RecordLookup:
        return self

    def __exit__(self, *_: object) -> None:
        if self._records is not None:
            self._records.close()

    def __call__(self, function: Any) -> tuple[Candidate, str] | None:
        """Returns the candidate for the kernel `function` and the name of its rung, or None."""
        if self._records is None:
            return None
        workload = workload_of(function)
        trials: dict[DeviceKey, list[TrialRecord]] = {}
        every = list(self._records.trials(Where(workload, self._target)))
        if not every:
            return None
        space = kernel_space(function, self._profile)
        for trial in every:
            if fits(space, trial.candidate):
                trials.setdefault(trial.device, []).append(trial)
            else:
                self.skipped[f"made by edgesdk {trial.edgesdk}, its knobs no longer exist"] += 1
        found = self._best(self._records, workload, trials, space)
        if found is None:
            return None
        record, level = found
        if _is_closed(trials[record.device]):
            return None
        usual = space.candidate(space.default)
        default = winner(t for t in trials[record.device] if t.candidate == usual)
        if default is not None and record.cost_s > (1 - WORTH_HAVING) * default.cost_s:
            return None
        self.used[workload] = record.candidate
        return record.candidate, _RUNGS[level]

    def _best(
        self,
        records: Records,
        workload: str,
        trials: dict[DeviceKey, list[TrialRecord]],
        space: KernelSpace,
    ) -> tuple[TrialRecord, str] | None:
        if self._device is not None:
            return records.best(
                workload,
                self._target,
                self._device,
                accept=lambda candidate: fits(space, candidate),
            )
        # No device is known: the kind of device of this target with the most trials.
        for group in sorted(trials.values(), key=len, reverse=True):
            won = winner(group)
            if won is not None:
                return won, "target"
        return None


def _is_closed(trials: list[TrialRecord]) -> bool:
    """Whether the last word on a kernel was that its tuned schedules did not help a network."""
    last = max(trials, key=lambda trial: trial.created)
    return last.extra.get(VERDICT) == KEEP_DEFAULT
