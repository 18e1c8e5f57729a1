"""`edgesdk tune` when something breaks around it: the records, the board's disk."""

from __future__ import annotations

import pytest
from command_line import Cli
from conftest import in_folder
from tuning_place import save_network

import edgesdk
from edgesdk.deploy.emulated_board import EmulatedBoard
from edgesdk.deploy.transport import open_transport
from edgesdk.devices import add_device
from edgesdk.errors import DeviceError, ToolMissingError
from edgesdk.profiles import load_target
from edgesdk.toolchain import load_toolchain
from edgesdk.tuning.records import Records
from edgesdk.tuning.state import SessionState


def test_damaged_records_end_a_session_before_it_begins(cli: Cli) -> None:
    save_network(cli.here / "net.onnx", channels=(8, 16), size=8)
    damaged = cli.here / "damaged.db"
    content = b"no database at all, " * 500
    damaged.write_bytes(content)
    said = cli("tune", "net.onnx", "--target", "local", "--trials", "4", "--records", str(damaged))
    assert said.code == 3
    assert "damaged" in said.err and f"mv {damaged}" in said.err
    assert "Traceback" not in said.err
    assert damaged.read_bytes() == content
    assert not (cli.here / "bundles").exists()


def test_a_full_disk_ends_a_session_and_says_so(cli: Cli, aarch64_board: EmulatedBoard) -> None:
    profile = load_target("rpi4")
    try:
        load_toolchain(profile.toolchain).require(profile.machine)
    except ToolMissingError as error:
        pytest.skip(error.message)
    board = in_folder(aarch64_board, "small")
    add_device(board)
    save_network(cli.here / "net.onnx", channels=(8, 16), size=8)
    filled: list[int] = []

    def show(state: SessionState) -> None:
        if state.trials < 2 or filled:
            return
        filled.append(state.trials)
        with open_transport(board) as transport:
            filler = f"{transport.work_dir}/filler"
            transport.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], timeout_s=20)

    try:
        with pytest.raises(DeviceError, match="board: disk full: ") as caught:
            edgesdk.tune(
                cli.here / "net.onnx",
                target="rpi4",
                device="board",
                trials=40,
                repeat=2,
                min_repeat_ms=1,
                timeout_s=60,
                show=show,
            )
    finally:
        with open_transport(board) as transport:
            transport.run(["rm", "-f", f"{transport.work_dir}/filler"], timeout_s=20)
    assert caught.value.exit_code == 7 and caught.value.hint
    with Records.open() as records:
        kinds = [trial.error_kind for trial in records.trials()]
        assert [session.state for session in records.sessions()] == ["failed"]
    assert kinds.count("") >= filled[0] and kinds.count("device") == 1
