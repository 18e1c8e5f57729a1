"""What ~/.ssh/config says about a host, asked from OpenSSH itself (`ssh -G`).

So Host and Match blocks, Include, canonical names and defaults mean exactly what they mean when the
user types `ssh board`. Only tokens (`%h`) in some values are left to expand here.
"""

from __future__ import annotations

import getpass
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from edgesdk.devices import Device, SshAddress, parse_ssh_address
from edgesdk.errors import ConfigError, ToolMissingError
from edgesdk.proc import run_command

_DEFAULT_KEYS = ("id_rsa", "id_ecdsa", "id_ed25519")
_ASK_TIMEOUT_S = 20.0  # a Match block may run programs


@dataclass(frozen=True)
class SshSettings:
    """How one host is reached. `alias` is what the user calls it, `hostname` the real name.

    `identity_agent` is a path, "none", or None for $SSH_AUTH_SOCK. `known_hosts_files` are the
    user's (the first one is written to), `global_known_hosts_files` the system's.
    """

    alias: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    identities_only: bool
    identity_agent: str | None
    known_hosts_files: tuple[Path, ...]
    global_known_hosts_files: tuple[Path, ...]
    hash_known_hosts: bool
    host_key_alias: str | None
    proxy_jump: tuple[SshAddress, ...]
    proxy_command: str | None


def settings_for(device: Device) -> SshSettings:
    """Returns how to reach `device`; its own values win over the file's.

    Raises ConfigError when its files are missing or the configuration is wrong, ToolMissingError
    when there is a configuration but no `ssh` to read it.
    """
    assert device.host is not None  # Device checks it
    config = Path(device.ssh_config).expanduser() if device.ssh_config else None
    identity = Path(device.identity_file).expanduser() if device.identity_file else None
    for path in (config, identity):
        if path is not None and not path.is_file():
            raise ConfigError(
                f"device {device.name!r}: {path} does not exist",
                hint="correct its path in devices.toml",
            )
    address = SshAddress(device.host, device.user, device.port)
    return resolve(address, config=config, identity=identity)


def resolve(
    address: SshAddress, *, config: Path | None = None, identity: Path | None = None
) -> SshSettings:
    """Returns how to reach `address`; `config` replaces ~/.ssh/config, `identity` is a key file.

    Raises ConfigError when the configuration is wrong, ToolMissingError as `settings_for` does.
    """
    if shutil.which("ssh") is None:
        return _without_openssh(address, config, identity)
    argv: list[str | Path] = ["ssh", "-G", "-T"]
    argv += ["-F", config] if config else []
    argv += ["-i", identity] if identity else []
    argv += ["-l", address.user] if address.user else []
    argv += ["-p", str(address.port)] if address.port else []
    result = run_command([*argv, "--", address.host], timeout_s=_ASK_TIMEOUT_S)
    if not result.ok:
        raise ConfigError(
            f"ssh cannot tell how to reach {address.host!r}: {result.last_line()}",
            hint=f"ssh -G {address.host}",
        )
    return _settings_from(result.stdout_text, address.host)


def _settings_from(text: str, alias: str) -> SshSettings:
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)

    def first(key: str) -> str | None:
        value = values.get(key, [None])[0]
        return None if value in (None, "none") and key != "identityagent" else value

    tokens = {
        "%": "%",
        "h": first("hostname") or alias,
        "n": alias,
        "p": first("port") or "22",
        "r": first("user") or getpass.getuser(),
        "u": getpass.getuser(),
        "d": str(Path.home()),
        "l": socket.gethostname(),
        "L": socket.gethostname().partition(".")[0],
    }

    def expand(value: str) -> str:
        return re.sub(r"%(.)", lambda m: tokens.get(m[1], m[0]), value)

    def path(value: str) -> Path:
        return Path(expand(value)).expanduser()

    def paths(key: str) -> tuple[Path, ...]:
        return tuple(path(word) for word in (first(key) or "").split())

    agent = first("identityagent")
    if agent == "SSH_AUTH_SOCK":
        agent = None
    command = first("proxycommand")
    return SshSettings(
        alias=alias,
        hostname=tokens["h"],
        port=int(tokens["p"]),
        user=tokens["r"],
        identity_files=tuple(path(v) for v in values.get("identityfile", ()) if v != "none"),
        identities_only=first("identitiesonly") == "yes",
        identity_agent=agent if agent in (None, "none") else str(path(str(agent))),
        known_hosts_files=paths("userknownhostsfile"),
        global_known_hosts_files=paths("globalknownhostsfile"),
        hash_known_hosts=first("hashknownhosts") == "yes",
        host_key_alias=first("hostkeyalias"),
        proxy_jump=tuple(
            parse_ssh_address(hop) for hop in (first("proxyjump") or "").split(",") if hop
        ),
        proxy_command=expand(command) if command else None,
    )


def _without_openssh(
    address: SshAddress, config: Path | None, identity: Path | None
) -> SshSettings:
    """OpenSSH's defaults, for a machine that has neither OpenSSH nor a configuration for it."""
    folder = Path.home() / ".ssh"
    config = config or folder / "config"
    if config.exists():
        raise ToolMissingError(
            f"{config} says how to reach hosts, but ssh, which reads it, is not installed",
            hint="install OpenSSH's client (Debian: apt-get install openssh-client)",
        )
    return SshSettings(
        alias=address.host,
        hostname=address.host,
        port=address.port or 22,
        user=address.user or getpass.getuser(),
        identity_files=(identity,) if identity else tuple(folder / k for k in _DEFAULT_KEYS),
        identities_only=False,
        identity_agent=None,
        known_hosts_files=(folder / "known_hosts",),
        global_known_hosts_files=(Path("/etc/ssh/ssh_known_hosts"),),
        hash_known_hosts=False,
        host_key_alias=None,
        proxy_jump=(),
        proxy_command=None,
    )
