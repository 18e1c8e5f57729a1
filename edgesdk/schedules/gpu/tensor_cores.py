"""Matrix products and convolutions on the tensor cores of NVIDIA's GPUs (sm_80 and later).

They multiply half-precision numbers, or floats whose last 13 bits are rounded away (TF32), and add
up in floats; neither is done unless the user allows it. The products are those of `gemm.py`, the
tiles are a warp's (`warp_products.py`): a block of threads brings both operands of a step of K to
shared memory, some steps ahead, and each of its warps multiplies a part. The sums go through shared
memory to the threads that apply bias, activation and residual.
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
from edgesdk.schedules.gpu import gemm, warp_products
from edgesdk.schedules.gpu.binding import VECTOR, epilogue_of
from edgesdk.schedules.gpu.warp_products import FRAGMENT, STEP
from edgesdk.schedules.hardware import divisors
from edgesdk.schedules.template import Knobs, Space, Template

if TYPE_CHECKING:
    import numpy as np

NAME = "gpu_tensor_cores"
_BLOCKS = FRAGMENT // VECTOR  # of channels, in a fragment
_OLDEST = 80


def has_tensor_cores(gpu: GpuInfo) -> bool:
    """Whether all code of `gpu` may use them: TF32 and the copies ahead begin with sm_80."""
    built_for = (*gpu.architectures, *([gpu.ptx] if gpu.ptx is not None else []))
    return gpu.api == "cuda" and min(built_for) >= _OLDEST


def rounded_pixels(pixels: int) -> int:
    """`pixels`, or more, so that they are whole tiles: large ones if few are wasted."""
    for unit in (64, 32):
        rounded = -(-pixels // unit) * unit
        if rounded <= 1.15 * pixels:
            return rounded
    return -(-pixels // FRAGMENT) * FRAGMENT


def conv2d(data: Any, weight: Any, config: Conv2d) -> Any:
    """The convolution of `data` ([N, C/4, H*W, 4], or few channels as [N, C, H, W]) with
    `pack_conv2d`'s weights: [N, O/4, OH*OW, 4], in the type of `data`."""
    from tvm import te

    pixels = config.out_shape[2] * config.out_shape[3]
    columns = gemm.conv2d_columns(
        data,
        config,
        pixels=rounded_pixels(pixels),
        steps=int(weight.shape[0]),
        window_first=True,
    )
    result = product(columns, weight, gathered=gemm.is_plain(data, config))
    shape = (config.out_shape[0], -(-config.out_shape[1] // VECTOR), pixels, VECTOR)
    return te.compute(shape, lambda *at: result[at], name="cut")


def pack_conv2d(weight: np.ndarray, *, plain: bool) -> np.ndarray:
    """[O, I, KH, KW] -> [K/4, O/4, 4 of O, 4 of K] in the order of `conv2d_columns`; both are
    rounded up to fragments, floats to TF32."""
    import numpy as np

    out_channels, channels, kh, kw = weight.shape
    if plain:
        rows = weight.reshape(out_channels, -1)
    else:
        wide = np.zeros((out_channels, -(-channels // VECTOR) * VECTOR, kh, kw), weight.dtype)
        wide[:, :channels] = weight
        rows = wide.transpose(0, 2, 3, 1).reshape(out_channels, -1)
    return _pack(rows)


def _pack(rows: np.ndarray) -> np.ndarray:
    import numpy as np

    outs, terms = rows.shape
    shape = (-(-outs // FRAGMENT) * FRAGMENT, -(-terms // (STEP * VECTOR)) * STEP * VECTOR)
    full = np.zeros(shape, rows.dtype)
    full[:outs, :terms] = rows
    blocks = full.reshape(shape[0] // VECTOR, VECTOR, shape[1] // VECTOR, VECTOR)
    packed = np.ascontiguousarray(blocks.transpose(2, 0, 1, 3))
    return round_tf32(packed) if packed.dtype == np.float32 else packed


def round_tf32(values: np.ndarray) -> np.ndarray:
    """float32 with 10 bits after the leading one, halves away from zero (PTX ISA,
    `cvt.rna.tf32.f32`)."""
    import numpy as np

    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


def dense(data: Any, weight: Any, columns: int) -> Any:
    """[M, K] times `pack_dense`'s weights -> [M, columns], in the type of `data`."""
    from tvm import te, tirx

    m, k = (int(d) for d in data.shape)
    rows = rounded_pixels(m)

    def element(i: Any, o: Any, p: Any, c: Any) -> Any:
        term = o * VECTOR + c
        conditions = [p < m] if rows != m else []
        if k % (STEP * VECTOR):
            conditions.append(term < k)
        value, zero = data[p, term], tirx.const(0, data.dtype)
        return tirx.if_then_else(tirx.all(*conditions), value, zero) if conditions else value

    left = te.compute((1, int(weight.shape[0]), rows, VECTOR), element, name="columns")
    result = product(left, weight)
    return te.compute(
        (m, columns),
        lambda i, j: result[0, j // VECTOR, i, j % VECTOR],
        name="dense_rows",
    )


def pack_dense(weight: np.ndarray) -> np.ndarray:
    """[K, N] -> [K/4, N/4, 4 of N, 4 of K], rounded up like `pack_conv2d`."""
    return _pack(weight.T)


def product(left: Any, right: Any, *, gathered: bool = False) -> Any:
    """[N, K/4, P, 4] times [K/4, O/4, 4 of O, 4 of K] -> [N, O/4, P, 4], added up in floats.

    `gathered`: see `Problem`.
    """
    from tvm import te

    n, steps, pixels, _ = (int(d) for d in left.shape)
    rk = te.reduce_axis((0, steps), "k")
    rc = te.reduce_axis((0, VECTOR), "c")

    def element(i: Any, o: Any, p: Any, b: Any) -> Any:
        operands = left[i, rk, p, rc], right[rk, o, b, rc]
        a, w = (x if x.dtype == "float32" else x.astype("float32") for x in operands)
        return te.sum(a * w, axis=[rk, rc])

    return te.compute(
        (n, int(right.shape[1]), pixels, VECTOR),
        element,
        name="product",
        attrs={"edgesdk.template": NAME, "edgesdk.dtype": str(left.dtype)}
        | ({"edgesdk.gathered": 1} if gathered else {}),
    )


@dataclass(frozen=True)
class Problem:
    """`batch` products of `blocks` times 4 channels, `pixels` rows and sums of `steps` times 4
    terms, of operands of `dtype`. `gathered`: the rows' numbers lie apart (few channels)."""

    batch: int
    blocks: int
    pixels: int
    steps: int
    dtype: str
    gathered: bool = False

    @property
    def bytes(self) -> int:
        """Of an operand's element."""
        return 4 if self.dtype == "float32" else 2


def problem_of(sch: Any, block: Any, precision: str = "fp32") -> Problem:
    """The problem of the template's `block`, whose operands become halves with "fp16"."""
    definition = sch.get(block)
    n, o, p, _, k, _ = (int(v.dom.extent) for v in definition.iter_vars)
    notes = definition.annotations
    dtype = "float16" if precision == "fp16" else str(notes["edgesdk.dtype"])
    return Problem(n, o, p, k, dtype, "edgesdk.gathered" in notes)


_MAX_SPLIT = 16
_MAX_STAGES = 3
_MAX_FRAGMENTS = 16  # of 8 registers a thread


def space_of(problem: Problem, gpu: GpuInfo) -> Space:
    """The values of each knob. Not all combinations fit: see `check`."""
    rows, columns = problem.pixels // FRAGMENT, problem.blocks // _BLOCKS
    return {
        # A warp's tile in fragments, and the warps of a block.
        "rows": tuple(divisors(rows, 4)),
        "columns": tuple(divisors(columns, 4)),
        "warps_p": tuple(divisors(rows, 8)),
        "warps_o": tuple(divisors(columns, 8)),
        # Steps of 16 terms that are copied at once, copies ahead, and parts of each sum.
        "step": tuple(divisors(problem.steps // STEP, 4)),
        "stages": tuple(range(_MAX_STAGES + 1)),
        "split": tuple(divisors(problem.steps // STEP, _MAX_SPLIT)),
    }


def check(knobs: Knobs, problem: Problem, gpu: GpuInfo) -> None:
    """Raises ValueError unless tiles divide the output evenly and fit the GPU."""
    if (
        problem.pixels % (FRAGMENT * knobs["rows"] * knobs["warps_p"])
        or problem.blocks % (_BLOCKS * knobs["columns"] * knobs["warps_o"])
        or problem.steps % (STEP * knobs["step"] * knobs["split"])
    ):
        raise ValueError("the tile does not divide the output")
    if knobs["split"] > 1 and problem.steps < 2 * STEP * knobs["step"] * knobs["split"]:
        raise ValueError("nothing to add up in a part of the sum")
    if gpu.warp * knobs["warps_p"] * knobs["warps_o"] > gpu.max_threads:
        raise ValueError("too many threads")
    if knobs["rows"] * knobs["columns"] > _MAX_FRAGMENTS:
        raise ValueError("too many registers")
    if shared_bytes(knobs, problem) > gpu.shared_kib * 1024:
        raise ValueError("too much shared memory")


def shared_bytes(knobs: Knobs, problem: Problem) -> int:
    """What the tiles of both operands take, in all stages; sums take the place of one of them if
    they fit."""
    depth = (knobs["stages"] + 1) * knobs["step"] * STEP
    padding = _padding(problem.dtype)
    pixels, channels = _tile(knobs)
    operands = [problem.bytes * depth * (VECTOR * size + padding) for size in (pixels, channels)]
    sums = problem.bytes * pixels * channels if knobs["split"] == 1 else 0
    return sum(operands) + (sums if sums > max(operands) else 0)


def _tile(knobs: Knobs) -> tuple[int, int]:
    """Pixels and channels of a block of threads."""
    return (
        FRAGMENT * knobs["rows"] * knobs["warps_p"],
        FRAGMENT * knobs["columns"] * knobs["warps_o"],
    )


def _padding(dtype: str) -> int:
    """Elements behind each block of terms, so that a warp's loads meet all banks of shared memory:
    4 threads read blocks of terms 32 bytes further on in the banks."""
    return 8 if dtype == "float32" else 16


def default_of(problem: Problem, gpu: GpuInfo) -> Knobs:
    """The tiling with the least `cost_of`. Raises ValueError if none fits."""
    space = space_of(problem, gpu)
    best: Knobs | None = None
    best_cost = float("inf")
    for values in itertools.product(*space.values()):
        knobs = dict(zip(space, values, strict=True))
        try:
            check(knobs, problem, gpu)
        except ValueError:
            continue
        cost = cost_of(knobs, problem, gpu)
        if cost < best_cost:
            best, best_cost = knobs, cost
    if best is None:
        raise ValueError("no tile fits")
    return best


@dataclass(frozen=True)
class CostConstants:
    """The constants of `cost_of`, in cycles and bytes."""

    multiply: float = 15.5  # a fragment times 16 terms, TF32
    half_multiply: float = 6.65
    load: float = 9.8  # an operand's 16 times 16 numbers from shared memory, in floats
    fetch: float = 0.0189  # a byte of a tile from the L2 cache
    copy: float = 0.0601  # a vector of 4 numbers of a tile
    gather: float = 1.61  # the same if each number is found by itself
    step_start: float = 18.2
    warp_start: float = 13.2
    shared_blocks: float = 4.23  # what a multiprocessor holds, in what a block may take
    whole_rounds: float = 0.117
    overlap: float = 0.335
    full_warps: float = 10.3
    gaps: float = 0.374
    latency: float = 1208
    stage_hides: float = 1.95
    latency_alone: float = 516  # where no copy is ahead, each step waits
    block_start: float = 982
    launch: float = 2407
    split_launch: float = 1805
    split_bytes: float = 29.6


FITTED = CostConstants()


def cost_of(knobs: Knobs, problem: Problem, gpu: GpuInfo, c: CostConstants = FITTED) -> float:
    """Cycles of the whole product, roughly: see `gemm.cost_of`."""
    pixels, channels = _tile(knobs)
    warps = knobs["warps_p"] * knobs["warps_o"]
    rows, columns, depth = knobs["rows"], knobs["columns"], knobs["step"]
    tasks = (
        problem.batch
        * (problem.pixels // pixels)
        * (VECTOR * problem.blocks // channels)
        * knobs["split"]
    )
    # Measured: what the compiler gives a thread.
    registers = 9.7 * rows * columns + 1.2 * (rows + columns) + 5.8 * depth + 25
    by_registers = int(gpu.registers / (gpu.warp * warps * registers))
    by_shared = int(c.shared_blocks * gpu.shared_kib * 1024 / shared_bytes(knobs, problem))
    resident = max(1, min(by_registers, by_shared, 32))
    filled = tasks / (gpu.multiprocessors * resident)
    rounds = c.whole_rounds * math.ceil(filled) + (1 - c.whole_rounds) * max(1.0, filled)
    together = min(resident, math.ceil(tasks / gpu.multiprocessors))
    active = warps * together
    multiply = c.multiply if problem.dtype == "float32" else c.half_multiply
    multiplies = multiply * rows * columns * active
    loads = c.load * problem.bytes / 4 * (rows + columns) * active
    fetched = c.fetch * 16 * problem.bytes * (pixels + channels) * together
    copies = (c.gather if problem.gathered else c.copy) * pixels + c.copy * channels
    copies *= STEP * together
    work = max(multiplies, loads, fetched, copies)
    work += c.overlap * (multiplies + loads + fetched + copies)
    busy = min(1.0, active / c.full_warps) ** c.gaps
    step = depth * work / busy + c.step_start + c.warp_start * active
    if knobs["stages"] == 0 or problem.gathered:
        step += c.latency_alone
    else:
        step = max(step, c.latency / (c.stage_hides * knobs["stages"] + 1))
    steps = problem.steps // (STEP * depth * knobs["split"])
    cycles = rounds * (steps * step + c.block_start) + c.launch
    if knobs["split"] > 1:
        moved = 32 * problem.batch * problem.pixels * problem.blocks * knobs["split"]
        cycles += c.split_launch + moved / (c.split_bytes * gpu.multiprocessors)
    return cycles


def _space(sch: Any, block: Any, profile: TargetProfile) -> Space:
    assert profile.gpu is not None
    return space_of(problem_of(sch, block, profile.precision), profile.gpu)


def _default(sch: Any, block: Any, profile: TargetProfile) -> Knobs:
    assert profile.gpu is not None
    return default_of(problem_of(sch, block, profile.precision), profile.gpu)


def _checker(sch: Any, block: Any, profile: TargetProfile) -> Callable[[Knobs], None]:
    assert profile.gpu is not None
    return partial(check, problem=problem_of(sch, block, profile.precision), gpu=profile.gpu)


def _schedule(sch: Any, block: Any, profile: TargetProfile, knobs: Knobs) -> None:
    assert profile.gpu is not None
    problem = problem_of(sch, block, profile.precision)
    check(knobs, problem, profile.gpu)
    if knobs["split"] > 1:
        block, part = gemm.split_sums(sch, block, knobs["split"])
        sch.reorder(part, *sch.get_loops(block)[:4])
        sums = sch.cache_write(block, 0, "wmma.accumulator")
        _schedule_tile(sch, block, sums, None, problem.dtype, knobs)
    else:
        out = epilogue_of(sch, block)
        sums = sch.cache_write(block, 0, "wmma.accumulator")
        _schedule_tile(sch, block, sums, out, problem.dtype, knobs)


def _schedule_tile(
    sch: Any, block: Any, sums: Any, out: Any | None, dtype: str, knobs: Knobs
) -> None:
    """Schedules `block`, whose results `sums` stores: for `out`, or as they are if that is None."""
    columns = sch.get_producers(block)[0]
    *above, o, p, b, k, c = sch.get_loops(block)
    o_block, o_warp, o = sch.split(o, [None, knobs["warps_o"], _BLOCKS * knobs["columns"]])
    p_block, p_warp, p = sch.split(p, [None, knobs["warps_p"], FRAGMENT * knobs["rows"]])
    k_outer, k_step, k = sch.split(k, [None, knobs["step"], STEP])
    sch.reorder(*above, o_block, p_block, o_warp, p_warp, k_outer, k_step, k, o, p, b, c)
    grid = sch.fuse(*above, o_block, p_block)
    sch.bind(grid, "blockIdx.x")
    warp = sch.fuse(o_warp, p_warp)
    sch.bind(warp, "threadIdx.y")
    sch.unroll(k_step)
    right = sch.cache_read(block, 1, "shared")
    sch.set_scope(columns, 0, "shared")
    sch.reverse_compute_at(sums, warp, preserve_unit_loops=True)
    padding = _padding(dtype)
    for stage, axis in ((columns, 1), (right, 0)):
        sch.compute_at(stage, k_outer, preserve_unit_loops=True)
        _spread(sch, sch.get_loops(stage)[3:], knobs)
        sch.storage_align(stage, 0, axis, 4 * padding, padding)
        sch.unsafe_set_dtype(stage, 0, dtype)
    if out is not None:
        sch.set_scope(sums, 0, "shared")
        sch.unsafe_set_dtype(sums, 0, dtype)
        sch.reverse_compute_at(out, grid, preserve_unit_loops=True)
        _spread(sch, sch.get_loops(out)[1:], knobs)
    if knobs["stages"] > 0 and tiles.extent(sch, k_outer) > knobs["stages"]:
        # Copies of later steps are under way while this one is multiplied.
        sch.annotate(k_outer, "software_pipeline_stage", [0, 0, knobs["stages"]])
        sch.annotate(k_outer, "software_pipeline_order", [0, 1, 2])
        sch.annotate(k_outer, "software_pipeline_async_stages", [0])
    init = sch.decompose_reduction(block, k_outer)
    stored = ("float32", "global") if out is None else (dtype, "shared")
    fill, multiply, store = warp_products.register(knobs["rows"], knobs["columns"], dtype, *stored)
    sch.tensorize(sch.get_loops(init)[-3], fill)
    sch.tensorize(k, multiply)
    sch.tensorize(sch.get_loops(sums)[-3], store)


def _spread(sch: Any, loops: list[Any], knobs: Knobs) -> None:
    """All threads of a block share `loops`, 4 neighbours each at a time if there are."""
    *outer, last = loops
    if tiles.extent(sch, last) % VECTOR == 0:
        rest, lane = sch.split(last, [None, VECTOR])
        sch.vectorize(lane)
        outer.append(rest)
    else:
        outer.append(last)
    fused = sch.fuse(*outer) if len(outer) > 1 else outer[0]
    _, warp, thread = sch.split(fused, [None, knobs["warps_p"] * knobs["warps_o"], 32])
    sch.bind(warp, "threadIdx.y")
    sch.bind(thread, "threadIdx.x")


TEMPLATE = Template(NAME, _space, _default, _schedule, _checker)
