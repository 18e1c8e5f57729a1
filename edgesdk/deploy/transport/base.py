"""What every way to a device can do: run a program, move a file, talk to a program, end.

Callers never see whether it is SSH or this machine. Paths on the device are strings; a relative one
stands below `work_dir`, the only folder on the device that edgesdk writes to.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from edgesdk.errors import DeviceError
from edgesdk.proc import CommandResult

CHUNK_BYTES = 1 << 20

Progress = Callable[[int], None]
"""Called with the number of bytes that the current transfer has moved so far."""

# For shell scripts on the device: sets `sum` to the SHA-256 of a file; fails where no program of
# the system can (not every one has sha256sum).
HASH_OF = """
hash_of() {
    for tool in sha256sum 'busybox sha256sum' 'toybox sha256sum' \\
            'openssl dgst -sha256 -r' 'shasum -a 256'; do
        if sum=$($tool <"$1" 2>/dev/null); then sum=${sum%% *}; return 0; fi
    done
    return 1
}
"""


class DeviceTimeoutError(DeviceError):
    """A program on the device ran past its limit and was ended, or a transfer stood still."""


class Stream(Protocol):
    """A program that runs on the device, with its input and output. For one thread at a time."""

    def write(self, data: bytes) -> None:
        """Sends all of `data` to the program. Raises DeviceError when it has ended."""

    def read(self, size: int, *, timeout_s: float) -> bytes:
        """Returns 1 to `size` bytes of output, or b"" when the program has closed it.

        Raises DeviceTimeoutError when nothing comes within `timeout_s` seconds.
        """

    def close_input(self) -> None:
        """Lets the program read an end of file."""

    def stderr_text(self) -> str:
        """Returns what the program has written to its standard error so far."""

    def close(self) -> None:
        """Ends the program, if it still runs, with everything that it started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Transport(Protocol):
    """An open connection to the device called `name`; ends with `close` or its `with` block.

    Everything raises DeviceUnreachableError when the connection is lost.
    """

    @property
    def name(self) -> str:
        """The device's name in `devices.toml`."""

    @property
    def work_dir(self) -> str:
        """The absolute path of the folder on the device that belongs to edgesdk."""

    def run(
        self, argv: Sequence[str], *, timeout_s: float, input_bytes: bytes | None = None
    ) -> CommandResult:
        """Runs `argv` and returns what it left; a non-zero exit code is not an error here.

        A `returncode` below 0 is the signal that ended the program. Past `timeout_s` seconds the
        program is ended with everything that it started, and DeviceTimeoutError raised.
        """

    def upload(
        self,
        local: Path,
        remote: str,
        *,
        executable: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Copies the file `local` to `remote`, making its folder; whole or not at all.

        It is written beside its place under another name, checked by SHA-256 on the device, and
        renamed; so a running program keeps the old file and nobody sees half of one. Raises
        DeviceError when the device cannot take it (disk full, read-only, no permission), UsageError
        when there is no file `local`.
        """

    def download(self, remote: str, local: Path) -> None:
        """Copies the file `remote` of the device to `local`, whole or not at all.

        Raises DeviceError when it cannot be read there.
        """

    def open_stream(self, argv: Sequence[str]) -> Stream:
        """Starts `argv` and returns its input and output."""

    def close(self) -> None:
        """Ends the connection. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def absolute_path(work_dir: str, remote: str) -> str:
    """Returns `remote` below `work_dir`, or `remote` itself where it is absolute already."""
    return posixpath.normpath(posixpath.join(work_dir, remote))


def start_on_socket(
    argv: Sequence[str], *, stderr: int | IO[bytes], cwd: Path | None = None
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Starts a program of this machine in a process group of its own, to be talked to.

    Returns a socket for its input and output: unlike pipes, it can be read with a time limit. Ends
    with `end_process_group`. Raises OSError when the program cannot be started.
    """
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=stderr,
            cwd=cwd,
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, process


def end_process_group(process: subprocess.Popen[bytes]) -> None:
    """Ends `process`, if it still runs, and everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)


def size_text(size_bytes: int) -> str:
    """Returns `size_bytes` for people, e.g. "6.3 MB" (10^6 bytes)."""
    value, unit = float(size_bytes), "bytes"
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
