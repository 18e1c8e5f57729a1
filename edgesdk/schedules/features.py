"""What is known of a kernel without scheduling or running it: sizes, and a floor of its time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules.hardware import lanes
from edgesdk.schedules.tiles import REDUCE

# Bytes that a core moves to or from memory in a cycle: some 8 to 16 GB/s at 1.5 GHz.
_BYTES_PER_CYCLE = 8


@dataclass(frozen=True)
class KernelFacts:
    """Sizes of an unscheduled kernel.

    `spatial` and `reduce` are the extents of the main block's axes (the template's block, or the
    one with the most iterations), `row` its annotation `edgesdk.row` (0: none), `iterations` those
    of all blocks together, `arguments` the shapes of the parameters, `size_bytes` their bytes.
    """

    spatial: tuple[int, ...]
    reduce: tuple[int, ...]
    row: int
    iterations: int
    arguments: tuple[tuple[int, ...], ...]
    size_bytes: int


def kernel_facts(function: Any) -> KernelFacts:
    """Returns the facts of a PrimFunc whose blocks are all children of its root block.

    One without such blocks has no axes, and an iteration for each element of its arguments.
    """
    import tvm
    import tvm_ffi
    from tvm.s_tir import Schedule, ScheduleError

    sch = Schedule(tvm.IRModule({"main": function}), error_render_level="none")
    arguments = tuple(tuple(int(d) for d in p.ty.shape) for p in function.params)
    size_bytes = sum(
        math.prod(shape) * tvm_ffi.dtype(str(p.ty.dtype)).itemsize
        for shape, p in zip(arguments, function.params, strict=True)
    )
    try:
        blocks = [sch.get(b) for b in sch.get_child_blocks(sch.get_sblock("root"))]
    except ScheduleError:  # loops written by hand in one opaque block, as a scatter's
        return KernelFacts((), (), 0, sum(map(math.prod, arguments)), arguments, size_bytes)
    sizes = [math.prod(int(v.dom.extent) for v in b.iter_vars) for b in blocks]
    marked = [b for b in blocks if "edgesdk.template" in b.annotations]
    main = marked[0] if marked else blocks[sizes.index(max(sizes))]
    return KernelFacts(
        spatial=tuple(int(v.dom.extent) for v in main.iter_vars if int(v.iter_type) != REDUCE),
        reduce=tuple(int(v.dom.extent) for v in main.iter_vars if int(v.iter_type) == REDUCE),
        row=int(main.annotations.get("edgesdk.row", 0)),
        iterations=sum(sizes),
        arguments=arguments,
        size_bytes=size_bytes,
    )


def floor_cycles(facts: KernelFacts, profile: TargetProfile, *, vectors: bool = True) -> float:
    """The cycles of one core that the kernel takes at least: its roofline.

    One vector operation a cycle (a scalar one without `vectors`), or its bytes at the rate of
    memory, whichever takes longer. Good for comparing kernels of one network.
    """
    width = lanes(profile) if vectors else 1
    return max(facts.iterations / width, facts.size_bytes / _BYTES_PER_CYCLE)
