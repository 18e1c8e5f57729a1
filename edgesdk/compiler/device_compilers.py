"""Which compiler makes the code of a GPU: by the driver that runs it."""

from __future__ import annotations

from edgesdk.compiler import cuda, metal, opencl
from edgesdk.compiler.device_code import DeviceCode
from edgesdk.profiles import GpuInfo

_COMPILERS = {"cuda": cuda, "opencl": opencl, "metal": metal}
_ADAPT = {"cuda": cuda.start_early, "opencl": opencl.adapt, "metal": metal.adapt}


def adapt(code: DeviceCode, gpu: GpuInfo) -> DeviceCode:
    """`code` with what such a GPU's driver makes good use of. Raises CompileError."""
    return _ADAPT[gpu.api](code, gpu)


def compile_images(source: str, gpu: GpuInfo, *, keep: bool = True) -> tuple[cuda.Image, ...]:
    """Compiles TVM's source for `gpu` in every form that it names.

    Unless `keep` is False, results are kept in the user's cache folder. Raises ToolMissingError or
    CompileError.
    """
    return _COMPILERS[gpu.api].compile_images(source, gpu, keep=keep)


def require_compiler(gpu: GpuInfo) -> tuple[str, ...]:
    """Returns which compilers are used for `gpu`, by name. Raises ToolMissingError if one lacks."""
    return _COMPILERS[gpu.api].require_compiler(gpu)
