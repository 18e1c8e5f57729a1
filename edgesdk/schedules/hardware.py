"""What the templates ask of a CPU: numbers derived from a target profile."""

from __future__ import annotations

from edgesdk.profiles import TargetProfile

FLOAT_BITS = 32


def lanes(profile: TargetProfile) -> int:
    """Floats of 32 bits in one vector register."""
    return max(1, profile.cpu.vector_bits // FLOAT_BITS)


def accumulators(profile: TargetProfile) -> int:
    """Vector registers that a register tile may fill with sums, leaving some for the operands."""
    return max(4, profile.cpu.vector_registers - 4)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return max(d for d in range(1, min(number, limit) + 1) if number % d == 0)


def divisors(number: int, limit: int) -> list[int]:
    """The divisors of `number` up to `limit`, ascending."""
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]
