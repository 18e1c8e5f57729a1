"""The way to a board: addresses, host keys, user keys, the agent, jump hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesdk.deploy.emulated_board import EmulatedBoard
from edgesdk.deploy.transport import open_transport
from edgesdk.deploy.transport.ssh_connect import accept_host_key
from edgesdk.devices import Device
from edgesdk.errors import ConfigError, DeviceError, DeviceUnreachableError


def new_key(path: Path, passphrase: str = "") -> Path:
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "", "-f", str(path)]
    subprocess.run(argv, check=True, timeout=20)
    return path


def device_with(config: Path, host: str = "board", **changes: object) -> Device:
    return dataclasses.replace(
        Device("pi", transport="ssh", host=host, ssh_config=str(config)),
        **changes,  # type: ignore[arg-type]
    )


def write_config(
    path: Path,
    board: EmulatedBoard,
    *,
    alias: str = "board",
    identity: Path | None = None,
    **keys: str,
) -> Path:
    """A configuration for `ssh -F` that names the board; a keyword ending in _ is left as it is."""
    values = {
        "HostName": board.host,
        "Port": str(board.port),
        "User": board.user,
        "IdentityFile": str(identity or board.identity_file),
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": str(board.known_hosts),
    } | keys
    lines = [f"Host {alias}", *(f"    {key} {value}" for key, value in values.items() if value)]
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return path


def machine_of(device: Device) -> str:
    with open_transport(device) as transport:
        return transport.run(["uname", "-m"], timeout_s=20).stdout_text.strip()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            if path.exists():
                break
            time.sleep(0.05)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=10)


def add_to_agent(*keys: Path) -> None:
    for key in keys:
        subprocess.run(["ssh-add", "-q", str(key)], check=True, timeout=20)


def test_boards_of_both_kinds_are_reached_at_once(
    aarch64_board: EmulatedBoard, armhf_board: EmulatedBoard
) -> None:
    with (
        open_transport(aarch64_board.device("a")) as first,
        open_transport(armhf_board.device("b")) as second,
    ):
        assert first.run(["uname", "-m"], timeout_s=20).stdout == b"aarch64\n"
        assert second.run(["uname", "-m"], timeout_s=20).stdout == b"armv7l\n"
        assert first.work_dir == "/home/pi/.edgesdk"


def test_an_alias_of_the_ssh_configuration_is_enough(
    aarch64_board: EmulatedBoard, tmp_path: Path
) -> None:
    included = write_config(tmp_path / "included", aarch64_board, alias="my-pi")
    config = tmp_path / "config"
    config.write_text(f"Include {included}\n", encoding="utf-8")
    assert machine_of(device_with(config, "my-pi")) == "aarch64"


def test_the_entry_wins_over_the_configuration(
    aarch64_board: EmulatedBoard, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path / "config", aarch64_board, Port="1", User="nobody", IdentityFile=""
    )
    device = device_with(
        config,
        port=aarch64_board.port,
        user=aarch64_board.user,
        identity_file=str(aarch64_board.identity_file),
    )
    assert machine_of(device) == "aarch64"


@pytest.mark.parametrize("hashed", ["yes", "no"])
def test_an_unknown_host_key_is_refused_until_it_is_accepted(
    aarch64_board: EmulatedBoard, tmp_path: Path, hashed: str
) -> None:
    known = tmp_path / "new" / "known_hosts"
    config = write_config(
        tmp_path / "config",
        aarch64_board,
        UserKnownHostsFile=str(known),
        HashKnownHosts=hashed,
    )
    device = device_with(config)
    listed = subprocess.run(
        ["ssh-keygen", "-lf", str(aarch64_board.settings / "ssh_host_key.pub")],
        check=True,
        capture_output=True,
        text=True,
        timeout=20,
    )
    fingerprint = listed.stdout.split()[1]
    with pytest.raises(DeviceUnreachableError) as caught:
        open_transport(device)
    assert caught.value.exit_code == 6
    assert fingerprint in caught.value.message
    assert caught.value.hint is not None
    assert "--accept-key" in caught.value.hint
    assert not known.exists()

    (accepted,) = accept_host_key(device)
    assert accepted.fingerprint == fingerprint
    assert (f"[{aarch64_board.host}]" in known.read_text()) == (hashed == "no")
    assert machine_of(device) == "aarch64"
    assert accept_host_key(device) == ()
    # OpenSSH agrees with what was written.
    argv = ["ssh", "-F", str(config), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
    done = subprocess.run([*argv, "board", "true"], capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_a_changed_host_key_is_always_refused(aarch64_board: EmulatedBoard, tmp_path: Path) -> None:
    other = new_key(tmp_path / "other").with_suffix(".pub").read_text().split()[:2]
    known = tmp_path / "known_hosts"
    before = f"[{aarch64_board.host}]:{aarch64_board.port} {' '.join(other)}\n"
    known.write_text(before, encoding="utf-8")
    config = write_config(tmp_path / "config", aarch64_board, UserKnownHostsFile=str(known))
    for attempt in (open_transport, accept_host_key):
        with pytest.raises(DeviceUnreachableError, match="has changed") as caught:
            attempt(device_with(config))
        assert caught.value.hint is not None
        assert "ssh-keygen -R" in caught.value.hint
    assert known.read_text() == before


def test_a_revoked_host_key_is_refused(aarch64_board: EmulatedBoard, tmp_path: Path) -> None:
    line = aarch64_board.host_key_line()
    known = tmp_path / "known_hosts"
    known.write_text(f"{line}@revoked * {line.partition(' ')[2]}", encoding="utf-8")
    config = write_config(tmp_path / "config", aarch64_board, UserKnownHostsFile=str(known))
    with pytest.raises(DeviceUnreachableError, match="revoked"):
        open_transport(device_with(config))


def test_a_wrong_user_key_is_refused_in_words(any_board: EmulatedBoard, tmp_path: Path) -> None:
    wrong = new_key(tmp_path / "wrong")
    config = write_config(tmp_path / "config", any_board, identity=wrong)
    with pytest.raises(DeviceUnreachableError) as caught:
        open_transport(device_with(config))
    assert caught.value.exit_code == 6
    assert "does not let in the user 'pi'" in caught.value.message
    assert str(wrong) in caught.value.message
    assert caught.value.hint is not None
    assert f"ssh-copy-id -i {wrong}.pub -p {any_board.port} pi@" in caught.value.hint


def test_a_key_file_comes_before_a_full_agent(
    agent: None, aarch64_board: EmulatedBoard, tmp_path: Path
) -> None:
    add_to_agent(*(new_key(tmp_path / f"agent{index}") for index in range(7)))
    config = write_config(tmp_path / "config", aarch64_board, IdentitiesOnly="no")
    assert machine_of(device_with(config)) == "aarch64"
    # Without the right key the server loses patience, and the message says why.
    wrong = write_config(
        tmp_path / "wrong", aarch64_board, identity=tmp_path / "agent0", IdentitiesOnly="no"
    )
    with pytest.raises(
        DeviceUnreachableError, match=r"too many .*agent0 \(agent\), \d of the agent"
    ) as caught:
        open_transport(device_with(wrong))
    assert caught.value.hint is not None
    assert "--identity" in caught.value.hint
    # IdentitiesOnly keeps the agent's other keys out.
    only = write_config(tmp_path / "only", aarch64_board, identity=tmp_path / "agent0")
    with pytest.raises(DeviceUnreachableError, match=r"offered: \S+agent0 \(agent\)\)"):
        open_transport(device_with(only))


def test_the_agent_opens_what_a_passphrase_protects(
    agent: None, aarch64_board: EmulatedBoard, tmp_path: Path
) -> None:
    protected = tmp_path / "protected"
    protected.write_bytes(aarch64_board.identity_file.read_bytes())
    protected.chmod(0o600)
    argv = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(protected)]
    subprocess.run(argv, check=True, timeout=20)
    config = write_config(tmp_path / "config", aarch64_board, identity=protected)
    with pytest.raises(DeviceUnreachableError, match="has a passphrase"):
        open_transport(device_with(config))
    add_to_agent(aarch64_board.identity_file)
    public = aarch64_board.identity_file.with_suffix(".pub").read_text()
    Path(f"{protected}.pub").write_text(public)
    assert machine_of(device_with(config)) == "aarch64"


def test_nobody_listens(aarch64_board: EmulatedBoard) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        device = dataclasses.replace(aarch64_board.device(), port=unused.getsockname()[1])
        with pytest.raises(DeviceUnreachableError, match="connection refused") as caught:
            open_transport(device)
    assert caught.value.exit_code == 6
    assert caught.value.hint


def test_something_else_listens(aarch64_board: EmulatedBoard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        device = dataclasses.replace(
            aarch64_board.device(), port=silent.getsockname()[1], timeout_s=1.0
        )
        start = time.monotonic()
        with pytest.raises(DeviceUnreachableError, match="no SSH server answers"):
            open_transport(device)
        assert time.monotonic() - start < 10


def test_an_unknown_name() -> None:
    device = Device("pi", transport="ssh", host="no-such-board.invalid")
    with pytest.raises(DeviceUnreachableError, match="no host is called"):
        open_transport(device)


def test_a_key_file_that_is_gone(aarch64_board: EmulatedBoard, tmp_path: Path) -> None:
    device = dataclasses.replace(aarch64_board.device(), identity_file=str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="does not exist"):
        open_transport(device)


def test_a_jump_host_leads_to_a_second_board(
    aarch64_board: EmulatedBoard, armhf_board: EmulatedBoard, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    config = tmp_path / "config"
    write_config(config, aarch64_board, alias="jump", UserKnownHostsFile=str(known))
    write_config(
        config, armhf_board, alias="inner", UserKnownHostsFile=str(known), ProxyJump="jump"
    )
    device = device_with(config, "inner")
    with pytest.raises(DeviceUnreachableError) as caught:
        open_transport(device)
    # It is the jump host whose key is asked for first.
    assert f"[{aarch64_board.host}]:{aarch64_board.port}" in caught.value.message
    assert [key.host for key in accept_host_key(device)] == [
        f"[{board.host}]:{board.port}" for board in (aarch64_board, armhf_board)
    ]
    logins = aarch64_board.log.count("Accepted publickey")
    assert machine_of(device) == "armv7l"
    assert aarch64_board.log.count("Accepted publickey") == logins + 1

    write_config(config, armhf_board, alias="closed", ProxyJump="jump", Port="1")
    with pytest.raises(DeviceUnreachableError, match="jump host jump cannot connect"):
        open_transport(device_with(config, "closed"))
    write_config(config, armhf_board, alias="circle", ProxyJump="circle")
    with pytest.raises(ConfigError, match="more than 8 jump hosts"):
        open_transport(device_with(config, "circle"))


def test_a_proxy_command_is_used_and_ended(
    aarch64_board: EmulatedBoard, armhf_board: EmulatedBoard, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    write_config(config, aarch64_board, alias="jump")
    pid_file = tmp_path / "pid"
    command = f"sh -c 'echo $$ >{pid_file}; exec ssh -F {config} -W %h:%p jump'"
    write_config(config, armhf_board, alias="inner", ProxyCommand=command)
    assert machine_of(device_with(config, "inner")) == "armv7l"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_work_folder_that_cannot_be_is_named(aarch64_board: EmulatedBoard) -> None:
    device = dataclasses.replace(aarch64_board.device(), work_dir="/dev/null/x")
    with (
        contextlib.closing(open_transport(device)) as transport,
        pytest.raises(DeviceError, match="cannot make the folder /dev/null/x"),
    ):
        transport.upload(aarch64_board.known_hosts, "file")
