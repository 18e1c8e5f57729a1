"""Steps that several templates share: epilogues, extents, unrolling."""

from __future__ import annotations

from typing import Any

from edgesdk.schedules.hardware import largest_divisor

# Starting a parallel loop costs some microseconds: below this many innermost operations it does
# not pay.
PARALLEL_WORK = 32 * 1024
# Into so many tasks an element-wise loop is divided, if it can be: some for every core.
_TASKS = 64
# Of a real network's kernels none comes near it; the compiler takes a second for so many.
_MAX_INLINED = 8192

REDUCE = 2  # IterVar's iter_type of a reduction axis


def grows_too_much(sch: Any, block: Any) -> bool:
    """Whether inlining `block` would make code of more than _MAX_INLINED expressions.

    Each inlined value is computed again wherever it is read: an unrolled recurrent cell, whose
    steps read the one before several times, would double with every step.
    """
    size, _ = _expressions(sch.get(block))
    written = sch.get(block).writes[0].source.id_
    reads = sum(_expressions(sch.get(c))[1].get(written, 0) for c in sch.get_consumers(block))
    return size * reads > _MAX_INLINED


def _expressions(definition: Any) -> tuple[int, dict[int, int]]:
    """The number of expressions in a block's body, and how often each buffer is loaded there."""
    import tvm
    import tvm_ffi

    counts = {"all": 0}
    loads: dict[int, int] = {}

    def visit(node: Any) -> None:
        counts["all"] += 1
        if type(node).__name__ == "TensorLoad":
            loads[node.source.id_] = loads.get(node.source.id_, 0) + 1

    tvm_ffi.structural_walk(definition.body, (tvm.ir.Expr, visit))
    return counts["all"], loads


def gather_epilogue(sch: Any, block: Any, vector: int) -> Any:
    """Makes one block of everything that follows `block` and returns it: it writes the output.

    Bias, activation and residual are inlined into it. A kernel that has none gets a block that
    only copies, so that the sums can stay in registers until they are complete. Where a follower
    spreads the result over a larger tensor (a channel's scale over its pixels), the sums are
    complete before it begins: it is scheduled on its own, with vectors of `vector` lanes. What is
    computed from other tensors (a residual that is dequantised) is inlined where it is read.
    """
    name = sch.get(block).name_hint
    order = [sch.get(child).name_hint for child in sch.get_child_blocks(sch.get_sblock("root"))]
    followers = order[order.index(name) + 1 :]
    reached = {name}
    for follower in list(followers):
        producers = {sch.get(p).name_hint for p in sch.get_producers(sch.get_sblock(follower))}
        if producers & reached:
            reached.add(follower)
        else:
            sch.compute_inline(sch.get_sblock(follower))
            followers.remove(follower)
    size = _spatial_size(sch, block)
    # Panels of a matrix product are rounded up, so what follows may be smaller.
    same = [f for f in followers if _spatial_size(sch, sch.get_sblock(f)) <= size]
    larger = followers[len(same) :]
    if followers[: len(same)] != same:
        raise ValueError("a kernel whose tensors grow and shrink again")
    for follower in (*same[:-1], *larger[:-1]):
        sch.compute_inline(sch.get_sblock(follower))
    if larger:
        schedule_map(sch, sch.get_sblock(larger[-1]), vector)
    return sch.get_sblock(same[-1]) if same else sch.cache_write(block, 0, "local")


def schedule_map(sch: Any, block: Any, vector: int) -> None:
    """Schedules an element-wise block: threads over its outer loops, vectors along the last."""
    loops = sch.get_loops(block)
    if not loops:
        return
    size = work(sch, block)
    *outer, inner = loops
    inner = vectorize(sch, inner, vector) or inner
    if size < PARALLEL_WORK:
        return
    *outer, last = outer or [inner]
    # One loop stays within each task: where loops are fused, each iteration divides to find its
    # place.
    apart = 1
    for loop in outer:
        apart *= extent(sch, loop)
    if apart < _TASKS:
        within = largest_divisor(extent(sch, last), max(1, apart * extent(sch, last) // _TASKS))
        last, _ = sch.split(last, [None, within])
        outer = [*outer, last]
    sch.parallel(sch.fuse(*outer) if len(outer) > 1 else outer[0])


def vectorize(sch: Any, loop: Any, vector: int) -> Any | None:
    """Turns `loop` into vectors; returns the loop that remains around them, if any.

    A loop that `vector` lanes do not divide is left to LLVM, which makes vectors and a tail of it:
    narrower vectors that divide it took two to four times as long.
    """
    size = extent(sch, loop)
    if vector == 1 or size % vector:
        return None
    if size == vector:
        sch.vectorize(loop)
        return None
    outer, inner = sch.split(loop, [None, vector])
    sch.vectorize(inner)
    return outer


def _spatial_size(sch: Any, block: Any) -> int:
    size = 1
    for var in sch.get(block).iter_vars:
        if int(var.iter_type) != REDUCE:
            size *= int(var.dom.extent)
    return size


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


def work(sch: Any, block: Any) -> int:
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
