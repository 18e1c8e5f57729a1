"""A device that is reached through a POSIX shell on it, whatever carries its input and output.

Programs and files both go through the shell, so that an exit code vouches for each.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from edgesdk.bundle import file_sha256
from edgesdk.deploy.transport.base import (
    HASH_OF,
    Progress,
    Stream,
    Transport,
    absolute_path,
    size_text,
)
from edgesdk.devices import Device
from edgesdk.errors import DeviceError, DeviceUnreachableError, UsageError
from edgesdk.proc import CommandResult

SMALL_TIMEOUT_S = 30.0  # for our own little shell scripts on the device

Feed = Callable[[Callable[[bytes], None]], None]
"""Gets a function that writes to a program's input."""


class ShellSession(Protocol):
    """What carries the shell."""

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        feed: Feed = ...,
        sink: Callable[[bytes], None] | None = None,
    ) -> CommandResult:
        """As `Transport.run`; `feed` gets a function that writes its input, `sink` its output."""

    def open_stream(self, argv: Sequence[str]) -> Stream:
        """As `Transport.open_stream`."""

    def close(self) -> None:
        """As `Transport.close`."""


_HASH_TIMEOUT_S = 600.0  # hashing and syncing a large file on a slow card
_READ_TIMEOUT_S = 24 * 3600.0  # of a file of any size; a dead connection is noticed long before
SEND_BYTES = 32_768  # what every SFTP server must take in one request

# $1: the final path, $2: the temporary file, $3: its SHA-256 ("" = checked already), $4: "program"
# or "data". Not every `sync` takes a file.
_FINISH_UPLOAD = f"""{HASH_OF}
if [ -n "$3" ]; then
    hash_of "$2" || exit 66
    [ "$sum" = "$3" ] || exit 65
fi
if [ -d "$1" ]; then rm -f "$2"; exit 67; fi
[ "$4" = data ] || chmod 755 "$2"
sync "$2" 2>/dev/null || sync
mv -f "$2" "$1" || exit 1
[ "$4" = data ] || [ -x "$1" ] || exit 68
"""
_DIFFERS, _NO_HASH_TOOL, _IS_FOLDER, _NOT_EXECUTABLE = 65, 66, 67, 68

# Why a file could not be written: the free KiB, then what the system says to a new file there.
_EXPLAIN = """
free=$(df -Pk "$(dirname "$1")" 2>/dev/null | tail -n 1)
set -- "$1" $free
echo "${5:-}"
rm -f "$1"
mkdir -p "$(dirname "$1")" 2>&1 && ( : >"$1" ) 2>&1 && rm -f "$1"
"""


class ShellTransport(Transport):
    """All of a transport on top of an open `session`, which it closes.

    Raises DeviceError when the device has no usable work folder.
    """

    def __init__(self, device: Device, session: ShellSession) -> None:
        self._device = device
        self._session = session
        try:
            self._work_dir = self._find_work_dir()
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self._device.name

    @property
    def work_dir(self) -> str:
        return self._work_dir

    def run(
        self, argv: Sequence[str], *, timeout_s: float, input_bytes: bytes | None = None
    ) -> CommandResult:
        return self._session.run(
            argv, timeout_s=timeout_s, feed=lambda write: write(input_bytes or b"")
        )

    def upload(
        self,
        local: Path,
        remote: str,
        *,
        executable: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if not local.is_file():
            raise UsageError(f"{local} is not a file")
        target = absolute_path(self._work_dir, remote)
        folder, base = posixpath.split(target)
        temporary = posixpath.join(folder, f".{base}.{secrets.token_hex(4)}.part")
        try:
            self._send(local, temporary, progress)
            self._finish_upload(local, temporary, target, "program" if executable else "data")
        except DeviceUnreachableError:
            raise  # nothing can be removed there now; the next push to this folder replaces it
        except BaseException:
            with contextlib.suppress(DeviceError, DeviceUnreachableError):
                self._shell('rm -f "$1"', temporary)
            raise

    def download(self, remote: str, local: Path) -> None:
        source = absolute_path(self._work_dir, remote)
        handle, temporary = tempfile.mkstemp(dir=local.parent, prefix=f".{local.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                self._fetch(source, file)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(local)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def open_stream(self, argv: Sequence[str]) -> Stream:
        return self._session.open_stream(argv)

    def close(self) -> None:
        self._session.close()

    def _find_work_dir(self) -> str:
        result = self.run(["sh", "-c", 'printf %s "$HOME"'], timeout_s=SMALL_TIMEOUT_S)
        home = result.stdout_text
        folder = self._device.work_dir
        folder = folder.removeprefix("~/") if folder.startswith("~/") else folder
        if not (result.ok and home.startswith("/")) and not folder.startswith("/"):
            raise DeviceError(
                f"{self.name}: the user has no home folder there ({result.last_line()})",
                hint="set an absolute work-dir for the device in devices.toml",
            )
        return absolute_path(home or "/", folder)

    def _shell(self, script: str, *args: str, timeout_s: float = SMALL_TIMEOUT_S) -> CommandResult:
        return self.run(["sh", "-c", script, "edgesdk", *args], timeout_s=timeout_s)

    def _send(self, local: Path, temporary: str, progress: Progress | None) -> None:
        """Writes `local` to the device's file `temporary`, making its folder."""
        self._send_through_shell(local, temporary, progress)

    def _send_through_shell(self, local: Path, temporary: str, progress: Progress | None) -> None:
        def feed(write: Callable[[bytes], None]) -> None:
            done = 0
            with local.open("rb") as reader:
                while chunk := reader.read(SEND_BYTES):
                    write(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(done)

        script = '[ -d "${1%/*}" ] || mkdir -p "${1%/*}" && cat >"$1"'
        # A tenth of the slowest network in use, so that only a dead one is cut off.
        limit = _HASH_TIMEOUT_S + local.stat().st_size / 10_000
        result = self._session.run(
            ["sh", "-c", script, "edgesdk", temporary], timeout_s=limit, feed=feed
        )
        if not result.ok:
            raise self._write_error(local, temporary, result.last_line())

    def _finish_upload(self, local: Path, temporary: str, target: str, kind: str) -> None:
        wanted = file_sha256(local)
        arguments = [target, temporary, wanted, kind]
        result = self._shell(_FINISH_UPLOAD, *arguments, timeout_s=_HASH_TIMEOUT_S)
        if result.returncode == _NO_HASH_TOOL:
            if self._hash_by_reading(temporary) != wanted:
                raise self._differs(local, target)
            arguments[2] = ""
            result = self._shell(_FINISH_UPLOAD, *arguments, timeout_s=_HASH_TIMEOUT_S)
        if result.returncode == _DIFFERS:
            raise self._differs(local, target)
        if result.returncode == _IS_FOLDER:
            raise DeviceError(
                f"{self.name}: {target} is a folder there, not a file", hint="remove it first"
            )
        if result.returncode == _NOT_EXECUTABLE:
            raise DeviceError(
                f"{self.name}: nothing can be started in {posixpath.dirname(target)}: "
                "it is mounted noexec",
                hint="set another work-dir for the device in devices.toml",
            )
        if not result.ok:
            raise self._write_error(local, temporary, result.last_line())

    def _hash_by_reading(self, remote: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            with copy.open("wb") as file:
                self._fetch(remote, file)
            return file_sha256(copy)

    def _fetch(self, source: str, file: BinaryIO) -> None:
        """Writes the device's file into `file`. Through `cat`: its exit code vouches for all."""
        result = self._session.run(
            ["cat", source],
            timeout_s=_READ_TIMEOUT_S,
            sink=lambda chunk: (file.write(chunk), None)[1],
        )
        if not result.ok:
            raise DeviceError(f"{self.name}: cannot read {source}: {result.last_line()}")

    def _make_folder(self, folder: str) -> None:
        result = self._shell('mkdir -p "$1"', folder)
        if not result.ok:
            raise DeviceError(
                f"{self.name}: cannot make the folder {folder}: {result.last_line()}",
                hint="check its owner, or set another work-dir for the device in devices.toml",
            )

    def _write_error(self, local: Path, temporary: str, said: str) -> DeviceError:
        """Finds out why writing failed: SFTP itself only says "Failure". Removes `temporary`."""
        free_kib, _, system = self._shell(_EXPLAIN, temporary).stdout_text.partition("\n")
        size = local.stat().st_size
        folder = posixpath.dirname(temporary)
        full = "no space left" in said.lower()
        if full or (free_kib.isdigit() and int(free_kib) * 1024 < min(size, 1 << 16)):
            free = f"{size_text(int(free_kib) * 1024)} free" if free_kib.isdigit() else "none free"
            return DeviceError(
                f"{self.name}: the disk is full: {local.name} needs {size_text(size)}, "
                f"and {folder} has {free}",
                hint="delete something there, or set another work-dir in devices.toml",
            )
        reason = system.strip().rpartition(": ")[2] or said
        return DeviceError(
            f"{self.name}: cannot write to {folder}: {reason}",
            hint="check its owner and mount, or set another work-dir in devices.toml",
        )

    def _differs(self, local: Path, target: str) -> DeviceError:
        return DeviceError(
            f"{self.name}: {target} arrived damaged: its SHA-256 is not that of {local.name}",
            hint="try again; if it happens again, the device's disk is failing",
        )
