"""What a schedule template is: a family of schedules with knobs, and a default decision.

The knobs are integers chosen from lists that the kernel and the profile give. A tuner searches
them; without tuning the default decision is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgesdk.profiles import TargetProfile

Knobs = dict[str, int]
Space = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Template:
    """A template for kernels whose main block carries the annotation `edgesdk.template` = `name`.

    `space(sch, block, profile)` gives the values of each knob, `default(sch, block, profile)` one
    decision among them; both only read. `apply(sch, block, profile, knobs)` schedules the kernel
    and raises ValueError or TVM's ScheduleError if the knobs do not fit.

    Where many combinations of knobs do not, `checker(sch, block, profile)` gives the function that
    raises ValueError for them without scheduling anything.
    """

    name: str
    space: Callable[[Any, Any, TargetProfile], Space]
    default: Callable[[Any, Any, TargetProfile], Knobs]
    apply: Callable[[Any, Any, TargetProfile, Knobs], None]
    checker: Callable[[Any, Any, TargetProfile], Callable[[Knobs], None]] | None = None
