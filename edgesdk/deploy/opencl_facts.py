"""What a device says of its OpenCL, and whether that is enough for a bundle.

`clinfo` tells it, if it is installed there, as `nvidia-smi` does for CUDA; that a library of OpenCL
is there, the device script sees itself. What nobody can tell counts as fine: edgert asks the driver
again when the library is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgesdk.bundle.manifest import GpuContract


@dataclass(frozen=True)
class OpenclFacts:
    """The first device of the first platform; None where nobody could tell.

    `library` is the path of the driver's or the loader's library, None if there is none. Sizes are
    in bytes: of local memory, of the largest buffer, and of all memory. `work_group` counts work
    items.
    """

    library: str | None
    name: str | None = None
    version: str | None = None
    driver: str | None = None
    extensions: frozenset[str] | None = None
    local_memory_bytes: int | None = None
    work_group: int | None = None
    buffer_bytes: int | None = None
    memory_bytes: int | None = None
    images: bool | None = None
    sub_groups: bool | None = None


def parse_opencl(said: Mapping[str, Sequence[str]]) -> OpenclFacts | None:
    """Reads the device script's answers. None if it did not look for OpenCL."""
    if "opencl_library" not in said:
        return None

    def first(key: str) -> str | None:
        return said.get(f"CL_{key}", [""])[0] or None

    def number(key: str) -> int | None:
        text = first(key) or ""
        return int(text) if text.isdigit() else None

    def yes(key: str) -> bool | None:
        text = first(key)
        return None if text is None else text == "CL_TRUE"

    extensions = first("DEVICE_EXTENSIONS")
    groups = number("DEVICE_MAX_NUM_SUB_GROUPS")
    library = said["opencl_library"][0]
    return OpenclFacts(
        library=None if library == "none" else library,
        name=first("DEVICE_NAME"),
        version=first("DEVICE_VERSION"),
        driver=first("DRIVER_VERSION"),
        extensions=None if extensions is None else frozenset(extensions.split()),
        local_memory_bytes=number("DEVICE_LOCAL_MEM_SIZE"),
        work_group=number("DEVICE_MAX_WORK_GROUP_SIZE"),
        buffer_bytes=number("DEVICE_MAX_MEM_ALLOC_SIZE"),
        memory_bytes=number("DEVICE_GLOBAL_MEM_SIZE"),
        images=yes("DEVICE_IMAGE_SUPPORT"),
        sub_groups=None if groups is None else groups > 0,
    )


def opencl_problem(gpu: GpuContract, facts: OpenclFacts | None) -> tuple[str, str] | None:
    """What a device with `facts` lacks for code that asks for `gpu`, and what to do; None if it
    lacks nothing that is known."""
    if facts is None:
        return None
    if facts.library is None:
        return (
            "it has no OpenCL (libOpenCL.so.1, or a driver's own library)",
            "install its GPU's driver and the loader (on Debian ocl-icd-libopencl1), or set"
            " EDGESDK_OPENCL_LIBRARY there",
        )
    name = facts.name or "its GPU"
    if facts.extensions is not None:
        missing = [e for e in gpu.extensions if e not in facts.extensions]
        if missing:
            half = "cl_khr_fp16" in missing
            return (
                f"{name} has no {', '.join(missing)}, which the bundle uses",
                "compile without --precision fp16" if half else "compile for its CPU",
            )
    for what, needed, have, unit in (
        ("work groups", gpu.work_group, facts.work_group, "work items"),
        ("local memory", gpu.local_memory_bytes, facts.local_memory_bytes, "bytes"),
        ("buffers", gpu.buffer_bytes, facts.buffer_bytes, "bytes"),
    ):
        if needed is not None and have is not None and needed > have:
            return (
                f"{name} has {what} of at most {have} {unit}, and the bundle needs {needed}",
                "copy its target and set [gpu] max-threads and shared-kib to what it has"
                if what != "buffers"
                else "use a smaller input, or compile for its CPU",
            )
    return None


def opencl_text(facts: OpenclFacts | None) -> str:
    """One line for people; empty if there is no OpenCL and nobody expects it."""
    if facts is None or facts.library is None:
        return ""
    half = facts.extensions is not None and "cl_khr_fp16" in facts.extensions
    parts = [
        facts.name or f"driver's library {facts.library}",
        facts.version or "",
        f"driver {facts.driver}" if facts.driver else "",
        "half precision" if half else "",
        f"{facts.local_memory_bytes // 1024} KiB of local memory"
        if facts.local_memory_bytes
        else "",
        f"work groups of {facts.work_group}" if facts.work_group else "",
    ]
    return ", ".join(p for p in parts if p)
