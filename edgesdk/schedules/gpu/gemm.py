"""Matrix products on a GPU, and convolutions as such ("implicit GEMM").

Activations are [N, C/4, H*W, 4]: a thread moves 16 bytes, and neighbouring threads neighbouring
pixels. A convolution multiplies a matrix of K rows (input channels times window) and P columns
(pixels), which is never written to memory, with packed weights. A block of threads computes a tile
of pixels and output channels; both operands of a step of K go through shared memory, and a thread
keeps a smaller tile of sums in registers (Volkov and Demmel, "Benchmarking GPUs to Tune Dense
Linear Algebra", 2008). Bias, activation and residual are applied when the tile is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import tiles
from edgesdk.schedules.conv2d import Conv2d
from edgesdk.schedules.gpu.binding import epilogue_of
from edgesdk.schedules.hardware import divisors
from edgesdk.schedules.template import Knobs, Space, Template

if TYPE_CHECKING:
    import numpy as np

GEMM = "gpu_gemm"
VECTOR = 4  # floats in 16 bytes, the widest load of a thread
# Fewer pixels make a product of a matrix and a few vectors, which is bound by reading the matrix.
_MIN_PIXELS = 8


def conv2d_columns(data: Any, config: Conv2d) -> Any:
    """The matrix of a convolution's inputs: [N, C/4, H*W, 4] or, for few channels, [N, C, H, W] ->
    [N * groups, K/4, P, 4], with zeros where the window reaches beyond the picture.

    K runs over channel blocks, window rows, window columns and channels of a block; with plain
    input over window rows, columns and channels, rounded up to 4.
    """
    from tvm import te, tirx

    kh, kw = config.window
    (sy, sx), (dy, dx) = config.stride, config.dilation
    top, left = config.padding[:2]
    groups = config.groups
    n, channels, h, w = config.in_shape
    _, _, out_h, out_w = config.out_shape
    plain = len(data.shape) == 4 and int(data.shape[-1]) == w and int(data.shape[1]) == channels
    per_group = channels // groups
    terms = kh * kw * (per_group if plain else -(-per_group // VECTOR) * VECTOR)
    zero = tirx.const(0, data.dtype)

    def element(i: Any, k: Any, p: Any, c: Any) -> Any:
        if plain:
            term = k * VECTOR + c
            channel, ky, kx = term // (kh * kw), term // kw % kh, term % kw
        else:
            channel_block, ky, kx = k // (kh * kw), k // kw % kh, k % kw
        y = p // out_w * sy + ky * dy - top
        x = p % out_w * sx + kx * dx - left
        conditions = []
        if _rounded(out_h * out_w) != out_h * out_w:
            conditions.append(p < out_h * out_w)
        if top or config.padding[2] or (out_h - 1) * sy + (kh - 1) * dy - top >= h:
            conditions += [y >= 0, y < h]
        if left or config.padding[3] or (out_w - 1) * sx + (kw - 1) * dx - left >= w:
            conditions += [x >= 0, x < w]
        if plain:
            if terms % VECTOR:
                conditions.append(term < terms)
            value = data[i // groups, i % groups * per_group + channel, y, x]
        else:
            blocks = per_group // VECTOR if groups > 1 else 0
            value = data[i // groups, i % groups * blocks + channel_block, y * w + x, c]
        return tirx.if_then_else(tirx.all(*conditions), value, zero) if conditions else value

    shape = (n * groups, -(-terms // VECTOR), _rounded(out_h * out_w), VECTOR)
    return te.compute(shape, element, name="columns")


def _rounded(pixels: int) -> int:
    """`pixels`, or more where they have no divisors that make good tiles (13 x 13, say)."""
    if pixels < 32 or pixels % 16 == 0 or pixels % 7 == 0:
        return pixels
    return -(-pixels // 32) * 32


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
        rows = np.zeros((groups, -(-terms // VECTOR) * VECTOR, wide.shape[1]), weight.dtype)
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

    result = product(conv2d_columns(data, config), weight, groups=config.groups)
    n, blocks, rounded, _ = (int(d) for d in result.shape)
    pixels = config.out_shape[2] * config.out_shape[3]
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
        attrs=attrs if pixels >= _MIN_PIXELS else None,
    )


def pack_dense(weight: np.ndarray) -> np.ndarray:
    """[K, N] -> [1, K/4, 4, N], both rounded up to multiples of 4 with zeros."""
    import numpy as np

    k, n = weight.shape
    wide = np.zeros((-(-k // VECTOR) * VECTOR, -(-n // VECTOR) * VECTOR), weight.dtype)
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


def _sizes(sch: Any, block: Any) -> tuple[int, int, int]:
    """Output blocks of 4 (in a group), pixels, and steps of 4 along K."""
    axes = [int(v.dom.extent) for v in sch.get(block).iter_vars]
    return int(sch.get(block).annotations["edgesdk.blocks"]), axes[2], axes[4]


# Pixels and blocks of 4 channels that a thread keeps: at most 8 x 8 sums.
_MAX_THREAD_PIXELS = 8
_MAX_THREAD_BLOCKS = 2


def _space(sch: Any, block: Any, profile: TargetProfile) -> Space:
    blocks, pixels, steps = _sizes(sch, block)
    return {
        # A thread's tile, the threads along pixels and channels, and the step along K.
        "pixels": tuple(divisors(pixels, _MAX_THREAD_PIXELS)),
        "blocks": tuple(divisors(blocks, _MAX_THREAD_BLOCKS)),
        "threads_p": tuple(divisors(pixels, 128)),
        "threads_o": tuple(divisors(blocks, 32)),
        "step": tuple(divisors(steps, 16)),
    }


def _default(sch: Any, block: Any, profile: TargetProfile) -> Knobs:
    """The tiling with the least estimated time: rounds of thread blocks over the multiprocessors
    times the cycles of a block, bounded by arithmetic and by loads from shared memory."""
    assert profile.gpu is not None
    blocks, pixels, steps = _sizes(sch, block)
    axes = [int(v.dom.extent) for v in sch.get(block).iter_vars]
    groups = axes[0] * axes[1] // blocks
    space = _space(sch, block, profile)
    best: Knobs = {}
    best_cost = float("inf")
    for tp in space["threads_p"]:
        for to in space["threads_o"]:
            if not 32 <= tp * to <= 256 and tp * to != min(256, blocks * pixels):
                continue
            for p in space["pixels"]:
                if pixels % (p * tp):
                    continue
                for o in space["blocks"]:
                    if blocks % (o * to):
                        continue
                    for step in space["step"]:
                        cost = _cost(profile, groups, blocks, pixels, steps, p, o, tp, to, step)
                        if cost < best_cost:
                            best_cost = cost
                            best = {
                                "pixels": p,
                                "blocks": o,
                                "threads_p": tp,
                                "threads_o": to,
                                "step": step,
                            }
    if not best:
        raise ValueError("no tile fits")
    return best


def _cost(
    profile: TargetProfile,
    groups: int,
    blocks: int,
    pixels: int,
    steps: int,
    p: int,
    o: int,
    tp: int,
    to: int,
    step: int,
) -> float:
    """Cycles of the whole product, roughly."""
    assert profile.gpu is not None
    threads = tp * to
    shared = 16 * step * (p * tp + 4 * o * to)
    if shared > profile.gpu.shared_kib * 1024:
        return float("inf")
    tasks = groups * (blocks // (o * to)) * (pixels // (p * tp))
    warps = -(-threads // 32)
    # Thread blocks that run at once on one multiprocessor: registers and shared memory bound them.
    registers = threads * (4 * p * o + 4 * (p + 4 * o) + 24)
    resident = max(1, min(65536 // registers, profile.gpu.shared_kib * 1024 * 2 // shared, 8))
    concurrent = min(resident, -(-tasks // profile.gpu.multiprocessors))
    waves = -(-tasks // (profile.gpu.multiprocessors * concurrent))
    # One step of 4 terms: multiply-adds of a warp take a cycle each on a quarter of the core.
    fmas = 16 * p * o * warps * concurrent / 4
    loads = (p + 4 * o) * warps * concurrent * 2
    per_step = max(fmas, loads)
    # Each stage of `step` waits for memory once, hidden by the other warps.
    stage = max(per_step * step, 500.0 if concurrent * warps < 8 else 350.0) + 40
    moved = shared / 32 * concurrent / 2  # bytes from L2 per cycle and multiprocessor
    return waves * (steps / step) * max(stage, moved)


def _schedule(sch: Any, block: Any, profile: TargetProfile, knobs: Knobs) -> None:
    tp, to = knobs["threads_p"], knobs["threads_o"]
    out = epilogue_of(sch, block)
    columns = sch.get_producers(block)[0]
    loops = sch.get_loops(out)
    if len(loops) == 2:  # [M, columns] of `dense`
        p, o = loops
        o, b = sch.split(o, [None, VECTOR])
        g = sch.add_unit_loop(p)
        sch.reorder(g, o, p, b)
    else:
        g, o, p, b = loops
    # A thread's pixels lie a block's width apart, so that neighbours read neighbouring words.
    o_block, o_virtual, o_thread = sch.split(o, [None, knobs["blocks"], to])
    p_block, p_virtual, p_thread = sch.split(p, [None, knobs["pixels"], tp])
    sch.reorder(g, o_block, p_block, o_virtual, p_virtual, o_thread, p_thread, b)
    sch.bind(sch.fuse(g, o_block, p_block), "blockIdx.x")
    sch.bind(o_virtual, "vthread.y")
    sch.bind(p_virtual, "vthread.x")
    threads = sch.fuse(o_thread, p_thread)
    sch.bind(threads, "threadIdx.x")
    sch.vectorize(b)
    sch.set_scope(block, 0, "local")
    sch.compute_at(block, threads, preserve_unit_loops=True)
    inner = sch.get_loops(block)[4:]
    g, o, p, b, k, c = inner
    k_outer, k_inner = sch.split(k, [None, knobs["step"]])
    sch.reorder(k_outer, k_inner, g, c, o, p, b)
    for loop in (c, o, p, b):
        sch.unroll(loop)
    sch.unroll(k_inner)
    right = sch.cache_read(block, 1, "shared")
    sch.set_scope(columns, 0, "shared")
    for stage in (columns, right):
        sch.compute_at(stage, k_outer, preserve_unit_loops=True)
        _fill(sch, stage, tp * to)
    sch.decompose_reduction(block, k_outer)


def _fill(sch: Any, stage: Any, threads: int) -> None:
    """All threads of a block copy a tile to shared memory, 16 bytes each at a time."""
    loops = sch.get_loops(stage)[5:]
    fused = sch.fuse(*loops)
    size = tiles.extent(sch, fused)
    vector = VECTOR if size % VECTOR == 0 else 1
    _, thread, lane = sch.split(fused, [None, threads, vector])
    sch.bind(thread, "threadIdx.x")
    if vector > 1:
        sch.vectorize(lane)


TEMPLATES = (Template(GEMM, _space, _default, _schedule),)
