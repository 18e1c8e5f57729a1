"""Tensor expressions that take the place of TVM's own when Relax operators become kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgesdk.frontend import kernels
from edgesdk.schedules import vector_math


def legalizations() -> dict[str, Callable[[Any, Any], Any]]:
    """Returns the map for `relax.transform.LegalizeOps`: operator name -> rule(builder, call)."""
    _allow_vectors("tirx.nearbyint")
    functions = {
        "exp": vector_math.exp,
        "sigmoid": vector_math.sigmoid,
        "tanh": vector_math.tanh,
        "erf": vector_math.erf,
    }
    rules = {f"relax.{name}": _map(function, name) for name, function in functions.items()}
    return rules | {"relax.nn.softmax": _softmax, "relax.nn.max_pool2d": _max_pool2d}


def _allow_vectors(operator: str) -> None:
    """Lets TVM's vectoriser take an operator of one number that LLVM has for vectors, too."""
    from tvm.ir import Op, register_op_attr

    if Op.get(operator).get_attr("TVectorizable") is None:
        register_op_attr(operator, "TVectorizable", True)


def _map(function: Callable[[Any], Any], name: str) -> Callable[[Any, Any], Any]:
    def compute(x: Any) -> Any:
        from tvm import te

        return te.compute(x.shape, lambda *i: function(x[i]), name=name, tag="elemwise")

    return lambda builder, call: builder.call_te(compute, call.args[0], primfunc_name_hint=name)


def _softmax(builder: Any, call: Any) -> Any:
    axis = int(call.attrs.axis)
    return builder.call_te(lambda x: softmax(x, axis), call.args[0], primfunc_name_hint="softmax")


def _max_pool2d(builder: Any, call: Any) -> Any:
    attrs = call.attrs

    def ints(values: Any) -> list[int]:
        return [int(v) for v in values]

    pads = ints(attrs.padding)
    return builder.call_te(
        kernels.max_pool,
        call.args[0],
        ints(attrs.pool_size),
        ints(attrs.strides),
        ints(attrs.dilation),
        pads[:2],
        pads[2:],
        primfunc_name_hint="max_pool2d",
    )


def softmax(x: Any, axis: int) -> Any:
    """exp(x - max) / sum of them along `axis`, for a tensor of any shape."""
    from tvm import te

    shape = list(x.shape)
    axis %= len(shape)
    kept = [d if i != axis else 1 for i, d in enumerate(shape)]

    def along(index: tuple[Any, ...], position: Any) -> tuple[Any, ...]:
        return (*index[:axis], position, *index[axis + 1 :])

    rm = te.reduce_axis((0, shape[axis]), "k")
    largest = te.compute(kept, lambda *i: te.max(x[along(i, rm)], axis=rm), name="row_max")
    powers = te.compute(
        shape, lambda *i: vector_math.exp(x[i] - largest[along(i, 0)]), name="powers"
    )
    rs = te.reduce_axis((0, shape[axis]), "k")
    total = te.compute(kept, lambda *i: te.sum(powers[along(i, rs)], axis=rs), name="row_sum")
    return te.compute(shape, lambda *i: powers[i] / total[along(i, 0)], name="softmax")
