"""Scheduled kernels to one object file for the target's CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgesdk.compiler.objects import fit_for_linking, global_symbols
from edgesdk.errors import CompileError, UnsupportedModelError

# What edgert has of TVM's runtime (device_scripts/edgert/tvm_symbols.cc).
_PROVIDED = {
    "TVMFFIErrorSetRaisedFromCStrParts",
    "TVMFFIErrorSetRaisedFromCStr",
    "__TVMBackendParallelLaunch",
    "__TVMBackendAllocWorkspace",
    "__TVMBackendFreeWorkspace",
}
_PIPELINE = "edgesdk"
# All registers of the widest kind, twice.
_STACK_BYTES = 4096


def write_object(functions: dict[str, Any], target: Any, path: Path) -> None:
    """Compiles `functions` (symbol -> scheduled PrimFunc) to the object file `path`.

    Each becomes `__tvm_ffi_<symbol>` with the signature TVMFFISafeCallType. Raises CompileError
    with TVM's last words if code generation fails, OSError if the file cannot be written.
    """
    import tvm

    module = tvm.IRModule(
        {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
    )
    # On a full disk LLVM ends the process at once, so it writes to memory and we to the disk.
    with os.fdopen(os.memfd_create(path.name), "r+b") as memory, path.open("wb") as file:
        try:
            built = tvm.tirx.build(module, target=target, pipeline=_pipeline())
            built.write_to_file(f"/proc/self/fd/{memory.fileno()}", "o")
        except Exception as error:  # TVM raises many types; all mean the same here
            raise CompileError(
                f"TVM could not generate code: {last_words(error)}",
                hint="please report this with the model's operators (`edgesdk inspect`)",
            ) from error
        data = bytearray(memory.read())
        fit_for_linking(data, provided=_PROVIDED)
        file.write(data)


def _pipeline() -> str:
    """The name of TVM's passes for scheduled kernels, `_keep_on_stack` before the last of them."""
    import tvm
    from tvm.s_tir.pipeline import default_s_tir_pipeline

    def ours() -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
        passes, host_passes, device_passes = default_s_tir_pipeline()

        @tvm.transform.module_pass(opt_level=0, name="KeepOnStack")
        def keep_on_stack(module: Any, _: Any) -> Any:
            return tvm.IRModule(
                {name: _keep_on_stack(function) for name, function in module.functions.items()},
                attrs=module.attrs,
            )

        return (
            passes,
            lambda: tvm.transform.Sequential([keep_on_stack, host_passes()]),
            device_passes,
        )

    tvm.tirx.register_tir_pipeline(_PIPELINE, ours)
    return _PIPELINE


def _keep_on_stack(function: Any) -> Any:
    """`function` with its small buffers on the stack, where LLVM turns them into registers.

    TVM asks the runtime for memory for each buffer of the scope "local", and for others from 1 KiB
    on: a register tile would cost an allocation each time, and its sums would live in memory.
    """
    import tvm
    import tvm_ffi

    def keep(allocation: Any) -> Any:
        buffer = allocation.buffer
        size_bytes = tvm_ffi.dtype(str(buffer.dtype)).itemsize
        for extent in buffer.shape:
            if not isinstance(extent, tvm.tirx.IntImm):
                return allocation
            size_bytes *= int(extent)
        if size_bytes > _STACK_BYTES:
            return allocation
        return tvm.tirx.AllocBuffer(buffer, {"disable_lower_builtin": tvm.tirx.IntImm("int32", 1)})

    return tvm_ffi.structural_map(function, (tvm.tirx.AllocBuffer, keep))


def check_symbols(path: Path) -> None:
    """Raises UnsupportedModelError if the object needs TVM runtime functions that edgert lacks.

    Generated code keeps such functions in weak variables of its own, so the linker would not say.
    """
    foreign = sorted(
        name
        for name in global_symbols(path.read_bytes())
        if name.startswith(("TVM", "__TVM", "__tvm_ffi__")) and name not in _PROVIDED
    )
    if foreign:
        raise UnsupportedModelError(
            f"a kernel calls TVM's runtime ({', '.join(foreign)}), which is not on the device",
            hint="an operator of the model has no implementation in plain code yet",
        )


def last_words(error: BaseException) -> str:
    """The last non-empty line of an exception's text: TVM puts the reason there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
