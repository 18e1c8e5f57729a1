"""CUDA C++ to machine code, ahead of time: a machine without a GPU does it, the device never.

The compiler is NVIDIA's run-time compilation library out of its PyPI packages, or the nvcc that the
user has installed. Several may be there, and which one is taken matters: CUDA 13 has dropped the
architectures of Jetson Nano, TX2 and Xavier, and the files that it makes have another format (ABI
version 8 in the ELF header, 7 before), which drivers of CUDA 12 need not know.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from edgesdk.compiler.device_code import DeviceCode
from edgesdk.errors import CompileError, ToolMissingError
from edgesdk.proc import run_command
from edgesdk.profiles import GpuInfo
from edgesdk.resources import cache_folder
from edgesdk.schedules.gpu import warp_products

_COMPILE_LIMIT_S = 900.0
_TOOL_LIMIT_S = 60.0

# Package of the Python environment -> the library in it.
_NVRTC_WHEELS = (
    ("nvidia.cu13", "lib/libnvrtc.so.13"),
    ("nvidia.cuda_nvrtc", "lib/libnvrtc.so.12"),
    ("nvidia.cuda_nvrtc", "lib/libnvrtc.so.11.2"),
)
# Extras of edgesdk, and the oldest release of CUDA in each.
_EXTRAS = (("cuda", 12), ("cuda-legacy", 11))

_STARTS_EARLY = 90
# The head of a function in TVM's code.
_FUNCTION = re.compile(r'(extern "C" __global__ void [^;{]*\{)')
# Before anything else: waits until the launch before is complete and its results can be read.
_WAIT = '  asm volatile("griddepcontrol.wait;" ::: "memory");'

# Run-time compilation has no headers; nvcc has its own in front of the source.
_PRELUDE = """\
#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define __asm__ asm
#define __volatile__ volatile
#else
#include <stdint.h>
#endif
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
#define CUDART_INF_F __int_as_float(0x7f800000)
#define CUDART_NAN_F __int_as_float(0x7fffffff)
#define CUDART_INF __longlong_as_double(0x7ff0000000000000ll)
#define CUDART_NAN __longlong_as_double(0x7fffffffffffffffll)
"""

# Half precision as TVM writes it. Each operation is done in floats and rounded, which for these
# gives what an instruction for halves would (float has more than twice its bits).
_HALF = """\
struct half {
  uint16_t bits;
  half() = default;
  template <class T> __device__ __forceinline__ explicit half(T value) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(static_cast<float>(value)));
  }
  template <class T> __device__ __forceinline__ explicit operator T() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return static_cast<T>(value);
  }
};
struct __align__(4) half2 { half x, y; };
struct __align__(8) half4 { half x, y, z, w; };
__device__ __forceinline__ half2 make_half2(half x, half y) { return {x, y}; }
__device__ __forceinline__ half4 make_half4(half x, half y, half z, half w) {
  return {x, y, z, w};
}
__device__ __forceinline__ half __float2half_rn(float value) { return half(value); }
__device__ __forceinline__ half __float2half(float value) { return half(value); }
__device__ __forceinline__ float __half2float(half value) { return float(value); }
__device__ __forceinline__ half operator-(half a) { return half(-float(a)); }
#define EDGESDK_BINARY(name, expression) \\
  __device__ __forceinline__ half name(half x, half y) { \\
    const float a = float(x), b = float(y); \\
    return half(expression); \\
  }
EDGESDK_BINARY(operator+, a + b)
EDGESDK_BINARY(operator-, a - b)
EDGESDK_BINARY(operator*, a * b)
EDGESDK_BINARY(operator/, a / b)
EDGESDK_BINARY(max, a > b ? a : b)
EDGESDK_BINARY(min, a < b ? a : b)
EDGESDK_BINARY(hpow, powf(a, b))
EDGESDK_BINARY(fmod, fmodf(a, b))
#undef EDGESDK_BINARY
#define EDGESDK_COMPARE(sign) \\
  __device__ __forceinline__ bool operator sign(half a, half b) { return float(a) sign float(b); }
EDGESDK_COMPARE(<) EDGESDK_COMPARE(<=) EDGESDK_COMPARE(>) EDGESDK_COMPARE(>=)
EDGESDK_COMPARE(==) EDGESDK_COMPARE(!=)
#undef EDGESDK_COMPARE
#define EDGESDK_UNARY(name, function) \\
  __device__ __forceinline__ half name(half x) { return half(function(float(x))); }
EDGESDK_UNARY(hexp, expf) EDGESDK_UNARY(hexp2, exp2f) EDGESDK_UNARY(hlog, logf)
EDGESDK_UNARY(hlog2, log2f) EDGESDK_UNARY(hlog10, log10f) EDGESDK_UNARY(hsqrt, sqrtf)
EDGESDK_UNARY(hrsqrt, rsqrtf) EDGESDK_UNARY(htanh, tanhf) EDGESDK_UNARY(hsin, sinf)
EDGESDK_UNARY(hcos, cosf) EDGESDK_UNARY(htan, tanf) EDGESDK_UNARY(hatan, atanf)
EDGESDK_UNARY(herf, erff) EDGESDK_UNARY(hfloor, floorf) EDGESDK_UNARY(hceil, ceilf)
EDGESDK_UNARY(htrunc, truncf) EDGESDK_UNARY(hrint, rintf) EDGESDK_UNARY(hround, roundf)
EDGESDK_UNARY(__habs, fabsf) EDGESDK_UNARY(habs, fabsf)
#undef EDGESDK_UNARY
"""


_Format = Literal["cubin", "ptx"]


@dataclass(frozen=True)
class KernelResources:
    """What a GPU function takes: registers of a thread, bytes of shared memory of a block, bytes
    of stack of a thread, and bytes that had to be spilled from registers."""

    function: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Image:
    """Device code for one architecture (10 * major + minor); `resources` is empty for PTX, and for
    source text, which fits all.

    `driver` is the CUDA version from which on a driver takes it: machine code made by one release
    runs with every driver of its major version, PTX needs a driver as new as the compiler (CUDA
    Compatibility, "Minor Version Compatibility").
    """

    format: Literal["cubin", "ptx", "opencl", "metal"]
    architecture: int
    data: bytes
    resources: tuple[KernelResources, ...]
    compiler: str
    driver: str


class _Compiler(Protocol):
    @property
    def version(self) -> str: ...

    @property
    def release(self) -> tuple[int, int]: ...

    @property
    def architectures(self) -> frozenset[int]: ...

    def compile(
        self, source: str, options: Sequence[str], format: _Format
    ) -> tuple[bytes, str]: ...


def compile_images(source: str, gpu: GpuInfo, *, keep: bool = True) -> tuple[Image, ...]:
    """Compiles CUDA C++ (TVM's) for every architecture of `gpu`, and to PTX if it names one.

    Unless `keep` is False, results are kept in the user's cache folder. Raises ToolMissingError if
    no installed compiler knows an architecture, CompileError with its first error.
    """
    code = source[_start_of_code(source) :]
    body = _PRELUDE
    if re.search(r"\bhalf[24]?\b", code):
        body += _HALF
    if warp_products.MULTIPLY in code:
        body += warp_products.SOURCE
    body += code
    compile_one = _kept if keep else _compiled
    return tuple(
        compile_one(body, format, architecture, _compiler_for(format, architecture, gpu))
        for format, architecture in _wanted(gpu)
    )


def start_early(code: DeviceCode, gpu: GpuInfo) -> DeviceCode:
    """`code` whose functions begin while the one before them ends, and wait for it by themselves.

    From sm_90 on; saves the time in which a GPU would start the next launch (CUDA programming
    guide, "Programmatic Dependent Launch").
    """
    if min((*gpu.architectures, *([gpu.ptx] if gpu.ptx is not None else []))) < _STARTS_EARLY:
        return code
    source = _FUNCTION.sub(lambda head: f"{head[1]}\n{_WAIT}", code.source)
    kernels = {
        name: replace(
            kernel, launches=tuple(replace(n, starts_early=True) for n in kernel.launches)
        )
        for name, kernel in code.kernels.items()
    }
    return DeviceCode(source, kernels)


def require_compiler(gpu: GpuInfo) -> tuple[str, ...]:
    """Returns which compilers are used for `gpu`, by name.

    Raises ToolMissingError unless every architecture of it can be compiled for.
    """
    found = (_compiler_for(format, architecture, gpu) for format, architecture in _wanted(gpu))
    return tuple(dict.fromkeys(compiler.version for compiler in found))


def too_new(gpu: GpuInfo) -> tuple[str, str | None] | None:
    """Says if machine code for `gpu` is made by too new a compiler, and what installs an older one.

    None if its driver is promised to take the code. Raises ToolMissingError if nothing compiles it.
    """
    for architecture in gpu.architectures:
        compiler = _compiler_for("cubin", architecture, gpu)
        if not _fits(compiler, gpu):
            major = compiler.release[0]
            older = next((extra for extra, oldest in _EXTRAS if oldest < major), None)
            return (
                f"{compiler.version} makes code for drivers of CUDA {major} and later, and some of"
                f" these have {gpu.cuda}",
                None if older is None else f"pip install 'edgesdk[{older}]'",
            )
    return None


def _wanted(gpu: GpuInfo) -> list[tuple[_Format, int]]:
    wanted: list[tuple[_Format, int]] = [("cubin", a) for a in gpu.architectures]
    if gpu.ptx is not None:
        wanted.append(("ptx", gpu.ptx))
    return wanted


# The last words of the header that TVM puts before its code, for fp16 and other types.
_END_OF_HEADER = "#define ushort unsigned short\n#endif\n"


def _start_of_code(source: str) -> int:
    return source.index(_END_OF_HEADER) + len(_END_OF_HEADER)


def _compiled(source: str, format: _Format, architecture: int, compiler: _Compiler) -> Image:
    data, log = compiler.compile(source, _options(format, architecture), format)
    resources = _read_resources(log) if format == "cubin" else ()
    return Image(
        format, architecture, data, tuple(resources), compiler.version, _driver(format, compiler)
    )


def _kept(source: str, format: _Format, architecture: int, compiler: _Compiler) -> Image:
    """As `_compiled`, or what it gave before for the same source and compiler."""
    named = [source, compiler.version, *_options(format, architecture)]
    key = hashlib.sha256("\0".join(named).encode()).hexdigest()[:32]
    path = cache_folder() / "cuda" / f"{key}.{format}"
    report = path.with_suffix(".json")
    if path.exists() and report.exists():
        resources = json.loads(report.read_text(encoding="utf-8"))
        known = tuple(KernelResources(**r) for r in resources)
        data, driver = path.read_bytes(), _driver(format, compiler)
        return Image(format, architecture, data, known, compiler.version, driver)
    image = _compiled(source, format, architecture, compiler)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(report, json.dumps([asdict(r) for r in image.resources]).encode())
    _write(path, image.data)
    return image


def _driver(format: _Format, compiler: _Compiler) -> str:
    major, minor = compiler.release
    return f"{major}.0" if format == "cubin" else f"{major}.{minor}"


def _options(format: _Format, architecture: int) -> list[str]:
    if format == "ptx":
        return [f"-arch=compute_{architecture}", "-std=c++17"]
    return [f"-arch=sm_{architecture}", "-std=c++17", "-Xptxas=-v"]


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    Path(file.name).replace(path)


def _read_resources(log: str) -> list[KernelResources]:
    """From what ptxas says with -v."""
    found = []
    name, stack, spill = "", 0, 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name = match[1]
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", line):
            stack, spill = int(match[1]), int(match[2])
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found.append(
                KernelResources(name, int(match[1]), int(shared[1]) if shared else 0, stack, spill)
            )
    return found


def _compiler_for(format: _Format, architecture: int, gpu: GpuInfo) -> _Compiler:
    """The newest compiler whose machine code `gpu`'s driver takes, else the oldest there is.

    For PTX the oldest: it needs a driver as new as its compiler.
    """
    compilers = _compilers()
    known = [c for c in compilers if architecture in c.architectures]
    if not known:
        have = f" (installed: {', '.join(c.version for c in compilers)})" if compilers else ""
        raise ToolMissingError(
            f"no CUDA compiler for sm_{architecture} is installed{have}",
            hint="pip install 'edgesdk[cuda]' (or install a CUDA toolkit, whose nvcc serves, too)",
        )
    fitting = [c for c in known if _fits(c, gpu)]
    if format == "cubin" and fitting:
        return max(fitting, key=lambda c: c.release)
    return min(known, key=lambda c: c.release)


def _fits(compiler: _Compiler, gpu: GpuInfo) -> bool:
    return gpu.cuda is None or compiler.release[0] <= _release(gpu.cuda)[0]


def _release(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


@functools.cache
def _compilers() -> tuple[_Compiler, ...]:
    """Those that are installed."""
    found: list[_Compiler] = []
    for package, name in _NVRTC_WHEELS:
        library = _package_folder(package)
        if library is not None and (library / name).exists():
            found.append(_Nvrtc(library / name))
    nvcc = _nvcc()
    if nvcc is not None:
        found.append(_Nvcc(nvcc))
    return tuple(found)


def _package_folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _nvcc() -> Path | None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            path = Path(os.environ[variable]) / "bin" / "nvcc"
            if path.exists():
                return path
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return Path(found) if found else None


class _Nvrtc:
    """The run-time compilation library, called through its C functions (CUDA documentation,
    "NVRTC")."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.release = (major.value, minor.value)
        self.version = f"NVRTC {major.value}.{minor.value}"
        count = ctypes.c_int()
        self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._library.nvrtcGetSupportedArchs(numbers)
        self.architectures = frozenset(numbers)

    def compile(self, source: str, options: Sequence[str], format: _Format) -> tuple[bytes, str]:
        library, program = self._library, ctypes.c_void_p()
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
        )
        try:
            encoded = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            failed = library.nvrtcCompileProgram(program, len(options), encoded)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if failed:
                raise _failure(log)
            return self._read(program, "CUBIN" if format == "cubin" else "PTX"), log
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw


class _Nvcc:
    def __init__(self, path: Path) -> None:
        self._path = path

    @functools.cached_property
    def release(self) -> tuple[int, int]:
        match = re.search(r"release (\d+\.\d+)", self._ask("--version"))
        if match is None:
            raise ToolMissingError(
                f"{self._path} does not say its release", hint=f"{self._path} --version"
            )
        return _release(match[1])

    @property
    def version(self) -> str:
        major, minor = self.release
        return f"nvcc {major}.{minor}"

    @functools.cached_property
    def architectures(self) -> frozenset[int]:
        listed = re.findall(r"sm_(\d+)\b", self._ask("--list-gpu-code"))
        return frozenset(int(number) for number in listed)

    def compile(self, source: str, options: Sequence[str], format: _Format) -> tuple[bytes, str]:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "kernels.cu").write_text(source, encoding="utf-8")
            output = folder / f"kernels.{format}"
            argv = [str(self._path), *options, f"-{format}", "kernels.cu", "-o", str(output)]
            result = run_command(argv, timeout_s=_COMPILE_LIMIT_S, cwd=folder)
            log = (result.stderr + result.stdout).decode(errors="replace")
            if not result.ok:
                raise _failure(log)
            data = output.read_bytes()
            # As the library gives it: text that ends with a zero byte.
            return data + b"\0" if format == "ptx" else data, log

    def _ask(self, option: str) -> str:
        result = run_command([str(self._path), option], timeout_s=_TOOL_LIMIT_S)
        return result.stdout.decode(errors="replace")


def _failure(log: str) -> CompileError:
    lines = [line.strip() for line in log.splitlines()]
    reason = next((line for line in lines if "error" in line), lines[0] if lines else "no reason")
    return CompileError(
        f"the CUDA compiler refused a kernel: {reason[:300]}",
        hint="please report this with the model's operators (`edgesdk inspect`)",
    )
