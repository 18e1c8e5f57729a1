"""known_hosts files: which key a host had last time (sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT").

Own code because paramiko's reader knows neither wildcards nor `@revoked` lines, and so would call a
key unknown that the user has accepted or, worse, has withdrawn.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgesdk.errors import ConfigError

_SSH_PORT = 22


@dataclass(frozen=True)
class KnownKey:
    """A line that names the host. `marker` is "", "@revoked" or "@cert-authority"."""

    marker: str
    key_type: str
    blob: bytes


Verdict = Literal["known", "unknown", "changed", "revoked"]


def host_name(host: str, port: int) -> str:
    """Returns the name of a host in such a file: with the port where it is not 22."""
    return host if port == _SSH_PORT else f"[{host}]:{port}"


def find_keys(files: Iterable[Path], name: str) -> tuple[KnownKey, ...]:
    """Returns the keys that `files` have for `name` (see `host_name`); missing files are empty."""
    found: list[KnownKey] = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            # Going on without it would call a known host unknown, or a withdrawn key fine.
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        for line in text.splitlines():
            key = _parse(line, name)
            if key is not None:
                found.append(key)
    return tuple(found)


def judge(keys: Iterable[KnownKey], blob: bytes) -> Verdict:
    """Says what the key `blob` of a host is, given all `keys` that are known for it."""
    keys = tuple(keys)
    if any(k.marker == "@revoked" and k.blob == blob for k in keys):
        return "revoked"
    plain = [k for k in keys if not k.marker]
    if not plain:
        return "unknown"
    return "known" if any(k.blob == blob for k in plain) else "changed"


def fingerprint(blob: bytes) -> str:
    """Returns the fingerprint as `ssh-keygen -l` prints it: SHA256:<base64 without padding>."""
    digest = hashlib.sha256(blob).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def append_key(path: Path, name: str, key_type: str, blob: bytes, *, hashed: bool) -> None:
    """Adds a line for the host to the file; `hashed` hides its name as HashKnownHosts does.

    Raises ConfigError when the file cannot be written.
    """
    line = f"{_hashed(name) if hashed else name} {key_type} {base64.b64encode(blob).decode()}\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            path.touch(mode=0o600)
        elif (text := path.read_bytes()) and not text.endswith(b"\n"):
            line = "\n" + line
        with path.open("a", encoding="ascii") as file:
            file.write(line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def _parse(line: str, name: str) -> KnownKey | None:
    words = line.split()
    marker = words.pop(0) if words and words[0].startswith("@") else ""
    if len(words) < 3 or words[0].startswith("#") or not _matches(words[0], name):
        return None
    try:
        return KnownKey(marker, words[1], base64.b64decode(words[2], validate=True))
    except binascii.Error:
        return None  # ssh skips a damaged line too


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        return _hash_matches(patterns, name)
    matched = False
    for pattern in patterns.lower().split(","):
        negated = pattern.startswith("!")
        # Brackets belong to the name here; only "*" and "?" are wildcards.
        literal = pattern.lstrip("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(name.lower(), literal):
            if negated:
                return False
            matched = True
    return matched


def _hash_matches(field: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in field.split("|")[2:4])
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.digest(salt, name.lower().encode(), "sha1"), digest)


def _hashed(name: str) -> str:
    salt = os.urandom(20)
    digest = hmac.digest(salt, name.lower().encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
