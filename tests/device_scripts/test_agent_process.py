"""The measuring agent on this machine, plain and under sanitizers, through its client."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from candidates import X, Y, build_candidates, request
from device_build import ENVIRONMENT, Build
from processes import child_of, eventually, is_running

from edgesdk.compiler import link
from edgesdk.deploy.transport.local import LocalTransport
from edgesdk.devices import Device
from edgesdk.errors import DeviceError
from edgesdk.profiles import load_target
from edgesdk.toolchain import load_toolchain
from edgesdk.tuning import agent as client
from edgesdk.tuning.agent import Agent, frame_bytes
from edgesdk.tuning.measure import DeviceState


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
