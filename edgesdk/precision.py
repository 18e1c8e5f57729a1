"""What numbers a network is computed with, and how far its results may be off then.

`fp32` is exact arithmetic of floats. `tf32` lets the tensor cores of an NVIDIA GPU round what they
multiply to 10 bits behind the leading one; everything else stays in floats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgesdk.errors import UsageError
from edgesdk.profiles import TargetProfile


@dataclass(frozen=True)
class Precision:
    """`tolerance`: the error relative to an output's largest value that the gate allows, if the
    reference does not itself move by more (`numerics.tolerance_of`)."""

    name: str
    tolerance: float = 0.0


# A factor of a product is off by 2^-11 at most, and the errors of a sum mostly cancel; through some
# fifty layers about 1e-3 was seen.
_ROUNDED = 1e-2

PRECISIONS = {p.name: p for p in (Precision("fp32"), Precision("tf32", _ROUNDED))}


def find_precision(name: str) -> Precision:
    """Raises UsageError if there is no such precision."""
    if name not in PRECISIONS:
        raise UsageError(f"unknown precision {name!r}", hint=f"one of: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def in_precision(profile: TargetProfile, precision: Precision) -> TargetProfile:
    """`profile` with what `precision` lets the schedules do. Raises UsageError if the target cannot
    compute so."""
    if precision.name != "tf32":
        return profile
    from edgesdk.schedules.gpu.tensor_cores import has_tensor_cores

    if profile.gpu is None or not has_tensor_cores(profile.gpu):
        raise UsageError(
            f"{profile.name} has no TF32: NVIDIA's GPUs have it from sm_80 on",
            hint="leave out --allow-tf32",
        )
    return replace(profile, gpu=replace(profile.gpu, tf32=True))
