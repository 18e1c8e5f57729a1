"""`devices.toml` in the user's configuration folder: which boards there are and how to reach them.

A target says what a device is and ships with edgesdk; a device is the board on the desk, with its
address, user and key, and stays in the user's own file. One table per device:

    [pi]
    transport = "ssh"
    host = "192.168.1.7"
    target = "rpi4"
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgesdk.errors import ConfigError, UsageError
from edgesdk.resources import config_folder
from edgesdk.settings import check_table, suggestion

LOCAL_NAME = "local"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Device:
    """One table of `devices.toml`.

    `host` may be an alias of ~/.ssh/config. What is None is taken from there (`user`, `port`,
    `identity_file`). `ssh_config` is a file to read instead of ~/.ssh/config, as `ssh -F` does.
    `work_dir` is the folder on the device that edgesdk owns: absolute, or below the home folder.
    `target` is the target profile that the device serves. `timeout_s` limits, in seconds, how long
    connecting may take and how long the device may be silent during a transfer. `serial` is what
    `adb devices` calls a phone; its work folder counts from /data/local/tmp.
    """

    name: str
    transport: Literal["local", "ssh", "adb"]
    host: str | None = None
    port: int | None = None
    user: str | None = None
    identity_file: str | None = None
    ssh_config: str | None = None
    work_dir: str = ".edgesdk"
    target: str | None = None
    timeout_s: float = 15.0
    serial: str | None = None

    def __post_init__(self) -> None:
        if self.transport == "ssh" and not self.host:
            raise ValueError("host is missing: ssh needs one")
        if self.transport == "adb" and not re.fullmatch(r"[\w.:-]+", self.serial or ""):
            raise ValueError(f"serial is {self.serial!r}, not as `adb devices` prints it")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}, not between 1 and 65535")
        if not 0 < self.timeout_s <= 3600:
            raise ValueError(f"timeout-s is {self.timeout_s}, not between 0 and 3600")


@dataclass(frozen=True)
class SshAddress:
    """`user@host:port` taken apart; what was not given is None."""

    host: str
    user: str | None = None
    port: int | None = None


def devices_file() -> Path:
    """Returns the path of `devices.toml`, which need not exist."""
    return config_folder() / "devices.toml"


def load_devices() -> dict[str, Device]:
    """Returns all devices by name, `local` first. Raises ConfigError when the file is wrong."""
    return {LOCAL_NAME: Device(LOCAL_NAME, transport="local")} | {
        name: _device_from(name, table) for name, table in _read_tables(_read_text()).items()
    }


def _device_from(name: str, table: dict[str, Any]) -> Device:
    where = f"{devices_file()}, [{name}]"
    device = check_table(table, Device, where=where, given={"name": name})
    if name == LOCAL_NAME and device.transport != "local":
        raise ConfigError(
            f"{where}: the device {LOCAL_NAME!r} is this machine, not one reached by "
            f"{device.transport}",
            hint="give that device another name",
        )
    return device


def get_device(name: str) -> Device:
    """Returns the device called `name`. Raises UsageError when there is none."""
    devices = load_devices()
    if name in devices:
        return devices[name]
    raise UsageError(
        f"there is no device {name!r}; known are {', '.join(devices)}",
        hint=suggestion(name, devices, otherwise=f"edgesdk devices add {name} --ssh user@host"),
    )


def add_device(device: Device, *, replace: bool = False) -> None:
    """Writes `device` into `devices.toml`, leaving the rest of the file as it is.

    A relative `identity_file` or `ssh_config` is made absolute. Raises UsageError when the name or
    a file cannot be meant, or the name is taken and `replace` is false; ConfigError when
    `devices.toml` is wrong or cannot be written.
    """
    if not _NAME.fullmatch(device.name):
        raise UsageError(
            f"{device.name!r} is no name for a device",
            hint="use letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )
    if device.name == LOCAL_NAME:
        raise UsageError(
            f"the device {LOCAL_NAME!r} is this machine and always exists",
            hint="choose another name",
        )
    device = dataclasses.replace(
        device,
        identity_file=_absolute(device.identity_file, "the key file"),
        ssh_config=_absolute(device.ssh_config, "the SSH configuration"),
    )
    table = _table_from(device)
    text = _read_text()
    tables = _read_tables(text)
    if device.name in tables:
        if not replace:
            raise UsageError(
                f"there is already a device {device.name!r}",
                hint=f"edgesdk devices remove {device.name}",
            )
        text = _without_table(text, device.name)
    separator = "" if not text.strip() else "\n" if text.endswith("\n") else "\n\n"
    lines = [f"[{_key(device.name)}]", *(f"{k} = {_value(v)}" for k, v in table.items())]
    _write_text(text + separator + "\n".join(lines) + "\n", tables | {device.name: table})


def remove_device(name: str) -> None:
    """Removes the device from `devices.toml`; nothing on the device changes.

    Raises UsageError when there is no such device, or it is `local`.
    """
    if name == LOCAL_NAME:
        raise UsageError(f"the device {LOCAL_NAME!r} is this machine and cannot be removed")
    get_device(name)
    text = _read_text()
    tables = _read_tables(text)
    del tables[name]
    _write_text(_without_table(text, name), tables)


def parse_ssh_address(text: str) -> SshAddress:
    """Takes `[user@]host[:port]` apart; also `ssh://...`, an alias, `[::1]:22` and a bare `::1`.

    Raises UsageError when it is none of these.
    """

    def refuse(why: str) -> UsageError:
        return UsageError(
            f"{text!r} is no SSH address: {why}",
            hint="write user@host or user@host:port; an IPv6 address with a port as [::1]:22",
        )

    user, at, rest = text.removeprefix("ssh://").removesuffix("/").rpartition("@")
    if at and not user:
        raise refuse("the user before '@' is missing")
    host, port_text = rest, ""
    if rest.startswith("["):
        host, bracket, after = rest[1:].partition("]")
        if not bracket:
            raise refuse("']' is missing")
        if after and not after.startswith(":"):
            raise refuse(f"{after!r} after ']' is no port")
        port_text = after[1:]
        if after and not port_text:
            raise refuse("the port after ':' is missing")
    elif rest.count(":") == 1:
        host, _, port_text = rest.partition(":")
        if not port_text:
            raise refuse("the port after ':' is missing")
    if not host:
        raise refuse("the host is missing")
    # A leading "-" would reach ssh as an option.
    if host.startswith("-") or user.startswith("-") or re.search(r"[\s/\\'\"`$;|&<>]", user + host):
        raise refuse("it has a character that no host name has")
    if port_text and not (port_text.isascii() and port_text.isdigit()):
        raise refuse(f"{port_text!r} is no port number")
    if port_text and not 1 <= int(port_text) <= 65535:
        raise refuse(f"port {port_text} is not between 1 and 65535")
    return SshAddress(host, user or None, int(port_text) if port_text else None)


def ssh_address(device: Device) -> str:
    """Returns the address of an SSH device as `parse_ssh_address` reads it."""
    host = str(device.host)
    if device.port is not None:
        host = f"[{host}]:{device.port}" if ":" in host else f"{host}:{device.port}"
    return f"{device.user}@{host}" if device.user else host


def _absolute(value: str | None, what: str) -> str | None:
    if value is None:
        return None
    path = Path(value).expanduser()
    if not path.is_file():
        raise UsageError(f"{what} {value!r} is not a file", hint="give the path of the file")
    return value if value.startswith("~") else str(path.absolute())


def _read_text() -> str:
    try:
        return devices_file().read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{devices_file()} cannot be read: {error}") from error


def _read_tables(text: str) -> dict[str, dict[str, Any]]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{devices_file()} is not valid TOML: {error}") from error
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"{devices_file()}: {name!r} stands outside of a device's table",
                hint="write the name of the device in brackets above its lines, e.g. [pi]",
            )
    return tables


def _table_from(device: Device) -> dict[str, Any]:
    """Returns what has to be written: the transport and whatever differs from the default."""
    table: dict[str, Any] = {"transport": device.transport}
    for field in dataclasses.fields(Device):
        value = getattr(device, field.name)
        if field.name not in ("name", "transport") and value != field.default:
            table[field.name.replace("_", "-")] = value
    return table


def _key(name: str) -> str:
    return f'"{name}"' if "." in name else name


def _value(value: str | int | float) -> str:
    # A JSON string is a TOML basic string, except that TOML wants DEL escaped.
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _without_table(text: str, name: str) -> str:
    """Cuts the lines from the header of the table to the next header out of `text`."""
    header = re.compile(rf"\s*\[\s*(['\"]?){re.escape(name)}\1\s*\]\s*(#.*)?")
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            inside = header.fullmatch(line.rstrip("\r\n")) is not None
        if not inside:
            kept.append(line)
    return "".join(kept)


def _write_text(text: str, expected: dict[str, dict[str, Any]]) -> None:
    """Replaces the file in one step, after checking that `text` says what is meant."""
    path = devices_file()
    try:
        right = tomllib.loads(text) == expected
    except tomllib.TOMLDecodeError:
        right = False
    if not right:
        raise ConfigError(
            f"{path} is written in a way that edgesdk cannot edit",
            hint="change it by hand: one table in brackets per device",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".devices-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
