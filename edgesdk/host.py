"""What this machine is, for the target `local`: read from /proc and /sys, without TVM.

The target is a plain base (`x86-64-v3`, `generic`) plus the features that the kernel lists, never a
CPU model's name: a model's name would switch on features that a virtual machine, a microcode update
or a maker (the Raspberry Pi's Cortex-A72 has no AES) took away.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgesdk.errors import ConfigError, ToolMissingError
from edgesdk.profiles import Contract, CpuInfo, GpuInfo

_PROC_CPUINFO = Path("/proc/cpuinfo")
_SYS_CPU = Path("/sys/devices/system/cpu")

# CUdevice_attribute of the CUDA driver API.
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
# cl_device_type of the OpenCL API.
_DEVICE_TYPE_ALL = 0xFFFFFFFF
_METAL = "/System/Library/Frameworks/Metal.framework/Metal"

# The levels of the x86-64 psABI, best first, with what each adds to the one below it as
# /proc/cpuinfo names it ("pni" is SSE3, "abm" has LZCNT).
_X86_LEVELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("x86-64-v4", ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")),
    ("x86-64-v3", ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")),
    ("x86-64-v2", ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3")),
    ("x86-64", ()),
)

# /proc/cpuinfo name -> LLVM name, for what no level holds and kernels of networks can use. AMX is
# left out: a process must ask the kernel for it first.
_X86_EXTRAS = {
    "avx_vnni": "avxvnni",
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "avx512_fp16": "avx512fp16",
    "avx512vbmi": "avx512vbmi",
    "avx512_vbmi2": "avx512vbmi2",
    "avx512ifma": "avx512ifma",
}

# SVE is left out: LLVM would use vectors of unknown length, which the templates do not plan for.
_AARCH64_FEATURES = {
    "asimd": "neon",
    "asimddp": "dotprod",
    "asimdhp": "fullfp16",
    "asimdrdm": "rdm",
    "atomics": "lse",
    "crc32": "crc",
    "i8mm": "i8mm",
    "bf16": "bf16",
}


@dataclass(frozen=True)
class HostInfo:
    """This machine: the CPU's name, and the three tables of a target profile.

    `cpu_features` is all that every core has as /proc/cpuinfo names it; `contract` lists only those
    that code for the target `local` may use.
    """

    cpu_name: str
    cpu_features: frozenset[str]
    tvm: dict[str, Any]
    cpu: CpuInfo
    contract: Contract


def detect_host(
    *, machine: str | None = None, cpuinfo: str | None = None, sys_cpu: Path = _SYS_CPU
) -> HostInfo:
    """Returns what this machine is; the arguments stand in for `uname -m`, /proc/cpuinfo and /sys.

    Raises ConfigError on a system that TVM has no build for.
    """
    if platform.system() != "Linux":
        raise ConfigError(
            f"the target 'local' does not know {platform.system()}", hint="use a Linux machine"
        )
    machine = machine or platform.machine()
    cpuinfo = cpuinfo or _PROC_CPUINFO.read_text(encoding="utf-8", errors="replace")
    # All cores: a feature that one core of a mixed system lacks must not be used.
    if machine == "x86_64":
        features = _features(cpuinfo, "flags")
        tvm, used, vector_bits, registers = _x86_target(features)
        loader = "ld-linux-x86-64.so.2"
    elif machine == "aarch64":
        features = _features(cpuinfo, "Features")
        tvm, used, vector_bits, registers = _aarch64_target(features)
        loader = "ld-linux-aarch64.so.1"
    else:
        raise ConfigError(
            f"the target 'local' does not know the machine {machine!r}",
            hint="compile on x86_64 or aarch64, with the target of this device",
        )
    cores = _usable_cores(sys_cpu)
    libc, libc_version = _libc()
    return HostInfo(
        cpu_name=_cpu_name(cpuinfo, machine),
        cpu_features=features,
        tvm={**tvm, "num-cores": cores},
        cpu=CpuInfo(
            cores=cores,
            vector_bits=vector_bits,
            vector_registers=registers,
            **_caches(sys_cpu),
        ),
        contract=Contract(
            os="linux",
            machine=(machine,),
            cpu_features=used,
            libraries=("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", loader),
            libc=libc,
            libc_version=libc_version,
        ),
    )


def _x86_target(flags: frozenset[str]) -> tuple[dict[str, Any], tuple[str, ...], int, int]:
    index = 0
    while not all(flags.issuperset(needs) for _, needs in _X86_LEVELS[index:]):
        index += 1
    mcpu = _X86_LEVELS[index][0]
    used = [flag for _, needs in reversed(_X86_LEVELS[index:]) for flag in needs]
    avx512, avx2 = mcpu == "x86-64-v4", index <= 1
    extras = [
        flag
        for flag in _X86_EXTRAS
        if flag in flags and (avx512 if flag.startswith("avx512") else avx2)
    ]
    mattr = [f"+{_X86_EXTRAS[flag]}" for flag in extras]
    if avx512:
        # LLVM tunes x86-64-v4 for 256-bit vectors; the schedules plan for 512.
        mattr.append("-prefer-256-bit")
    tvm: dict[str, Any] = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu}
    if mattr:
        tvm["mattr"] = mattr
    vector_bits, registers = (512, 32) if avx512 else (256, 16) if avx2 else (128, 16)
    return tvm, (*used, *extras), vector_bits, registers


def _aarch64_target(features: frozenset[str]) -> tuple[dict[str, Any], tuple[str, ...], int, int]:
    if "asimd" not in features:
        raise ConfigError("this CPU has no Advanced SIMD", hint="use another machine")
    used = tuple(f for f in _AARCH64_FEATURES if f in features)
    mattr = [f"+{_AARCH64_FEATURES[f]}" for f in used]
    tvm = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "generic", "mattr": mattr}
    return tvm, used, 128, 32


def _features(cpuinfo: str, key: str) -> frozenset[str]:
    """The features that every core lists under `key`."""
    cores = [frozenset(value.split()) for value in _values(cpuinfo, key)]
    if not cores:
        raise ConfigError(
            f"{_PROC_CPUINFO} lists no CPU features ({key!r})",
            hint="use a named target, see `edgesdk targets`",
        )
    return frozenset.intersection(*cores)


def _values(cpuinfo: str, key: str) -> list[str]:
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return [value.strip() for name, _, value in lines if name.strip() == key]


def _cpu_name(cpuinfo: str, machine: str) -> str:
    # Only x86 kernels, and Raspberry Pi's under "Model", print a name for people.
    for key in ("model name", "Model"):
        names = _values(cpuinfo, key)
        if names:
            return names[0]
    return machine


def _usable_cores(sys_cpu: Path) -> int:
    """Physical cores that this process may run on; threads of one core share its vector units."""
    cores = set()
    for number in os.sched_getaffinity(0):
        siblings = _read(sys_cpu / f"cpu{number}" / "topology" / "thread_siblings_list")
        cores.add(siblings or str(number))
    return len(cores)


def _caches(sys_cpu: Path) -> dict[str, int]:
    """Cache sizes of cpu0; where the kernel tells none (some virtual machines), small safe ones."""
    found = {"l1d_kib": 32, "l2_kib": 256, "l3_kib": 0, "cache_line_bytes": 64}
    for index in sorted((sys_cpu / "cpu0" / "cache").glob("index*")):
        level, kind = _read(index / "level"), _read(index / "type")
        size = _read(index / "size").removesuffix("K")
        name = {"1": "l1d_kib", "2": "l2_kib", "3": "l3_kib"}.get(level)
        if name is None or kind == "Instruction" or not size.isdigit() or size == "0":
            continue
        found[name] = int(size)
        line = _read(index / "coherency_line_size")
        if name == "l1d_kib" and line.isdigit() and line != "0":
            found["cache_line_bytes"] = int(line)
    return found


def _libc() -> tuple[Literal["glibc"] | None, str | None]:
    # TVM has wheels for glibc only, so another libc can only be one that was not recognised.
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        return None, None
    return ("glibc", version) if name == "glibc" else (None, None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def require_gpu(gpu: GpuInfo) -> None:
    """Raises ToolMissingError, with the reason, if this machine has no GPU that `gpu` describes."""
    reasons: dict[str, Callable[[], str | None]] = {
        "cuda": lambda: _cuda_reason(gpu),
        "opencl": _opencl_reason,
        "metal": _metal_reason,
    }
    reason = reasons[gpu.api]()
    if reason is not None:
        there = "edgesdk-run LIBRARY --selftest golden"  # docs/apple.md
        check = there if gpu.api == "metal" else "edgesdk verify BUNDLE --device D"
        raise ToolMissingError(reason, hint=f"`{check}` checks it there")


def _cuda_reason(gpu: GpuInfo) -> str | None:
    """Asks the driver (CUDA driver API, "Device Management"); None if code for `gpu` runs here."""
    import ctypes

    try:
        driver = ctypes.CDLL(os.environ.get("EDGESDK_CUDA_LIBRARY") or "libcuda.so.1")
    except OSError:
        return "no NVIDIA driver here"
    count, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "no NVIDIA GPU here"
    driver.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, 0)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, 0)
    have = 10 * major.value + minor.value
    if any(a // 10 == major.value and a <= have for a in gpu.architectures):
        return None
    if gpu.ptx is not None and gpu.ptx <= have:
        return None
    return f"the GPU here is sm_{have}"


def _metal_reason() -> str | None:
    """Asks for the device (Metal, "MTLCreateSystemDefaultDevice"); None if there is one."""
    import ctypes

    try:
        library = ctypes.CDLL(os.environ.get("EDGESDK_METAL_LIBRARY") or _METAL)
    except OSError:
        return "no Metal here: it is on Apple's systems only"
    library.MTLCreateSystemDefaultDevice.restype = ctypes.c_void_p
    return None if library.MTLCreateSystemDefaultDevice() else "Metal finds no GPU here"


def _opencl_reason() -> str | None:
    """Asks the drivers (OpenCL API, "Querying Devices"); None if there is a device."""
    import ctypes

    try:
        library = ctypes.CDLL(os.environ.get("EDGESDK_OPENCL_LIBRARY") or "libOpenCL.so.1")
    except OSError:
        return "no OpenCL here (libOpenCL.so.1)"
    count = ctypes.c_uint32()
    if library.clGetPlatformIDs(0, None, ctypes.byref(count)) or not count.value:
        return "no OpenCL driver here"
    platforms = (ctypes.c_void_p * count.value)()
    library.clGetPlatformIDs(count, platforms, None)
    for platform_id in platforms:
        library.clGetDeviceIDs(
            ctypes.c_void_p(platform_id),
            ctypes.c_uint64(_DEVICE_TYPE_ALL),
            0,
            None,
            ctypes.byref(count),
        )
        if count.value:
            return None
    return "no OpenCL device here"
