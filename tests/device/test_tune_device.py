"""`edgesdk tune` on an emulated board over real SSH: that it works, not how fast."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from command_line import Cli
from tuning_place import save_network

import edgesdk
from edgesdk.deploy.emulated_board import EmulatedBoard
from edgesdk.deploy.transport import open_transport
from edgesdk.devices import add_device
from edgesdk.errors import ToolMissingError
from edgesdk.profiles import load_target
from edgesdk.toolchain import load_toolchain
from edgesdk.tuning.records import Records
from edgesdk.tuning.state import SessionState


@pytest.fixture
def desk(cli: Cli, aarch64_board: EmulatedBoard) -> Cli:
    """A folder with a small network, and the board as the device "board"."""
    profile = load_target("rpi4")
    try:
        load_toolchain(profile.toolchain).require(profile.machine)
    except ToolMissingError as error:
        pytest.skip(error.message)
    add_device(aarch64_board.device())
    save_network(cli.here / "net.onnx", channels=(8, 16), size=8)
    return cli


def left_behind(board: EmulatedBoard) -> str:
    with open_transport(board.device()) as transport:
        folders = transport.run(["ls", "-A", f"{transport.work_dir}/agents"], timeout_s=30)
        return folders.stdout_text


def test_a_session(desk: Cli, aarch64_board: EmulatedBoard) -> None:
    # Emulated, a candidate takes long to load, and its time means nothing.
    quick = ("--repeat", "2", "--min-repeat-ms", "1", "--timeout", "60")
    where = ("--target", "rpi4", "--device", "board", "--trials", "6")
    session = desk.succeeds("tune", "net.onnx", *where, *quick, "--json").json["sessions"][0]
    assert (session["phase"], session["device"], session["trials"]) == ("finished", "board", 6)
    assert session["errors"] == {}
    assert any(t["best_ms"] for t in session["tasks"])
    assert Path(session["report"]).is_file()
    assert desk("verify", "bundles/net-rpi4", "--device", "board").code == 0
    with Records.open() as records:
        assert {t.device.isa.split()[0] for t in records.trials()} == {"aarch64"}
    assert left_behind(aarch64_board) == ""


def test_an_agent_that_is_killed(desk: Cli, aarch64_board: EmulatedBoard) -> None:
    killed: list[int] = []
    notes: list[str] = []

    def show(state: SessionState) -> None:
        notes.append(state.note)
        if state.trials < 2 or killed:
            return
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "qemu" in " ".join(command[:1]) and any("edgesdk-agent" in c for c in command):
                killed.append(process.pid)
                process.kill()

    result = edgesdk.tune(
        desk.here / "net.onnx",
        target="rpi4",
        device="board",
        trials=6,
        repeat=2,
        min_repeat_ms=1,
        timeout_s=60,
        show=show,
    )
    assert killed
    assert result.state.phase == "finished" and result.state.trials == 6
    assert result.state.errors == {"device": 1}
    assert any("the device is gone" in note for note in notes)
