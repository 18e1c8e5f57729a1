"""Matrix products with constant weights, packed into panels as wide as a few vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import tiles
from edgesdk.schedules.hardware import accumulators, divisors, lanes

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


def schedule_dense(sch: Any, block: Any, profile: TargetProfile) -> None:
    """Applies the template: a tile of rows times one panel in registers."""
    out = tiles.gather_epilogue(sch, block)
    i, j = sch.get_loops(out)[-2:]
    rows, columns = tiles.extent(sch, i), tiles.extent(sch, j)
    panel_var = sch.get(block).iter_vars[2]
    width = int(panel_var.dom.extent)
    vector = lanes(profile)
    fit = max(1, accumulators(profile) // max(1, width // vector))
    row_tile = max(divisors(rows, fit))
    io, ii = sch.split(i, [None, row_tile])
    jo, ji = sch.split(j, [None, width])
    sch.reorder(jo, io, ii, ji)
    task = sch.fuse(jo, io)
    sch.set_scope(block, 0, "local")
    sch.compute_at(block, task, preserve_unit_loops=True)
    p, bi, bj, k = sch.get_loops(block)[1:]
    sch.reorder(k, p, bi, bj)
    for loop in (p, bi):
        sch.unroll(loop)
    sch.vectorize(bj)
    if rows * columns * tiles.reduction_size(sch, block) >= tiles.PARALLEL_WORK:
        sch.parallel(task)
    init = sch.decompose_reduction(block, k)
    tiles.unroll_and_vectorize(sch, init, after=1)
    sch.unroll(ii)
    if columns % width == 0:
        sch.vectorize(ji)
