"""Programs over an SSH connection: started in groups of their own, fed, read, limited, ended."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from edgesdk.deploy.transport.base import DeviceTimeoutError, Stream
from edgesdk.deploy.transport.shell import SMALL_TIMEOUT_S, Feed
from edgesdk.deploy.transport.ssh_connect import connect
from edgesdk.devices import Device
from edgesdk.errors import DeviceError, DeviceUnreachableError
from edgesdk.proc import CommandResult

if TYPE_CHECKING:
    import paramiko

# Starts every program. $1 is this text itself, $2 a token that ends whatever the user's shell
# start-up files print, the rest the program. The line on standard error tells the process group,
# through which a program is ended with its children. OpenSSH gives each command a group of its own;
# where a server does not (`kill -0` on the group fails), setsid makes one. No `exec` at the end:
# paramiko does not hear of signals, but the shell turns them into exit codes above 128.
_START = (
    'kill -0 -$$ 2>/dev/null || exec setsid sh -c "$1" "$0" "$@"; '
    'printf "%s\\n" "$2"; printf "%s %s\\n" "$2" $$ >&2; shift 2; "$@"; exit $?'
)


class SshSession:
    """A connection to `device`; see `ssh_connect.connect` for what its constructor raises."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._connection = connect(device)
        self._sftp: paramiko.SFTPClient | None = None
        self._has_sftp = True

    @property
    def name(self) -> str:
        return self._device.name

    def close(self) -> None:
        self._connection.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        feed: Feed = lambda write: None,
        sink: Callable[[bytes], None] | None = None,
    ) -> CommandResult:
        """Runs `argv`; `feed` gets a function that writes to its input, `sink` its output."""
        deadline = time.monotonic() + timeout_s
        stdout, stderr = bytearray(), bytearray()
        channel, group, first_out, first_err = self.start(argv)
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
                self.end_group(group)
                raise DeviceTimeoutError(
                    f"{self.name}: {argv[0]} did not finish within {timeout_s:g} s and was ended"
                ) from None
            except BaseException:
                with contextlib.suppress(DeviceError, DeviceUnreachableError):
                    self.end_group(group)
                raise
            code = channel.exit_status
        if code < 0:
            self.check_alive(f"while {argv[0]} ran")
            raise DeviceError(f"{self.name}: {argv[0]} was ended there by something else")
        signal_number = code - 128
        returncode = -signal_number if 1 <= signal_number <= 64 else code
        return CommandResult(tuple(argv), returncode, bytes(stdout), bytes(stderr))

    def open_stream(self, argv: Sequence[str]) -> Stream:
        return SshStream(self, *self.start(argv))

    def start(self, argv: Sequence[str]) -> tuple[paramiko.Channel, int, bytes, bytes]:
        """Starts `argv`. Returns its channel, process group, and output that came along already."""
        token = f"edgesdk-{secrets.token_hex(8)}"
        command = shlex.join(["sh", "-c", _START, "sh", _START, token, *argv])
        with self.alive(f"while starting {argv[0]}"):
            channel = self._transport.open_session(timeout=self._device.timeout_s)
            try:
                channel.settimeout(max(self._device.timeout_s, SMALL_TIMEOUT_S))
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
                self.check_alive("while a program was being started")
                said = data.decode("utf-8", "replace").strip() or "it said nothing"
                raise DeviceError(
                    f"{self.name}: the login shell starts no program: {said.splitlines()[-1]}",
                    hint="edgesdk needs a POSIX shell, and setsid where the SSH server is Dropbear",
                )
            data += chunk

    def end_group(self, group: int) -> None:
        """Ends all processes of the group; returns when the signal is sent."""
        channel, *_ = self.start(["sh", "-c", f"kill -9 -{group}"])
        with contextlib.closing(channel):
            channel.status_event.wait(SMALL_TIMEOUT_S)

    @property
    def _transport(self) -> paramiko.Transport:
        transport = self._connection.transport
        if transport is None or not transport.is_active():
            raise DeviceUnreachableError(
                f"the connection to {self.name} was lost, or is closed", hint="connect again"
            )
        return transport

    def open_sftp(self) -> paramiko.SFTPClient | None:
        """Returns the SFTP session, None where the server has no SFTP."""
        import paramiko

        if self._sftp is None and self._has_sftp:
            with self.alive("while SFTP was opened"):
                try:
                    self._sftp = paramiko.SFTPClient.from_transport(self._transport)
                except (paramiko.SSHException, EOFError) as error:
                    # EOFError: Dropbear accepts the request and then has no program for it.
                    self.check_alive("while SFTP was opened", error)
                    self._has_sftp = False
            if self._sftp is not None:
                self._sftp.get_channel().settimeout(self._device.timeout_s)
        return self._sftp

    @contextlib.contextmanager
    def alive(self, when: str) -> Iterator[None]:
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
            self.check_alive(when, error)
            raise DeviceError(f"{self.name}: the SSH server failed {when}: {error}") from error

    def check_alive(self, when: str, error: BaseException | None = None) -> None:
        transport = self._connection.transport
        # After an error: paramiko's thread notes the end of the connection a moment later.
        for _ in range(10 if error is not None else 1):
            if transport is None or not transport.is_active():
                raise DeviceUnreachableError(
                    f"the connection to {self.name} was lost {when}",
                    hint="did the board restart, or leave the network? try again",
                ) from error
            time.sleep(0.05)


class SshStream(Stream):
    def __init__(
        self,
        owner: SshSession,
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
            self._owner.check_alive("while a program was written to", error)
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
            self._owner.check_alive("while a program was read from")
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
            self._owner.end_group(self._group)
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


def _feed(channel: paramiko.Channel, feed: Feed) -> None:
    with contextlib.suppress(OSError):  # the program ended without reading everything
        feed(lambda data: _send_all(channel, data))
        channel.shutdown_write()


def _send_all(channel: paramiko.Channel, data: bytes) -> None:
    view = memoryview(data)
    while view:
        with contextlib.suppress(TimeoutError):  # the limit is for the whole run, not for a write
            view = view[channel.send(view[: 1 << 16].tobytes()) :]
