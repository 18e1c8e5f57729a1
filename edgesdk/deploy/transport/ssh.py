"""A device reached over SSH. It needs a POSIX shell there; SFTP is used where it exists."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import TYPE_CHECKING

from edgesdk.deploy.transport.base import DeviceTimeoutError, Progress
from edgesdk.deploy.transport.shell import SEND_BYTES, ShellTransport
from edgesdk.deploy.transport.ssh_session import SshSession
from edgesdk.devices import Device

if TYPE_CHECKING:
    import paramiko


class SshTransport(ShellTransport):
    """Connects in its constructor; see `ssh_connect.connect` for what that raises."""

    def __init__(self, device: Device) -> None:
        self._ssh = SshSession(device)
        super().__init__(device, self._ssh)

    def _send(self, local: Path, temporary: str, progress: Progress | None) -> None:
        sftp = self._ssh.open_sftp()
        if sftp is None:
            self._send_through_shell(local, temporary, progress)
            return
        with self._ssh.alive(f"while {local.name} was copied"):
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
                self._ssh.check_alive(f"while {local.name} was copied", error)
                raise self._write_error(local, temporary, str(error)) from error

    def _send_through_sftp(
        self, sftp: paramiko.SFTPClient, local: Path, temporary: str, progress: Progress | None
    ) -> None:
        with local.open("rb") as reader, sftp.open(temporary, "wb") as writer:
            # Without it every 32 KB wait for their answer. An error then surfaces at a later write
            # or at close.
            writer.set_pipelined(True)
            done = 0
            while chunk := reader.read(SEND_BYTES):
                writer.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done)
