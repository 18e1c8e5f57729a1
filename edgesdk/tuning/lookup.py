"""Which tuned candidate a kernel gets when a model is compiled: the top rungs of the ladder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import Candidate, kernel_space, workload_of
from edgesdk.tuning.devicekey import DeviceKey
from edgesdk.tuning.records import Records, Where, records_path
from edgesdk.tuning.trial import TrialRecord, canonical, target_key, winner

# A tuned candidate must beat the template's default by this much, or it is noise.
WORTH_HAVING = 0.02

_RUNGS = {
    "device": "tuned",
    "model": "tuned (same model of device)",
    "cpu": "tuned (same CPU)",
    "target": "tuned (another device of this target)",
}


class RecordLookup:
    """Looks candidates up in the records for one target and, if known, one kind of device.

    `used` holds the candidates it gave, by workload.
    """

    def __init__(
        self, profile: TargetProfile, device: DeviceKey | None, path: Path | None = None
    ) -> None:
        self._profile = profile
        self._target = target_key(profile.tvm)
        self._device = device
        self._path = records_path(path)
        self.used: dict[str, Candidate] = {}

    def __call__(self, function: Any) -> tuple[Candidate, str] | None:
        """Returns the candidate for the kernel `function` and the name of its rung, or None."""
        if not self._path.exists():
            return None
        workload = workload_of(function)
        with Records.open(self._path, read_only=True) as records:
            found = self._best(records, workload)
            if found is None:
                return None
            record, level = found
            where = Where(workload, self._target, record.device.fingerprint)
            default = kernel_space(function, self._profile)
            usual = canonical(default.candidate(default.default))
            plain = winner(t for t in records.trials(where) if canonical(t.candidate) == usual)
        if plain is not None and record.cost_s > (1 - WORTH_HAVING) * plain.cost_s:
            return None
        self.used[workload] = record.candidate
        return record.candidate, _RUNGS[level]

    def _best(self, records: Records, workload: str) -> tuple[TrialRecord, str] | None:
        if self._device is not None:
            return records.best(workload, self._target, self._device)
        # No device is known: the kind of device of this target with the most trials.
        trials: dict[DeviceKey, list[TrialRecord]] = {}
        for trial in records.trials(Where(workload, self._target)):
            trials.setdefault(trial.device, []).append(trial)
        for group in sorted(trials.values(), key=len, reverse=True):
            won = winner(group)
            if won is not None:
                return won, "target"
        return None
