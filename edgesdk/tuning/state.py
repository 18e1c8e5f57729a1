"""Where a tuning session stands, as plain data: what the live table and the report show.

All times of tasks are for one call of the kernel; a task's share of the network's time is its calls
times its time before tuning.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Literal

TaskPhase = Literal["waiting", "tuning", "done", "skipped"]
SessionPhase = Literal[
    "preparing", "canary", "tuning", "confirming", "comparing", "finished", "interrupted", "failed"
]


@dataclass(frozen=True)
class TaskState:
    """One kernel of the network.

    `calls` in each run of the network; `share` of the network's time before tuning, 0 to 1.
    `trials` counts the measurements so far, failed ones too. `baseline_ms` is the kernel as an
    untuned build has it, `best_ms` the best so far (None: nothing measured), `gflops` the speed of
    the best in 10^9 operations a second. `note` says why a task is skipped, or what it starts from
    ("records of the same CPU"). `candidate` is the best so far by all records of this device, as
    JSON, `schedule` the kernel that it gives as TVMScript; "" where they are not known yet.
    """

    name: str
    workload: str
    calls: int
    share: float
    phase: TaskPhase = "waiting"
    trials: int = 0
    baseline_ms: float | None = None
    best_ms: float | None = None
    gflops: float | None = None
    note: str = ""
    candidate: str = ""
    schedule: str = ""

    @property
    def gain(self) -> float | None:
        """How many times faster than before tuning; None until both are measured."""
        if not self.baseline_ms or not self.best_ms:
            return None
        return self.baseline_ms / self.best_ms


@dataclass(frozen=True)
class FinalLatency:
    """The whole network, untuned and tuned in turns on the device; latencies in milliseconds.

    `max_relative_error` compares the tuned outputs with the reference; `wrong` says that it is more
    than is allowed. `shipped` says whether the bundle uses the tuned code. With `summed`, the
    device could not run the network: both are sums over the kernels that were tuned.
    """

    untuned_ms: tuple[float, ...]
    tuned_ms: tuple[float, ...]
    max_relative_error: float
    shipped: bool
    wrong: bool = False
    summed: bool = False

    @property
    def verdict(self) -> str:
        """Why the tuned code is not used, or ""."""
        if self.shipped:
            return ""
        why = "gives wrong results on the device" if self.wrong else "is not faster"
        return f"the tuned network {why}: the untuned code is kept"

    @property
    def gain(self) -> float:
        """How many times faster than untuned, by the medians."""
        return statistics.median(self.untuned_ms) / statistics.median(self.tuned_ms)


@dataclass(frozen=True)
class SessionState:
    """A tuning session at one moment.

    `baseline_latency_ms` and `latency_ms` are estimates for the network, before tuning and with the
    best so far: the sum over its tasks. `trial_limit` or `time_limit_s` is what the user allowed,
    `eta_s` what is left of it. `errors` counts failed trials by error kind. `temperature_c` and
    `throttled` are None where the device cannot tell. `note` says what the session waits for.
    """

    model: str
    target: str
    device: str
    phase: SessionPhase = "preparing"
    tasks: tuple[TaskState, ...] = ()
    trials: int = 0
    trial_limit: int | None = None
    elapsed_s: float = 0.0
    time_limit_s: float | None = None
    trials_per_s: float = 0.0
    eta_s: float | None = None
    baseline_latency_ms: float | None = None
    latency_ms: float | None = None
    temperature_c: float | None = None
    throttled: bool | None = None
    errors: dict[str, int] = field(default_factory=dict)
    note: str = ""
    final: FinalLatency | None = None

    @property
    def gain(self) -> float | None:
        """How many times faster the network is than before tuning, as estimated so far."""
        if not self.baseline_latency_ms or not self.latency_ms:
            return None
        return self.baseline_latency_ms / self.latency_ms
