"""One trial, one session, and which of several candidates is the fastest: plain data, no files."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edgesdk import __version__
from edgesdk.tuning.devicekey import DeviceKey

# The `error_kind` of a trial that failed through the device or the connection (it was switched off,
# it is full): that says nothing of the candidate.
DEVICE_ERROR = "device"

# No kernel is faster or slower than this: samples beyond come from a clock that jumped.
_SHORTEST_S = 1e-9
_LONGEST_S = 3600.0

SessionEnd = Literal["interrupted", "failed", "finished"]


@dataclass(frozen=True)
class TrialRecord:
    """One measurement of one candidate.

    `workload` is the hash of the unscheduled kernel, `kernel` its readable name, `target` the
    target_key() of the profile, `samples_s` what each repeat took for one call, in seconds.
    `error_kind` and `error` are empty for a candidate that ran and was right. `created` counts
    seconds since 1970. `edgesdk` is the version whose templates the candidate was built with.
    `extra` is plain data for whoever made the record, e.g. the cost model.
    """

    workload: str
    target: str
    device: DeviceKey
    candidate: dict[str, Any]
    samples_s: tuple[float, ...]
    error_kind: str = ""
    error: str = ""
    session: str = ""
    kernel: str = ""
    created: float = field(default_factory=time.time)
    edgesdk: str = __version__
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def cost_s(self) -> float:
        """The median of the samples in seconds; infinite if the trial failed.

        A sample that cannot be true (0 s, more than an hour, NaN) counts as infinitely slow.
        """
        if self.error_kind or not self.samples_s:
            return math.inf
        return statistics.median(
            s if _SHORTEST_S <= s <= _LONGEST_S else math.inf for s in self.samples_s
        )

    @property
    def ok(self) -> bool:
        """Whether the candidate ran, was right, and took a time that can be true."""
        return math.isfinite(self.cost_s)


@dataclass(frozen=True)
class Session:
    """One run of the tuner. `device` is a fingerprint; times count seconds since 1970.

    A session whose process was killed stays "running".
    """

    id: str
    model: str
    model_sha256: str
    target: str
    device: str
    options: dict[str, Any]
    state: Literal["running"] | SessionEnd = "running"
    started: float = field(default_factory=time.time)
    finished: float | None = None


def canonical(data: Any) -> str:
    """Returns `data` as JSON that is the same text for the same data.

    Raises ValueError or TypeError if it is not plain JSON data; NaN and infinity are none.
    """
    return json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def target_key(tvm: Mapping[str, Any]) -> str:
    """Returns what records call the target of a profile with this [tvm] table."""
    return canonical(dict(tvm))


def winner(trials: Iterable[TrialRecord]) -> TrialRecord | None:
    """Returns the fastest candidate of trials of one kernel on one kind of device, or None.

    What is compared is the median over the samples of all its ok trials, so that measuring a
    candidate again corrects one that was lucky; the record that is returned has all of them. A
    candidate whose newest trial failed cannot win; trials that failed through the device, or whose
    time cannot be true, say nothing.
    """
    by_candidate: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if trial.ok or trial.error_kind not in ("", DEVICE_ERROR):
            by_candidate.setdefault(canonical(trial.candidate), []).append(trial)
    best = None
    for group in by_candidate.values():
        newest = max(group, key=lambda t: t.created)
        if newest.ok:
            samples = tuple(s for trial in group if trial.ok for s in trial.samples_s)
            pooled = replace(newest, samples_s=samples)
            # Samples that cannot be true count here, too: many of them make it infinitely slow.
            if pooled.ok and (best is None or pooled.cost_s < best.cost_s):
                best = pooled
    return best
