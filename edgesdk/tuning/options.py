"""What a user may choose for a tuning session."""

from __future__ import annotations

from dataclasses import dataclass

from edgesdk.errors import UsageError
from edgesdk.settings import suggestion

TUNERS = ("evolutionary", "random", "grid", "replay")
DEFAULT_MINUTES = 10.0


@dataclass(frozen=True)
class TuneOptions:
    """`trials` and `minutes` bound the search; 10 minutes if neither is given.

    `tuner` is one of TUNERS (see `edgesdk.tuning.search`), `seed` draws its candidates. Without
    `resume` everything is measured anew. The session fails when less than `min_valid_share` of its
    trials can be measured. Each candidate gives `repeat` samples of at least `min_repeat_ms`;
    `timeout_s` and `memory_limit_mib` are what it may take on the device, `build_timeout_s` and
    `build_memory_mib` what its build may take here. `flush_cache` empties the caches before each
    call. `threads` 0: all CPUs of the device.
    """

    trials: int | None = None
    minutes: float | None = None
    tuner: str = "evolutionary"
    seed: int = 0
    resume: bool = True
    min_valid_share: float = 0.5
    repeat: int = 5
    min_repeat_ms: float = 20.0
    flush_cache: bool = False
    threads: int = 0
    timeout_s: float = 20.0
    memory_limit_mib: int = 1024
    build_timeout_s: float = 60.0
    build_memory_mib: int = 4096

    def __post_init__(self) -> None:
        """Raises UsageError for values that cannot be meant."""
        if self.tuner not in TUNERS:
            raise UsageError(
                f"unknown tuner {self.tuner!r}",
                hint=suggestion(self.tuner, TUNERS, otherwise=f"one of: {', '.join(TUNERS)}"),
            )
        for name in ("trials", "repeat", "memory_limit_mib", "build_memory_mib"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{_option(name)} is {value}", hint="give at least 1")
        for name in ("minutes", "min_repeat_ms", "timeout_s", "build_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{_option(name)} is {value}", hint="give more than 0")
        if self.threads < 0:
            raise UsageError(f"--threads is {self.threads}", hint="give 0 for all, or more")
        if not 0 <= self.min_valid_share <= 1:
            raise UsageError(
                f"--min-valid is {self.min_valid_share}", hint="give a share between 0 and 1"
            )

    @property
    def time_limit_s(self) -> float | None:
        """What bounds the session's time, in seconds."""
        if self.minutes is not None:
            return self.minutes * 60
        return None if self.trials is not None else DEFAULT_MINUTES * 60


def _option(name: str) -> str:
    """The option of the command line for a field."""
    names = {"timeout_s": "timeout", "memory_limit_mib": "memory-limit"}
    names |= {"build_timeout_s": "build-timeout", "build_memory_mib": "build-memory"}
    return "--" + names.get(name, name.replace("_", "-"))
