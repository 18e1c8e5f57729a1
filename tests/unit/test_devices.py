"""`devices.toml`: what is read, what is refused, and that editing leaves the rest alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgesdk.devices import (
    Device,
    SshAddress,
    add_device,
    devices_file,
    get_device,
    load_devices,
    parse_ssh_address,
    remove_device,
    ssh_address,
)
from edgesdk.errors import ConfigError, UsageError


@pytest.fixture(autouse=True)
def own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "edgesdk"


def write(text: str) -> None:
    devices_file().parent.mkdir(parents=True, exist_ok=True)
    devices_file().write_text(text, encoding="utf-8")


def test_without_a_file_there_is_this_machine() -> None:
    assert load_devices() == {"local": Device("local", transport="local")}
    assert get_device("local").transport == "local"


def test_a_device_comes_back_as_it_was_added(tmp_path: Path) -> None:
    key = tmp_path / 'odd "key" \\ name'
    key.write_text("x")
    device = Device(
        "pi-4.garden",
        transport="ssh",
        host="192.168.1.7",
        port=2222,
        user="pi",
        identity_file=str(key),
        work_dir="/data/edge",
        target="rpi4",
        timeout_s=30.0,
    )
    add_device(device)
    assert get_device("pi-4.garden") == device
    assert list(load_devices()) == ["local", "pi-4.garden"]


def test_only_what_differs_from_the_default_is_written() -> None:
    add_device(Device("pi", transport="ssh", host="my-pi"))
    assert devices_file().read_text() == '[pi]\ntransport = "ssh"\nhost = "my-pi"\n'


def test_editing_leaves_comments_and_other_devices_alone() -> None:
    first = '# My boards\n\n[shelf]  # upper one\ntransport = "ssh"\nhost = "a"  # by cable\n'
    write(
        first + '\n[ "pi" ]\ntransport = "ssh"\nhost = "b"\nport = 3\n\n[last]\ntransport = "local"'
    )
    add_device(Device("new", transport="ssh", host="c"))
    remove_device("pi")
    text = devices_file().read_text()
    assert text.startswith(first)
    assert list(load_devices()) == ["local", "shelf", "last", "new"]
    add_device(Device("shelf", transport="ssh", host="d"), replace=True)
    assert get_device("shelf").host == "d"
    assert [p.name for p in devices_file().parent.iterdir()] == ["devices.toml"]


def test_a_file_that_cannot_be_edited_safely_is_left_alone() -> None:
    text = 'pi = {transport = "ssh", host = "b"}\n'
    write(text)
    assert get_device("pi").host == "b"
    with pytest.raises(ConfigError, match="cannot edit"):
        remove_device("pi")
    assert devices_file().read_text() == text


def test_a_relative_key_file_works_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("x")
    monkeypatch.chdir(tmp_path)
    add_device(Device("pi", transport="ssh", host="b", identity_file="key"))
    assert get_device("pi").identity_file == str(tmp_path / "key")


def test_adding_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    add_device(Device("pi", transport="ssh", host="b"))
    for device, why in (
        (Device("pi", transport="ssh", host="c"), "already a device"),
        (Device("local", transport="ssh", host="c"), "always exists"),
        (Device("my pi", transport="ssh", host="c"), "no name for a device"),
        (Device("-x", transport="ssh", host="c"), "no name for a device"),
        (Device("x", transport="ssh", host="c", identity_file="absent"), "is not a file"),
    ):
        with pytest.raises(UsageError, match=why) as caught:
            add_device(device)
        assert caught.value.hint
    assert get_device("pi").host == "b"


def test_an_unknown_name_gets_a_suggestion() -> None:
    add_device(Device("kitchen", transport="ssh", host="b"))
    with pytest.raises(UsageError, match="no device 'kitchn'") as caught:
        get_device("kitchn")
    assert caught.value.exit_code == 2
    assert caught.value.hint == "did you mean 'kitchen'?"
    with pytest.raises(UsageError) as caught:
        remove_device("zzz")
    assert caught.value.hint == "edgesdk devices add zzz --ssh user@host"
    with pytest.raises(UsageError, match="cannot be removed"):
        remove_device("local")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[pi]\ntransport = "ssh"\nhots = "b"\n', "unknown key 'hots'"),
        ('[pi]\nhost = "b"\n', "'transport' is missing"),
        ('[pi]\ntransport = "telnet"\nhost = "b"\n', "'transport' is 'telnet'"),
        ('[pi]\ntransport = "ssh"\n', "host is missing"),
        ('[pi]\ntransport = "ssh"\nhost = "b"\nport = "22"\n', "'port' is '22', not an integer"),
        ('[pi]\ntransport = "ssh"\nhost = "b"\nport = 70000\n', "port is 70000"),
        ('[pi]\ntransport = "ssh"\nhost = "b"\ntimeout-s = 0\n', "timeout-s is 0"),
        ('[local]\ntransport = "ssh"\nhost = "b"\n', "is this machine"),
        ('host = "b"\n', "'host' stands outside"),
        ("[pi\n", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(text: str, why: str) -> None:
    write(text)
    with pytest.raises(ConfigError, match=why) as caught:
        load_devices()
    assert caught.value.exit_code == 3
    assert "devices.toml" in caught.value.message


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("pi@192.168.1.7:2222", SshAddress("192.168.1.7", "pi", 2222)),
        ("pi@host", SshAddress("host", "pi")),
        ("my-alias", SshAddress("my-alias")),
        ("host:22", SshAddress("host", None, 22)),
        ("[::1]:22", SshAddress("::1", None, 22)),
        ("pi@[fe80::1%eth0]", SshAddress("fe80::1%eth0", "pi")),
        ("fe80::1", SshAddress("fe80::1")),
        ("ssh://pi@host:22/", SshAddress("host", "pi", 22)),
        ("me@corp.example@bastion", SshAddress("bastion", "me@corp.example")),
    ],
)
def test_addresses(text: str, address: SshAddress) -> None:
    assert parse_ssh_address(text) == address
    device = Device("x", "ssh", host=address.host, port=address.port, user=address.user)
    assert parse_ssh_address(ssh_address(device)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pi@",
        "@host",
        "host:",
        "host:ssh",
        "host:0",
        "host:65536",
        "host:²",
        "[::1",
        "[::1]22",
        "[::1]:",
        "-oProxyCommand=x",
        "-l@host",
        "a b",
        "host;reboot",
        "$(reboot)",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="no SSH address") as caught:
        parse_ssh_address(text)
    assert caught.value.hint


def test_importing_devices_and_transports_loads_nothing_heavy() -> None:
    code = (
        "import sys, edgesdk.devices, edgesdk.deploy.transport, edgesdk.deploy.push\n"
        "heavy = {'tvm', 'onnx', 'onnxruntime', 'numpy', 'paramiko'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
