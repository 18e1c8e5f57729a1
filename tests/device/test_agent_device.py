"""The measuring agent on emulated boards, over real SSH."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from candidates import build_candidates
from candidates import request as candidate
from conftest import in_folder

from edgesdk.deploy.emulated_board import EmulatedBoard
from edgesdk.deploy.transport import open_transport
from edgesdk.deploy.transport.base import Transport
from edgesdk.errors import DeviceError, DeviceMismatchError, DeviceUnreachableError, EdgeSdkError
from edgesdk.profiles import load_target
from edgesdk.toolchain import load_toolchain
from edgesdk.tuning.agent import Agent

TARGETS = {"aarch64_board": "rpi4", "armhf_board": "rpi4-32", "dropbear_board": "rpi4"}
BITS = {"rpi4": 64, "rpi4-32": 32}


def built(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    toolchain = load_toolchain(load_target(target).toolchain)
    return build_candidates(toolchain, tmp_path_factory.mktemp(target))


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {target: built(target, tmp_path_factory) for target in BITS}


@pytest.fixture
def library(libraries: dict[str, Path]) -> Path:
    return libraries["rpi4"]


@pytest.fixture
def agent(transport: Transport) -> Iterator[Agent]:
    with Agent(transport, load_target("rpi4")) as started:
        yield started


def processes(transport: Transport) -> str:
    return transport.run(["ps", "-eo", "args"], timeout_s=20).stdout_text


def folders(transport: Transport) -> list[str]:
    return transport.run(["ls", f"{transport.work_dir}/agents"], timeout_s=20).stdout_text.split()


@pytest.mark.parametrize("board", TARGETS)
def test_candidates_on_every_kind_of_board(
    board: str, libraries: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    target = TARGETS[board]
    expected = {
        "good": "",
        "wrong": "wrong",
        "crash": "crash",
        "raises": "kernel",
        "workspace": "",
        "hang": "timeout",
        "absent": "load",
    }
    with open_transport(request.getfixturevalue(board).device()) as transport:
        with Agent(transport, load_target(target)) as agent:
            assert agent.pointer_bits == BITS[target]
            assert agent.facts.machine
            limits = {"hang": 2.0}
            results = list(
                agent.measure(
                    candidate(agent, libraries[target], name, timeout_s=limits.get(name, 60.0))
                    for name in expected
                )
            )
        found = dict(zip(expected, (r.error_kind for r in results), strict=True))
        assert found == expected, [r.error for r in results]
        assert len(results[0].samples_s) == 3
        assert folders(transport) == []
        assert "edgesdk-agent" not in processes(transport)


def test_memory_is_limited_where_the_system_does_not(agent: Agent, library: Path) -> None:
    """qemu ignores RLIMIT_DATA, as Linux before 4.7 does."""
    bad, good = agent.measure(
        [candidate(agent, library, name, memory_limit_bytes=64 << 20) for name in ("eat", "good")]
    )
    assert (bad.error_kind, good.error_kind) == ("memory", ""), (bad.error, good.error)


def test_a_full_disk_is_the_devices_fault(aarch64_board: EmulatedBoard, library: Path) -> None:
    with open_transport(in_folder(aarch64_board, "small")) as transport:
        with Agent(transport, load_target("rpi4")) as agent:
            wanted = candidate(agent, library, "good")
            filler = f"{transport.work_dir}/filler"
            transport.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], timeout_s=60)
            (full,) = agent.measure([wanted])
            transport.run(["rm", filler], timeout_s=20)
            (after,) = agent.measure([wanted])
        assert (full.error_kind, after.error_kind) == ("device", "")
        assert full.error.endswith("No space left on device")
        assert folders(transport) == []


def test_the_wrong_target_is_refused_before_anything_is_copied(
    armhf_board: EmulatedBoard,
) -> None:
    with open_transport(armhf_board.device()) as transport:
        before = folders(transport)
        with pytest.raises(DeviceMismatchError):
            Agent(transport, load_target("rpi4"))
        assert folders(transport) == before


def test_an_agent_that_is_killed(agent: Agent, transport: Transport, library: Path) -> None:
    def kill() -> None:
        time.sleep(1)
        transport.run(["kill", "-9", str(agent.pid)], timeout_s=20)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(DeviceError, match="the measuring agent ended"):
        list(agent.measure([candidate(agent, library, "hang", timeout_s=60)]))
    killer.join()
    agent.close()
    assert folders(transport) == []
    for _ in range(50):
        if "edgesdk-agent" not in processes(transport):
            return
        time.sleep(0.1)
    pytest.fail(processes(transport))


def test_a_connection_that_ends_ends_the_agent(
    aarch64_board: EmulatedBoard, transport: Transport, library: Path
) -> None:
    """As when the host is killed: nobody says goodbye."""
    lost = open_transport(aarch64_board.device())
    agent = Agent(lost, load_target("rpi4"))
    results = agent.measure([candidate(agent, library, "hang", timeout_s=60)])
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            next(results)
        except EdgeSdkError as error:
            seen.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(1)
    assert processes(transport).count("edgesdk-agent") >= 2
    lost.close()
    waiter.join(30)
    assert [type(error) for error in seen] == [DeviceUnreachableError]
    for _ in range(100):
        if "edgesdk-agent" not in processes(transport) and folders(transport) == []:
            break
        time.sleep(0.1)
    assert folders(transport) == []
    assert "edgesdk-agent" not in processes(transport)


def test_a_board_that_dies(mortal_board: EmulatedBoard, library: Path) -> None:
    with open_transport(mortal_board.device()) as transport:
        agent = Agent(transport, load_target("rpi4"))
        timer = threading.Timer(1.0, mortal_board.kill)
        timer.start()
        with pytest.raises(DeviceUnreachableError, match="was lost"):
            list(agent.measure([candidate(agent, library, "hang", timeout_s=60)]))
        timer.join()
        agent.close()
