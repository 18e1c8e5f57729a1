"""Steps that several GPU schedules share: epilogues, threads, and who inlines whom."""

from __future__ import annotations

from typing import Any

from edgesdk.schedules import tiles

THREADS = 256  # of a block that has no reason for another number


def inline_maps(sch: Any, *, keep: Any | None = None) -> None:
    """Inlines element-wise blocks into those that read them, `keep` and the last one excepted.

    Computing a cheap value again is faster than a round through memory.
    """
    kept = sch.get(keep).name_hint if keep is not None else None
    for block in sch.get_child_blocks(sch.get_sblock("root"))[:-1]:
        if sch.get(block).name_hint != kept and tiles.reduction_rank(sch, block) == 0:
            sch.compute_inline(block)


def epilogue_of(sch: Any, block: Any) -> Any:
    """Makes one block of everything that follows `block` and returns it; a copy if there is
    nothing. Raises ValueError where a follower is larger than the result."""
    name = sch.get(block).name_hint
    order = [sch.get(child).name_hint for child in sch.get_child_blocks(sch.get_sblock("root"))]
    followers = order[order.index(name) + 1 :]
    if not followers:
        return sch.cache_write(block, 0, "local")
    for follower in followers[:-1]:
        sch.compute_inline(sch.get_sblock(follower))
    out = sch.get_sblock(followers[-1])
    if tiles.reduction_rank(sch, out):
        raise ValueError("two sums in a kernel")
    if tiles.work(sch, out) > _spatial_work(sch, block):
        raise ValueError("the result is spread over a larger tensor")
    return out


def bind_threads(sch: Any, loops: list[Any], *, threads: int = THREADS) -> Any:
    """Fuses `loops` and spreads them over blocks of `threads`; returns the loop of the threads."""
    fused = sch.fuse(*loops) if len(loops) > 1 else loops[0]
    size = tiles.extent(sch, fused)
    grid, thread = sch.split(fused, [None, min(threads, size)])
    sch.bind(grid, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return thread


def _spatial_work(sch: Any, block: Any) -> int:
    size = 1
    for var in sch.get(block).iter_vars:
        if int(var.iter_type) != tiles.REDUCE:
            size *= int(var.dom.extent)
    return size
