"""Host keys, the SSH configuration, and this machine as a device; no server is needed."""

from __future__ import annotations

import base64
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesdk.deploy.transport import open_transport
from edgesdk.deploy.transport.base import DeviceTimeoutError, Transport, size_text
from edgesdk.deploy.transport.known_hosts import (
    append_key,
    find_keys,
    fingerprint,
    host_name,
    judge,
)
from edgesdk.deploy.transport.ssh_config import resolve
from edgesdk.devices import Device, SshAddress, get_device
from edgesdk.errors import ConfigError, DeviceError, ToolMissingError

# Key blobs need not be real keys here, only well-formed base64.
KEY, OTHER = b"key of the board", b"another key"


def line(names: str, blob: bytes = KEY, *, marker: str = "") -> str:
    return f"{marker}{names} ssh-ed25519 {base64.b64encode(blob).decode()} comment\n"


def verdict(tmp_path: Path, text: str, name: str, blob: bytes = KEY) -> str:
    path = tmp_path / "known_hosts"
    path.write_text(text, encoding="utf-8")
    return judge(find_keys([path, tmp_path / "absent"], name), blob)


def test_names_have_the_port_where_it_is_not_22() -> None:
    assert host_name("board", 22) == "board"
    assert host_name("::1", 2222) == "[::1]:2222"


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (line("board"), "board", "known"),
        (line("other,board"), "board", "known"),
        (line("BOARD"), "board", "known"),
        (line("*.lan"), "pi.lan", "known"),
        (line("*.lan,!pi.lan"), "pi.lan", "unknown"),
        (line("192.168.1.?"), "192.168.1.7", "known"),
        (line("[board]:2222"), "[board]:2222", "known"),
        (line("board"), "[board]:2222", "unknown"),
        (line("[board]:2222"), "board", "unknown"),
        (line("b"), "[board]:2222", "unknown"),
        (line("board", OTHER), "board", "changed"),
        (line("board", OTHER) + line("board"), "board", "known"),
        (line("board") + line("*", marker="@revoked "), "board", "revoked"),
        (line("board", marker="@cert-authority "), "board", "unknown"),
        ("# " + line("board"), "board", "unknown"),
        ("board ssh-ed25519 not/base64!\n", "board", "unknown"),
        ("board\n\n", "board", "unknown"),
    ],
)
def test_verdicts(tmp_path: Path, text: str, name: str, expected: str) -> None:
    assert verdict(tmp_path, text, name) == expected


def test_names_hashed_by_openssh_are_found(tmp_path: Path) -> None:
    key = tmp_path / "key"
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
    subprocess.run(argv, check=True, timeout=20)
    known = tmp_path / "known"
    public = (tmp_path / "key.pub").read_text().split()[:2]
    known.write_text(f"[127.0.0.1]:2222 {' '.join(public)}\n")
    subprocess.run(
        ["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, timeout=20, capture_output=True
    )
    assert known.read_text().startswith("|1|")
    blob = base64.b64decode(public[1])
    assert judge(find_keys([known], "[127.0.0.1]:2222"), blob) == "known"
    assert judge(find_keys([known], "127.0.0.1"), blob) == "unknown"
    shown = subprocess.run(
        ["ssh-keygen", "-lf", str(key)], check=True, timeout=20, capture_output=True, text=True
    )
    assert fingerprint(blob) == shown.stdout.split()[1]


@pytest.mark.parametrize("hashed", [True, False])
def test_an_appended_key_is_found_by_us_and_by_openssh(tmp_path: Path, hashed: bool) -> None:
    path = tmp_path / "folder" / "known_hosts"
    append_key(path, "one", "ssh-ed25519", OTHER, hashed=hashed)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))  # an editor took the last line's end
    append_key(path, "[two]:2222", "ssh-ed25519", KEY, hashed=hashed)
    assert judge(find_keys([path], "one"), OTHER) == "known"
    assert judge(find_keys([path], "[two]:2222"), KEY) == "known"
    assert path.stat().st_mode & 0o777 == 0o600
    assert ("two" in path.read_text()) != hashed


def test_a_known_hosts_file_that_cannot_be_read_is_not_taken_as_empty(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        find_keys([folder], "board")


def test_the_ssh_configuration_is_read_as_openssh_reads_it(tmp_path: Path) -> None:
    (tmp_path / "more").write_text(
        f"Host board\n  IdentityFile {tmp_path}/%n-%r\n  UserKnownHostsFile {tmp_path}/%k\n"
        "  HostKeyAlias alias\n  IdentityAgent none\n"
    )
    config = tmp_path / "config"
    config.write_text(
        f"Include {tmp_path}/more\n"
        "Host board\n  HostName 10.0.0.1\n  Port 2222\n  User pi\n  IdentitiesOnly yes\n"
        "  ProxyJump me@first:2200,second\n"
        "Host piped\n  ProxyCommand connect %h %p %r %%\n"
        "Host *\n  HashKnownHosts yes\n"
    )
    board = resolve(SshAddress("board"), config=config)
    assert (board.hostname, board.port, board.user) == ("10.0.0.1", 2222, "pi")
    assert board.identity_files == (tmp_path / "board-pi",)
    assert board.known_hosts_files == (tmp_path / "alias",)
    assert board.identities_only
    assert board.identity_agent == "none"
    assert board.host_key_alias == "alias"
    assert board.hash_known_hosts
    assert board.proxy_jump == (SshAddress("first", "me", 2200), SshAddress("second"))
    assert board.proxy_command is None

    piped = resolve(SshAddress("piped", "root", 23), config=config)
    assert piped.proxy_command == "connect piped 23 root %"
    assert piped.proxy_jump == ()
    own = resolve(SshAddress("board", "me", 7), config=config, identity=tmp_path / "config")
    assert (own.user, own.port) == ("me", 7)
    assert own.identity_files[0] == tmp_path / "config"


def test_a_wrong_ssh_configuration_is_a_configuration_error(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host board\n  Prot 22\n")
    with pytest.raises(ConfigError, match="ssh cannot tell how to reach 'board'"):
        resolve(SshAddress("board"), config=config)


def test_without_openssh_its_configuration_is_not_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    plain = resolve(SshAddress("board", "pi"))
    assert (plain.hostname, plain.port, plain.user) == ("board", 22, "pi")
    assert plain.known_hosts_files == (tmp_path / ".ssh" / "known_hosts",)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host *\n")
    with pytest.raises(ToolMissingError, match="ssh, which reads it, is not installed"):
        resolve(SshAddress("board"))


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with open_transport(get_device("local")) as transport:
        yield transport


def test_this_machine_runs_programs(local: Transport) -> None:
    result = local.run(["sh", "-c", "cat; exit 3"], timeout_s=10, input_bytes=b"in")
    assert (result.returncode, result.stdout) == (3, b"in")
    assert local.run(["sh", "-c", "kill -9 $$"], timeout_s=10).returncode == -9
    assert local.run(["no-such-program"], timeout_s=10).returncode == 127
    assert local.run(["pwd"], timeout_s=10).stdout_text.strip() == local.work_dir
    with pytest.raises(DeviceTimeoutError):
        local.run(["sleep", "10"], timeout_s=0.1)


def test_this_machine_takes_files_whole(local: Transport, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho ran\n")
    seen: list[int] = []
    local.upload(program, "a/b/program", executable=True, progress=seen.append)
    assert local.run([f"{local.work_dir}/a/b/program"], timeout_s=10).stdout == b"ran\n"
    assert seen[-1] == program.stat().st_size
    local.download("a/b/program", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == program.read_bytes()
    (Path(local.work_dir) / "folder").mkdir()
    with pytest.raises(DeviceError, match="cannot copy"):
        local.upload(program, "folder")
    with pytest.raises(DeviceError, match="No such file"):
        local.download("absent", tmp_path / "absent")
    assert sorted(p.name for p in Path(local.work_dir).rglob("*")) == [
        "a",
        "b",
        "folder",
        "program",
    ]


def test_a_stream_on_this_machine(local: Transport) -> None:
    marker = f"sleep {time.time_ns() % 10**6 + 10**6}"
    with local.open_stream(["sh", "-c", f"echo ready >&2; cat; {marker}"]) as stream:
        stream.write(b"ping")
        assert stream.read(4, timeout_s=5) == b"ping"
        assert stream.stderr_text() == "ready\n"
        with pytest.raises(DeviceTimeoutError):
            stream.read(1, timeout_s=0.1)
        stream.close_input()
    left = local.run(["ps", "-eo", "args"], timeout_s=10).stdout_text
    assert marker not in left
    with local.open_stream(["echo", "x"]) as stream:
        assert stream.read(10, timeout_s=5) == b"x\n"
        assert stream.read(10, timeout_s=5) == b""
    with pytest.raises(DeviceError, match="cannot start"):
        local.open_stream(["no-such-program"])


def test_a_work_folder_of_ones_own(tmp_path: Path) -> None:
    device = Device("here", transport="local", work_dir=str(tmp_path / "own"))
    with open_transport(device) as transport:
        assert transport.work_dir == str(tmp_path / "own")
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="cannot be made"):
        open_transport(Device("here", transport="local", work_dir=str(tmp_path / "file")))


def test_sizes_for_people() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 6_300_000, 5 * 10**12)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "6.3 MB",
        "5000.0 GB",
    ]
