"""What numbers a network is computed with, and how far its results may be off then.

`fp32` is exact arithmetic of floats. `tf32` lets the tensor cores of an NVIDIA GPU round what they
multiply to 10 bits behind the leading one; everything else stays in floats. `fp16` keeps weights,
and on a GPU the tensors between kernels, in half precision, which is half the memory; kernels add
up in floats, and the network's inputs and outputs stay what they are (`compiler/half.py`).
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


# Each number is off by 2^-11 of itself at most, and the errors of a sum mostly cancel; through some
# fifty layers about 1e-3 was seen.
_ROUNDED = 1e-2

PRECISIONS = {
    p.name: p for p in (Precision("fp32"), Precision("tf32", _ROUNDED), Precision("fp16", _ROUNDED))
}
# By machine, what /proc/cpuinfo calls the instructions between floats and halves.
_CONVERSIONS = {"x86_64": "f16c", "aarch64": "asimd", "arm": "vfpv4"}


def find_precision(name: str) -> Precision:
    """Raises UsageError if there is no such precision."""
    if name not in PRECISIONS:
        raise UsageError(f"unknown precision {name!r}", hint=f"one of: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def in_precision(profile: TargetProfile, precision: Precision) -> TargetProfile:
    """`profile` that computes with `precision`. Raises UsageError if the target cannot."""
    if precision.name == "tf32":
        from edgesdk.schedules.gpu.tensor_cores import has_tensor_cores

        if profile.gpu is None or not has_tensor_cores(profile.gpu):
            raise UsageError(
                f"{profile.name} has no TF32: NVIDIA's GPUs have it from sm_80 on",
                hint="leave out --allow-tf32",
            )
    if precision.name == "fp16":
        feature = _CONVERSIONS.get(profile.machine)
        if feature not in profile.contract.cpu_features:
            raise UsageError(
                f"{profile.name} promises no CPU that converts half precision"
                + (f" ({feature})" if feature else ""),
                hint="leave out --precision fp16",
            )
    return replace(profile, precision=precision.name)
