"""Steps that several templates share: epilogues, extents, unrolling."""

from __future__ import annotations

from typing import Any

# Starting a parallel loop costs some microseconds: below this many innermost operations it does
# not pay.
PARALLEL_WORK = 32 * 1024

REDUCE = 2  # IterVar's iter_type of a reduction axis


def gather_epilogue(sch: Any, block: Any) -> Any:
    """Makes one block of everything that follows `block` and returns it: it writes the output.

    Bias, activation and residual are inlined into it. A kernel that has none gets a block that
    only copies, so that the sums can stay in registers until they are complete.
    """
    name = sch.get(block).name_hint
    order = [sch.get(child).name_hint for child in sch.get_child_blocks(sch.get_sblock("root"))]
    followers = order[order.index(name) + 1 :]
    if not followers:
        return sch.cache_write(block, 0, "local")
    for follower in followers[:-1]:
        sch.compute_inline(sch.get_sblock(follower))
    return sch.get_sblock(followers[-1])


def extent(sch: Any, loop: Any) -> int:
    """The constant number of iterations of `loop`."""
    return int(sch.get(loop).extent)


def reduction_rank(sch: Any, block: Any) -> int:
    """The number of reduction axes of `block`."""
    return sum(int(v.iter_type) == REDUCE for v in sch.get(block).iter_vars)


def reduction_size(sch: Any, block: Any) -> int:
    """The number of terms of each sum of `block`."""
    size = 1
    for var in sch.get(block).iter_vars:
        if int(var.iter_type) == REDUCE:
            size *= int(var.dom.extent)
    return size


def work(sch: Any, block: Any, *, outer: Any | None = None) -> int:
    """Innermost iterations of all loops around `block`."""
    total = 1
    for loop in sch.get_loops(block):
        total *= extent(sch, loop)
    return total


def unroll_and_vectorize(sch: Any, block: Any, *, after: int) -> None:
    """Unrolls all loops of `block` but the first `after`, and turns the last into a vector."""
    loops = sch.get_loops(block)
    sch.vectorize(loops[-1])
    for loop in loops[after:-1]:
        sch.unroll(loop)
