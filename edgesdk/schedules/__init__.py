"""Which schedule a kernel gets: the ladder, from the best rung that fits down to plain loops.

`schedule_kernels` returns every kernel scheduled, and the coverage: which rung served which kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgesdk.compiler.plan import Plan
from edgesdk.profiles import TargetProfile
from edgesdk.schedules import generic


@dataclass(frozen=True)
class Coverage:
    """`rungs` maps the name of a rung to the kernels it served; `problems` says why a better rung
    failed on a kernel, one line each."""

    rungs: dict[str, tuple[str, ...]]
    problems: tuple[str, ...] = ()


def schedule_kernels(
    kernels: dict[str, Any], plan: Plan, profile: TargetProfile
) -> tuple[dict[str, Any], Coverage]:
    """Schedules each PrimFunc of `kernels` for the CPU of `profile`. Never fails: a kernel that no
    rung takes keeps its plain loops, and the coverage says so."""
    scheduled: dict[str, Any] = {}
    rungs: dict[str, list[str]] = {}
    problems = []
    for name, function in kernels.items():
        rung = "plain"
        try:
            scheduled[name] = generic.schedule(function, profile)
            rung = "generic"
        except Exception as error:  # TVM's ScheduleError carries pages of rendered IR
            scheduled[name] = function
            problems.append(f"{name}: generic: {type(error).__name__}")
        rungs.setdefault(rung, []).append(name)
    return scheduled, Coverage({k: tuple(v) for k, v in rungs.items()}, tuple(problems))
