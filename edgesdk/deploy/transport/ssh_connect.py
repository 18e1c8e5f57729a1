"""From a device's entry to a logged-in SSH connection: the way there, the host's key, the user's.

Unlike paramiko's SSHClient: the user's own key files are offered before the agent's keys (a full
agent otherwise uses up the server's patience), IdentitiesOnly is obeyed, jump hosts are chained,
and an unknown host is never accepted in passing.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import logging
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgesdk.deploy.transport.base import end_process_group, start_on_socket
from edgesdk.deploy.transport.known_hosts import (
    append_key,
    find_keys,
    fingerprint,
    host_name,
    judge,
)
from edgesdk.deploy.transport.ssh_config import SshSettings, resolve, settings_for
from edgesdk.devices import Device, ssh_address
from edgesdk.errors import ConfigError, DeviceUnreachableError

if TYPE_CHECKING:
    import paramiko

_MAX_HOPS = 8
_AGENT_KEY = "agent"
_KEEPALIVE_S = 10
# Linux ends a connection whose packets (the keepalives too) stay unanswered that long; the default
# is a quarter of an hour.
_UNANSWERED_MS = 30_000


@dataclass(frozen=True)
class AcceptedKey:
    """A host key that was added to known_hosts, and where to."""

    host: str
    fingerprint: str
    file: Path


class Connection:
    """A logged-in paramiko transport and everything that it runs through."""

    def __init__(self) -> None:
        self.transport: paramiko.Transport | None = None
        self._closers: list[Callable[[], None]] = []

    def on_close(self, closer: Callable[[], None]) -> None:
        self._closers.append(closer)

    def close(self) -> None:
        while self._closers:
            with contextlib.suppress(OSError, EOFError):  # it may be broken already
                self._closers.pop()()


def connect(device: Device) -> Connection:
    """Returns a connection to `device`, logged in.

    Raises DeviceUnreachableError when the way there, the host's key or the user's key fails;
    ConfigError and ToolMissingError as `ssh_config.settings_for` does.
    """
    connection = Connection()
    try:
        settings = settings_for(device)
        transport = _open(device, settings, connection, accepted=None)
        _log_in(device, settings, transport)
        connection.transport = transport
        transport.set_keepalive(_KEEPALIVE_S)
    except BaseException:
        connection.close()
        raise
    return connection


def accept_host_key(device: Device) -> tuple[AcceptedKey, ...]:
    """Adds the key that `device` shows now, and those of its jump hosts, to known_hosts.

    Returns the keys that were added: none when all are known. The caller shows them, and the user
    compares them with what the board prints (`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`).
    Raises DeviceUnreachableError when it cannot be reached or its key differs from the known one.
    """
    accepted: list[AcceptedKey] = []
    connection = Connection()
    try:
        _open(device, settings_for(device), connection, accepted=accepted)
    finally:
        connection.close()
    return tuple(accepted)


def _open(
    device: Device,
    settings: SshSettings,
    connection: Connection,
    *,
    accepted: list[AcceptedKey] | None,
    hops: int = 0,
) -> paramiko.Transport:
    """Connects up to the checked host key; unknown ones go into `accepted`, or are refused."""
    import paramiko

    # Without a handler, paramiko's inner tracebacks would go to the user's terminal.
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    where = _where(device, settings)
    sock = _socket_to(device, settings, connection, accepted=accepted, hops=hops)
    try:
        transport = paramiko.Transport(sock)
        connection.on_close(transport.close)
        transport.banner_timeout = device.timeout_s
        transport.auth_timeout = device.timeout_s
        name = settings.host_key_alias or host_name(settings.hostname, settings.port)
        keys = find_keys((*settings.known_hosts_files, *settings.global_known_hosts_files), name)
        _prefer_key_types(transport, [k.key_type for k in keys if not k.marker])
        transport.start_client(timeout=device.timeout_s)
        key = transport.get_remote_server_key()
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise DeviceUnreachableError(
            f"cannot reach {where}: no SSH server answers as one: {_text(error)}",
            hint="check host and port, and that an SSH server runs there",
        ) from error
    blob = key.asbytes()
    verdict = judge(keys, blob)
    if verdict == "unknown" and accepted is not None:
        accepted.append(_accept(settings, name, key.get_name(), blob))
    elif verdict != "known":
        raise _host_key_error(device, settings, where, verdict, name, blob)
    return transport


def _socket_to(
    device: Device,
    settings: SshSettings,
    connection: Connection,
    *,
    accepted: list[AcceptedKey] | None,
    hops: int,
) -> Any:
    """Returns a socket, or a channel that behaves as one, to the SSH server."""
    if settings.proxy_command:
        return _proxy_command(settings.proxy_command, connection)
    if settings.proxy_jump:
        return _through_jump(device, settings, connection, accepted=accepted, hops=hops)
    where = _where(device, settings)
    try:
        sock = socket.create_connection((settings.hostname, settings.port), device.timeout_s)
    except socket.gaierror as error:
        raise DeviceUnreachableError(
            f"cannot reach {where}: no host is called {settings.hostname!r}",
            hint="check its name, or give its IP address",
        ) from error
    except TimeoutError as error:
        raise DeviceUnreachableError(
            f"cannot reach {where}: no answer within {device.timeout_s:g} s",
            hint=f"is the board on, and in this network? ping {settings.hostname}",
        ) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DeviceUnreachableError(
            f"cannot reach {where}: {reason}",
            hint="is the board on, and does its SSH server listen on that port?",
        ) from error
    connection.on_close(sock.close)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _proxy_command(command: str, connection: Connection) -> socket.socket:
    sock, process = start_on_socket(["/bin/sh", "-c", f"exec {command}"], stderr=subprocess.DEVNULL)
    connection.on_close(lambda: end_process_group(process))
    connection.on_close(sock.close)
    return sock


def _through_jump(
    device: Device,
    settings: SshSettings,
    connection: Connection,
    *,
    accepted: list[AcceptedKey] | None,
    hops: int,
) -> Any:
    """Logs in to the last jump host, through the ones before it, and lets it connect onwards."""
    import paramiko

    if hops >= _MAX_HOPS:
        raise ConfigError(
            f"device {device.name!r}: more than {_MAX_HOPS} jump hosts; does one jump to itself?",
            hint=f"ssh -G {settings.alias} | grep -i proxyjump",
        )
    *before, last = settings.proxy_jump
    config = Path(device.ssh_config).expanduser() if device.ssh_config else None
    hop = resolve(last, config=config)
    if before:
        hop = dataclasses.replace(hop, proxy_jump=tuple(before), proxy_command=None)
    transport = _open(device, hop, connection, accepted=accepted, hops=hops + 1)
    _log_in(device, hop, transport)
    transport.set_keepalive(_KEEPALIVE_S)
    try:
        return transport.open_channel(
            "direct-tcpip",
            dest_addr=(settings.hostname, settings.port),
            src_addr=("127.0.0.1", 0),
            timeout=device.timeout_s,
        )
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise DeviceUnreachableError(
            f"cannot reach {_where(device, settings)}: the jump host {hop.alias} "
            f"cannot connect to it: {_text(error)}",
            hint="check host and port as seen from the jump host",
        ) from error


def _prefer_key_types(transport: paramiko.Transport, known: list[str]) -> None:
    """Asks for a key of a type that is known: a server has several, and any other looks new."""
    if "ssh-rsa" in known:  # the key's type; these are the signatures made with it
        known = [*known, "rsa-sha2-512", "rsa-sha2-256"]
    options = transport.get_security_options()
    offered = [t for t in options.key_types if not t.endswith("-cert-v01@openssh.com")]
    options.key_types = sorted(offered, key=lambda t: t not in known)


def _accept(settings: SshSettings, name: str, key_type: str, blob: bytes) -> AcceptedKey:
    if not settings.known_hosts_files:
        raise ConfigError(
            f"the key of {name} has no file to go to: UserKnownHostsFile is none",
            hint=f"ssh -G {settings.alias} | grep -i userknownhostsfile",
        )
    file = settings.known_hosts_files[0]
    append_key(file, name, key_type, blob, hashed=settings.hash_known_hosts)
    return AcceptedKey(name, fingerprint(blob), file)


def _host_key_error(
    device: Device, settings: SshSettings, where: str, verdict: str, name: str, blob: bytes
) -> DeviceUnreachableError:
    shown = fingerprint(blob)
    if verdict == "unknown":
        return DeviceUnreachableError(
            f"{where} is unknown; its host key is {shown}",
            hint=f"if that is the board's key: edgesdk devices add {device.name} "
            f"--ssh {ssh_address(device)} --accept-key",
        )
    file = settings.known_hosts_files[0] if settings.known_hosts_files else "known_hosts"
    if verdict == "revoked":
        return DeviceUnreachableError(
            f"{where} shows the host key {shown}, which is marked as revoked",
            hint=f"do not connect; the line is in {file} or in the system's known_hosts",
        )
    return DeviceUnreachableError(
        f"the host key of {where} has changed to {shown}: another device, or somebody in between",
        hint=f"only if the board was set up anew: ssh-keygen -R '{name}' -f {file}",
    )


def _log_in(device: Device, settings: SshSettings, transport: paramiko.Transport) -> None:
    import paramiko

    tried: list[str] = []
    try:
        # What OpenSSH asks first: some boards let everybody in, the others say what they want.
        transport.auth_none(settings.user)
        return
    except paramiko.BadAuthenticationType as error:
        allowed = error.allowed_types
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise _refused(device, settings, f"it ended the login: {_text(error)}", tried) from error
    if "publickey" not in allowed:
        raise _refused(device, settings, f"it wants {' or '.join(allowed)}, not a key", tried)
    candidates, unusable = _candidates(settings)
    for label, key in candidates:
        tried.append(label)
        try:
            if not transport.auth_publickey(settings.user, key):
                return
            raise _refused(device, settings, "it wants a second proof besides the key", tried)
        except (paramiko.SSHException, EOFError, OSError) as error:
            if transport.is_active() and isinstance(error, paramiko.AuthenticationException):
                continue
            why = _text(error)
            if len(tried) > 2:  # servers hang up after some wrong keys: OpenSSH's default is 6
                why = "it hung up after too many wrong keys"
            raise _refused(device, settings, why, tried) from error
    raise _refused(device, settings, "; ".join(unusable), tried)


def _candidates(settings: SshSettings) -> tuple[list[tuple[str, Any]], list[str]]:
    """Returns the keys to offer, in order, with names; and why some files are of no use."""
    import paramiko

    agent = {key.asbytes(): key for key in _agent_keys(settings.identity_agent)}
    candidates: dict[bytes, tuple[str, Any]] = {}
    unusable: list[str] = []
    for path in settings.identity_files:
        public = _public_blob(path)
        if public in agent:  # works for protected keys too
            candidates.setdefault(public, (f"{path} (agent)", agent[public]))
            continue
        if not path.is_file():
            continue
        try:
            key = paramiko.PKey.from_path(path)
            candidates.setdefault(key.asbytes(), (str(path), key))
        except Exception as error:  # cryptography raises TypeError, ValueError, Unsupported...
            text = str(error).lower()
            protected = "password" in text or "encrypted" in text or "passphrase" in text
            why = "has a passphrase (ssh-add it)" if protected else f"is no usable key: {error}"
            unusable.append(f"{path} {why}")
    if not settings.identities_only:
        for blob, key in agent.items():
            candidates.setdefault(blob, (_AGENT_KEY, key))
    return list(candidates.values()), unusable


def _agent_keys(agent_path: str | None) -> tuple[Any, ...]:
    from paramiko.agent import AgentSSH

    path = agent_path or os.environ.get("SSH_AUTH_SOCK")
    if path in (None, "", "none"):
        return ()
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(str(path))
        agent = AgentSSH()
        agent._connect(sock)  # the public Agent class knows $SSH_AUTH_SOCK only
        return tuple(agent.get_keys())
    except Exception:  # a stale socket of a session that has ended; the key files remain
        sock.close()
        return ()


def _public_blob(path: Path) -> bytes:
    """Returns the public key of the identity file `path`, b"" when it does not stand beside it."""
    for candidate in (Path(f"{path}.pub"), path):
        with contextlib.suppress(OSError, UnicodeDecodeError, IndexError, binascii.Error):
            words = candidate.read_text(encoding="utf-8").split()
            if words[0].startswith(("ssh-", "ecdsa-", "sk-")):
                return base64.b64decode(words[1], validate=True)
    return b""


def _refused(
    device: Device, settings: SshSettings, why: str, tried: list[str]
) -> DeviceUnreachableError:
    from_agent = tried.count(_AGENT_KEY)
    labels = [label for label in tried if label != _AGENT_KEY]
    labels += [f"{from_agent} of the agent's keys"] if from_agent else []
    offered = f"offered: {', '.join(labels)}" if tried else "no key to offer"
    key = next(iter(settings.identity_files), None)
    public = f"-i {key}.pub " if key is not None and Path(f"{key}.pub").is_file() else ""
    port = f"-p {settings.port} " if settings.port != 22 else ""
    hint = f"ssh-copy-id {public}{port}{settings.user}@{settings.hostname}"
    if "too many" in why.lower():
        hint = f"name the right key: edgesdk devices add {device.name} ... --identity FILE"
    details = f"{why}; {offered}" if why else offered
    return DeviceUnreachableError(
        f"{_where(device, settings)} does not let in the user {settings.user!r} ({details})",
        hint=hint,
    )


def _where(device: Device, settings: SshSettings) -> str:
    return f"{device.name} ({host_name(settings.hostname, settings.port)})"


def _text(error: BaseException) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__
