"""The rung of the ladder that fits every kernel: threads over the outer loops, vectors inside.

Blocks that only move or combine elements get all their loops fused, shared among the threads and cut
into vectors. Blocks that reduce get threads over their outer spatial loops. Nothing is reordered
within one sum, so results are those of the plain loops.
"""

from __future__ import annotations

from typing import Any

from edgesdk.profiles import TargetProfile

# Waking threads costs some microseconds: below this many elementary operations they do not pay.
PARALLEL_WORK = 32 * 1024


def schedule(function: Any, profile: TargetProfile) -> Any:
    """Returns `function` (a PrimFunc) with the generic schedule for the profile's CPU."""
    import tvm
    from tvm.s_tir import Schedule

    sch = Schedule(tvm.IRModule({"main": function}))
    root = sch.get_sblock("root")
    for block in sch.get_child_blocks(root):
        _schedule_block(sch, block, profile)
    return sch.mod["main"]


def _schedule_block(sch: Any, block: Any, profile: TargetProfile) -> None:
    if sch.get_child_blocks(block):
        return  # a nest of blocks: left as it is
    loops = sch.get_loops(block)
    if not loops:
        return
    kinds = [iter_var.iter_type for iter_var in sch.get(block).iter_vars]
    extents = [_extent(sch, loop) for loop in loops]
    if len(kinds) != len(loops) or None in extents:
        return
    spatial = 0
    while spatial < len(kinds) and kinds[spatial] == 0:  # IterVar::kDataPar
        spatial += 1
    if spatial == 0:
        return
    work = 1
    for extent in extents:
        work *= extent
    is_map = spatial == len(loops)
    fused = sch.fuse(*loops[:spatial]) if spatial > 1 else loops[0]
    lanes = max(1, profile.cpu.vector_bits // 32)
    if is_map:
        outer, inner = sch.split(fused, [None, lanes])
        if _extent(sch, outer) * lanes == work:
            sch.vectorize(inner)
        fused = outer
    if work >= PARALLEL_WORK:
        sch.parallel(fused)


def _extent(sch: Any, loop: Any) -> int | None:
    extent = sch.get(loop).extent
    try:
        return int(extent)
    except TypeError:
        return None
