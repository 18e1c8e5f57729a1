"""CUDA C++ to machine code, ahead of time: a machine without a GPU does it, the device never.

The compiler is NVIDIA's run-time compilation library out of its PyPI packages (CUDA 13 for today's
architectures, CUDA 12 for Jetson Nano, TX2 and Xavier, which CUDA 13 has dropped), or the nvcc that
the user has installed.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

from edgesdk.errors import CompileError, ToolMissingError
from edgesdk.proc import run_command
from edgesdk.profiles import GpuInfo
from edgesdk.resources import cache_folder

_COMPILE_LIMIT_S = 900.0
_TOOL_LIMIT_S = 60.0

# Package of the Python environment -> the library in it.
_NVRTC_WHEELS = (
    ("nvidia.cu13", "lib/libnvrtc.so.13"),
    ("nvidia.cuda_nvrtc", "lib/libnvrtc.so.12"),
)
INSTALL_HINT = (
    "pip install 'edgesdk[cuda]' (or install the CUDA toolkit, whose nvcc serves as well)"
)
INSTALL_HINT_OLD = "pip install 'edgesdk[cuda-legacy]' (or install a CUDA 12 toolkit)"
_OLDEST_OF_CUDA_13 = 75

# The source uses no header: run-time compilation has none, and needs none for these.
_PRELUDE = """\
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
#define __asm__ asm
#define __volatile__ volatile
#define CUDART_INF_F __int_as_float(0x7f800000)
#define CUDART_NAN_F __int_as_float(0x7fffffff)
#define CUDART_INF __longlong_as_double(0x7ff0000000000000ll)
#define CUDART_NAN __longlong_as_double(0x7fffffffffffffffll)
"""


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
    """Device code for one architecture (10 * major + minor); `resources` is empty for PTX."""

    format: Literal["cubin", "ptx"]
    architecture: int
    data: bytes
    resources: tuple[KernelResources, ...]


class _Compiler(Protocol):
    @property
    def version(self) -> str: ...

    @property
    def architectures(self) -> frozenset[int]: ...

    def compile(self, source: str, options: Sequence[str], format: str) -> tuple[bytes, str]: ...


def compile_images(source: str, gpu: GpuInfo) -> tuple[Image, ...]:
    """Compiles CUDA C++ (TVM's) for every architecture of `gpu`, and to PTX if it names one.

    Results are kept in the user's cache folder. Raises ToolMissingError if no installed compiler
    knows an architecture, CompileError with its first error.
    """
    body = source[_start_of_code(source) :]
    wanted = [("cubin", a) for a in gpu.architectures]
    if gpu.ptx is not None:
        wanted.append(("ptx", gpu.ptx))
    return tuple(_compile(_PRELUDE + body, format, arch) for format, arch in wanted)


def require_compiler(gpu: GpuInfo) -> None:
    """Raises ToolMissingError unless every architecture of `gpu` can be compiled for."""
    for architecture in (*gpu.architectures, *([gpu.ptx] if gpu.ptx is not None else [])):
        _compiler_for(architecture)


# The last words of the header that TVM puts before its code, for fp16 and other types.
_END_OF_HEADER = "#define ushort unsigned short\n#endif\n"


def _start_of_code(source: str) -> int:
    return source.index(_END_OF_HEADER) + len(_END_OF_HEADER)


def _compile(source: str, format: str, architecture: int) -> Image:
    compiler = _compiler_for(architecture)
    kind = "sm" if format == "cubin" else "compute"
    options = [f"-arch={kind}_{architecture}", "-std=c++17"]
    if format == "cubin":
        options.append("-Xptxas=-v")
    key = hashlib.sha256(
        json.dumps([source, format, options, compiler.version]).encode()
    ).hexdigest()[:32]
    path = cache_folder() / "cuda" / f"{key}.{format}"
    report = path.with_suffix(".json")
    if not (path.exists() and report.exists()):
        data, log = compiler.compile(source, options, format)
        path.parent.mkdir(parents=True, exist_ok=True)
        resources = _read_resources(log) if format == "cubin" else []
        _write(report, json.dumps([asdict(r) for r in resources]).encode())
        _write(path, data)
    return Image(
        "cubin" if format == "cubin" else "ptx",
        architecture,
        path.read_bytes(),
        tuple(KernelResources(**r) for r in json.loads(report.read_text(encoding="utf-8"))),
    )


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


def _compiler_for(architecture: int) -> _Compiler:
    compilers = _compilers()
    for compiler in compilers:
        if architecture in compiler.architectures:
            return compiler
    old = architecture < _OLDEST_OF_CUDA_13
    have = f" (installed: {', '.join(c.version for c in compilers)})" if compilers else ""
    raise ToolMissingError(
        f"no CUDA compiler for sm_{architecture} is installed{have}",
        hint=INSTALL_HINT_OLD if old else INSTALL_HINT,
    )


@functools.cache
def _compilers() -> tuple[_Compiler, ...]:
    """The installed ones, the preferred first."""
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
        self.version = f"NVRTC {major.value}.{minor.value}"
        count = ctypes.c_int()
        self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._library.nvrtcGetSupportedArchs(numbers)
        self.architectures = frozenset(numbers)

    def compile(self, source: str, options: Sequence[str], format: str) -> tuple[bytes, str]:
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
    def version(self) -> str:
        text = self._ask("--version")
        match = re.search(r"release ([\d.]+)", text)
        return f"nvcc {match[1] if match else '?'}"

    @functools.cached_property
    def architectures(self) -> frozenset[int]:
        listed = re.findall(r"sm_(\d+)\b", self._ask("--list-gpu-code"))
        return frozenset(int(number) for number in listed)

    def compile(self, source: str, options: Sequence[str], format: str) -> tuple[bytes, str]:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "kernels.cu").write_text(source, encoding="utf-8")
            output = folder / f"kernels.{format}"
            argv = [str(self._path), *options, f"-{format}", "kernels.cu", "-o", str(output)]
            result = run_command(argv, timeout_s=_COMPILE_LIMIT_S, cwd=folder)
            if not result.ok:
                raise _failure(result.stderr or result.stdout)
            data = output.read_bytes()
            # As the library gives it: text that ends with a zero byte.
            return data + b"\0" if format == "ptx" else data, result.stderr + result.stdout

    def _ask(self, option: str) -> str:
        result = run_command([str(self._path), option], timeout_s=_TOOL_LIMIT_S)
        return result.stdout


def _failure(log: str) -> CompileError:
    lines = [line.strip() for line in log.splitlines()]
    reason = next((line for line in lines if "error" in line), lines[0] if lines else "no reason")
    return CompileError(
        f"the CUDA compiler refused a kernel: {reason[:300]}",
        hint="please report this with the model's operators (`edgesdk inspect`)",
    )
