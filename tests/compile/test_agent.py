"""Measuring kernels that TVM has compiled: with the agent, and behind TVM's own RPC tracker."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from candidates import build_candidates, request

from edgesdk.bundle.audit import audit_library, check_contract
from edgesdk.compiler import codegen, link
from edgesdk.deploy.transport.local import LocalTransport
from edgesdk.devices import Device
from edgesdk.errors import DeviceError, DeviceUnreachableError, ToolMissingError, UsageError
from edgesdk.profiles import load_target, target_names
from edgesdk.toolchain import load_toolchain
from edgesdk.tuning import tracker as tracker_module
from edgesdk.tuning.agent import Agent
from edgesdk.tuning.measure import DeviceState, Measurer, MeasureRequest, TensorArgument
from edgesdk.tuning.tracker import TrackerDevice

START_LIMIT_S = 60.0
KEY = "board"

A = np.random.default_rng(0).standard_normal((64, 64)).astype("float32")
B = np.random.default_rng(1).standard_normal((64, 64)).astype("float32")


@pytest.fixture(scope="module")
def matmul(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parallel matrix product (a, b, c), as the tuner builds candidates."""
    import tvm
    from tvm import te
    from tvm.s_tir import Schedule

    folder = tmp_path_factory.mktemp("matmul")
    a, b = te.placeholder((64, 64), name="a"), te.placeholder((64, 64), name="b")
    k = te.reduce_axis((0, 64), name="k")
    c = te.compute((64, 64), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    schedule = Schedule(tvm.IRModule({"main": te.create_prim_func([a, b, c])}))
    schedule.parallel(schedule.get_loops(schedule.get_sblock("c"))[0])
    profile = load_target("local")
    kernel = folder / "matmul.o"
    codegen.write_object(
        {"candidate": schedule.mod["main"]}, tvm.target.Target(profile.tvm), kernel
    )
    return load_toolchain(profile.toolchain).link_shared(
        [kernel], folder / "matmul.so", soname="matmul.so", flags=("-Wl,-z,undefs",)
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_candidates(load_toolchain("native"), tmp_path_factory.mktemp("candidates"))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    transport = LocalTransport(Device("board", "local", work_dir=str(tmp_path / "work")))
    with Agent(transport, load_target("local")) as started:
        yield started


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class RpcPlace:
    """TVM's RPC tracker with one server behind it, in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._start("tvm.exec.rpc_tracker", port)
        self._wait(lambda: self._answers(port))
        self.start_server()

    def start_server(self) -> None:
        port = free_port()
        self._start("tvm.exec.rpc_server", port, "--tracker", self.address, "--key", KEY)

        def registered() -> bool:
            with contextlib.suppress(DeviceError):
                TrackerDevice(self.address, KEY).close()
                return True
            return False

        self._wait(registered)

    def close(self) -> None:
        self._stack.close()

    def _start(self, module: str, port: int, *options: str) -> None:
        command = [sys.executable, "-m", module, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--port-end", str(port + 1), *options]
        log = self._stack.enter_context((self._folder / f"{module}-{port}.log").open("w"))
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        self._stack.callback(end)

    def _wait(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not ready():
            assert time.monotonic() < deadline, [p.read_text() for p in self._folder.iterdir()]
            time.sleep(0.2)

    @staticmethod
    def _answers(port: int) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return True
        return False


@pytest.fixture(scope="module")
def rpc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RpcPlace]:
    place = RpcPlace(tmp_path_factory.mktemp("rpc"))
    yield place
    place.close()


@pytest.fixture
def tracker(rpc: RpcPlace) -> Iterator[TrackerDevice]:
    with TrackerDevice(rpc.address, KEY) as device:
        yield device


def product(
    measurer: Measurer, library: Path, c: np.ndarray, b: np.ndarray = B, *, candidate: int = 0
) -> MeasureRequest:
    arguments = tuple(
        TensorArgument(x.shape, x.dtype.name, measurer.put(x.tobytes()), is_output=x is c)
        for x in (A, b, c)
    )
    return MeasureRequest(
        candidate, library, "candidate", arguments, tolerance=1e-4, min_repeat_ms=1, timeout_s=30
    )


@pytest.fixture(params=["agent", "tracker"])
def measurer(request: pytest.FixtureRequest) -> Measurer:
    device: Measurer = request.getfixturevalue(request.param)
    return device


def test_kernels_of_tvm_are_checked_and_timed(measurer: Measurer, matmul: Path) -> None:
    wrong = A @ B
    wrong[5, 7] += 1
    good, bad, again = measurer.measure(
        product(measurer, matmul, c, candidate=i) for i, c in enumerate((A @ B, wrong, A @ B))
    )
    assert [r.candidate for r in (good, bad, again)] == [0, 1, 2]
    assert good.ok and again.ok, (good.error, again.error)
    assert len(good.samples_s) == 3
    assert all(0 < sample < 1 for sample in good.samples_s)
    assert good.max_relative_error < 1e-6
    assert (bad.error_kind, bad.samples_s) == ("wrong", ())
    assert bad.error.startswith("argument 2 differs by 0.0")


def test_an_error_of_tvms_argument_check(measurer: Measurer, matmul: Path) -> None:
    (result,) = measurer.measure([product(measurer, matmul, A @ B, B[:, :63].copy())])
    assert result.error_kind == "kernel"
    assert "b.shape[1]" in result.error


def test_what_both_devices_tell_apart(measurer: Measurer, library: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("this is no library")
    results = list(
        measurer.measure(
            [
                request(measurer, library, "good", number=2, repeat=4),
                request(measurer, library, "unwritten"),
                request(measurer, library, "raises"),
                request(measurer, library, "absent"),
                request(measurer, text, "good"),
                request(measurer, library, "hang", timeout_s=1),
                request(measurer, library, "good", flush_cache_bytes=1 << 20, threads=1),
            ]
        )
    )
    kinds = [r.error_kind for r in results]
    assert kinds == ["", "wrong", "kernel", "load", "load", "timeout", ""], [
        r.error for r in results
    ]
    assert len(results[0].samples_s) == 4
    assert "x is not to my taste" in results[2].error
    assert results[5].error.startswith("not done within 1 s")


def test_the_tracker_knows_nothing_of_its_devices(tracker: TrackerDevice, library: Path) -> None:
    assert tracker.facts is None
    (result,) = tracker.measure([request(tracker, library, "good")])
    assert (result.before, result.after) == (DeviceState(), DeviceState())


def test_bfloat16_behind_the_tracker(tracker: TrackerDevice, library: Path) -> None:
    import ml_dtypes

    ones = np.ones(4, ml_dtypes.bfloat16)
    (result,) = tracker.measure([request(tracker, library, "no_work", y=ones)])
    assert (result.error_kind, result.max_relative_error) == ("wrong", float("inf"))


def test_a_crash_ends_tvms_server(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_module, "_RESTART_LIMIT_S", 2.0)
    place = RpcPlace(tmp_path)
    try:
        with TrackerDevice(place.address, KEY) as device:
            (crash,) = device.measure([request(device, library, "crash")])
            assert crash.error_kind == "crash"
            assert "in its first run" in crash.error
            with pytest.raises(DeviceError, match="no RPC server for 'board' is left") as caught:
                next(device.measure([request(device, library, "good")]))
            assert caught.value.hint
            place.start_server()
            assert next(device.measure([request(device, library, "good")])).ok
    finally:
        place.close()


def test_keys_and_addresses_that_lead_nowhere(rpc: RpcPlace) -> None:
    with pytest.raises(DeviceError, match="no device of the key 'bored'") as caught:
        TrackerDevice(rpc.address, "bored")
    assert caught.value.hint == "its keys: board"
    for address in ("host", "host:", ":9190", "host:port", "host:99999"):
        with pytest.raises(UsageError, match="is no address of a tracker"):
            TrackerDevice(address, KEY)
    with pytest.raises(DeviceUnreachableError, match="no RPC tracker answers"):
        TrackerDevice(f"127.0.0.1:{free_port()}", KEY)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(DeviceUnreachableError, match="is no RPC tracker"),
    ):

        def hang_up() -> None:
            peer, _ = server.accept()
            peer.sendall(b"SSH-2.0-")
            peer.close()

        threading.Thread(target=hang_up, daemon=True).start()
        TrackerDevice(f"127.0.0.1:{server.getsockname()[1]}", KEY)


def test_a_device_that_stays_busy(rpc: RpcPlace, library: Path) -> None:
    from tvm import rpc as tvm_rpc

    host, port = rpc.address.split(":")
    holder = tvm_rpc.connect_tracker(host, int(port))
    session = holder.request(KEY, session_timeout=60)
    with TrackerDevice(rpc.address, KEY, wait_s=1) as device:
        with pytest.raises(DeviceError, match=r"came from the tracker .* within 1 s"):
            next(device.measure([request(device, library, "good")]))
        del session
        assert next(device.measure([request(device, library, "good")])).ok


# Devices are tuned over a Linux system's processes and /proc.
LINUX_TARGETS = [name for name in target_names() if load_target(name).contract.os == "linux"]


@pytest.mark.parametrize("target", LINUX_TARGETS)
def test_the_agent_keeps_every_targets_contract(target: str) -> None:
    profile = load_target(target)
    toolchain = load_toolchain(profile.toolchain)
    try:
        toolchain.require(profile.machine)
    except ToolMissingError as error:
        pytest.skip(error.message)
    report = audit_library(link.agent(toolchain))
    check_contract(report, profile)
    assert not any("stdc++" in name or "gcc" in name for name in report.needed)
