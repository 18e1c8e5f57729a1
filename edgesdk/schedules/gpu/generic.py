"""The GPU rungs that fit every kernel.

Element-wise chains run in one launch, a thread an element. A short sum is a thread's own work; a
long one is spread over the threads of a block. Kernels of several sums over the same rows (softmax,
normalisation) keep a row in one block of threads. What fits none of these runs block by block, each
in a launch of its own.
"""

from __future__ import annotations

from typing import Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import tiles
from edgesdk.schedules.gpu.binding import (
    THREADS,
    VECTOR,
    bind_map,
    bind_threads,
    epilogue_of,
    inline_maps,
    keep_in_registers,
    sum_in_thread,
)
from edgesdk.schedules.template import Knobs, Space

NAME = "gpu_generic"

# A sum of more terms than this is shared by threads, if there are few outputs.
_LONG_SUM = 32
# Outputs that keep a GPU busy with a thread each.
_MANY = 16 * 1024


def space(function: Any, profile: TargetProfile) -> Space:
    """There is nothing to choose."""
    return {}


def default(function: Any, profile: TargetProfile) -> Knobs:
    """The only decision."""
    return {}


def schedule(function: Any, profile: TargetProfile, knobs: Knobs) -> Any:
    """Returns `function` with its loops on the GPU. Raises ValueError or TVM's ScheduleError on a
    kernel it does not fit."""
    if not _has_blocks(function):
        raise ValueError("there are no blocks to schedule")
    try:
        return _scheduled(function, spread=True)
    except ValueError:
        # Threads cannot share every reduction: TVM knows sums and maxima whose identity is the
        # type's lowest number, not those that begin at minus infinity.
        return _scheduled(function, spread=False)


def _scheduled(function: Any, *, spread: bool) -> Any:
    """`spread`: threads of a block may share a sum."""
    sch = _schedule_of(function)
    inline_maps(sch)
    blocks = list(sch.get_child_blocks(sch.get_sblock("root")))
    sums = [b for b in blocks if tiles.reduction_rank(sch, b)]
    if not sums:
        for block in blocks:
            bind_map(sch, block)
    elif len(sums) == 1:
        _sum(sch, sums[0], spread=spread)
    elif spread:
        _rows(sch, blocks)
    else:
        raise ValueError("several sums that threads cannot share")
    _check_reductions(sch.mod)
    return sch.mod["main"]


def _has_blocks(function: Any) -> bool:
    """Whether there is something to schedule: TVM writes scatters as loops without blocks."""
    return str(function.body.block.name_hint) == "root"


def _check_reductions(module: Any) -> None:
    """Raises ValueError for a reduction that its threads cannot share."""
    import tvm
    from tvm import s_tir

    passes = [s_tir.transform.CanonicalizeLoop(), s_tir.transform.LowerCrossThreadReduction()]
    tvm.transform.Sequential(passes)(module)


def schedule_plain(function: Any) -> Any:
    """Every block of `function` in a launch of its own, a thread for each of its elements.

    A function without blocks stays as it is, for the CPU.
    """
    if not _has_blocks(function):
        return function
    sch = _schedule_of(function)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        if tiles.reduction_rank(sch, block) == 0:
            bind_map(sch, block)
            continue
        spatial = _spatial_loops(sch, block) or [sch.add_unit_loop(block)]
        bind_threads(sch, spatial)
    return sch.mod["main"]


def _schedule_of(function: Any) -> Any:
    import tvm
    from tvm.s_tir import Schedule

    return Schedule(tvm.IRModule({"main": function}), error_render_level="none")


def _spatial_loops(sch: Any, block: Any) -> list[Any]:
    loops = sch.get_loops(block)
    return loops[: len(loops) - tiles.reduction_rank(sch, block)]


def _sum(sch: Any, block: Any, *, spread: bool) -> None:
    """One sum and what follows it."""
    out = epilogue_of(sch, block)
    spatial = _spatial_loops(sch, out)
    outputs, terms = tiles.work(sch, out), tiles.reduction_size(sch, block)
    if not spread or terms <= _LONG_SUM or outputs >= _MANY or not spatial:
        if not spatial:
            spatial = [sch.add_unit_loop(out)]
        last = tiles.extent(sch, spatial[-1])
        if last == VECTOR and len(spatial) > 1:
            thread = bind_threads(sch, spatial[:-1], threads=128)
            sch.vectorize(spatial[-1])
        else:
            thread = bind_threads(sch, spatial, threads=128)
        sum_in_thread(sch, block, thread)
        return
    # Neighbouring threads read neighbouring elements: of the output if its last axis is not summed.
    columns = _contiguous_columns(sch, block, spatial)
    lanes = max(d for d in (1, 2, 4, 8, 16, 32) if columns % d == 0)
    fused = sch.fuse(*spatial) if len(spatial) > 1 else spatial[0]
    grid, lane = sch.split(fused, [None, lanes])
    sch.bind(grid, "blockIdx.x")
    sch.bind(lane, "threadIdx.x")
    keep_in_registers(sch, block)
    sch.compute_at(block, lane, preserve_unit_loops=True)
    _spread_terms(sch, block, THREADS // lanes, "threadIdx.y")


def _contiguous_columns(sch: Any, block: Any, spatial: list[Any]) -> int:
    """The extent of the output's last axis if the sum's terms lie that far apart, else 1."""
    definition = sch.get(block)
    last = definition.iter_vars[len(definition.iter_vars) - tiles.reduction_rank(sch, block) - 1]
    for region in definition.reads:
        axes = list(region.region)
        if axes and str(axes[-1].min) == str(last.var):
            return tiles.extent(sch, spatial[-1])
    return 1


def _spread_terms(sch: Any, block: Any, threads: int, axis: str) -> None:
    """Spreads the terms of `block` over `threads` threads, whose sums are then added up."""
    loops = sch.get_loops(block)
    terms = loops[len(loops) - tiles.reduction_rank(sch, block) :]
    fused = sch.fuse(*terms) if len(terms) > 1 else terms[0]
    _, thread = sch.split(fused, [None, threads])
    sch.bind(thread, axis)


def _rows(sch: Any, blocks: list[Any]) -> None:
    """Several sums over the same rows: one block of threads does all that belongs to a row."""
    out = blocks[-1]
    if tiles.reduction_rank(sch, out):
        raise ValueError("the last block is a sum of several")
    shared = len(sch.get_loops(out))
    for block in blocks:
        common = 0
        for mine, its in zip(_spatial_loops(sch, block), sch.get_loops(out), strict=False):
            if tiles.extent(sch, mine) != tiles.extent(sch, its):
                break
            common += 1
        shared = min(shared, common)
    loops = sch.get_loops(out)
    if shared == len(loops):
        shared -= 1
    if shared < 0:
        raise ValueError("sums over different rows")
    rows = loops[:shared] or [sch.add_unit_loop(loops[0])]
    row = sch.fuse(*rows) if len(rows) > 1 else rows[0]
    sch.bind(row, "blockIdx.x")
    for block in reversed(blocks[:-1]):
        sch.set_scope(block, 0, "shared")
        sch.compute_at(block, row, preserve_unit_loops=True)
    for block in blocks:
        inner = sch.get_loops(block)[1:]
        rank = tiles.reduction_rank(sch, block)
        if rank:
            _spread_terms(sch, block, THREADS, "threadIdx.x")
            continue
        fused = sch.fuse(*inner) if len(inner) > 1 else inner[0]
        _, thread = sch.split(fused, [None, THREADS])
        sch.bind(thread, "threadIdx.x")
