"""Matrix products on a GPU, and convolutions as such ("implicit GEMM").

Activations are [N, C/4, H*W, 4]: a thread moves 16 bytes, and neighbouring threads neighbouring
pixels. A convolution multiplies a matrix of K rows (input channels times window) and P columns
(pixels), which is never written to memory, with packed weights. A block of threads computes a tile
of pixels and output channels; both operands of a step of K go through shared memory, and a thread
keeps a smaller tile of sums in registers (Volkov and Demmel, "Benchmarking GPUs to Tune Dense
Linear Algebra", 2008). Bias, activation and residual are applied when the tile is written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from edgesdk.profiles import GpuInfo, TargetProfile
from edgesdk.schedules import tiles
from edgesdk.schedules.conv2d import Conv2d
from edgesdk.schedules.gpu.binding import VECTOR, bind_threads, epilogue_of, sum_in_thread
from edgesdk.schedules.hardware import divisors
from edgesdk.schedules.template import Knobs, Space, Template

if TYPE_CHECKING:
    import numpy as np

GEMM = "gpu_gemm"
_THREADS_OF_SUM = 128  # in a block that adds up partial sums
# Fewer pixels make a product of a matrix and a few vectors, which is bound by reading the matrix.
MIN_PIXELS = 8


def conv2d_columns(
    data: Any, config: Conv2d, *, pixels: int, steps: int, window_first: bool = False
) -> Any:
    """The matrix of a convolution's inputs: [N, C/4, H*W, 4] or, for few channels, [N, C, H, W] ->
    [N * groups, steps, pixels, 4], with zeros where the window reaches beyond the picture and
    behind the last term and pixel.

    K runs over channel blocks, window rows, window columns and channels of a block, or with
    `window_first` over window rows and columns first; with plain input over channels, window rows
    and columns.
    """
    from tvm import te, tirx

    kh, kw = config.window
    (sy, sx), (dy, dx) = config.stride, config.dilation
    top, left = config.padding[:2]
    groups = config.groups
    n, channels, h, w = config.in_shape
    _, _, out_h, out_w = config.out_shape
    plain = is_plain(data, config)
    per_group = channels // groups
    blocks = -(-per_group // VECTOR)
    terms = kh * kw * (per_group if plain else blocks * VECTOR)
    zero = tirx.const(0, data.dtype)

    def element(i: Any, k: Any, p: Any, c: Any) -> Any:
        if plain:
            term = k * VECTOR + c
            channel, ky, kx = term // (kh * kw), term // kw % kh, term % kw
        elif window_first:
            channel_block, ky, kx = k % blocks, k // blocks // kw, k // blocks % kw
        else:
            channel_block, ky, kx = k // (kh * kw), k // kw % kh, k % kw
        y = p // out_w * sy + ky * dy - top
        x = p % out_w * sx + kx * dx - left
        conditions = []
        if pixels != out_h * out_w:
            conditions.append(p < out_h * out_w)
        if top or config.padding[2] or (out_h - 1) * sy + (kh - 1) * dy - top >= h:
            conditions += [y >= 0, y < h]
        if left or config.padding[3] or (out_w - 1) * sx + (kw - 1) * dx - left >= w:
            conditions += [x >= 0, x < w]
        if steps * VECTOR != terms:
            conditions.append((term < terms) if plain else (k < terms // VECTOR))
        if plain:
            value = data[i // groups, i % groups * per_group + channel, y, x]
        else:
            value = data[i // groups, i % groups * blocks + channel_block, y * w + x, c]
        return tirx.if_then_else(tirx.all(*conditions), value, zero) if conditions else value

    return te.compute((n * groups, steps, pixels, VECTOR), element, name="columns")


def is_plain(data: Any, config: Conv2d) -> bool:
    """Whether `data` is [N, C, H, W], not in blocks."""
    return tuple(map(int, data.shape)) == config.in_shape


def rounded_pixels(pixels: int) -> int:
    """`pixels`, or more where they have no divisors that make good tiles (13 x 13, say)."""
    if pixels < 32 or pixels % 16 == 0 or pixels % 7 == 0:
        return pixels
    return -(-pixels // 32) * 32


def rounded_terms(terms: int) -> int:
    """Whole blocks of 4 terms; of many terms, a multiple of 4 such blocks, so that steps divide
    them (7 x 7 x 3 are 36.75 blocks)."""
    unit = VECTOR if terms <= 4 * VECTOR else 4 * VECTOR
    return terms if terms % VECTOR == 0 else -(-terms // unit) * unit


def pack_conv2d(weight: np.ndarray, config: Conv2d, *, plain: bool) -> np.ndarray:
    """[O, I/groups, KH, KW] -> [groups, K/4, 4, O/groups], O/groups rounded up to 4, in the order
    of `conv2d_columns`."""
    import numpy as np

    groups = config.groups
    out_channels, per_group, kh, kw = weight.shape
    outs = out_channels // groups
    wide = np.zeros((groups, -(-outs // VECTOR) * VECTOR, per_group, kh, kw), weight.dtype)
    wide[:, :outs] = weight.reshape(groups, outs, per_group, kh, kw)
    if plain:
        terms = per_group * kh * kw
        rows = np.zeros((groups, rounded_terms(terms), wide.shape[1]), weight.dtype)
        rows[:, :terms] = wide.reshape(groups, -1, terms).transpose(0, 2, 1)
        return np.ascontiguousarray(rows.reshape(groups, -1, VECTOR, wide.shape[1]))
    blocks = -(-per_group // VECTOR)
    full = np.zeros((groups, wide.shape[1], blocks * VECTOR, kh, kw), weight.dtype)
    full[:, :, :per_group] = wide
    split = full.reshape(groups, wide.shape[1], blocks, VECTOR, kh, kw)
    packed = split.transpose(0, 2, 4, 5, 3, 1)
    return np.ascontiguousarray(packed.reshape(groups, blocks * kh * kw, VECTOR, wide.shape[1]))


def conv2d(data: Any, weight: Any, config: Conv2d) -> Any:
    """The convolution of `data` (see `conv2d_columns`) with `pack_conv2d`'s weights:
    [N, O/4, OH*OW, 4]."""
    from tvm import te

    pixels = config.out_shape[2] * config.out_shape[3]
    steps = int(weight.shape[1])
    columns = conv2d_columns(data, config, pixels=rounded_pixels(pixels), steps=steps)
    result = product(columns, weight, groups=config.groups)
    n, blocks, rounded, _ = (int(d) for d in result.shape)
    if rounded == pixels:
        return result
    shape = (n, blocks, pixels, VECTOR)
    return te.compute(shape, lambda i, o, p, b: result[i, o, p, b], name="cut")


def product(left: Any, right: Any, *, groups: int = 1, batched: bool = False) -> Any:
    """[N * groups, K/4, P, 4] times [groups, K/4, 4, O] -> [N, groups * O/4, P, 4].

    With `batched`, [N, K/4, P, 4] times [N, K/4, 4, O] -> [N, O/4, P, 4].
    """
    from tvm import te

    n, steps, pixels, _ = (int(d) for d in left.shape)
    blocks = int(right.shape[3]) // VECTOR
    rk = te.reduce_axis((0, steps), "k")
    rc = te.reduce_axis((0, VECTOR), "c")

    def element(i: Any, o: Any, p: Any, b: Any) -> Any:
        which, column = (i if batched else 0), o * VECTOR + b
        if groups > 1:
            i, which, column = i * groups + o // blocks, o // blocks, o % blocks * VECTOR + b
        return te.sum(left[i, rk, p, rc] * right[which, rk, rc, column], axis=[rk, rc])

    attrs = {"edgesdk.template": GEMM, "edgesdk.blocks": blocks}
    return te.compute(
        (n // groups, groups * blocks, pixels, VECTOR),
        element,
        name="product",
        attrs=attrs if pixels >= MIN_PIXELS else None,
    )


def pack_dense(weight: np.ndarray) -> np.ndarray:
    """[K, N] -> [1, K/4, 4, N], both rounded up with zeros."""
    import numpy as np

    k, n = weight.shape
    # Many columns in whole tiles: of 6625, say, the blocks of 4 are a prime number.
    unit = VECTOR if n < 128 else 4 * VECTOR if n < 512 else 16 * VECTOR
    wide = np.zeros((-(-k // VECTOR) * VECTOR, -(-n // unit) * unit), weight.dtype)
    wide[:k, :n] = weight
    return wide.reshape(1, -1, VECTOR, wide.shape[1])


def dense(data: Any, weight: Any, columns: int) -> Any:
    """[M, K] times `pack_dense`'s weights -> [M, columns]."""
    from tvm import te, tirx

    m, k = (int(d) for d in data.shape)
    blocks = int(weight.shape[1])

    def element(i: Any, o: Any, p: Any, c: Any) -> Any:
        term = o * VECTOR + c
        value = data[p, term]
        if k % VECTOR:
            value = tirx.if_then_else(term < k, value, tirx.const(0, data.dtype))
        return value

    left = te.compute((1, blocks, m, VECTOR), element, name="columns")
    result = product(left, weight)
    return te.compute(
        (m, columns), lambda i, j: result[0, j // VECTOR, i, j % VECTOR], name="dense_rows"
    )


@dataclass(frozen=True)
class Problem:
    """A product as the template sees it: `groups` independent ones of `blocks` times 4 columns,
    `pixels` rows, and sums of `steps` times 4 terms."""

    groups: int
    blocks: int
    pixels: int
    steps: int


def problem_of(sch: Any, block: Any) -> Problem:
    """The problem of the template's `block`."""
    definition = sch.get(block)
    g, o, p, _, k, _ = (int(v.dom.extent) for v in definition.iter_vars)
    blocks = int(definition.annotations["edgesdk.blocks"])
    return Problem(g * o // blocks, blocks, p, k)


# Pixels and blocks of 4 channels that a thread keeps: at most 8 x 8 sums.
_MAX_THREAD_PIXELS = 8
_MAX_THREAD_BLOCKS = 2
_MAX_SPLIT = 16
_MAX_STAGES = 3


def space_of(problem: Problem, gpu: GpuInfo) -> Space:
    """The values of each knob. Not all combinations fit: see `check`."""
    return {
        # A thread's tile, the threads along pixels and channels, and the step along K.
        "pixels": tuple(divisors(problem.pixels, _MAX_THREAD_PIXELS)),
        "blocks": tuple(divisors(problem.blocks, _MAX_THREAD_BLOCKS)),
        "threads_p": tuple(divisors(problem.pixels, 128)),
        "threads_o": tuple(divisors(problem.blocks, 32)),
        "step": tuple(divisors(problem.steps, 16)),
        # Steps that are copied ahead, and parts of each sum that run side by side.
        "stages": tuple(range(_MAX_STAGES + 1)) if _can_copy_async(gpu) else (0,),
        "split": tuple(divisors(problem.steps, _MAX_SPLIT)),
    }


def check(knobs: Knobs, problem: Problem, gpu: GpuInfo) -> None:
    """Raises ValueError unless tiles divide the output evenly and fit the GPU."""
    if (
        problem.pixels % (knobs["pixels"] * knobs["threads_p"])
        or problem.blocks % (knobs["blocks"] * knobs["threads_o"])
        or problem.steps % (knobs["split"] * knobs["step"])
    ):
        raise ValueError("the tile does not divide the output")
    if knobs["threads_p"] * knobs["threads_o"] > gpu.max_threads:
        raise ValueError("too many threads")
    if shared_bytes(knobs) > gpu.shared_kib * 1024:
        raise ValueError("too much shared memory")


def shared_bytes(knobs: Knobs) -> int:
    """What the tiles of both operands take, in all stages."""
    values = knobs["pixels"] * knobs["threads_p"] + 4 * knobs["blocks"] * knobs["threads_o"]
    return 4 * VECTOR * values * knobs["step"] * (knobs["stages"] + 1)


def _can_copy_async(gpu: GpuInfo) -> bool:
    """Whether threads may go on while a copy to shared memory runs (cp.async: sm_80 and later)."""
    return gpu.api == "cuda" and bool(gpu.architectures) and min(gpu.architectures) >= 80


def default_of(problem: Problem, gpu: GpuInfo) -> Knobs:
    """The tiling with the least `cost_of`. Raises ValueError if none fits."""
    space = space_of(problem, gpu)
    best: Knobs | None = None
    best_cost = float("inf")
    few = min(64, problem.pixels * problem.blocks)
    stages = min(2, max(space["stages"]))
    for tp, to, p, o in itertools.product(
        space["threads_p"], space["threads_o"], space["pixels"], space["blocks"]
    ):
        if not few <= tp * to <= 256 or problem.pixels % (p * tp) or problem.blocks % (o * to):
            continue
        for step, split in itertools.product(space["step"], space["split"]):
            if step * p * o < 8 and step < max(space["step"]):
                continue
            knobs = {
                "pixels": p,
                "blocks": o,
                "threads_p": tp,
                "threads_o": to,
                "step": step,
                "stages": stages,
                "split": split,
            }
            if problem.steps % (split * step) or shared_bytes(knobs) > gpu.shared_kib * 1024:
                continue
            cost = cost_of(knobs, problem, gpu)
            if cost < best_cost:
                best, best_cost = knobs, cost
    if best is None:
        raise ValueError("no tile fits")
    return best


@dataclass(frozen=True)
class CostConstants:
    """The constants of `cost_of`, in cycles and bytes: fitted to 2413 tilings of 53 products on an
    H200 (benchmarks/cuda/fit.py). The tiling of least cost takes 1.05 times as long as the best
    measured, in the geometric mean, and at most 1.3 times."""

    sum_registers: float = 3.6  # for each vector of sums of a thread
    other_registers: float = 17.0
    shared_blocks: float = 4.8  # what a multiprocessor holds, in what a block may take
    whole_rounds: float = 0.45  # the rest of the blocks start when others end
    load: float = 1.24
    fetch: float = 0.22
    step_start: float = 7.8
    step_rest: float = 4.2
    full_warps: float = 12.0  # fewer leave gaps between dependent instructions
    gaps: float = 0.41
    overlap: float = 0.44  # the part of all work that does not hide behind the longest
    latency: float = 1050.0
    stage_hides: float = 1.5
    block_start: float = 1100.0
    launch: float = 3100.0
    split_launch: float = 4600.0
    split_bytes: float = 36.0  # of partial sums that a multiprocessor moves in a cycle


FITTED = CostConstants()


def cost_of(knobs: Knobs, problem: Problem, gpu: GpuInfo, c: CostConstants = FITTED) -> float:
    """Cycles of the whole product, roughly.

    A multiprocessor runs some blocks of threads at once, as many as registers and shared memory
    allow. A step takes about the longest of: multiply-adds, loads from shared memory, bytes from
    the L2 cache, and the wait for memory that stages hide.
    """
    p, o, step = knobs["pixels"], knobs["blocks"], knobs["step"]
    warps = -(-knobs["threads_p"] * knobs["threads_o"] // gpu.warp)
    rows, columns = p * knobs["threads_p"], o * knobs["threads_o"]
    tasks = problem.groups * (problem.pixels // rows) * (problem.blocks // columns) * knobs["split"]
    registers = c.sum_registers * p * o + 4 * (p + 4 * o) + c.other_registers
    by_registers = int(gpu.registers / (gpu.warp * warps * registers))
    by_shared = int(c.shared_blocks * gpu.shared_kib * 1024 / shared_bytes(knobs))
    resident = max(1, min(by_registers, by_shared, 32))
    filled = tasks / (gpu.multiprocessors * resident)
    rounds = c.whole_rounds * math.ceil(filled) + (1 - c.whole_rounds) * max(1.0, filled)
    together = min(resident, math.ceil(tasks / gpu.multiprocessors))
    active = warps * together
    arithmetic = 4.0 * p * o * active
    loads = c.load * (p + 4 * o) * active
    fetched = c.fetch * (rows + 4 * columns) * together
    work = max(arithmetic, loads, fetched) + c.overlap * (arithmetic + loads + fetched)
    overhead = (c.step_start / step + c.step_rest) * active
    busy = min(1.0, active / c.full_warps) ** c.gaps
    latency = c.latency / (step * (c.stage_hides * knobs["stages"] + 1))
    steps = problem.steps // knobs["split"]
    cycles = rounds * (steps * max((work + overhead) / busy, latency) + c.block_start) + c.launch
    if knobs["split"] > 1:  # partial sums are written, read, and added up in a launch of their own
        moved = 32 * problem.groups * problem.pixels * problem.blocks * knobs["split"]
        cycles += c.split_launch + moved / (c.split_bytes * gpu.multiprocessors)
    return cycles


def _space(sch: Any, block: Any, profile: TargetProfile) -> Space:
    assert profile.gpu is not None
    return space_of(problem_of(sch, block), profile.gpu)


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
    if knobs["split"] > 1:
        block, _ = split_sums(sch, block, knobs["split"])
        out = sch.cache_write(block, 0, "local")
    else:
        out = epilogue_of(sch, block)
    _schedule_tile(sch, block, out, problem.blocks, knobs)


def split_sums(sch: Any, block: Any, parts: int) -> tuple[Any, Any]:
    """Splits the sums of `block` into `parts` that run side by side, and adds them up in a second
    launch, which the epilogue joins. Returns the block of partial sums and its loop of parts."""
    k = sch.get_loops(block)[4]
    outer, _ = sch.split(k, [parts, None])
    partial = sch.rfactor(outer, 0)
    out = epilogue_of(sch, block)
    *rest, lane = sch.get_loops(out)
    if tiles.extent(sch, lane) % VECTOR == 0:
        outer, lane = sch.split(lane, [None, VECTOR])
        sch.vectorize(lane)
        rest.append(outer)
    else:
        rest.append(lane)
    thread = bind_threads(sch, rest, threads=_THREADS_OF_SUM)
    sum_in_thread(sch, block, thread)
    return partial, sch.get_loops(partial)[4]


def _schedule_tile(sch: Any, block: Any, out: Any, blocks: int, knobs: Knobs) -> None:
    """Schedules the sums of `block`, which `out` stores. `blocks` are those of a group."""
    tp, to = knobs["threads_p"], knobs["threads_o"]
    producers = sch.get_producers(block)
    columns = producers[0] if producers else sch.cache_read(block, 0, "shared")
    *above, o, p, b = output_loops(sch, out, blocks)
    # A thread's pixels lie a block's width apart, so that neighbours read neighbouring words.
    o_block, o_virtual, o_thread = sch.split(o, [None, knobs["blocks"], to])
    p_block, p_virtual, p_thread = sch.split(p, [None, knobs["pixels"], tp])
    grid = [*above, o_block, p_block]
    sch.reorder(*grid, o_virtual, p_virtual, o_thread, p_thread, b)
    sch.bind(sch.fuse(*grid), "blockIdx.x")
    sch.bind(o_virtual, "vthread.y")
    sch.bind(p_virtual, "vthread.x")
    threads = sch.fuse(o_thread, p_thread)
    sch.bind(threads, "threadIdx.x")
    sch.vectorize(b)
    sch.set_scope(block, 0, "local")
    sch.compute_at(block, threads, preserve_unit_loops=True)
    *spatial, o, p, b, k, c = sch.get_loops(block)[4:]
    k_outer, k_inner = sch.split(k, [None, knobs["step"]])
    sch.reorder(k_outer, k_inner, *spatial, c, o, p, b)
    for loop in (c, o, p, b):
        sch.unroll(loop)
    right = sch.cache_read(block, 1, "shared")
    sch.set_scope(columns, 0, "shared")
    for stage in (columns, right):
        sch.compute_at(stage, k_outer, preserve_unit_loops=True)
        _fill(sch, stage, tp * to)
    if knobs["stages"] > 0 and tiles.extent(sch, k_outer) > knobs["stages"]:
        # Copies of later steps are under way while this one is computed.
        sch.annotate(k_outer, "software_pipeline_stage", [0, 0, knobs["stages"]])
        sch.annotate(k_outer, "software_pipeline_order", [0, 1, 2])
        sch.annotate(k_outer, "software_pipeline_async_stages", [0])
    sch.decompose_reduction(block, k_outer)


def output_loops(sch: Any, out: Any, blocks: int) -> list[Any]:
    """The loops of `out`, which stores a product: outer ones, blocks of 4 channels (`blocks` in a
    group), pixels, and the channels of a block."""
    loops = sch.get_loops(out)
    if len(loops) == 2:  # [M, columns] of `dense`
        p, o = loops
        o, b = sch.split(o, [None, VECTOR])
        above = [sch.add_unit_loop(p)]
    else:
        *above, o, p, b = loops
    # Groups first: only so is it plain that a tile lies within one.
    group, o = sch.split(o, [None, blocks])
    return [*above, group, o, p, b]


def _fill(sch: Any, stage: Any, threads: int) -> None:
    """All threads of a block copy a tile to shared memory, 16 bytes each at a time."""
    *outer, last = sch.get_loops(stage)[5:]
    # Fused with the lanes, the condition of a copy would seem to differ among them.
    rest, lane = sch.split(last, [None, VECTOR])
    _, thread = sch.split(sch.fuse(*outer, rest), [None, threads])
    sch.bind(thread, "threadIdx.x")
    sch.vectorize(lane)


TEMPLATES = (Template(GEMM, _space, _default, _schedule, _checker),)
