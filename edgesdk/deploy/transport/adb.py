"""An Android device reached through adb, by its serial number.

Android 7 and newer: there adb carries a program's output, errors and input apart and unchanged
("shell v2"). So the agent is talked to on them, and no port is forwarded. `adb push` is not used:
it loses the bit that makes a file executable, and leaves half a file where it is interrupted.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from edgesdk.deploy.transport.base import (
    DeviceTimeoutError,
    Stream,
    absolute_path,
    end_process_group,
    start_on_socket,
)
from edgesdk.deploy.transport.shell import SMALL_TIMEOUT_S, Feed, ShellTransport
from edgesdk.devices import Device
from edgesdk.errors import DeviceError, DeviceUnreachableError, ToolMissingError
from edgesdk.proc import CommandResult, CommandTimeout, run_command
from edgesdk.toolchain import apt_command

# The one folder where the shell's user may write, and start what it wrote; /sdcard is noexec.
_PARENT = "/data/local/tmp"

# Starts every program: $1 is this text itself, $2 a token, the rest the program. The first line of
# the output tells the process group, the last line of the errors the exit code: adb's own says 1
# for a lost phone, too.
_START = (
    'kill -0 -$$ 2>/dev/null || exec setsid sh -c "$1" "$0" "$@"; '
    'printf "%s %s\\n" "$2" $$; token=$2; shift 2; "$@"; code=$?; '
    'printf "\\n%s %s\\n" "$token" $code >&2; exit $code'
)

# What adb says, in words and with what to do.
_REASONS = (
    ("unauthorized", "it has not been allowed yet", "unlock the phone and accept this computer"),
    ("offline", "it is offline", "unplug it and plug it in again"),
    ("no permissions", "this user may not use its USB port", "see: adb devices"),
    ("not found", "it is not connected", "see: adb devices"),
)


class AdbTransport(ShellTransport):
    """Connects in its constructor.

    Raises ToolMissingError without adb, DeviceUnreachableError when adb does not reach the device.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device, AdbSession(device))

    def _find_work_dir(self) -> str:
        return absolute_path(_PARENT, self._device.work_dir)


class AdbSession:
    """Programs on the device `device.serial`, each by an adb of its own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._adb = (_find_adb(), "-s", str(device.serial))
        argv = [*self._adb, "features"]
        try:
            result = run_command(argv, timeout_s=max(device.timeout_s, SMALL_TIMEOUT_S))
        except CommandTimeout as error:
            raise DeviceUnreachableError(
                f"{device.name}: adb did not answer", hint="adb kill-server, then try again"
            ) from error
        if not result.ok:
            raise self.unreachable(result.stderr_text)
        if "shell_v2" not in result.stdout_text.split():
            raise DeviceError(
                f"{device.name}: its adb is that of an Android before 7, which is too old",
                hint="Android 10 is the oldest that bundles are made for",
            )

    @property
    def name(self) -> str:
        return self._device.name

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        feed: Feed = lambda write: None,
        sink: Callable[[bytes], None] | None = None,
    ) -> CommandResult:
        """See `ShellSession`."""
        deadline = time.monotonic() + timeout_s
        stdout = bytearray()
        sink = sink or stdout.extend
        with AdbStream(self, argv) as stream:
            feeder = threading.Thread(target=stream.feed, args=(feed,), daemon=True)
            feeder.start()
            try:
                while True:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise DeviceTimeoutError("")
                    chunk = stream.read(1 << 17, timeout_s=left)
                    if not chunk:
                        break
                    sink(chunk)
                code = stream.wait(max(0.1, deadline - time.monotonic()))
            except DeviceTimeoutError:
                raise DeviceTimeoutError(
                    f"{self.name}: {argv[0]} did not finish within {timeout_s:g} s and was ended"
                ) from None
            stderr = stream.errors()
        number = code - 128
        returncode = -number if 1 <= number <= 64 else code
        return CommandResult(tuple(argv), returncode, bytes(stdout), stderr)

    def open_stream(self, argv: Sequence[str]) -> Stream:
        return AdbStream(self, argv)

    def close(self) -> None:
        """Nothing is open between programs."""

    def shell(self, command: str) -> list[str]:
        """The command of this machine that has the device's shell run `command`."""
        return [*self._adb, "shell", "-T", command]

    def end_group(self, group: int) -> None:
        """Ends all processes of the group on the device."""
        # A phone that is gone has ended them itself.
        with contextlib.suppress(CommandTimeout):
            run_command(self.shell(f"kill -9 -{group}"), timeout_s=SMALL_TIMEOUT_S)

    def unreachable(self, said: str, when: str = "") -> DeviceUnreachableError:
        """The error for what adb has said."""
        lines = [line for line in said.splitlines() if line.strip() and not line.startswith("*")]
        text = lines[-1].strip() if lines else "the connection was lost"
        hint = "is the cable in? see: adb devices"
        for mark, reason, cure in _REASONS:
            if mark in said:
                text, hint = f"{reason} (serial {self._device.serial})", cure
                break
        return DeviceUnreachableError(f"{self.name}: {text}{when}", hint=hint)


class AdbStream(Stream):
    """A program on the device."""

    def __init__(self, session: AdbSession, argv: Sequence[str]) -> None:
        self._session = session
        self._program = argv[0]
        self._token = f"edgesdk-{secrets.token_hex(8)}"
        self._group: int | None = None
        self._ahead = b""
        self._closed = False
        command = shlex.join(["sh", "-c", _START, "sh", _START, self._token, *argv])
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        try:
            self._socket, self._process = start_on_socket(
                session.shell(f"exec {command}"), stderr=self._stderr
            )
        except OSError as error:
            self._stderr.close()
            raise DeviceError(f"{session.name}: adb cannot be started: {error.strerror}") from error
        try:
            self._read_group()
        except BaseException:
            self.close()
            raise

    def feed(self, feed: Feed) -> None:
        """Lets `feed` write the program's whole input."""
        with contextlib.suppress(DeviceError, OSError):  # it ended without reading everything
            feed(self.write)
        self.close_input()

    def write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise DeviceError(
                f"{self._session.name}: {self._program} has ended: {error}"
            ) from error

    def read(self, size: int, *, timeout_s: float) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
            return data
        data = self._receive(size, timeout_s)
        if not data:
            self.wait(SMALL_TIMEOUT_S)  # for its error, if the connection has ended, too
        return data

    def wait(self, timeout_s: float) -> int:
        """Returns the program's exit code, above 128 for a signal.

        Raises DeviceTimeoutError, or DeviceUnreachableError when the connection was lost.
        """
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DeviceTimeoutError(
                f"{self._session.name}: {self._program} has not ended"
            ) from None
        found = self._exit_line().search(self._all_errors())
        if found is not None:
            return int(found[1])
        if self._process.returncode > 128:  # its shell was ended with it
            return self._process.returncode
        said = self._all_errors().decode("utf-8", "replace")
        raise self._session.unreachable(said, f" while {self._program} ran")

    def errors(self) -> bytes:
        """Returns what the program has written to its standard error so far."""
        return self._exit_line().sub(b"", self._all_errors())

    def close_input(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_WR)

    def stderr_text(self) -> str:
        return self.errors().decode("utf-8", "replace")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._group is not None and self._process.poll() is None:
            self._session.end_group(self._group)
        end_process_group(self._process)
        self._socket.close()
        self._stderr.close()

    def _read_group(self) -> None:
        data = b""
        while b"\n" not in data:
            chunk = self._receive(4096, SMALL_TIMEOUT_S)
            if not chunk:
                self.wait(SMALL_TIMEOUT_S)
                said = self.stderr_text().strip() or "it said nothing"
                raise DeviceError(f"{self._session.name}: the shell starts no program: {said}")
            data += chunk
        line, _, self._ahead = data.partition(b"\n")
        self._group = int(line.split()[1])

    def _receive(self, size: int, timeout_s: float) -> bytes:
        self._socket.settimeout(timeout_s)
        try:
            return self._socket.recv(size)
        except TimeoutError:
            raise DeviceTimeoutError(
                f"{self._session.name}: {self._program} said nothing for {timeout_s:g} s"
            ) from None
        except ConnectionError:  # it ended without reading all of its input
            return b""

    def _all_errors(self) -> bytes:
        # adb writes at the end of the same open file: read without moving that place.
        descriptor = self._stderr.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def _exit_line(self) -> re.Pattern[bytes]:
        return re.compile(rb"\n%s (\d+)\n\Z" % self._token.encode())


def _find_adb() -> str:
    """Returns adb's path: in the PATH, or in Android's SDK."""
    home = os.environ.get("ANDROID_HOME")
    beside = Path(home) / "platform-tools" / "adb" if home else None
    found = shutil.which("adb") or (str(beside) if beside is not None and beside.exists() else None)
    if found is None:
        raise ToolMissingError("adb is not installed", hint=apt_command("adb"))
    return found
