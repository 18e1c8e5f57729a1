"""OpenCL C as it goes into a library. The device's driver compiles it when a model is first opened.

There is nothing to compile with here; what drivers' compilers are particular about is seen to in
the source.
"""

from __future__ import annotations

import re

from edgesdk.compiler.cuda import Image
from edgesdk.compiler.device_code import DeviceCode
from edgesdk.profiles import GpuInfo

# The version of the API that the source needs; edgert builds it with -cl-std=CL1.2.
_VERSION = "1.2"
_PROTOTYPE = re.compile(r"^__kernel void \w+\([^{]*\);\n", re.MULTILINE)
_DEFINITION = re.compile(r"^__kernel void (\w+)\(", re.MULTILINE)


def fix_sizes(code: DeviceCode, gpu: GpuInfo) -> DeviceCode:
    """`code` whose kernels say which size of work-group they are launched with.

    The compiler then gives each thread the registers that such a group leaves it, and refuses what
    does not fit (OpenCL C specification, "reqd_work_group_size"). TVM's prototypes, which would
    have to say it, too, are left out.
    """
    blocks = {
        launch.function: launch.block
        for kernel in code.kernels.values()
        for launch in kernel.launches
    }

    def with_size(head: re.Match[str]) -> str:
        sizes = ", ".join(str(size) for size in blocks[head[1]])
        return f"__attribute__((reqd_work_group_size({sizes})))\n{head[0]}"

    return DeviceCode(_DEFINITION.sub(with_size, _PROTOTYPE.sub("", code.source)), code.kernels)


def compile_images(source: str, gpu: GpuInfo, *, keep: bool = True) -> tuple[Image, ...]:
    """Returns the image of OpenCL C, a text that ends with a zero byte.

    `keep` is for compilers that take time.
    """
    return (Image("opencl", 0, source.encode() + b"\0", (), "the device's driver", _VERSION),)


def require_compiler(gpu: GpuInfo) -> tuple[str, ...]:
    """The compiler is on the device."""
    return ("the device's driver",)
