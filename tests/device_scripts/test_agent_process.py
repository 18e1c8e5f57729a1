"""The measuring agent on this machine, plain and under sanitizers: candidates, ends, protocol."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from candidates import X, Y, build_candidates, request
from device_build import ENVIRONMENT, Build

from edgesdk.compiler import link
from edgesdk.deploy.transport.base import end_process_group, start_on_socket
from edgesdk.deploy.transport.local import LocalTransport
from edgesdk.devices import Device
from edgesdk.errors import DeviceError
from edgesdk.profiles import load_target
from edgesdk.toolchain import load_toolchain
from edgesdk.tuning import agent as client
from edgesdk.tuning.agent import Agent, frame_bytes
from edgesdk.tuning.measure import DeviceState

PUT, DROP, MEASURE, HELLO, RESULT, ERROR = 1, 2, 3, 16, 17, 18


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_candidates(load_toolchain("native"), tmp_path_factory.mktemp("candidates"))


@pytest.fixture(params=["plain", "asan"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def transport(tmp_path: Path) -> LocalTransport:
    return LocalTransport(Device("board", "local", work_dir=str(tmp_path / "work")))


@pytest.fixture
def start(
    build: Callable[[str], Build],
    transport: LocalTransport,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], Agent]]:
    """start(kind): an agent of that build, through the client."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as stack:

        def started(kind: str) -> Agent:
            program = build(kind).folder / "edgesdk-agent"
            monkeypatch.setattr(link, "agent", lambda toolchain: program)
            return stack.enter_context(Agent(transport, load_target("local")))

        yield started


@pytest.fixture
def agent(start: Callable[[str], Agent], kind: str) -> Agent:
    return start(kind)


def eventually(condition: Callable[[], bool], *, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def child_of(pid: int) -> int:
    assert eventually(lambda: bool(children(pid)))
    return children(pid)[0]


# Candidates.


@pytest.mark.parametrize("symbol", ["good", "plain", "__tvm_ffi_good", "workspace", "prints"])
def test_good_candidates(agent: Agent, library: Path, symbol: str) -> None:
    (result,) = agent.measure([request(agent, library, symbol, candidate=5)])
    assert (result.candidate, result.error_kind, result.error) == (5, "", "")
    assert len(result.samples_s) == 3
    assert all(sample > 0 for sample in result.samples_s)
    assert result.max_relative_error == 0


@pytest.mark.parametrize(
    ("symbol", "error_kind", "error"),
    [
        ("wrong", "wrong", "argument 1 differs by 0.167 (relative; 1e-06 is allowed)"),
        ("unwritten", "wrong", "argument 1 differs by inf"),
        ("outside", "wrong", "it writes outside of argument 1"),
        ("crash", "crash", "in its first run"),
        ("crash_later", "crash", "while it was timed"),
        ("leave", "crash", "it ended its process with exit code 0 in its first run"),
        ("raises", "kernel", "ValueError: x is not to my taste"),
        ("fails", "kernel", "it failed without a message"),
        ("huge_workspace", "memory", "out of memory: needs 1099511627776 bytes of scratch"),
        ("absent", "load", "the library has no function 'absent'"),
    ],
)
def test_bad_candidates_cost_themselves_only(
    agent: Agent, library: Path, symbol: str, error_kind: str, error: str
) -> None:
    bad, good = agent.measure([request(agent, library, name) for name in (symbol, "good")])
    assert (bad.error_kind, bad.samples_s) == (error_kind, ())
    assert error in bad.error
    assert good.ok, good.error


def test_a_crash_names_its_signal(start: Callable[[str], Agent], library: Path) -> None:
    agent = start("plain")
    (result,) = agent.measure([request(agent, library, "crash")])
    assert result.error == "ended by signal 11 (Segmentation fault) in its first run"


@pytest.mark.parametrize("limit", [64 << 20, 0])
def test_a_candidate_that_eats_memory(
    start: Callable[[str], Agent], library: Path, limit: int
) -> None:
    agent = start("plain")
    if limit == 0:  # what it takes until its time is up must not hurt this machine
        (result,) = agent.measure([request(agent, library, "workspace", memory_limit_bytes=limit)])
        assert result.ok, result.error
        return
    bad, good = agent.measure(
        [request(agent, library, name, memory_limit_bytes=limit) for name in ("eat", "good")]
    )
    assert bad.error_kind == "memory", bad.error
    assert "67 MB of memory" in bad.error
    assert good.ok, good.error


@pytest.mark.parametrize("symbol", ["hang", "spin"])
def test_hanging_candidates_and_those_that_queue_behind(
    agent: Agent, library: Path, symbol: str
) -> None:
    """The limit counts from a candidate's start: the last waits longer than its limit is."""
    names = [symbol, symbol, symbol, "good"]
    results = list(agent.measure(request(agent, library, n, timeout_s=2) for n in names))
    assert [r.error_kind for r in results] == ["timeout", "timeout", "timeout", ""]
    assert results[0].error == "not done within 2 s: ended in its first run"


def test_files_that_are_no_library(agent: Agent, library: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("this is no library")
    cut = tmp_path / "cut.so"
    cut.write_bytes(library.read_bytes()[:3000])
    empty = tmp_path / "empty.so"
    empty.write_bytes(b"")
    results = list(agent.measure(request(agent, p, "good") for p in (text, cut, empty, library)))
    assert [r.error_kind for r in results] == ["load", "load", "load", ""]
    assert all(r.error for r in results[:3])


def test_results_come_in_order(agent: Agent, library: Path) -> None:
    names = ["good", "wrong", "crash", "slow", "fails", "good"] * 4
    requests = (request(agent, library, n, candidate=i) for i, n in enumerate(names))
    results = list(agent.measure(requests))
    assert [r.candidate for r in results] == list(range(24))
    assert [r.error_kind for r in results] == ["", "wrong", "crash", "", "kernel", ""] * 4


def test_how_often_a_candidate_is_called(agent: Agent, library: Path) -> None:
    """One check, then warm-up, then samples of that many calls; the eighth call fails."""
    fitting = request(agent, library, "seven_calls", number=2, repeat=2, warmup=2)
    too_many = request(agent, library, "seven_calls", number=2, repeat=2, warmup=3)
    first, second = agent.measure([fitting, too_many])
    assert (first.error_kind, len(first.samples_s)) == ("", 2)
    assert (second.error_kind, second.error) == ("kernel", "RuntimeError: an eighth call")
    assert len(second.samples_s) == 1


def test_samples_are_seconds_per_call(agent: Agent, library: Path) -> None:
    options = ({"number": 3}, {"min_repeat_ms": 5}, {"flush_cache_bytes": 1 << 20, "number": 2})
    for result in agent.measure(request(agent, library, "slow", **o) for o in options):
        assert result.ok, result.error
        assert all(0.001 < sample < 1 for sample in result.samples_s)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads(agent: Agent, library: Path, threads: int) -> None:
    counted = np.array([threads], "float32")
    (result,) = agent.measure(
        [request(agent, library, "threads", x=X[:1], y=counted, threads=threads)]
    )
    assert result.ok, result.error


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "uint8", "bool"])
def test_data_types_and_shapes(agent: Agent, library: Path, dtype: str) -> None:
    """A kernel that writes nothing: right where all bits are set already, wrong elsewhere."""
    x = np.zeros((2, 0, 3), "float32")
    is_float = dtype.startswith("float")
    unwritten = np.frombuffer(b"\xff" * 8 * 6, dtype)[:6].reshape(1, 2, 3)
    requests = [
        request(agent, library, "no_work", x=x, y=unwritten),
        request(agent, library, "no_work", x=x, y=np.ones((1, 2, 3), dtype)),
    ]
    same, other = agent.measure(requests)
    assert same.ok, same.error
    assert other.error_kind == "wrong"
    assert other.max_relative_error == np.inf if is_float else other.max_relative_error > 0


def test_infinities_must_agree_and_the_tolerance_counts(agent: Agent, library: Path) -> None:
    x = X.copy()
    x[5], x[6], x[7] = np.inf, -np.inf, np.nan
    close = (2 * x + 1).astype("float32")
    close[0] *= np.float32(1 + 1e-4)
    opposite = (2 * x + 1).astype("float32")
    opposite[5] = -np.inf
    results = list(
        agent.measure(
            [
                request(agent, library, "good", x=x, y=(2 * x + 1).astype("float32")),
                request(agent, library, "good", x=x, y=close, tolerance=1e-3),
                request(agent, library, "good", x=x, y=close, tolerance=1e-5),
                request(agent, library, "good", x=x, y=opposite, tolerance=1e30),
            ]
        )
    )
    assert [r.error_kind for r in results] == ["", "", "wrong", "wrong"]
    assert results[1].max_relative_error == pytest.approx(3.3e-5, rel=0.1)
    assert results[3].max_relative_error == np.inf


def test_the_state_of_the_device_comes_with_the_result(
    start: Callable[[str], Agent],
    transport: LocalTransport,
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in {
        "devices/system/cpu/cpufreq/policy0/scaling_cur_freq": "1500000\n",
        "class/thermal/thermal_zone0/temp": "61234\n",
        "class/thermal/cooling_device0/type": "thermal-cpufreq-0\n",
        "class/thermal/cooling_device0/cur_state": "3\n",
    }.items():
        (tmp_path / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / name).write_text(text)
    original = transport.open_stream
    options = ["--sysfs", str(tmp_path / "sys")]
    monkeypatch.setattr(transport, "open_stream", lambda argv: original([*argv, *options]))
    agent = start("plain")
    good, bad = agent.measure([request(agent, library, name) for name in ("good", "wrong")])
    assert good.before == good.after == DeviceState(1_500_000, 61.234, True)
    assert bad.before == bad.after == DeviceState()


# The client.


def test_blobs_go_once_and_can_be_dropped(agent: Agent, library: Path) -> None:
    first = request(agent, library, "good")
    sent: list[bytes] = []
    original = agent._send
    agent._send = lambda frames: (sent.append(frames), original(frames))[1]  # type: ignore[method-assign]
    assert agent.put(X.tobytes()) == first.arguments[0].blob
    assert sent == []
    agent.drop(first.arguments[0].blob)
    with pytest.raises(ValueError, match="were not put on the device"):
        next(agent.measure([first]))
    agent.put(X.tobytes())
    assert next(agent.measure([first])).ok


def test_large_blobs_come_in_parts(agent: Agent, library: Path) -> None:
    x = np.random.default_rng(0).standard_normal(1_000_000).astype("float32")
    y = x * np.float32(2) + np.float32(1)
    (result,) = agent.measure([request(agent, library, "good", x=x, y=y)])
    assert result.ok, result.error


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"repeat": 0}, "repeat is 0"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"number": -1}, "number is -1"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"y": Y[:-1].astype("complex64")}, "'complex64' is not known"),
    ],
)
def test_requests_that_cannot_be_meant(
    start: Callable[[str], Agent], library: Path, options: dict[str, object], match: str
) -> None:
    agent = start("plain")
    with pytest.raises(ValueError, match=match):
        next(agent.measure([request(agent, library, "good", **options)]))
    assert next(agent.measure([request(agent, library, "good")])).ok


def test_an_abandoned_measure_does_not_confuse_the_next(agent: Agent, library: Path) -> None:
    names = ["good", "wrong", "fails", "good"]
    for result in agent.measure(request(agent, library, n, candidate=1) for n in names):
        assert result.ok
        break
    results = list(agent.measure(request(agent, library, "good", candidate=i) for i in (7, 8, 9)))
    assert [(r.candidate, r.ok) for r in results] == [(7, True), (8, True), (9, True)]


def test_an_agent_that_is_killed_in_mid_measurement(agent: Agent, library: Path) -> None:
    requests = (request(agent, library, n) for n in ("good", "hang"))
    results = agent.measure(requests)
    assert next(results).ok
    child = child_of(agent.pid)
    os.kill(agent.pid, signal.SIGKILL)
    with pytest.raises(DeviceError, match="the measuring agent ended: without a word"):
        next(results)
    assert eventually(lambda: not is_running(child))
    with pytest.raises(DeviceError, match="has ended"):
        agent.put(b"more")
    folder = Path(agent.folder)
    assert folder.exists()
    agent.close()
    assert not folder.exists()


def test_a_broken_channel_is_told(
    start: Callable[[str], Agent], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def garbled(kind: int, payload: bytes) -> bytes:
        return frame_bytes(kind, payload)[:-1] + b"?"

    agent = start("plain")
    monkeypatch.setattr(client, "frame_bytes", garbled)
    with pytest.raises(DeviceError, match=r"it refuses what it was sent: .* wrong checksum"):
        list(agent.measure([request(agent, library, "good")]))


def test_a_program_that_is_no_agent(
    start: Callable[[str], Agent],
    transport: LocalTransport,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "program"
    for script, match in {
        "echo hello": "it sent what is no frame: b'hello",
        "echo 'no such thing' >&2; exit 1": "the measuring agent ended: no such thing",
    }.items():
        program.write_text(f"#!/bin/sh\n{script}\n")
        monkeypatch.setattr(link, "agent", lambda toolchain: program)
        with pytest.raises(DeviceError, match=match):
            Agent(transport, load_target("local"))
    assert list((Path(transport.work_dir) / "agents").iterdir()) == []


# The program, spoken to directly.


class Channel:
    """An agent without a client. Its folder is `folder`."""

    def __init__(self, program: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.stderr = (folder.parent / f"{folder.name}.stderr").open("w+")
        self.socket, self.process = start_on_socket([str(program), str(folder)], stderr=self.stderr)
        self.socket.settimeout(20)

    def send(self, kind: int, payload: bytes) -> None:
        self.socket.sendall(frame_bytes(kind, payload))

    def receive(self) -> tuple[int, bytes]:
        head = self._exactly(20)
        _, _, kind, size, _, _ = struct.unpack("<4sHHIII", head)
        return kind, self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.socket.recv(size - len(data))
            assert chunk, "the agent has closed the channel"
            data += chunk
        return data

    def measure(self, ticket: int, library: bytes, symbol: str, timeout_s: float) -> None:
        """A request without arguments: for candidates that do not look at them."""
        key = struct.pack("<Q24x", ticket)
        self.send(PUT, key + struct.pack("<QQ", 0, len(library)) + library)
        text = symbol.encode()
        self.send(
            MEASURE,
            struct.pack("<Q32sH", ticket, key, len(text))
            + text
            + struct.pack("<4I3d2QH", 1, 1, 0, 0, 1.0, 1e-6, timeout_s, 0, 0, 0),
        )
        self.send(DROP, key)

    def result(self) -> tuple[int, int]:
        """Ticket and kind of failure."""
        kind, payload = self.receive()
        assert kind == RESULT
        ticket, failure = struct.unpack_from("<QB", payload)
        return ticket, failure


@pytest.fixture
def channel(
    build: Callable[[str], Build], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Channel]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    opened = Channel(build(kind).folder / "edgesdk-agent", tmp_path / "agents" / "run-1")
    assert opened.receive()[0] == HELLO
    yield opened
    end_process_group(opened.process)
    opened.socket.close()
    opened.stderr.close()


def test_the_next_candidates_arrive_while_one_is_measured(channel: Channel, library: Path) -> None:
    """More than a socket holds is taken from the host before the first result comes."""
    code = library.read_bytes()
    channel.measure(1, code, "hang", timeout_s=5)
    child = child_of(channel.process.pid)
    for ticket in range(2, 42):
        channel.measure(ticket, code + bytes(300_000), "leave", timeout_s=5)
    assert is_running(child)
    channel.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        channel.socket.recv(1)
    channel.socket.settimeout(20)
    results = [channel.result() for _ in range(41)]
    assert results == [(1, 3), *((ticket, 2) for ticket in range(2, 42))]


def test_the_end_of_the_channel_ends_all(channel: Channel, library: Path) -> None:
    channel.measure(1, library.read_bytes(), "hang", timeout_s=60)
    child = child_of(channel.process.pid)
    channel.socket.shutdown(socket.SHUT_WR)
    assert channel.process.wait(10) == 0
    assert not is_running(child)
    assert not channel.folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_all(channel: Channel, library: Path, number: signal.Signals) -> None:
    channel.measure(1, library.read_bytes(), "hang", timeout_s=60)
    child = child_of(channel.process.pid)
    channel.process.send_signal(number)
    assert channel.process.wait(10) == 0
    assert not is_running(child)
    assert not channel.folder.exists()


def test_what_a_candidate_started_ends_with_it(channel: Channel, library: Path) -> None:
    channel.measure(1, library.read_bytes(), "fork_and_hang", timeout_s=3)
    child = child_of(channel.process.pid)
    grandchild = child_of(child)
    assert channel.result() == (1, 3)
    assert eventually(lambda: not is_running(grandchild))


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0", os.urandom(100_000)])
def test_garbage_on_the_channel(channel: Channel, garbage: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it does not wait for the rest
        channel.socket.sendall(garbage)
    kind, payload = channel.receive()
    assert (kind, payload[2:]) == (ERROR, b"this is no frame of edgesdk")
    assert channel.process.wait(10) == 3
    assert not channel.folder.exists()
    channel.stderr.seek(0)
    assert channel.stderr.read() == "edgesdk-agent: this is no frame of edgesdk\n"


def test_a_request_that_breaks_the_rules_ends_the_talk(channel: Channel) -> None:
    channel.send(MEASURE, b"")
    kind, payload = channel.receive()
    assert (kind, payload[2:]) == (ERROR, b"a request to measure is too short")
    assert channel.process.wait(10) == 3


def test_a_device_without_memory_for_the_data(channel: Channel, library: Path) -> None:
    key, huge = b"L" * 32, 1 << 60
    channel.send(PUT, key + struct.pack("<QQ", 0, huge))
    request = struct.pack("<Q32sH", 1, key, 1) + b"x"
    request += struct.pack("<4I3d2QH", 1, 1, 0, 0, 1.0, 1e-6, 1.0, 0, 0, 0)
    channel.send(MEASURE, request)
    kind, payload = channel.receive()
    assert kind == RESULT
    assert payload[8] == 7
    assert b"the device has no memory for 1152921504606846976 bytes" in payload


def test_folders_of_agents_that_were_killed_are_removed(
    build: Callable[[str], Build], channel: Channel, tmp_path: Path
) -> None:
    old, fresh, other = (tmp_path / "agents" / n for n in ("run-old", "run-fresh", "other"))
    for folder in (old, fresh, other):
        folder.mkdir()
        (folder / "edgesdk-agent").write_text("x")
    long_ago = time.time() - 7200
    for folder in (old, other, channel.folder):  # the channel's agent still runs
        os.utime(folder, (long_ago, long_ago))
    second = Channel(build("plain").folder / "edgesdk-agent", tmp_path / "agents" / "run-2")
    try:
        assert second.receive()[0] == HELLO
        left = sorted(p.name for p in (tmp_path / "agents").iterdir() if p.is_dir())
        assert left == ["other", "run-1", "run-2", "run-fresh"]
    finally:
        end_process_group(second.process)


def test_wrong_arguments(build: Callable[[str], Build], tmp_path: Path) -> None:
    program = build("plain").folder / "edgesdk-agent"
    for arguments in ([], ["relative"], [tmp_path, "--bogus", "x"], ["/" + "x" * 2000]):
        result = subprocess.run([program, *arguments], capture_output=True, check=False)
        assert result.returncode == 2
        assert result.stderr.startswith(b"usage: edgesdk-agent FOLDER")
    absent = subprocess.run([program, tmp_path / "absent"], capture_output=True, check=False)
    assert absent.returncode == 7
    assert os.strerror(errno.ENOENT).encode() in absent.stderr
