"""The C++ tests: natively under sanitizers, and emulated on the machines that boards have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from device_build import Build

PROGRAMS = (
    "test_thread_pool",
    "test_executor",
    "test_cpu_features",
    "test_npy",
    "test_agent_parts",
    "test_model_api",
)
KINDS = ("plain", "asan", "tsan", "rpi4", "rpi4-32")
# The others use POSIX themselves.
WINDOWS_PROGRAMS = ("test_thread_pool", "test_executor", "test_cpu_features", "test_model_api")
CASES = [(kind, program) for kind in KINDS for program in PROGRAMS]
CASES += [("windows-x86_64", program) for program in WINDOWS_PROGRAMS]


@pytest.mark.parametrize(("kind", "program"), CASES)
def test_checks_hold(build: Callable[[str], Build], kind: str, program: str) -> None:
    made = build(kind)
    result = made.run(made.program(program))
    assert result.ok, result.stdout_text + result.stderr_text
    assert "ok" in result.stdout_text


# No GPU has 32-bit programs, and the stand-in for its driver is for Linux.
@pytest.mark.parametrize("program", ["test_cuda", "test_cuda_old"])
@pytest.mark.parametrize("kind", ["plain", "asan", "tsan", "rpi4"])
def test_checks_with_a_driver_hold(build: Callable[[str], Build], kind: str, program: str) -> None:
    """On a stand-in for a GPU's driver of today, and on one of an old driver."""
    made = build(kind)
    result = made.run(made.folder / "tests" / program)
    assert result.ok, result.stdout_text + result.stderr_text
    assert "ok     any_call_may_fail" in result.stdout_text


@pytest.mark.parametrize("program", ["test_opencl", "test_metal"])
@pytest.mark.parametrize("kind", ["plain", "asan", "tsan", "rpi4"])
def test_checks_with_source_text_hold(
    build: Callable[[str], Build], kind: str, program: str
) -> None:
    """On a stand-in for a vendor's OpenCL library, and for Apple's Metal."""
    made = build(kind)
    result = made.run(made.folder / "tests" / program)
    assert result.ok, result.stdout_text + result.stderr_text
    assert "ok     any_call_may_fail" in result.stdout_text


def test_a_failing_check_fails(build: Callable[[str], Build]) -> None:
    made = build("plain")
    result = made.run(made.folder / "tests" / "test_npy", "no_such_test")
    assert result.returncode == 1
    assert "no such test" in result.stderr_text


@pytest.mark.parametrize("kind", ["asan", "tsan"])
def test_sanitizers_are_on(build: Callable[[str], Build], kind: str) -> None:
    """A build without them would pass everything."""
    made = build(kind)
    marker = {"asan": b"__asan_init", "tsan": b"__tsan_init"}[kind]
    for file in (made.launcher, made.library("model_a"), made.folder / "tests" / "test_executor"):
        assert marker in file.read_bytes(), file


def test_the_thread_count_comes_from_the_environment(build: Callable[[str], Build]) -> None:
    import json
    import os

    made = build("plain")
    usable = len(os.sched_getaffinity(0))
    for text, threads in {"1": 1, "3": 3, "0": usable, "many": usable, "-2": usable}.items():
        result = made.run(
            made.launcher, made.library("model_a"), "--json", env={"EDGESDK_NUM_THREADS": text}
        )
        assert json.loads(result.stdout)["threads"] == threads, text
    one_cpu = min(os.sched_getaffinity(0))
    result = made.run(
        "taskset",
        "-c",
        str(one_cpu),
        made.launcher,
        made.library("model_a"),
        "--json",
        env={"EDGESDK_NUM_THREADS": ""},
    )
    assert json.loads(result.stdout)["threads"] == 1
