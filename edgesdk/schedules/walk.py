"""The walk over a graph whose tensors are kept in two layouts, plain and in channel blocks.

`GraphWalk` goes through `main` once, from front to back, and builds it anew. What becomes of an
operator is in the rules of its subclasses (`layout.py`); a tensor is moved to another layout when
the first rule asks for it there, and kept in both from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules.blocks import block_array, block_tensor, unblock_tensor
from edgesdk.schedules.hardware import lanes

if TYPE_CHECKING:
    import numpy as np


@dataclass
class LayoutTensor:
    """A value of the new graph, in one layout or in both; `shape` is that of the plain one."""

    shape: tuple[int, ...]
    dtype: str
    plain: Any = None
    blocked: Any = None


class GraphWalk:
    """`rules` maps the name of an operator to what makes a new value of a call of it, a
    `LayoutTensor` or an expression in plain layout. An operator without a rule, or whose rule
    returns None, stays as it is, on plain tensors. `block` counts the channels of a block."""

    def __init__(self, module: Any, profile: TargetProfile) -> None:
        from tvm import relax

        self.module = module
        self.profile = profile
        self.block = lanes(profile)
        self.bb = relax.BlockBuilder(module)
        # By the handle of the old graph's variable: what it has become, and what it was bound to.
        self.tensors: dict[int, Any] = {}
        self.calls: dict[int, Any] = {}
        self.rules: dict[str, Callable[[Any], Any]] = {}

    def run(self) -> Any:
        from tvm import relax

        old = self.module["main"]
        parameters = list(old.params)
        with self.bb.function("edgesdk_main", parameters, attrs=dict(old.attrs or {})):
            with self.bb.dataflow():
                for parameter in parameters:
                    self._set(parameter, parameter)
                for binding in old.body.blocks[0].bindings:
                    self.calls[binding.var.id_] = binding.value
                    self._set(binding.var, self._bind(binding.value))
                result = old.body.body
                if isinstance(result, relax.Tuple):
                    new = relax.Tuple([self._plain(item) for item in result.fields])
                else:
                    new = self._plain(result)
                output = self.bb.emit_output(new)
            self.bb.emit_func_output(output)
        module = self.bb.get()
        main = module["edgesdk_main"].with_attr("global_symbol", "main")
        functions = {
            gv: f
            for gv, f in module.functions.items()
            if gv.name_hint not in ("main", "edgesdk_main")
        }
        import tvm

        functions[module.get_global_var("main")] = main
        return tvm.IRModule(functions, global_infos=dict(module.global_infos))

    def _te(
        self,
        function: Callable[..., Any],
        *tensors: Any,
        hint: str,
        pattern: int | None = None,
        **static: Any,
    ) -> Any:
        """Emits a kernel; `emit_te` takes tensors only, so all else is bound before.

        `pattern` is what may be fused with it; TVM finds out where it is None."""
        return self.bb.emit_te(
            lambda *given: function(*given, **static),
            *tensors,
            primfunc_name_hint=hint,
            primfunc_attrs=None if pattern is None else {"op_pattern": pattern},
        )

    # What a variable of the old graph has become.

    def _set(self, variable: Any, value: Any) -> None:
        if not isinstance(value, LayoutTensor):
            shape, dtype = type_of(value)
            if shape is not None:
                value = LayoutTensor(shape, dtype, plain=value)
        self.tensors[variable.id_] = value

    def _get(self, expr: Any) -> Any:
        from tvm import ir, relax

        if isinstance(expr, relax.Var):
            return self.tensors[expr.id_]
        if isinstance(expr, ir.GenericConst):
            shape, dtype = type_of(expr)
            return LayoutTensor(shape or (), dtype, plain=expr)
        return expr

    def _plain(self, expr: Any) -> Any:
        """`expr` of the old graph as an expression of the new one, in plain layout."""
        from tvm import relax

        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._plain(item) for item in expr.fields])
        value = self._get(expr)
        return self._plain_of(value) if isinstance(value, LayoutTensor) else value

    def _plain_of(self, value: LayoutTensor) -> Any:
        if value.plain is None:
            value.plain = self._emit_unblocked(value)
        return value.plain

    def _blocked(self, value: LayoutTensor) -> Any:
        if value.blocked is None:
            constant = constant_of(value.plain)
            if constant is not None:
                value.blocked = as_const(block_array(constant, self.block))
            else:
                value.blocked = self._emit_blocked(value)
        return value.blocked

    def _emit_blocked(self, value: LayoutTensor) -> Any:
        from tvm import relax

        n, c, h, w = value.shape
        if c % self.block == 0 and h * w == 1:
            return self.bb.emit(relax.op.reshape(value.plain, (n, c // self.block, 1, self.block)))
        return self._te(block_tensor, value.plain, block=self.block, hint="block")

    def _emit_unblocked(self, value: LayoutTensor) -> Any:
        from tvm import relax

        _, c, h, w = value.shape
        if c % self.block == 0 and h * w == 1:
            return self.bb.emit(relax.op.reshape(value.blocked, value.shape))
        return self._te(unblock_tensor, value.blocked, shape=value.shape, hint="unblock")

    # The operators.

    def _bind(self, value: Any) -> Any:
        from tvm import relax

        if not isinstance(value, relax.Call):
            if isinstance(value, relax.Tuple):
                return self._plain(value)
            if isinstance(value, relax.TupleGetItem):
                return self.bb.emit(relax.TupleGetItem(self._plain(value.tuple_value), value.index))
            return self._get(value)
        rule = self.rules.get(getattr(value.op, "name", ""))
        result = rule(value) if rule is not None else None
        return result if result is not None else self._unchanged(value)

    def _unchanged(self, call: Any) -> Any:
        return self._emit_call(call, [self._plain(a) for a in call.args])

    def _emit_call(self, call: Any, arguments: list[Any]) -> Any:
        from tvm import relax

        return self.bb.emit(
            relax.Call(call.op, arguments, attrs=call.attrs, ty_args=list(call.ty_args))
        )

    def _bound(self, expr: Any, operator: str) -> Any | None:
        """The call of `operator` that `expr` of the old graph is bound to, or None."""
        from tvm import relax

        call = self.calls.get(expr.id_) if isinstance(expr, relax.Var) else None
        return call if getattr(getattr(call, "op", None), "name", "") == operator else None


def type_of(expr: Any) -> tuple[Any, str]:
    info = expr.ty
    shape = getattr(info, "shape", None)
    if shape is None:
        return None, ""
    return tuple(int(d) for d in shape), str(info.dtype)


def constant_of(expr: Any) -> np.ndarray | None:
    from tvm import ir

    if not isinstance(expr, ir.GenericConst) or not hasattr(expr.value, "numpy"):
        return None
    return expr.value.numpy()


def as_const(array: np.ndarray) -> Any:
    from tvm import relax

    return relax.const(array)
