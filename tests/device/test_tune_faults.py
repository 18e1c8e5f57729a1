"""`edgesdk tune` when something breaks around it: records, the board's disk, the connection."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import Cli
from conftest import in_folder
from cut_link import CutLink
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
from edgesdk.tuning.trial import canonical


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


@pytest.fixture
def link(cli: Cli, aarch64_board: EmulatedBoard, tmp_path: Path) -> Iterator[CutLink]:
    """The device "board" behind a link that can be cut, and a small network to tune."""
    profile = load_target("rpi4")
    try:
        load_toolchain(profile.toolchain).require(profile.machine)
    except ToolMissingError as error:
        pytest.skip(error.message)
    board = aarch64_board.device()
    assert board.port is not None
    with CutLink(board.port) as link:
        known_hosts, ssh_config = tmp_path / "known_hosts", tmp_path / "ssh_config"
        line = aarch64_board.host_key_line().replace(f":{board.port} ", f":{link.port} ")
        known_hosts.write_text(line, encoding="utf-8")
        ssh_config.write_text(
            f"Host *\n    IdentitiesOnly yes\n    UserKnownHostsFile {known_hosts}\n",
            encoding="utf-8",
        )
        add_device(dataclasses.replace(board, port=link.port, ssh_config=str(ssh_config)))
        save_network(cli.here / "net.onnx", channels=(8, 16), size=8)
        yield link


def tune_through(link: CutLink, cli: Cli, cut: Callable[[], None]) -> SessionState:
    """Tunes with 6 trials; `cut` is called once, when two of them are done."""
    done: list[bool] = []

    def show(state: SessionState) -> None:
        if state.trials >= 2 and not done:
            done.append(True)
            cut()

    state = edgesdk.tune(
        cli.here / "net.onnx",
        target="rpi4",
        device="board",
        trials=6,
        repeat=2,
        min_repeat_ms=1,
        timeout_s=60,
        show=show,
    ).state
    assert done and link.cuts == 1
    return state


def check_nothing_lost(state: SessionState) -> None:
    """The session finished, and only trials in flight were lost: one batch at the most."""
    assert (state.phase, state.trials) == ("finished", 6)
    assert state.errors.keys() == {"device"}
    with Records.open() as records:
        trials = list(records.trials())
        assert [session.state for session in records.sessions()] == ["finished"]
    good = {canonical(t.candidate) + t.workload for t in trials if not t.error_kind}
    assert len(good) >= 2
    assert all(t.error_kind in ("", "device") for t in trials)


def test_a_device_that_reboots(link: CutLink, cli: Cli) -> None:
    def reboot() -> None:
        link.cut()
        link.mend_later(4.0)

    check_nothing_lost(tune_through(link, cli, reboot))


def test_a_link_that_breaks_in_mid_upload(link: CutLink, cli: Cli) -> None:
    def soon() -> None:
        link.bytes_to_board = 0
        link.cut_after_bytes = 8000  # less than a candidate's library has

    check_nothing_lost(tune_through(link, cli, soon))
