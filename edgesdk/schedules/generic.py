"""The rung that fits every kernel: threads outside, vectors inside, sums in registers.

Chains of element-wise blocks become one. A kernel of one sum and what follows it (a matrix product
of two activations, a convolution that no template knows, a mean) keeps a small tile of sums in
registers while the terms run. A kernel of several sums (softmax, normalisation) runs all of them
for one row before it goes on to the next. A sum whose terms lie side by side is added up in the
lanes of a vector, and they at the end.
"""

from __future__ import annotations

import math
from typing import Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import tiles
from edgesdk.schedules.hardware import accumulators, divisors, lanes
from edgesdk.schedules.template import Knobs, Space

_DATA_PARALLEL = 0  # IterVar's iter_type of a spatial axis
# Fewer terms than this are not worth a vector's lanes.
_MANY_TERMS = 32
_ON_THE_STACK = 4096  # numbers of a row that a thread keeps there


NAME = "generic"


def space(function: Any, profile: TargetProfile) -> Space:
    """The knobs of `function`: those of a sum's register tile, none for other kernels."""
    sch, blocks = _prepared(function)
    block = _only_sum(sch, blocks)
    if block is None or _adds_neighbours(sch, block):
        return {}
    axes = _spatial_extents(sch, block)
    if not axes:
        return {}
    vector = lanes(profile)
    rows = axes[-2] if len(axes) > 1 else 1
    return {
        "columns": tuple(divisors(axes[-1], 4 * vector)),
        "rows": tuple(divisors(rows, 12)),
    }


def default(function: Any, profile: TargetProfile) -> Knobs:
    """The decision among `space` that is taken without tuning."""
    sch, blocks = _prepared(function)
    block = _only_sum(sch, blocks)
    tiled = block is not None and not _adds_neighbours(sch, block)
    axes = _spatial_extents(sch, block) if tiled else []
    if not axes:
        return {}
    vector = lanes(profile)
    columns = max(divisors(axes[-1], 2 * vector))
    fit = max(1, min(8, accumulators(profile) // (2 * -(-columns // vector))))
    rows = max(divisors(axes[-2], fit)) if len(axes) > 1 and columns > 1 else 1
    return {"columns": columns, "rows": rows}


def schedule(function: Any, profile: TargetProfile, knobs: Knobs) -> Any:
    """Returns `function` (a PrimFunc) with the generic schedule for the profile's CPU.

    Raises TVM's ScheduleError, or ValueError, on a kernel that it does not fit.
    """
    sch, blocks = _prepared(function)
    block = _only_sum(sch, blocks)
    if all(_is_map(sch, b) for b in blocks):
        for each in blocks:
            tiles.schedule_map(sch, each, lanes(profile))
    elif block is not None and not _adds_neighbours(sch, block):
        for each in blocks[: _position(sch, blocks, block)]:
            tiles.schedule_map(sch, each, lanes(profile))
        _schedule_sum(sch, block, profile, knobs)
    else:
        _schedule_rows(sch, blocks, profile)
    return sch.mod["main"]


def _prepared(function: Any) -> tuple[Any, list[Any]]:
    """A schedule of `function` with its element-wise chains joined, and its blocks."""
    import tvm
    from tvm.s_tir import Schedule

    sch = Schedule(tvm.IRModule({"main": function}), error_render_level="none")
    _inline_maps(sch)
    blocks = list(sch.get_child_blocks(sch.get_sblock("root")))
    for block in blocks:
        _check(sch, block)
    return sch, blocks


def _only_sum(sch: Any, blocks: list[Any]) -> Any | None:
    """The one block that sums, if there is one and only its epilogue follows it."""
    sums = [b for b in blocks if not _is_map(sch, b)]
    if len(sums) != 1 or not _only_maps_follow(sch, blocks, sums[0]):
        return None
    return sums[0]


def _check(sch: Any, block: Any) -> None:
    """Raises ValueError unless each loop around `block` is one of its axes, of known size."""
    loops = sch.get_loops(block)
    axes = sch.get(block).iter_vars
    if len(loops) != len(axes):
        raise ValueError("loops and axes differ")
    for loop in loops:
        tiles.extent(sch, loop)
    if sch.get_child_blocks(block):
        raise ValueError("a block within a block")
    spatial = [int(axis.iter_type) == _DATA_PARALLEL for axis in axes]
    if any(not s and int(a.iter_type) != tiles.REDUCE for s, a in zip(spatial, axes, strict=True)):
        raise ValueError("an axis of unusual type")
    if sorted(spatial, reverse=True) != spatial:
        raise ValueError("a sum outside of a spatial axis")


def _is_map(sch: Any, block: Any) -> bool:
    return tiles.reduction_rank(sch, block) == 0


def _inline_maps(sch: Any) -> None:
    """Inlines element-wise blocks that one other block reads: nothing is computed twice."""
    for block in sch.get_child_blocks(sch.get_sblock("root"))[:-1]:
        if not _is_map(sch, block) or len(sch.get_consumers(block)) != 1:
            continue
        # A value that a sum reads is computed once and kept: the sum may read it many times.
        if _is_map(sch, sch.get_consumers(block)[0]) and not tiles.grows_too_much(sch, block):
            sch.compute_inline(block)


def _position(sch: Any, blocks: list[Any], block: Any) -> int:
    names = [sch.get(b).name_hint for b in blocks]
    return names.index(sch.get(block).name_hint)


def _only_maps_follow(sch: Any, blocks: list[Any], block: Any) -> bool:
    """Whether the blocks after `block` form one chain that reads it element by element."""
    after = blocks[_position(sch, blocks, block) + 1 :]
    if len(after) > 1:
        return False
    wanted = _spatial_extents(sch, block)
    return all(
        [tiles.extent(sch, loop) for loop in sch.get_loops(other)] == wanted for other in after
    )


def _spatial_extents(sch: Any, block: Any) -> list[int]:
    return [tiles.extent(sch, loop) for loop in _spatial_loops(sch, block)]


def _spatial_loops(sch: Any, block: Any) -> list[Any]:
    loops = sch.get_loops(block)
    return loops[: len(loops) - tiles.reduction_rank(sch, block)]


def _schedule_sum(sch: Any, block: Any, profile: TargetProfile, knobs: Knobs) -> None:
    """One sum and its epilogue: a tile of rows times vectors of sums in registers."""
    spatial = len(_spatial_loops(sch, block))
    if spatial == 0:
        return
    work = tiles.work(sch, block)
    out = tiles.gather_epilogue(sch, block, lanes(profile))
    loops = sch.get_loops(out)
    width = knobs["columns"]
    column, lane = sch.split(loops[-1], [None, width])
    outer, tile = [*loops[:-1], column], [lane]
    if spatial > 1:
        row, inner_row = sch.split(loops[-2], [None, knobs["rows"]])
        outer, tile = [*loops[:-2], row, column], [inner_row, lane]
    sch.reorder(*outer, *tile)
    task = sch.fuse(*outer) if len(outer) > 1 else outer[0]
    sch.set_scope(block, 0, "local")
    sch.compute_at(block, task, preserve_unit_loops=True)
    inner = sch.get_loops(block)[1:]
    sums, terms = inner[:spatial], inner[spatial:]
    sch.reorder(*terms, *sums)
    for loop in sums[:-1]:
        sch.unroll(loop)
    if width > 1:
        sch.vectorize(sums[-1])
    if work >= tiles.PARALLEL_WORK:
        sch.parallel(task)
    init = sch.decompose_reduction(block, terms[0])
    init_loops = sch.get_loops(init)[1:]
    for loop in init_loops[:-1]:
        sch.unroll(loop)
    if width > 1:
        sch.vectorize(init_loops[-1])
        sch.vectorize(tile[-1])
    for loop in tile[:-1]:
        sch.unroll(loop)


def _adds_neighbours(sch: Any, block: Any) -> bool:
    """Whether the terms of the sum `block` lie side by side in what it reads, and are many.

    Not for a maximum that begins at minus infinity: TVM splits only those that begin at the type's
    lowest number.
    """
    definition = sch.get(block)
    rank = tiles.reduction_rank(sch, block)
    if rank == 0 or len(definition.writes) != 1:
        return False
    last = definition.iter_vars[-1]
    first = getattr(definition.init, "value", None)
    if int(last.dom.extent) < _MANY_TERMS or "inf" in str(first):
        return False
    contiguous = [str(region.region[-1].min) for region in definition.reads if region.region]
    return str(last.var) in contiguous and len(contiguous) == 1


def _in_lanes(sch: Any, block: Any, profile: TargetProfile) -> Any | None:
    """Splits the sum `block` into one for each lane of a vector, and the sum of those.

    Returns the block of those for each lane; None if terms do not divide. In which order terms are
    added is nobody's promise.
    """
    *_, terms = sch.get_loops(block)
    vector = lanes(profile)
    if vector == 1 or tiles.extent(sch, terms) % vector:
        return None
    _, lane = sch.split(terms, [None, vector])
    partial = sch.rfactor(lane, 0)
    sch.set_scope(partial, 0, "local")
    return partial


def _schedule_rows(sch: Any, blocks: list[Any], profile: TargetProfile) -> None:
    """Sums over the same rows: all that belongs to a row is done together."""
    if not _is_map(sch, blocks[-1]):
        if len(blocks) > 1:
            raise ValueError("the last block is a sum of several")
        blocks = [*blocks, sch.cache_write(blocks[-1], 0, "local")]
    out = blocks[-1]
    work = tiles.work(sch, out) * len(blocks)
    shared = len(sch.get_loops(out))
    for block in blocks:
        loops = _spatial_loops(sch, block)
        common = 0
        for mine, its in zip(loops, sch.get_loops(out), strict=False):
            if tiles.extent(sch, mine) != tiles.extent(sch, its):
                break
            common += 1
        # A sum that keeps an axis of length 1 stops being shared there.
        shared = min(shared, common)
    if shared == 0:
        for block in blocks:
            if _is_map(sch, block):
                tiles.schedule_map(sch, block, lanes(profile))
        return
    loops = sch.get_loops(out)
    if shared == len(loops):
        loops.append(sch.add_unit_loop(out))
    work = max(work, *(tiles.work(sch, b) * tiles.reduction_size(sch, b) for b in blocks))
    in_lanes = {
        index: partial
        for index, block in enumerate(blocks)
        if _adds_neighbours(sch, block) and (partial := _in_lanes(sch, block, profile)) is not None
    }
    row = sch.fuse(*loops[:shared]) if shared > 1 else loops[0]
    for index in reversed(range(len(blocks) - 1)):
        sch.compute_at(blocks[index], row, preserve_unit_loops=True)
        if index in in_lanes:
            sch.compute_at(in_lanes[index], row, preserve_unit_loops=True)
    for block in blocks:
        if _is_map(sch, block):
            tiles.vectorize(sch, sch.get_loops(block)[-1], lanes(profile))
    for block in blocks[:-1]:
        # Without it TVM would ask for memory in every row.
        own = _spatial_loops(sch, block)[1:]
        if math.prod(tiles.extent(sch, loop) for loop in own) <= _ON_THE_STACK:
            sch.set_scope(block, 0, "local")
    if work >= tiles.PARALLEL_WORK:
        sch.parallel(row)
    for index, partial in in_lanes.items():
        _schedule_lanes(sch, partial, blocks[index])


def _schedule_lanes(sch: Any, partial: Any, total: Any) -> None:
    """The sums of the lanes, `partial`, in a register, and then their sum `total`."""
    for loop in sch.get_loops(total)[1:]:
        sch.unroll(loop)
    axes = sch.get(partial).iter_vars
    own = sch.get_loops(partial)[-len(axes) :]
    terms = [x for x, a in zip(own, axes, strict=True) if int(a.iter_type) == tiles.REDUCE]
    others = [x for x, a in zip(own, axes, strict=True) if int(a.iter_type) != tiles.REDUCE]
    lane = next(x for x in others if tiles.extent(sch, x) > 1)
    rest = [x for x in others if x is not lane]
    sch.reorder(*rest, *terms, lane)
    sch.vectorize(lane)
    sch.vectorize(sch.get_loops(sch.decompose_reduction(partial, terms[0]))[-1])
