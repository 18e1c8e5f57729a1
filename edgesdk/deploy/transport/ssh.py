"""A device reached over SSH. It needs a POSIX shell there; SFTP is used where it exists."""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from edgesdk.deploy.transport.base import (
    DeviceTimeoutError,
    Progress,
    Stream,
    Transport,
    absolute_path,
    sha256_of,
    size_text,
)
from edgesdk.deploy.transport.ssh_connect import Connection, connect
from edgesdk.devices import Device
from edgesdk.errors import DeviceError, DeviceUnreachableError
from edgesdk.proc import CommandResult

if TYPE_CHECKING:
    import paramiko

_SMALL_TIMEOUT_S = 30.0  # for our own little shell scripts on the device
_HASH_TIMEOUT_S = 600.0  # hashing and syncing a large file on a slow card
_SFTP_WRITE_BYTES = 32_768  # what every SFTP server must take in one request

# Starts every program. $1 is this text itself, $2 a token that ends whatever the user's shell
# start-up files print, the rest the program. The line on standard error tells the process group,
# through which a program is ended with its children. OpenSSH gives each command a group of its own;
# where a server does not (`kill -0` on the group fails), setsid makes one. No `exec` at the end:
# paramiko does not hear of signals, but the shell turns them into exit codes above 128.
_START = (
    'kill -0 -$$ 2>/dev/null || exec setsid sh -c "$1" "$0" "$@"; '
    'printf "%s\\n" "$2"; printf "%s %s\\n" "$2" $$ >&2; shift 2; "$@"; exit $?'
)

# $1: the final path, $2: the temporary file, $3: its SHA-256 ("" = checked already), $4: mode.
# Not every system has sha256sum, and not every `sync` takes a file.
_FINISH_UPLOAD = """
hash_of() {
    for tool in sha256sum 'busybox sha256sum' 'toybox sha256sum' \\
            'openssl dgst -sha256 -r' 'shasum -a 256'; do
        if sum=$($tool <"$1" 2>/dev/null); then sum=${sum%% *}; return 0; fi
    done
    return 1
}
if [ -n "$3" ]; then
    hash_of "$2" || exit 66
    [ "$sum" = "$3" ] || exit 65
fi
if [ -d "$1" ]; then rm -f "$2"; exit 67; fi
chmod "$4" "$2"
sync "$2" 2>/dev/null || sync
mv -f "$2" "$1" || exit 1
[ "$4" = 644 ] || [ -x "$1" ] || exit 68
"""
_DIFFERS, _NO_HASH_TOOL, _IS_FOLDER, _NOT_EXECUTABLE = 65, 66, 67, 68

# Why a file could not be written: the free KiB, then what the system says to a new file there.
_EXPLAIN = """
free=$(df -Pk "$(dirname "$1")" 2>/dev/null | tail -n 1)
set -- "$1" $free
echo "${5:-}"
rm -f "$1"
( : >"$1" ) 2>&1 && rm -f "$1"
"""


class SshTransport(Transport):
    """Connects in its constructor; see `ssh_connect.connect` for what that raises."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._connection: Connection = connect(device)
        self._sftp: paramiko.SFTPClient | None = None
        self._has_sftp = True
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
        def feed(write: Callable[[bytes], None]) -> None:
            if input_bytes:
                write(input_bytes)

        return self._run(argv, timeout_s=timeout_s, feed=feed)

    def upload(
        self,
        local: Path,
        remote: str,
        *,
        executable: bool = False,
        progress: Progress | None = None,
    ) -> None:
        target = absolute_path(self._work_dir, remote)
        folder, base = posixpath.split(target)
        temporary = posixpath.join(folder, f".{base}.{secrets.token_hex(4)}.part")
        try:
            self._send(local, temporary, progress)
            self._finish_upload(local, temporary, target, "755" if executable else "644")
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
        return _SshStream(self, *self._start(argv))

    def close(self) -> None:
        self._connection.close()

    # Programs

    def _find_work_dir(self) -> str:
        result = self.run(["sh", "-c", 'printf %s "$HOME"'], timeout_s=_SMALL_TIMEOUT_S)
        home = result.stdout_text
        folder = self._device.work_dir
        folder = folder.removeprefix("~/") if folder.startswith("~/") else folder
        if not (result.ok and home.startswith("/")) and not folder.startswith("/"):
            raise DeviceError(
                f"{self.name}: the user has no home folder there ({result.last_line()})",
                hint="set an absolute work-dir for the device in devices.toml",
            )
        return absolute_path(home or "/", folder)

    def _shell(self, script: str, *args: str, timeout_s: float = _SMALL_TIMEOUT_S) -> CommandResult:
        return self.run(["sh", "-c", script, "edgesdk", *args], timeout_s=timeout_s)

    def _run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        feed: Callable[[Callable[[bytes], None]], None],
        sink: Callable[[bytes], None] | None = None,
    ) -> CommandResult:
        """Runs `argv`; `feed` gets a function that writes to its input, `sink` its output."""
        deadline = time.monotonic() + timeout_s
        stdout, stderr = bytearray(), bytearray()
        channel, group, first_out, first_err = self._start(argv)
        sink = sink or stdout.extend
        with contextlib.closing(channel):
            errors = threading.Thread(
                target=_collect, args=(channel.recv_stderr, stderr), daemon=True
            )
            inputs = threading.Thread(target=_feed, args=(channel, feed), daemon=True)
            try:
                stderr += first_err
                sink(first_out)
                errors.start()
                inputs.start()
                while chunk := _before(deadline, channel, lambda: channel.recv(1 << 17)):
                    sink(chunk)
                errors.join(max(0.0, deadline - time.monotonic()))
                channel.status_event.wait(max(0.0, deadline - time.monotonic()))
                if errors.is_alive() or not channel.status_event.is_set():
                    raise TimeoutError
            except TimeoutError:
                self._end_group(group)
                raise DeviceTimeoutError(
                    f"{self.name}: {argv[0]} did not finish within {timeout_s:g} s and was ended"
                ) from None
            except BaseException:
                with contextlib.suppress(DeviceError, DeviceUnreachableError):
                    self._end_group(group)
                raise
            code = channel.exit_status
        if code < 0:
            self._check_alive(f"while {argv[0]} ran")
            raise DeviceError(f"{self.name}: {argv[0]} was ended there by something else")
        signal_number = code - 128
        returncode = -signal_number if 1 <= signal_number <= 64 else code
        return CommandResult(tuple(argv), returncode, bytes(stdout), bytes(stderr))

    def _start(self, argv: Sequence[str]) -> tuple[paramiko.Channel, int, bytes, bytes]:
        """Starts `argv`. Returns its channel, process group, and output that came along already."""
        token = f"edgesdk-{secrets.token_hex(8)}"
        command = shlex.join(["sh", "-c", _START, "sh", _START, token, *argv])
        with self._alive(f"while starting {argv[0]}"):
            channel = self._transport.open_session(timeout=self._device.timeout_s)
            try:
                channel.settimeout(max(self._device.timeout_s, _SMALL_TIMEOUT_S))
                channel.exec_command(f"exec {command}")
                marker = token.encode()
                err_line, stderr = self._read_past(marker, channel.recv_stderr)
                _, stdout = self._read_past(marker, channel.recv)
                return channel, int(err_line), stdout, stderr
            except BaseException:
                channel.close()
                raise

    def _read_past(self, marker: bytes, receive: Callable[[int], bytes]) -> tuple[bytes, bytes]:
        """Returns the rest of the line with `marker`, and what follows that line."""
        data = b""
        while True:
            _, found, after = data.partition(marker)
            if found and b"\n" in after:
                line, _, rest = after.partition(b"\n")
                return line, rest
            chunk = receive(4096)
            if not chunk:
                self._check_alive("while a program was being started")
                said = data.decode("utf-8", "replace").strip() or "it said nothing"
                raise DeviceError(
                    f"{self.name}: the login shell starts no program: {said.splitlines()[-1]}",
                    hint="edgesdk needs a POSIX shell, and setsid where the SSH server is Dropbear",
                )
            data += chunk

    def _end_group(self, group: int) -> None:
        """Ends all processes of the group; returns when the signal is sent."""
        channel, *_ = self._start(["sh", "-c", f"kill -9 -{group}"])
        with contextlib.closing(channel):
            channel.status_event.wait(_SMALL_TIMEOUT_S)

    # Files

    def _send(self, local: Path, temporary: str, progress: Progress | None) -> None:
        sftp = self._open_sftp()
        if sftp is None:
            self._send_through_shell(local, temporary, progress)
            return
        with self._alive(f"while {local.name} was copied"):
            try:
                self._send_through_sftp(sftp, local, temporary, progress)
            except FileNotFoundError:
                self._make_folder(posixpath.dirname(temporary))
                try:
                    self._send_through_sftp(sftp, local, temporary, progress)
                except OSError as error:
                    raise self._write_error(local, temporary, str(error)) from error
            except TimeoutError as error:
                raise DeviceTimeoutError(
                    f"{self.name}: nothing moved for {self._device.timeout_s:g} s "
                    f"while {local.name} was copied",
                    hint="check the network; a slow board may want a larger timeout-s",
                ) from error
            except OSError as error:
                self._check_alive(f"while {local.name} was copied")
                raise self._write_error(local, temporary, str(error)) from error

    def _send_through_sftp(
        self, sftp: paramiko.SFTPClient, local: Path, temporary: str, progress: Progress | None
    ) -> None:
        with local.open("rb") as reader, sftp.open(temporary, "wb") as writer:
            # Without it every 32 KB wait for their answer. An error then surfaces at a later write
            # or at close.
            writer.set_pipelined(True)
            done = 0
            while chunk := reader.read(_SFTP_WRITE_BYTES):
                writer.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done)

    def _send_through_shell(self, local: Path, temporary: str, progress: Progress | None) -> None:
        def feed(write: Callable[[bytes], None]) -> None:
            done = 0
            with local.open("rb") as reader:
                while chunk := reader.read(_SFTP_WRITE_BYTES):
                    write(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(done)

        script = 'mkdir -p "$(dirname "$1")" && cat >"$1"'
        # A tenth of the slowest network in use, so that only a dead one is cut off.
        limit = _HASH_TIMEOUT_S + local.stat().st_size / 10_000
        result = self._run(["sh", "-c", script, "edgesdk", temporary], timeout_s=limit, feed=feed)
        if not result.ok:
            raise self._write_error(local, temporary, result.last_line())

    def _finish_upload(self, local: Path, temporary: str, target: str, mode: str) -> None:
        wanted = sha256_of(local)
        arguments = [target, temporary, wanted, mode]
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
            return sha256_of(copy)

    def _fetch(self, source: str, file: BinaryIO) -> None:
        """Writes the device's file into `file`. Through `cat`: its exit code vouches for all."""
        result = self._run(
            ["cat", source],
            timeout_s=24 * 3600.0,
            feed=lambda write: None,
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

    # The connection

    @property
    def _transport(self) -> paramiko.Transport:
        transport = self._connection.transport
        if transport is None or not transport.is_active():
            raise DeviceUnreachableError(
                f"the connection to {self.name} is closed", hint="connect again"
            )
        return transport

    def _open_sftp(self) -> paramiko.SFTPClient | None:
        """Returns the SFTP session, None where the server has no SFTP."""
        import paramiko

        if self._sftp is None and self._has_sftp:
            with self._alive("while SFTP was opened"):
                try:
                    self._sftp = paramiko.SFTPClient.from_transport(self._transport)
                except (paramiko.SSHException, EOFError) as error:
                    # EOFError: Dropbear accepts the request and then has no program for it.
                    self._check_alive("while SFTP was opened", error)
                    self._has_sftp = False
            if self._sftp is not None:
                self._sftp.get_channel().settimeout(self._device.timeout_s)
        return self._sftp

    @contextlib.contextmanager
    def _alive(self, when: str) -> Iterator[None]:
        """Turns what paramiko raises when a connection breaks into one error."""
        import paramiko

        try:
            yield
        except TimeoutError as error:
            raise DeviceTimeoutError(
                f"{self.name} did not answer within {self._device.timeout_s:g} s {when}",
                hint="the board may be overloaded or hang; a larger timeout-s waits longer",
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            self._check_alive(when, error)
            raise DeviceError(f"{self.name}: the SSH server failed {when}: {error}") from error

    def _check_alive(self, when: str, error: BaseException | None = None) -> None:
        transport = self._connection.transport
        # The end of the stream is seen a moment before the transport's thread notes that it ended.
        for _ in range(20):
            if transport is None or not transport.is_active():
                raise DeviceUnreachableError(
                    f"the connection to {self.name} was lost {when}",
                    hint="did the board restart, or leave the network? try again",
                ) from error
            if not isinstance(error, EOFError | OSError):
                break
            time.sleep(0.05)


class _SshStream(Stream):
    def __init__(
        self,
        owner: SshTransport,
        channel: paramiko.Channel,
        group: int,
        first_out: bytes,
        first_err: bytes,
    ) -> None:
        self._owner = owner
        self._channel = channel
        self._group = group
        self._ahead = first_out
        self._stderr = bytearray(first_err)
        threading.Thread(
            target=_collect, args=(channel.recv_stderr, self._stderr), daemon=True
        ).start()

    def write(self, data: bytes) -> None:
        try:
            self._channel.settimeout(None)
            self._channel.sendall(data)
        except OSError as error:
            self._owner._check_alive("while a program was written to", error)
            raise DeviceError(f"{self._owner.name}: the program has ended") from error

    def read(self, size: int, *, timeout_s: float) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
            return data
        self._channel.settimeout(timeout_s)
        try:
            data = self._channel.recv(size)
        except TimeoutError:
            raise DeviceTimeoutError(
                f"{self._owner.name}: the program said nothing for {timeout_s:g} s"
            ) from None
        if not data:
            self._owner._check_alive("while a program was read from")
        return data

    def close_input(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._channel.shutdown_write()

    def stderr_text(self) -> str:
        return bytes(self._stderr).decode("utf-8", "replace")

    def close(self) -> None:
        if self._channel.closed and self._channel.exit_status >= 0:
            return
        with contextlib.suppress(DeviceError, DeviceUnreachableError):  # gone with the connection
            self._owner._end_group(self._group)
        self._channel.close()


def _before(deadline: float, channel: Any, receive: Callable[[], bytes]) -> bytes:
    """Calls `receive`, which raises TimeoutError at `deadline` (of time.monotonic)."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    channel.settimeout(left)
    return receive()


def _collect(receive: Callable[[int], bytes], into: bytearray) -> None:
    """Reads until the end. Runs in a thread, so that neither output can block the other."""
    while True:
        try:
            chunk = receive(1 << 16)
        except TimeoutError:
            continue
        if not chunk:
            return
        into.extend(chunk)


def _feed(channel: paramiko.Channel, feed: Callable[[Callable[[bytes], None]], None]) -> None:
    with contextlib.suppress(OSError):  # the program ended without reading everything
        feed(lambda data: _send_all(channel, data))
        channel.shutdown_write()


def _send_all(channel: paramiko.Channel, data: bytes) -> None:
    view = memoryview(data)
    while view:
        with contextlib.suppress(TimeoutError):  # the limit is for the whole run, not for a write
            view = view[channel.send(view[: 1 << 16].tobytes()) :]
