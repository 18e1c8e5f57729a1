"""The measuring agent, spoken to directly: what overlaps, how it ends, what it refuses."""

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

import pytest
from candidates import build_candidates
from device_build import ENVIRONMENT, Build
from processes import child_of, eventually, is_running

from edgesdk.deploy.transport.base import end_process_group, start_on_socket
from edgesdk.toolchain import load_toolchain
from edgesdk.tuning.agent import frame_bytes

PUT, DROP, MEASURE, HELLO, RESULT, ERROR = 1, 2, 3, 16, 17, 18


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_candidates(load_toolchain("native"), tmp_path_factory.mktemp("candidates"))


@pytest.fixture(params=["plain", "asan"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
