"""Half precision in memory, floats in registers: what `--precision fp16` does to a lowered network.

Every large weight, and on a GPU every tensor between two kernels, is kept in half precision; a
kernel widens what it reads and rounds what it writes, and computes in between as it did before. So
no operator needs rules of its own, sums lose nothing, and fused layers are rounded once. The
network's inputs and outputs stay as they are.

On a CPU tensors stay in floats: a convolution would convert each number once for every time that it
is multiplied (SqueezeNet took 2.1 times as long), while a converted weight serves a whole tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgesdk.schedules.walk import constant_of, type_of

# Smaller constants (biases, scales) save nothing, and would lose.
_SMALL = 1024
_LARGEST = 65504.0  # of half precision
_WIDEN, _ROUND, _ALONE = "from_half", "to_half", "widen"


@dataclass
class _Value:
    """A tensor of the new network, in floats, in halves, or in both."""

    wide: Any = None
    half: Any = None


def store_in_halves(module: Any, *, tensors: bool) -> Any:
    """Returns `module` (see `lower.lower`) with weights of float32 in float16, and with `tensors`
    those between two kernels, too.

    Weights beyond the range of half precision stay as they are, and so do the tensors of kernels
    that are not loop nests of blocks.
    """
    return _Halver(module, tensors).run()


class _Halver:
    def __init__(self, module: Any, tensors: bool) -> None:
        from tvm import relax

        self.module, self.tensors = module, tensors
        self.main = module["main"]
        # main, and the functions that kernels are wrapped in.
        self.bb, self.wrappers = relax.BlockBuilder(), relax.BlockBuilder(module)
        self.values: dict[int, Any] = {}
        # (name of a kernel, which arguments and results are halves) -> its wrapper.
        self.made: dict[tuple[Any, ...], Any] = {}

    def run(self) -> Any:
        import tvm
        from tvm.relax import transform

        outputs = self.main.body.body
        self.kept = set(_variables(outputs, self.main.body.blocks))
        parameters = list(self.main.params)
        with self.bb.function("main", parameters, attrs=dict(self.main.attrs or {})):
            for parameter in parameters:
                self.values[parameter.id_] = _Value(wide=parameter)
            for block in self.main.body.blocks:
                for binding in block.bindings:
                    self.values[binding.var.id_] = self._bind(binding)
            self.bb.emit_func_output(self._wide(outputs))
        built = self.wrappers.get()
        functions = {gv: f for gv, f in built.functions.items() if gv.name_hint != "main"}
        # Those that widen between kernels have names of their own.
        built = self.bb.get()
        functions |= {gv: f for gv, f in built.functions.items() if gv.name_hint != "main"}
        main = built["main"].with_attr("global_symbol", "main")
        functions[self.module.get_global_var("main")] = main
        module = tvm.IRModule(functions, global_infos=dict(self.module.global_infos))
        passes = [transform.FuseTIR(), transform.DeadCodeElimination()]
        return _without_copies(tvm.transform.Sequential(passes)(module))

    # What a variable has become.

    def _bind(self, binding: Any) -> Any:
        from tvm import relax

        value = binding.value
        if isinstance(value, relax.Call):
            name = getattr(value.op, "name", "")
            if name == "relax.call_tir":
                return self._kernel(binding.var, value)
            if name == "relax.reshape" and self._is_half(value.args[0], binding.var):
                half = relax.op.reshape(self.values[value.args[0].id_].half, value.args[1])
                return _Value(half=self.bb.emit(half))
            arguments = [self._wide(a) for a in value.args]
            call = relax.Call(value.op, arguments, attrs=value.attrs, ty_args=list(value.ty_args))
            return _Value(wide=self.bb.emit(call))
        if isinstance(value, relax.TupleGetItem):
            if isinstance(value.tuple_value, relax.Var):
                known = self.values[value.tuple_value.id_]
                if isinstance(known, list):
                    return known[value.index]
            return _Value(
                wide=self.bb.emit(relax.TupleGetItem(self._wide(value.tuple_value), value.index))
            )
        if isinstance(value, relax.Var):
            return self.values[value.id_]
        return _Value(wide=self._wide(value))

    def _is_half(self, argument: Any, result: Any) -> bool:
        from tvm import relax

        if not isinstance(argument, relax.Var) or result.id_ in self.kept:
            return False
        return getattr(self.values[argument.id_], "half", None) is not None

    def _wide(self, expr: Any) -> Any:
        """`expr` of the old network in the new one, as it was."""
        from tvm import relax

        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._wide(item) for item in expr.fields])
        if not isinstance(expr, relax.Var):
            return expr
        value = self.values[expr.id_]
        if isinstance(value, list):
            return relax.Tuple([self._wide_of(each) for each in value])
        return self._wide_of(value)

    def _wide_of(self, value: _Value) -> Any:
        if value.wide is None:
            value.wide = self.bb.emit_te(_widened, value.half, primfunc_name_hint=_ALONE)
        return value.wide

    # Kernels.

    def _kernel(self, variable: Any, call: Any) -> Any:
        from tvm import relax

        gv, arguments = call.args[0], list(call.args[1].fields)
        results = _types(call.ty_args[0])
        keep = not self.tensors or variable.id_ in self.kept
        wanted = [t.dtype == "float32" and not keep for t in results]
        given = [self._half(a) for a in arguments]
        if not _has_blocks(self.module[gv]) or not (
            any(wanted) or any(g is not None for g in given)
        ):
            plain = relax.Call(
                call.op,
                [gv, relax.Tuple([self._wide(a) for a in arguments])],
                attrs=call.attrs,
                ty_args=list(call.ty_args),
            )
            return self._results(self.bb.emit(plain), [False] * len(results), call.ty_args[0])
        chosen = [
            self._wide(a) if half is None else half
            for a, half in zip(arguments, given, strict=True)
        ]
        key = (gv.name_hint, tuple(g is not None for g in given), tuple(wanted))
        if key not in self.made:
            self.made[key] = self._wrapper(gv, chosen, results, wanted, call.ty_args[0])
        done = self.bb.emit(relax.Call(self.made[key], chosen))
        return self._results(done, wanted, call.ty_args[0])

    def _half(self, argument: Any) -> Any | None:
        """`argument` in half precision, if it is kept so."""
        import numpy as np
        from tvm import relax

        if isinstance(argument, relax.Var):
            return getattr(self.values[argument.id_], "half", None)
        array = constant_of(argument)
        if array is None or array.dtype != np.float32 or array.size < _SMALL:
            return None
        if not np.abs(array).max() <= _LARGEST:  # NaN, too
            return None
        return relax.const(array.astype(np.float16))

    def _results(self, made: Any, halves: Sequence[bool], type_: Any) -> Any:
        from tvm import relax

        if not hasattr(type_, "fields"):
            return _Value(half=made) if halves[0] else _Value(wide=made)
        items = [self.bb.emit(relax.TupleGetItem(made, i)) for i in range(len(halves))]
        return [
            _Value(half=item) if half else _Value(wide=item)
            for item, half in zip(items, halves, strict=True)
        ]

    def _wrapper(
        self,
        gv: Any,
        arguments: Sequence[Any],
        results: Sequence[Any],
        wanted: Sequence[bool],
        type_: Any,
    ) -> Any:
        """A function that widens, calls the kernel, and rounds: FuseTIR makes one kernel of it."""
        from tvm import relax

        bb = self.wrappers
        parameters = [
            relax.Var(f"p{i}", relax.TensorType(*type_of(a))) for i, a in enumerate(arguments)
        ]
        with bb.function(f"{gv.name_hint}_half", parameters, attrs={"Primitive": True}):
            with bb.dataflow():
                wide = [
                    bb.emit_te(_widened, p, primfunc_name_hint=_WIDEN)
                    if type_of(p)[1] == "float16"
                    else p
                    for p in parameters
                ]
                done = bb.emit(
                    relax.call_tir(self.wrappers.get().get_global_var(gv.name_hint), wide, type_)
                )
                items = (
                    [bb.emit(relax.TupleGetItem(done, i)) for i in range(len(results))]
                    if hasattr(type_, "fields")
                    else [done]
                )
                rounded = [
                    bb.emit_te(_rounded, item, primfunc_name_hint=_ROUND) if half else item
                    for item, half in zip(items, wanted, strict=True)
                ]
                out = bb.emit_output(
                    relax.Tuple(rounded) if hasattr(type_, "fields") else rounded[0]
                )
            made = bb.emit_func_output(out)
        return made


def _variables(outputs: Any, blocks: Sequence[Any]) -> list[int]:
    """The handles of the variables that `outputs` returns, alone or in a tuple."""
    from tvm import relax

    if isinstance(outputs, relax.Tuple):
        return [each.id_ for each in outputs.fields if isinstance(each, relax.Var)]
    if not isinstance(outputs, relax.Var):
        return []
    bound = [b.value for block in blocks for b in block.bindings if b.var.id_ == outputs.id_]
    inner = _variables(bound[0], blocks) if bound and isinstance(bound[0], relax.Tuple) else []
    return [outputs.id_, *inner]


def _types(type_: Any) -> list[Any]:
    return list(type_.fields) if hasattr(type_, "fields") else [type_]


def _has_blocks(function: Any) -> bool:
    block = getattr(function.body, "block", None)
    return block is not None and str(block.name_hint) == "root"


def _widened(x: Any) -> Any:
    from tvm import te

    return te.compute(x.shape, lambda *at: x(*at).astype("float32"), name=_WIDEN)


def _rounded(x: Any) -> Any:
    from tvm import te

    return te.compute(x.shape, lambda *at: x(*at).astype("float16"), name=_ROUND)


def _without_copies(module: Any) -> Any:
    """Kernels that widen where they read, instead of in a loop nest of its own."""
    import tvm
    from tvm.s_tir import Schedule

    functions = dict(module.functions)
    for gv, function in functions.items():
        if not isinstance(function, tvm.tirx.PrimFunc) or not _has_blocks(function):
            continue
        sch = Schedule(tvm.IRModule({"main": function}), error_render_level="none")
        blocks = sch.get_child_blocks(sch.get_sblock("root"))
        names = [str(sch.get(b).name_hint) for b in blocks]
        for block, name in zip(blocks[:-1], names[:-1], strict=True):
            if name.startswith(_WIDEN):
                sch.compute_inline(block)
        functions[gv] = sch.mod["main"].with_attr("global_symbol", gv.name_hint)
    return tvm.IRModule(functions, global_infos=dict(module.global_infos))
