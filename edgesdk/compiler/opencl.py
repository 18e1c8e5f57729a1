"""OpenCL C as it goes into a library. The device's driver compiles it when a model is first opened.

There is nothing to compile with here; what drivers' compilers are particular about is seen to in
the source.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from edgesdk.compiler.cuda import Image
from edgesdk.compiler.device_code import DeviceCode
from edgesdk.profiles import GpuInfo

# The version of the API that the source needs; edgert builds it with -cl-std=CL1.2.
_VERSION = "1.2"
# Functions that TVM calls by their names in C, which OpenCL C calls without the last letter.
_C_NAMES = (
    *("acosf", "acoshf", "asinf", "asinhf", "atan2f", "atanf", "atanhf", "copysignf", "coshf"),
    *("cosf", "erff", "expf", "fmodf", "hypotf", "ldexpf", "log1pf", "nextafterf", "roundf"),
    *("sinhf", "sinf", "tanf", "tanhf", "truncf"),
)
_RENAMED = {"nearbyint": "rint", "nearbyintf": "rint"}
# TVM asks for an extension, or for one of AMD's from before there was a common one.
_EXTENSION = re.compile(
    r"^#ifdef (cl_khr_\w+)\n(#pragma OPENCL EXTENSION \1 : enable\n)(?:#.*\n)*?#endif *\n",
    re.MULTILINE,
)
# An array of a kernel that no schedule gave a place: each thread has one.
_PLACELESS = re.compile(r"^( +)__global (\w+ \w+\[\d+\];)$", re.MULTILINE)
_PROTOTYPE = re.compile(r"^__kernel void \w+\([^{]*\);\n", re.MULTILINE)
_DEFINITION = re.compile(r"^__kernel void (\w+)\(", re.MULTILINE)


_NEEDED = re.compile(r"^#pragma OPENCL EXTENSION (\w+) : enable$", re.MULTILINE)
_GROUP = re.compile(r"reqd_work_group_size\((\d+), (\d+), (\d+)\)")
_LOCAL = re.compile(r"^ +__local .*?(\w+) \w+\[(\d+)\];$", re.MULTILINE)
_BYTES = {"char": 1, "uchar": 1, "bool": 1, "short": 2, "ushort": 2, "half": 2, "int": 4, "uint": 4}
_BYTES |= {"float": 4, "long": 8, "ulong": 8, "double": 8}


@dataclass(frozen=True)
class Needs:
    """What OpenCL C asks of a device: extensions, the work items of its largest work-group, and the
    bytes of local memory of the kernel that takes most."""

    extensions: tuple[str, ...]
    work_group: int
    local_memory_bytes: int


def needs_of(source: str) -> Needs:
    """What `source`, as `adapt` makes it, asks of a device."""
    groups = [math.prod(map(int, sizes)) for sizes in _GROUP.findall(source)]
    kernels = _DEFINITION.split(source)[2::2]
    local = (sum(_size(*array) for array in _LOCAL.findall(body)) for body in kernels)
    return Needs(tuple(_NEEDED.findall(source)), max(groups, default=0), max(local, default=0))


def _size(type_name: str, count: str) -> int:
    """Bytes of an array; a vector of 3 takes the place of 4 (OpenCL C, "Alignment of Types")."""
    name, lanes = re.fullmatch(r"([a-z]+)(\d*)", type_name).groups()  # type: ignore[union-attr]
    width = int(lanes or 1)
    return _BYTES[name] * (4 if width == 3 else width) * int(count)


def adapt(code: DeviceCode, gpu: GpuInfo) -> DeviceCode:
    """`code` (TVM's) as OpenCL C 1.2 that all compilers take.

    Its kernels say which size of work-group they are launched with: the compiler then gives each
    thread the registers that such a group leaves it (OpenCL C specification,
    "reqd_work_group_size"). TVM's prototypes, which would have to say it, too, are left out.
    """
    blocks = {
        launch.function: launch.block
        for kernel in code.kernels.values()
        for launch in kernel.launches
    }

    def with_size(head: re.Match[str]) -> str:
        sizes = ", ".join(str(size) for size in blocks[head[1]])
        return f"__attribute__((reqd_work_group_size({sizes})))\n{head[0]}"

    source = _EXTENSION.sub(r"\2", code.source)
    source = _PLACELESS.sub(r"\1\2", source)
    # A kernel takes no pointers to bool, whose size is the compiler's (OpenCL C, "Restrictions").
    source = source.replace("__global bool*", "__global uchar*")
    source = _DEFINITION.sub(with_size, _PROTOTYPE.sub("", source))
    return DeviceCode(_defines(source) + source, code.kernels)


def _defines(source: str) -> str:
    """What gives functions that are called in `source` their names in OpenCL C."""
    names = {name: name.removesuffix("f") for name in _C_NAMES} | _RENAMED
    called = sorted(set(re.findall(r"\b(\w+)\(", source)) & names.keys())
    return "".join(f"#define {name} {names[name]}\n" for name in called)


def compile_images(source: str, gpu: GpuInfo, *, keep: bool = True) -> tuple[Image, ...]:
    """Returns the image of OpenCL C, a text that ends with a zero byte.

    `keep` is for compilers that take time.
    """
    return (Image("opencl", 0, source.encode() + b"\0", (), "the device's driver", _VERSION),)


def require_compiler(gpu: GpuInfo) -> tuple[str, ...]:
    """The compiler is on the device."""
    return ("the device's driver",)
