"""Metal Shading Language as it goes into a library. Metal compiles it when a model is opened.

There is no compiler for it outside of Apple's systems, so what it is particular about is seen to in
the source. Section numbers are those of Apple's "Metal Shading Language Specification".
"""

from __future__ import annotations

import re

from edgesdk.compiler.cuda import Image
from edgesdk.compiler.device_code import DeviceCode
from edgesdk.profiles import GpuInfo

# The version of the language that the source needs, for its 64-bit integers (2.1); edgert asks for
# it. macOS 10.15 and iOS 13 have it.
_VERSION = "2.2"
_HEADER = "#include <metal_stdlib>\nusing namespace metal;\n\n"
# What TVM writes in front of each function, as if each were a file.
_PREAMBLE = re.compile(
    r"^#include <metal_stdlib>\nusing namespace metal;\n\nunion __TVMArgUnion \{\n[^}]*\};\n+",
    re.MULTILINE,
)
_DEFINITION = re.compile(r"^kernel void (\w+)\(", re.MULTILINE)
# An array of a kernel that no schedule gave a place: each thread has one (4.1: variables within a
# function are in thread memory).
_PLACELESS = re.compile(r"^( +)device (\w+ \w+\[\d+\];)$", re.MULTILINE)
# An array that is read and written as vectors, which begin at multiples of their size (2.2).
_AS_VECTORS = re.compile(r"\(thread (\w+)\*\)\((\w+) \+")
# Functions by their names in C.
_C_NAMES = (
    *("acosf", "acoshf", "asinf", "asinhf", "atan2f", "atanf", "atanhf", "copysignf", "coshf"),
    *("cosf", "expf", "fmodf", "ldexpf", "logf", "powf", "roundf", "sinhf", "sinf", "sqrtf"),
    *("tanf", "tanhf", "truncf"),
)
_RENAMED = {"nearbyint": "rint", "nearbyintf": "rint"}
# Sums of 8 and 16 bits are int in C++. Functions of two arguments then have one of either type,
# which fits none better than others.
_SELECT = "#define select(otherwise, chosen, where) ((where) ? (chosen) : (otherwise))\n"
_OF_TWO_TYPES = """\
template <typename A, typename B> inline auto max(A a, B b) { return a < b ? b : a; }
template <typename A, typename B> inline auto min(A a, B b) { return b < a ? b : a; }
"""
_SMALL_INTEGER = re.compile(r"\b(?:u?char|u?short)\d?\b")


def adapt(code: DeviceCode, gpu: GpuInfo) -> DeviceCode:
    """`code` (TVM's) as one source that Metal takes.

    Its kernels say how many threads they are launched with, so that the compiler leaves each as
    many registers as such a group allows, and no fewer threads fit (5.1.3).
    """
    threads = {
        launch.function: launch.block[0] * launch.block[1] * launch.block[2]
        for kernel in code.kernels.values()
        for launch in kernel.launches
    }

    def with_threads(head: re.Match[str]) -> str:
        return f"[[max_total_threads_per_threadgroup({threads[head[1]]})]]\n{head[0]}"

    source = _PREAMBLE.sub("", code.source)
    source = _PLACELESS.sub(r"\1thread \2", source)
    source = _DEFINITION.sub(with_threads, _aligned(source))
    return DeviceCode(_HEADER + _defines(source) + source, code.kernels)


def _aligned(source: str) -> str:
    """Arrays that are used as vectors begin where such vectors may."""
    functions = re.split(r"(?m)^(?=kernel void )", source)
    return "".join(_with_aligned_arrays(function) for function in functions)


def _with_aligned_arrays(function: str) -> str:
    for name in {name for _, name in _AS_VECTORS.findall(function)}:
        declaration = rf"(?m)^( +)(thread \w+ {name}\[\d+\];)$"
        function = re.sub(declaration, r"\1alignas(16) \2", function)
    return function


def _defines(source: str) -> str:
    """What gives functions that are called in `source` their names in Metal's language."""
    names = {name: name.removesuffix("f") for name in _C_NAMES} | _RENAMED
    called = set(re.findall(r"\b(\w+)\(", source))
    text = "".join(f"#define {name} {names[name]}\n" for name in sorted(called & names.keys()))
    if "select" in called:
        text += _SELECT
    if called & {"max", "min"} and _SMALL_INTEGER.search(source):
        text += _OF_TWO_TYPES
    return text


def compile_images(source: str, gpu: GpuInfo, *, keep: bool = True) -> tuple[Image, ...]:
    """Returns the image of the source, a text that ends with a zero byte.

    `keep` is for compilers that take time.
    """
    return (Image("metal", 0, source.encode() + b"\0", (), "Metal on the device", _VERSION),)


def require_compiler(gpu: GpuInfo) -> tuple[str, ...]:
    """The compiler is on the device."""
    return ("Metal on the device",)
