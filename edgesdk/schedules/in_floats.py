"""Sums of 8-bit integers in float32, for targets without an instruction for them.

The schedules of floats are far faster there than 32-bit integers would be. Sums below 2^24 are
exact; larger ones are rounded to 24 bits, far below a step of the quantisation behind them.
"""

from __future__ import annotations

from typing import Any

_SUMS = ("relax.nn.conv2d", "relax.matmul")
# Between the 8-bit tensor and the int32 operand.
_WIDENING = ("relax.astype", "relax.subtract", "relax.reshape")


def sum_in_floats(module: Any) -> Any:
    """Returns `module` with the convolutions and products of its `main` that sum widened 8-bit
    integers times constants as ones of float32."""
    from tvm import ir, relax
    from tvm.relax.expr_functor import PyExprMutator, mutator

    @mutator
    class Floats(PyExprMutator):
        def visit_call_(self, call: Any) -> Any:
            call = self.visit_expr_post_order(call)
            if getattr(call.op, "name", "") not in _SUMS or str(call.ty.dtype) != "int32":
                return call
            if not isinstance(call.args[1], ir.GenericConst) or not self.is_widened(call.args[0]):
                return call
            weight = relax.const(call.args[1].value.numpy().astype("float32"))
            data = self.builder_.emit(relax.op.astype(call.args[0], "float32"))
            if call.op.name == "relax.matmul":
                total = relax.op.matmul(data, weight)
            else:
                attrs = call.attrs
                total = relax.op.nn.conv2d(
                    data,
                    weight,
                    strides=list(attrs.strides),
                    padding=list(attrs.padding),
                    dilation=list(attrs.dilation),
                    groups=int(attrs.groups),
                )
            return relax.op.astype(self.builder_.emit(total), "int32")

        def is_widened(self, expr: Any) -> bool:
            """Whether `expr` is astype of 8-bit integers, less a zero point, reshaped or not."""
            while isinstance(expr, relax.Var):
                bound = self.lookup_binding(expr)
                name = getattr(getattr(bound, "op", None), "name", "")
                if name not in _WIDENING:
                    return False
                expr = bound.args[0]
                if name == "relax.astype":
                    return str(expr.ty.dtype) in ("int8", "uint8")
            return False

    main = Floats(module).visit_expr(module["main"])
    functions = {gv: main if gv.name_hint == "main" else f for gv, f in module.functions.items()}
    import tvm

    return tvm.IRModule(functions, global_infos=dict(module.global_infos))
