"""Matrix products on a GPU that has no fast shared memory (Arm's Mali keep it in main memory).

The same products as `gemm.py`. A thread keeps a tile of sums in registers and reads both operands
from memory, 16 bytes at a time, where the caches serve neighbouring threads: those along pixels
read the same weights, those along channels the same pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from edgesdk.profiles import GpuInfo, TargetProfile
from edgesdk.schedules.gpu.binding import epilogue_of
from edgesdk.schedules.gpu.gemm import VECTOR, Problem, output_loops, problem_of
from edgesdk.schedules.hardware import divisors, largest_divisor
from edgesdk.schedules.template import Knobs, Space, Template

NAME = "gpu_gemm_registers"

_MAX_PIXELS = 8
_MAX_BLOCKS = 2
_MAX_THREADS_P = 64
_MAX_THREADS_O = 16
# By default a thread has 4 x 4 sums, which with both operands are 48 registers: Mali's threads have
# up to 64 before fewer of them run (Arm, "Mali Offline Compiler User Guide", "Work registers").
_PIXELS = 4
_THREADS = 64
# Threads along pixels: 16 of them read 256 bytes in a row.
_NEIGHBOURS = 16
# Threads for each core, below which some would wait idly for memory.
_THREADS_OF_CORE = 128


def space_of(problem: Problem) -> Space:
    """The values of each knob. Not all combinations fit: see `check`."""
    return {
        # A thread's tile, and the threads along pixels and channels.
        "pixels": tuple(divisors(problem.pixels, _MAX_PIXELS)),
        "blocks": tuple(divisors(problem.blocks, _MAX_BLOCKS)),
        "threads_p": tuple(divisors(problem.pixels, _MAX_THREADS_P)),
        "threads_o": tuple(divisors(problem.blocks, _MAX_THREADS_O)),
    }


def check(knobs: Knobs, problem: Problem, gpu: GpuInfo) -> None:
    """Raises ValueError unless tiles divide the output evenly and fit the GPU."""
    if problem.pixels % (knobs["pixels"] * knobs["threads_p"]) or problem.blocks % (
        knobs["blocks"] * knobs["threads_o"]
    ):
        raise ValueError("the tile does not divide the output")
    if knobs["threads_p"] * knobs["threads_o"] > gpu.max_threads:
        raise ValueError("too many threads")


def default_of(problem: Problem, gpu: GpuInfo) -> Knobs:
    """The largest tile that leaves every core threads enough."""
    wanted = _THREADS_OF_CORE * gpu.multiprocessors
    columns = problem.groups * problem.blocks
    pixels = max(
        (d for d in divisors(problem.pixels, _PIXELS) if problem.pixels // d * columns >= wanted),
        default=1,
    )
    threads_p = largest_divisor(problem.pixels // pixels, _NEIGHBOURS)
    threads = min(_THREADS, gpu.max_threads)
    threads_o = largest_divisor(problem.blocks, min(threads // threads_p, _MAX_THREADS_O))
    return {"pixels": pixels, "blocks": 1, "threads_p": threads_p, "threads_o": threads_o}


def _space(sch: Any, block: Any, profile: TargetProfile) -> Space:
    return space_of(problem_of(sch, block))


def _default(sch: Any, block: Any, profile: TargetProfile) -> Knobs:
    assert profile.gpu is not None
    return default_of(problem_of(sch, block), profile.gpu)


def _checker(sch: Any, block: Any, profile: TargetProfile) -> Callable[[Knobs], None]:
    assert profile.gpu is not None
    return partial(check, problem=problem_of(sch, block), gpu=profile.gpu)


def _schedule(sch: Any, block: Any, profile: TargetProfile, knobs: Knobs) -> None:
    assert profile.gpu is not None
    problem = problem_of(sch, block)
    check(knobs, problem, profile.gpu)
    out = epilogue_of(sch, block)
    columns = sch.get_producers(block)[0]
    *above, o, p, b = output_loops(sch, out, problem.blocks)
    o_block, o_thread, o_tile = sch.split(o, [None, knobs["threads_o"], knobs["blocks"]])
    # A thread's pixels lie a group's width apart, so that neighbours read neighbouring words.
    p_block, p_tile, p_thread = sch.split(p, [None, knobs["pixels"], knobs["threads_p"]])
    grid = [*above, o_block, p_block]
    sch.reorder(*grid, p_tile, o_thread, p_thread, o_tile, b)
    sch.bind(sch.fuse(*grid), "blockIdx.x")
    sch.bind(p_tile, "vthread.x")
    threads = sch.fuse(o_thread, p_thread)
    sch.bind(threads, "threadIdx.x")
    sch.unroll(o_tile)
    sch.vectorize(b)
    sch.set_scope(block, 0, "local")
    sch.compute_at(block, threads, preserve_unit_loops=True)
    *spatial, o, p, b, k, c = sch.get_loops(block)[3:]
    sch.reorder(k, *spatial, c, o, p, b)
    for loop in (c, o, p):
        sch.unroll(loop)
    sch.vectorize(b)
    right = sch.cache_read(block, 1, "local")
    sch.set_scope(columns, 0, "local")
    for operand in (columns, right):
        sch.compute_at(operand, k, preserve_unit_loops=True)
        _load(sch, operand)
    sch.decompose_reduction(block, k)


def _load(sch: Any, operand: Any) -> None:
    """A thread's part of an operand, 16 bytes at a time."""
    *outer, last = sch.get_loops(operand)[4:]
    rest, lane = sch.split(last, [None, VECTOR])
    for loop in (*outer, rest):
        sch.unroll(loop)
    sch.vectorize(lane)


TEMPLATE = Template(NAME, _space, _default, _schedule, _checker)
