"""This machine as a device: the same verbs, without a connection."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgesdk.bundle import file_sha256
from edgesdk.deploy.transport.base import (
    CHUNK_BYTES,
    DeviceTimeoutError,
    Progress,
    Stream,
    Transport,
    absolute_path,
    end_process_group,
    size_text,
    start_on_socket,
)
from edgesdk.devices import Device
from edgesdk.errors import DeviceError, ToolMissingError, UsageError
from edgesdk.proc import CommandResult, CommandTimeout, run_command
from edgesdk.resources import cache_folder


class LocalTransport(Transport):
    """Runs programs of this machine in a folder below the cache folder."""

    def __init__(self, device: Device) -> None:
        self._name = device.name
        # The default, ".edgesdk", is meant for a home folder that is not edgesdk's own.
        folder = cache_folder() / "devices" / device.name
        if device.work_dir != Device.work_dir:
            folder = Path.home() / Path(device.work_dir).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DeviceError(
                f"the work folder {folder} cannot be made: {error.strerror}",
                hint="set another work-dir for the device in devices.toml",
            ) from error
        self._work_dir = str(folder.absolute())

    @property
    def name(self) -> str:
        return self._name

    @property
    def work_dir(self) -> str:
        return self._work_dir

    def run(
        self, argv: Sequence[str], *, timeout_s: float, input_bytes: bytes | None = None
    ) -> CommandResult:
        try:
            return run_command(
                argv, timeout_s=timeout_s, cwd=Path(self._work_dir), input_bytes=input_bytes
            )
        except CommandTimeout as error:
            raise DeviceTimeoutError(f"{self._name}: {error.message}") from error
        except ToolMissingError as error:
            # As a shell reports it, so that callers see one behaviour on all devices.
            return CommandResult(tuple(argv), 127, b"", error.message.encode())

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
        target = Path(absolute_path(self._work_dir, remote))
        with self._explained(f"{local.name} to {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy(local, target, progress)
            if executable:
                target.chmod(0o755)
        if executable and not os.access(target, os.X_OK):
            raise DeviceError(
                f"{self._name}: nothing can be started in {target.parent}: it is mounted noexec",
                hint="set another work-dir for the device in devices.toml",
            )

    def download(self, remote: str, local: Path) -> None:
        source = Path(absolute_path(self._work_dir, remote))
        with self._explained(f"{source} to {local}"):
            _copy(source, local, None)

    def open_stream(self, argv: Sequence[str]) -> Stream:
        return _LocalStream(self._name, argv, Path(self._work_dir))

    def close(self) -> None:
        pass

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = None
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(self._work_dir).free
                hint = f"{size_text(free)} are free: delete something, or set another work-dir"
            raise DeviceError(
                f"{self._name}: cannot copy {what}: {error.strerror or error}", hint=hint
            ) from error


class _LocalStream(Stream):
    def __init__(self, name: str, argv: Sequence[str], cwd: Path) -> None:
        self._name = name
        self._program = argv[0]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        try:
            self._socket, self._process = start_on_socket(argv, stderr=self._stderr, cwd=cwd)
        except OSError as error:
            self._stderr.close()
            raise DeviceError(
                f"{name}: cannot start {argv[0]!r}: {error.strerror or error}"
            ) from error

    def write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise DeviceError(f"{self._name}: {self._program} has ended: {error}") from error

    def read(self, size: int, *, timeout_s: float) -> bytes:
        self._socket.settimeout(timeout_s)
        try:
            return self._socket.recv(size)
        except TimeoutError:
            raise DeviceTimeoutError(
                f"{self._name}: {self._program} said nothing for {timeout_s:g} s"
            ) from None
        except ConnectionError:  # it ended without reading all of its input
            return b""

    def close_input(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_WR)

    def stderr_text(self) -> str:
        # The program writes at the end of the same open file: read without moving that place.
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), size, 0).decode("utf-8", "replace")

    def close(self) -> None:
        if self._stderr.closed:
            return
        end_process_group(self._process)
        self._socket.close()
        self._stderr.close()


def _copy(source: Path, target: Path, progress: Progress | None) -> None:
    """Copies through a temporary name beside `target`; the hash guards against a failing disk."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with source.open("rb") as reader, os.fdopen(handle, "wb") as writer:
            done = 0
            while chunk := reader.read(CHUNK_BYTES):
                writer.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done)
            writer.flush()
            os.fsync(writer.fileno())
        if file_sha256(Path(temporary)) != file_sha256(source):
            raise OSError(errno.EIO, "the copy differs from the original")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
