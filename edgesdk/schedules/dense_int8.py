"""Matrix products of 8-bit integers with constant weights, with 32-bit sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import dense, dot
from edgesdk.schedules.dot import DotProduct
from edgesdk.schedules.hardware import divisors
from edgesdk.schedules.template import Knobs, Space, Template

if TYPE_CHECKING:
    import numpy as np

DENSE_INT8 = "dense_int8"


def pack_weight(weight: np.ndarray, width: int, depth: int) -> np.ndarray:
    """[K, N] -> [ceil(N / width), ceil(K / depth), width, depth], zeros beyond N and K."""
    import numpy as np

    k, n = weight.shape
    padded = np.zeros((-(-k // depth) * depth, -(-n // width) * width), weight.dtype)
    padded[:k, :n] = weight
    split = padded.reshape(-1, depth, padded.shape[1] // width, width)
    return np.ascontiguousarray(split.transpose(2, 0, 3, 1))


def pad_terms(x: Any, terms: int) -> Any:
    """[M, K] -> [M, terms], zeros beyond K."""
    from tvm import te, tirx

    rows, k = (int(d) for d in x.shape)
    return te.compute(
        (rows, terms),
        lambda i, j: tirx.if_then_else(j < k, x[i, j], tirx.const(0, x.dtype)),
        name="pad_terms",
        tag="injective,pad",
    )


def dense_int8(data: Any, weight: Any, columns: int, instruction: DotProduct) -> Any:
    """[M, K] times packed [N/w, K/depth, w, depth] -> [M, columns], int32."""
    from tvm import te

    depth = instruction.depth
    rows = int(data.shape[0])
    panels, steps, width, _ = (int(d) for d in weight.shape)
    rq = te.reduce_axis((0, steps), "kq")
    rk = te.reduce_axis((0, depth), "kk")

    def element(p: Any, i: Any, j: Any) -> Any:
        value = dot.widened(data[i, rq * depth + rk], instruction)
        return te.sum(value * weight[p, rq, j, rk].astype("int32"), axis=[rq, rk])

    product = te.compute(
        (panels, rows, width),
        element,
        name="dense_int8",
        attrs={"edgesdk.template": DENSE_INT8, "edgesdk.dot": instruction.name},
    )
    return te.compute(
        (rows, columns), lambda i, j: product[j // width, i, j % width], name="dense_rows"
    )


def _space(sch: Any, block: Any, profile: TargetProfile) -> Space:
    steps = int(sch.get(block).iter_vars[-2].dom.extent)
    return dense.space_of(sch, block, profile, steps=steps)


def _default(sch: Any, block: Any, profile: TargetProfile) -> Knobs:
    rows, _, vectors = dense.vectors_of(sch, block, profile)
    # The sums, the weights of a step, a broadcast number and a product that is not yet added.
    fit = max(1, (profile.cpu.vector_registers - 2 - vectors) // vectors)
    return {"rows": max(divisors(rows, fit)), "unroll": 1, "order": 0}


def _schedule(sch: Any, block: Any, profile: TargetProfile, knobs: Knobs) -> None:
    name = str(sch.get(block).annotations["edgesdk.dot"])
    dot.register(name)
    dense.schedule(sch, block, profile, knobs, intrinsic=name)


TEMPLATES = (Template(DENSE_INT8, _space, _default, _schedule),)
