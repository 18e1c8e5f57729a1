"""Scheduled kernels to one object file for the target's CPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from edgesdk.errors import CompileError, UnsupportedModelError

# What edgert has of TVM's runtime (device_scripts/edgert/tvm_symbols.cc).
_PROVIDED = {
    "TVMFFIErrorSetRaisedFromCStrParts",
    "TVMFFIErrorSetRaisedFromCStr",
    "__TVMBackendParallelLaunch",
    "__TVMBackendAllocWorkspace",
    "__TVMBackendFreeWorkspace",
}


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
            built = tvm.tirx.build(module, target=target)
            built.write_to_file(f"/proc/self/fd/{memory.fileno()}", "o")
        except Exception as error:  # TVM raises many types; all mean the same here
            raise CompileError(
                f"TVM could not generate code: {last_words(error)}",
                hint="please report this with the model's operators (`edgesdk inspect`)",
            ) from error
        shutil.copyfileobj(memory, file)


def check_symbols(path: Path) -> None:
    """Raises UnsupportedModelError if the object needs TVM runtime functions that edgert lacks.

    Generated code keeps such functions in weak variables of its own, so the linker would not say.
    """
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as stream:
        table = ELFFile(stream).get_section_by_name(".symtab")
        names = [
            symbol.name
            for symbol in table.iter_symbols()
            if symbol.entry["st_info"]["bind"] != "STB_LOCAL"
        ]
    foreign = sorted(
        n for n in names if n.startswith(("TVM", "__TVM", "__tvm_ffi__")) and n not in _PROVIDED
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
