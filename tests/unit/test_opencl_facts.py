"""What a device says of its OpenCL, and what is refused before anything is copied."""

from __future__ import annotations

import pytest

from edgesdk.bundle.manifest import ContractInfo, GpuContract
from edgesdk.compiler.opencl import Needs, needs_of
from edgesdk.deploy.facts import check_device, parse_facts
from edgesdk.deploy.opencl_facts import OpenclFacts, opencl_problem, opencl_text
from edgesdk.errors import DeviceMismatchError

# As clinfo says it of an RK3588's Mali-G610 with Arm's driver g13p0, cut to what is read.
MALI = """\
system=Linux
machine=aarch64
opencl_library=/usr/lib/aarch64-linux-gnu/libmali.so.1
CL_DEVICE_NAME=Mali-LODX r0p0
CL_DEVICE_VERSION=OpenCL 3.0 v1.g13p0-01eac0
CL_DRIVER_VERSION=3.0
CL_DEVICE_EXTENSIONS=cl_khr_global_int32_base_atomics cl_khr_fp16 cl_khr_icd cl_khr_subgroups
CL_DEVICE_LOCAL_MEM_SIZE=32768
CL_DEVICE_MAX_WORK_GROUP_SIZE=1024
CL_DEVICE_MAX_MEM_ALLOC_SIZE=8281649152
CL_DEVICE_GLOBAL_MEM_SIZE=8281649152
CL_DEVICE_IMAGE_SUPPORT=CL_TRUE
CL_DEVICE_MAX_NUM_SUB_GROUPS=64
end=yes
"""


def contract(**needs: object) -> ContractInfo:
    gpu = GpuContract("opencl", (), **needs)  # type: ignore[arg-type]
    return ContractInfo("linux", ("aarch64",), None, None, (), gpu)


def test_clinfo_is_read() -> None:
    facts = parse_facts(MALI).opencl
    assert facts == OpenclFacts(
        library="/usr/lib/aarch64-linux-gnu/libmali.so.1",
        name="Mali-LODX r0p0",
        version="OpenCL 3.0 v1.g13p0-01eac0",
        driver="3.0",
        extensions=frozenset(
            {"cl_khr_global_int32_base_atomics", "cl_khr_fp16", "cl_khr_icd", "cl_khr_subgroups"}
        ),
        local_memory_bytes=32768,
        work_group=1024,
        buffer_bytes=8281649152,
        memory_bytes=8281649152,
        images=True,
        sub_groups=True,
    )
    assert opencl_text(facts) == (
        "Mali-LODX r0p0, OpenCL 3.0 v1.g13p0-01eac0, driver 3.0, half precision, 32 KiB of local"
        " memory, work groups of 1024"
    )


def test_without_clinfo_only_the_library_is_known() -> None:
    text = "system=Linux\nmachine=aarch64\nopencl_library=/vendor/lib64/libOpenCL.so\nend=yes\n"
    facts = parse_facts(text).opencl
    assert facts == OpenclFacts("/vendor/lib64/libOpenCL.so")
    assert opencl_problem(GpuContract("opencl", (), extensions=("cl_khr_fp64",)), facts) is None
    # A device script of an older edgesdk did not look.
    assert parse_facts("system=Linux\nmachine=aarch64\nend=yes\n").opencl is None


@pytest.mark.parametrize(
    ("needs", "problem"),
    [
        ({"extensions": ("cl_khr_fp16",)}, ""),
        (
            {"extensions": ("cl_khr_fp16", "cl_khr_fp64")},
            "Mali-LODX r0p0 has no cl_khr_fp64, which the bundle uses",
        ),
        ({"work_group": 1024}, ""),
        (
            {"work_group": 2048},
            "Mali-LODX r0p0 has work groups of at most 1024 work items, and the bundle needs 2048",
        ),
        (
            {"local_memory_bytes": 40000},
            "Mali-LODX r0p0 has local memory of at most 32768 bytes, and the bundle needs 40000",
        ),
        (
            {"buffer_bytes": 1 << 34},
            "Mali-LODX r0p0 has buffers of at most 8281649152 bytes, and the bundle needs"
            " 17179869184",
        ),
    ],
)
def test_what_is_lacking_is_refused(needs: dict[str, object], problem: str) -> None:
    facts = parse_facts(MALI)
    if not problem:
        check_device(contract(**needs), facts, name="rock")
        return
    with pytest.raises(DeviceMismatchError) as caught:
        check_device(contract(**needs), facts, name="rock")
    assert problem in caught.value.message
    assert caught.value.hint


def test_no_opencl_at_all() -> None:
    facts = parse_facts("system=Linux\nmachine=aarch64\nopencl_library=none\nend=yes\n")
    with pytest.raises(DeviceMismatchError, match="it has no OpenCL"):
        check_device(contract(), facts, name="pi")


def test_what_source_needs() -> None:
    source = """\
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
__attribute__((reqd_work_group_size(64, 1, 1)))
__kernel void first(__global float* restrict x) {
  __local float a[100];
  __local half4 b[10];
}
__attribute__((reqd_work_group_size(8, 16, 2)))
__kernel void second(__global float* restrict x) {
  __local float3 c[3];
}
"""
    assert needs_of(source) == Needs(("cl_khr_fp16",), 256, 480)
