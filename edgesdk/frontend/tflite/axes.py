"""TFLite's operators along axes: normalisation, reductions, sorting."""

from __future__ import annotations

import numpy as np

from edgesdk.frontend.graph import element_type
from edgesdk.frontend.tflite.operators import activated, axis_in_nchw, converts, positive_axis
from edgesdk.frontend.tflite.writer import TO_NCHW, Operator


@converts("SOFTMAX", "LOG_SOFTMAX")
def _softmax(op: Operator) -> None:
    w, x = op.w, op[0]
    nchw = w.nchw(x)
    value = w.real(x, nchw=nchw)
    beta = float(op.options.beta) if op.kind == "SOFTMAX" else 1.0
    if beta != 1.0:
        value = w.node("Mul", value, w.constant(np.float32(beta)))
    kind = "Softmax" if op.kind == "SOFTMAX" else "LogSoftmax"
    w.put(op.out, w.node(kind, value, axis=1 if nchw else -1), nchw=nchw)


@converts("L2_NORMALIZATION")
def _l2_normalization(op: Operator) -> None:
    w, x = op.w, op[0]
    nchw = w.nchw(x)
    value = w.real(x, nchw=nchw)
    norm = w.node("ReduceL2", value, w.integers([1 if nchw else -1]), keepdims=1)
    norm = w.node("Max", norm, w.constant(np.float32(1e-6)))
    w.put(op.out, activated(op, w.node("Div", value, norm)), nchw=nchw)


@converts("LOCAL_RESPONSE_NORMALIZATION")
def _local_response(op: Operator) -> None:
    o = op.options
    size = 2 * int(o.radius) + 1
    value = op.w.node(
        "LRN",
        op.w.real(op[0], nchw=True),
        size=size,
        alpha=float(o.alpha) * size,
        beta=float(o.beta),
        bias=float(o.bias),
    )
    op.w.put(op.out, value, nchw=True)


_REDUCTIONS = {
    "MEAN": "ReduceMean", "SUM": "ReduceSum", "REDUCE_MAX": "ReduceMax",
    "REDUCE_MIN": "ReduceMin", "REDUCE_PROD": "ReduceProd", "REDUCE_ANY": "ReduceMax",
    "REDUCE_ALL": "ReduceMin",
}  # fmt: skip


@converts(*_REDUCTIONS)
def _reduce(op: Operator) -> None:
    w, x = op.w, op[0]
    axes = sorted({positive_axis(a, x.rank) for a in op.ints(1, "axes")})
    keep = bool(op.options.keepDims)
    nchw = w.nchw(x) and (keep or _same_order_without(axes))
    value = w.real(x, nchw=nchw)
    moved = [axis_in_nchw(a) for a in axes] if nchw else axes
    logical = op.kind in ("REDUCE_ANY", "REDUCE_ALL")
    if logical:
        value = w.node("Cast", value, to=element_type(np.dtype(np.uint8)))
    if axes:
        value = w.node(_REDUCTIONS[op.kind], value, w.integers(moved), keepdims=int(keep))
    if logical:
        value = w.node("Cast", value, to=element_type(np.dtype(bool)))
    w.put(op.out, value, nchw=nchw and keep)


@converts("ARG_MAX", "ARG_MIN")
def _arg(op: Operator) -> None:
    w, x = op.w, op[0]
    axis = positive_axis(op.ints(1, "axis")[0], x.rank)
    nchw = w.nchw(x) and _same_order_without([axis])
    kind = "ArgMax" if op.kind == "ARG_MAX" else "ArgMin"
    moved = axis_in_nchw(axis) if nchw else axis
    value = w.node(kind, w.real(x, nchw=nchw), axis=moved, keepdims=0)
    w.put(op.out, w.node("Cast", value, to=element_type(op.out.dtype)))


@converts("CUMSUM")
def _cumsum(op: Operator) -> None:
    axis = op.w.constant(np.int64(op.ints(1, "axis")[0]))
    o = op.options
    value = op.w.node(
        "CumSum", op.w.real(op[0]), axis, exclusive=int(o.exclusive), reverse=int(o.reverse)
    )
    op.w.put(op.out, value)


@converts("TOPK_V2")
def _topk(op: Operator) -> None:
    w = op.w
    k = w.integers([op.ints(1, "k")[0]])
    values, indices = w.many("TopK", [w.real(op[0]), k], 2)
    w.put(op.out, values)
    w.put(op.outputs[1], w.node("Cast", indices, to=element_type(op.outputs[1].dtype)))


def _same_order_without(axes: list[int]) -> bool:
    """Whether both orders are the same once `axes` (of the file) are gone."""
    return [a for a in TO_NCHW if a not in axes] == [a for a in range(4) if a not in axes]
