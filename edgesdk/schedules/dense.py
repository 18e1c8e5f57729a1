"""Matrix products with constant weights, packed into panels as wide as a few vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import tiles
from edgesdk.schedules.hardware import accumulators, divisors, lanes
from edgesdk.schedules.template import Knobs, Space, Template

if TYPE_CHECKING:
    import numpy as np

DENSE = "dense_packed"


def panel_width(columns: int, rows: int, profile: TargetProfile) -> int:
    """Columns of a panel: whole vectors, more of them when there are few rows to fill registers."""
    vector = lanes(profile)
    wanted = 2 if rows >= 6 else 4
    vectors = -(-columns // vector)
    return vector * min(wanted, vectors)


def pack_weight(weight: np.ndarray, width: int) -> np.ndarray:
    """[K, N] -> [ceil(N / width), K, width], zeros beyond N."""
    import numpy as np

    k, n = weight.shape
    padded = np.zeros((k, -(-n // width) * width), weight.dtype)
    padded[:, :n] = weight
    return np.ascontiguousarray(padded.reshape(k, -1, width).transpose(1, 0, 2))


def dense_packed(data: Any, weight: Any, columns: int) -> Any:
    """[M, K] times packed [N/w, K, w] -> [M, columns]."""
    from tvm import te

    m, k = (int(d) for d in data.shape)
    panels, _, width = (int(d) for d in weight.shape)
    rk = te.reduce_axis((0, k), "k")
    product = te.compute(
        (panels, m, width),
        lambda p, i, j: te.sum(data[i, rk] * weight[p, rk, j], axis=rk),
        name="dense",
        attrs={"edgesdk.template": DENSE},
    )
    return te.compute(
        (m, columns), lambda i, j: product[j // width, i, j % width], name="dense_rows"
    )


def vectors_of(sch: Any, block: Any, profile: TargetProfile) -> tuple[int, int, int]:
    """Rows, columns of a panel, and vectors of a panel."""
    _, rows, width = (int(v.dom.extent) for v in sch.get(block).iter_vars[:3])
    return rows, width, max(1, width // lanes(profile))


def _space(sch: Any, block: Any, profile: TargetProfile) -> Space:
    return space_of(sch, block, profile, steps=tiles.reduction_size(sch, block))


def space_of(sch: Any, block: Any, profile: TargetProfile, *, steps: int) -> Space:
    """The knobs of a product whose loop over terms has `steps` iterations."""
    rows, _, vectors = vectors_of(sch, block, profile)
    fit = max(1, (accumulators(profile) + 4) // vectors)
    return {
        "rows": tuple(divisors(rows, fit)),
        "unroll": tuple(divisors(steps, 4)),
        "order": (0, 1),
    }


def _default(sch: Any, block: Any, profile: TargetProfile) -> Knobs:
    rows, _, vectors = vectors_of(sch, block, profile)
    fit = max(1, accumulators(profile) // vectors)
    return {"rows": max(divisors(rows, fit)), "unroll": 1, "order": 0}


def schedule(
    sch: Any, block: Any, profile: TargetProfile, knobs: Knobs, *, intrinsic: str | None = None
) -> None:
    """A tile of rows times one panel in registers; "order" 0: panel by panel, 1: row by row.

    A tensor `intrinsic` takes the lanes of a vector together with the last loop of terms."""
    rows, width, _ = vectors_of(sch, block, profile)
    terms = tiles.reduction_size(sch, block)
    out = tiles.gather_epilogue(sch, block, lanes(profile))
    i, j = sch.get_loops(out)[-2:]
    columns = tiles.extent(sch, j)
    io, ii = sch.split(i, [None, knobs["rows"]])
    jo, ji = sch.split(j, [None, width])
    outer = [jo, io] if knobs["order"] == 0 else [io, jo]
    sch.reorder(*outer, ii, ji)
    task = sch.fuse(*outer)
    sch.set_scope(block, 0, "local")
    sch.compute_at(block, task, preserve_unit_loops=True)
    panel, row, lane, term, *within = sch.get_loops(block)[1:]
    reduction = [term]
    if knobs["unroll"] > 1:
        reduction = list(sch.split(term, [None, knobs["unroll"]]))
        sch.unroll(reduction[1])
    if intrinsic is None:
        sch.reorder(*reduction, panel, row, lane)
        sch.vectorize(lane)
    else:
        vector, lane = sch.split(lane, [None, lanes(profile)])
        sch.reorder(*reduction, panel, row, vector, lane, *within)
        sch.unroll(vector)
    for loop in (panel, row):
        sch.unroll(loop)
    if rows * columns * terms >= tiles.PARALLEL_WORK:
        sch.parallel(task)
    init = sch.decompose_reduction(block, reduction[0])
    tiles.unroll_and_vectorize(sch, init, after=1)
    if intrinsic is not None:
        sch.tensorize(lane, intrinsic)
    sch.unroll(ii)
    if columns % width == 0:
        sch.vectorize(ji)


TEMPLATES = (Template(DENSE, _space, _default, schedule),)
