"""Steps that several GPU schedules share: epilogues, threads, and who inlines whom."""

from __future__ import annotations

from typing import Any

from edgesdk.schedules import tiles

THREADS = 256  # of a block that has no reason for another number
VECTOR = 4  # floats in 16 bytes, the widest load of a thread
_MAX_UNROLLED = 25  # terms of a sum, those of a window


def inline_maps(sch: Any) -> None:
    """Inlines element-wise blocks into those that read them, the last one excepted.

    Computing a cheap value again is faster than a round through memory.
    """
    for block in sch.get_child_blocks(sch.get_sblock("root"))[:-1]:
        if tiles.reduction_rank(sch, block) == 0 and not tiles.grows_too_much(sch, block):
            sch.compute_inline(block)


def epilogue_of(sch: Any, block: Any) -> Any:
    """Makes one block of everything that follows `block` and returns it; a copy if there is
    nothing.

    Where a follower spreads the result over a larger tensor (a channel's scale over its pixels), it
    runs in a launch of its own. Raises ValueError for a second sum.
    """
    name = sch.get(block).name_hint
    order = [sch.get(child).name_hint for child in sch.get_child_blocks(sch.get_sblock("root"))]
    followers = order[order.index(name) + 1 :]
    if any(tiles.reduction_rank(sch, sch.get_sblock(f)) for f in followers):
        raise ValueError("two sums in a kernel")
    size = _spatial_work(sch, block)
    same = [f for f in followers if tiles.work(sch, sch.get_sblock(f)) <= size]
    larger = followers[len(same) :]
    if followers[: len(same)] != same:
        raise ValueError("a kernel whose tensors grow and shrink again")
    for follower in (*same[:-1], *larger[:-1]):
        sch.compute_inline(sch.get_sblock(follower))
    if larger:
        bind_map(sch, sch.get_sblock(larger[-1]))
    return sch.get_sblock(same[-1]) if same else sch.cache_write(block, 0, "local")


def bind_map(sch: Any, block: Any) -> None:
    """A thread for every element, or for 4 neighbours of a large tensor."""
    loops = sch.get_loops(block) or [sch.add_unit_loop(block)]
    last = tiles.extent(sch, loops[-1])
    if last == VECTOR and len(loops) > 1 and tiles.work(sch, block) >= VECTOR * THREADS:
        sch.vectorize(loops[-1])
        loops = loops[:-1]
    bind_threads(sch, loops)


def bind_threads(sch: Any, loops: list[Any], *, threads: int = THREADS) -> Any:
    """Fuses `loops` and spreads them over blocks of `threads`; returns the loop of the threads."""
    fused = sch.fuse(*loops) if len(loops) > 1 else loops[0]
    size = tiles.extent(sch, fused)
    grid, thread = sch.split(fused, [None, min(threads, size)])
    sch.bind(grid, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return thread


def sum_in_thread(sch: Any, block: Any, thread: Any) -> None:
    """A thread adds up its element of the sum `block`, or its 4 neighbours, in registers."""
    keep_in_registers(sch, block)
    sch.compute_at(block, thread, preserve_unit_loops=True)
    axes = sch.get(block).iter_vars
    loops = dict(enumerate(sch.get_loops(block)[-len(axes) :]))  # one for each axis, in their order
    terms = [loops[i] for i, axis in enumerate(axes) if int(axis.iter_type) == tiles.REDUCE]
    outputs = [loops[i] for i, axis in enumerate(axes) if int(axis.iter_type) != tiles.REDUCE]
    if not outputs:
        return
    sch.reorder(*outputs[:-1], *terms, outputs[-1])
    if tiles.extent(sch, outputs[-1]) == VECTOR:
        sch.vectorize(outputs[-1])
    if tiles.reduction_size(sch, block) <= _MAX_UNROLLED:
        for loop in terms:  # so they are read at once, not one after the other
            sch.unroll(loop)
    sch.decompose_reduction(block, terms[0])


def keep_in_registers(sch: Any, block: Any) -> None:
    """What the sum `block` writes is a thread's own, also what nobody reads: the largest number
    beside its index. Else each thread would have an array of all of them."""
    allocated = [buffer.name for buffer in sch.get(sch.get_sblock("root")).alloc_buffers]
    for number, region in enumerate(sch.get(block).writes):
        if region.source.name in allocated:
            sch.set_scope(block, number, "local")


def _spatial_work(sch: Any, block: Any) -> int:
    size = 1
    for var in sch.get(block).iter_vars:
        if int(var.iter_type) != tiles.REDUCE:
            size *= int(var.dom.extent)
    return size
