"""An emulated ARM board with a real SSH server, for the tests and the demonstration.

A Debian root of another architecture runs in a chroot through qemu-user: `uname -m` says aarch64,
real ARM files run, and the only way in is SSH on a loopback port. It shows that things work, never
how fast. The root is built once into the cache folder and mounted read-only; what a board writes
lives in memory and is gone with it. Server and mounts live in namespaces of their own: when the
server ends, for whatever reason, the kernel ends every process of the board and undoes every mount.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgesdk.devices import Device
from edgesdk.errors import EdgeSdkError, ToolMissingError
from edgesdk.proc import run_command
from edgesdk.resources import cache_folder

Architecture = Literal["arm64", "armhf"]
Server = Literal["openssh", "openssh-without-sftp", "dropbear"]

_SUITE = "bookworm"
_PACKAGES = ("openssh-server", "dropbear-bin", "busybox", "libstdc++6", "procps")
_USER = "pi"
# Runs inside the new root once, when it is built. "*" instead of "!": no password, but not locked,
# because sshd refuses locked accounts even with a key. Emulated, bash takes twice as long to start
# as the small shell does; the user root has it.
_SETUP = f"useradd --create-home --shell /bin/sh --password '*' {_USER}"
_BINFMT_NAMES = {"arm64": "qemu-aarch64", "armhf": "qemu-arm"}
_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_BUILD_TIMEOUT_S = 1800.0
_START_TIMEOUT_S = 30.0

# Dropbear starts itself anew for each connection, in a way that qemu-user cannot follow; so it is
# started for each connection here, as inetd does. $1: the port, the rest: the server's arguments.
_INETD = """
import contextlib, os, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    peer, _ = listener.accept()
    if os.fork() == 0:
        os.dup2(peer.fileno(), 0)
        os.dup2(peer.fileno(), 1)
        os.execvp(sys.argv[2], sys.argv[2:])
    peer.close()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
"""

# $1: the root, $2: the folder with keys and settings, $3: tmpfs folders "name=options" below the
# user's home, one a word, $4: the server, $5: the port, $6: Python, $7: _INETD.
_START_SCRIPT = f"""
set -eu
root=$1 settings=$2 folders=$3 server=$4 port=$5 python=$6 inetd=$7
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
for folder in root home run tmp; do
    mount -t tmpfs -o size=1g,mode=755 "board-$folder" "$root/$folder"
done
chmod 1777 "$root/tmp"
mkdir -p "$root/run/sshd" "$root/run/board"
cp "$settings"/ssh_host_key "$settings"/authorized_keys "$settings"/sshd_config "$root/run/board/"
home=$root/home/{_USER}
for user_home in "$root/root" "$home"; do
    mkdir -p "$user_home/.ssh"
    cp "$settings/authorized_keys" "$user_home/.ssh/"
    chmod 700 "$user_home/.ssh"
    chmod 600 "$user_home/.ssh/authorized_keys"
done
chroot "$root" chown -R {_USER}:{_USER} "/home/{_USER}"
for folder in $folders; do
    mkdir "$home/${{folder%%=*}}"
    mount -t tmpfs -o "${{folder#*=}}" board-folder "$home/${{folder%%=*}}"
done
case $server in
    openssh)
        exec chroot "$root" /usr/sbin/sshd -D -e -f /run/board/sshd_config \\
            -o "Subsystem=sftp internal-sftp" -p "$port" ;;
    openssh-without-sftp)
        exec chroot "$root" /usr/sbin/sshd -D -e -f /run/board/sshd_config -p "$port" ;;
    dropbear)
        # Dropbear starts this program for SFTP when it is there; small systems do not have it.
        mount --bind /dev/null "$root/usr/lib/openssh/sftp-server"
        chroot "$root" dropbearkey -t ed25519 -f /run/board/dropbear_host_key >/dev/null
        chroot "$root" dropbearkey -y -f /run/board/dropbear_host_key >"$settings/dropbear.pub"
        exec "$python" -I -c "$inetd" "$port" \\
            chroot "$root" /usr/sbin/dropbear -i -s -r /run/board/dropbear_host_key ;;
esac
"""

_SSHD_CONFIG = """\
ListenAddress 127.0.0.1
HostKey /run/board/ssh_host_key
AuthorizedKeysFile .ssh/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PrintMotd no
PidFile none
"""


class BoardError(EdgeSdkError):
    """An emulated board cannot be built or started on this machine (exit code 1)."""


def reason_unavailable(arch: Architecture) -> str | None:
    """Says why this machine cannot run an emulated board of `arch`, or None when it can."""
    if not sys.platform.startswith("linux"):
        return "emulated boards need Linux"
    if os.geteuid() != 0:
        return "emulated boards need root (chroot and mount)"
    for tool, package in (
        ("mmdebstrap", "mmdebstrap"),
        ("ssh-keygen", "openssh-client"),
        ("unshare", "util-linux"),
        ("setpriv", "util-linux"),
    ):
        if shutil.which(tool) is None:
            return f"{tool} is not installed: apt-get install {package}"
    if not _enable_emulation(arch):
        return (
            f"the kernel does not start {arch} programs: "
            "apt-get install qemu-user-static binfmt-support"
        )
    return None


def board_root(arch: Architecture) -> Path:
    """Returns the root folder of boards of `arch`; builds it first (minutes) when it is missing.

    Raises ToolMissingError when this machine cannot build it, BoardError when building fails.
    """
    reason = reason_unavailable(arch)
    if reason is not None:
        raise ToolMissingError(f"no emulated {arch} board: {reason}")
    recipe = "\n".join((arch, _SUITE, *_PACKAGES, _SETUP))
    key = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    boards = cache_folder() / "boards"
    boards.mkdir(parents=True, exist_ok=True)
    root = boards / f"{arch}-{key}"
    with (boards / f"{root.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.is_dir():
            _build_root(arch, root)
    return root


@dataclass(frozen=True)
class _Running:
    """One life of the board: its server process, and the port it answers on."""

    process: subprocess.Popen[bytes]
    port: int


class EmulatedBoard:
    """A board that is on between `with` and its end.

    `folders` maps folder names below the user's home to the mount options of a file system of their
    own, e.g. {"small": "size=8m", "readonly": "ro"}. `ssh_config` is a file for `ssh -F` and
    `Device.ssh_config`: it knows the board's key and the user's, and nothing of the real user's.
    """

    user = _USER
    host = "127.0.0.1"

    def __init__(
        self,
        arch: Architecture,
        *,
        server: Server = "openssh",
        folders: Mapping[str, str] | None = None,
    ) -> None:
        self.arch = arch
        self._server = server
        self._folders = dict(folders or {})
        self._running: _Running | None = None
        self._settings: Path | None = None

    def __enter__(self) -> EmulatedBoard:
        root = board_root(self.arch)
        self._settings = Path(tempfile.mkdtemp(prefix="edgesdk-board-"))
        try:
            self._write_settings()
            self._start(root)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._settings is not None:
            shutil.rmtree(self._settings, ignore_errors=True)
            self._settings = None

    @property
    def settings(self) -> Path:
        """The folder on this machine with the keys, `ssh_config` and `known_hosts` of the board."""
        if self._settings is None:
            raise BoardError("the board is not on")
        return self._settings

    @property
    def port(self) -> int:
        if self._running is None:
            raise BoardError("the board is not on")
        return self._running.port

    @property
    def ssh_config(self) -> Path:
        return self.settings / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.settings / "known_hosts"

    @property
    def identity_file(self) -> Path:
        return self.settings / "user_key"

    @property
    def log(self) -> str:
        """What the server has said so far."""
        return (self.settings / "server.log").read_text(encoding="utf-8", errors="replace")

    def device(self, name: str = "board") -> Device:
        """Returns the entry of `devices.toml` that reaches this board."""
        return Device(
            name=name,
            transport="ssh",
            host=self.host,
            port=self.port,
            user=self.user,
            identity_file=str(self.identity_file),
            ssh_config=str(self.ssh_config),
        )

    def host_key_line(self) -> str:
        """Returns the line of a known_hosts file for this board."""
        name = "dropbear.pub" if self._server == "dropbear" else "ssh_host_key.pub"
        for line in (self.settings / name).read_text(encoding="utf-8").splitlines():
            if line.startswith("ssh-ed25519 "):
                return f"[{self.host}]:{self.port} {' '.join(line.split()[:2])}\n"
        raise BoardError(f"the board wrote no host key into {name}")

    def kill(self) -> None:
        """Ends the server and every process of the board at once, as pulling the plug does."""
        if self._running is None:
            return
        process, self._running = self._running.process, None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)

    def _write_settings(self) -> None:
        folder = self.settings
        for name in ("ssh_host_key", "user_key"):
            path = folder / name
            run_command(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path], timeout_s=20
            )
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        (folder / "sshd_config").write_text(_SSHD_CONFIG, encoding="utf-8")

    def _start(self, root: Path) -> None:
        last = ""
        for _ in range(3):  # another program may take the port between choosing and listening
            port = _free_port()
            process = self._spawn(root, port)
            try:
                self._running = _Running(process, port)
                if _answers(process, port):
                    self.known_hosts.write_text(self.host_key_line(), encoding="utf-8")
                    self._write_ssh_config(port)
                    return
                last = self.log.strip().rpartition("\n")[2]
            except BaseException:
                self.kill()
                raise
            self.kill()
        raise BoardError(f"the emulated {self.arch} board did not start: {last or 'it is silent'}")

    def _spawn(self, root: Path, port: int) -> subprocess.Popen[bytes]:
        folders = " ".join(f"{name}={options}" for name, options in self._folders.items())
        # setpriv: the board also ends when this process is killed and cannot clean up.
        argv = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"]
        argv += ["--pid", "--fork", "--kill-child=KILL", "sh", "-c", _START_SCRIPT, "board"]
        argv += [str(root), str(self.settings), folders, self._server, str(port)]
        argv += [sys.executable, _INETD]
        with (self.settings / "server.log").open("wb") as log:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _write_ssh_config(self, port: int) -> None:
        self.ssh_config.write_text(
            f"Host {self.host} board\n"
            f"    HostName {self.host}\n    Port {port}\n    User {self.user}\n"
            f"    IdentityFile {self.identity_file}\n    IdentitiesOnly yes\n"
            f"    UserKnownHostsFile {self.known_hosts}\n",
            encoding="utf-8",
        )


def _enable_emulation(arch: Architecture) -> bool:
    """Switches the kernel's emulation of `arch` on, as installing qemu-user-static does.

    In a container the file system that the switch lives in is often not mounted. It is a switch of
    the whole machine, like the package itself, so it stays on.
    """
    switch = _BINFMT / _BINFMT_NAMES[arch]
    if not switch.exists() and shutil.which("update-binfmts"):
        if not (_BINFMT / "register").exists():
            run_command(["mount", "-t", "binfmt_misc", "none", _BINFMT], timeout_s=10)
        run_command(["update-binfmts", "--enable", _BINFMT_NAMES[arch]], timeout_s=10)
    return switch.exists()


def _build_root(arch: Architecture, root: Path) -> None:
    for old in root.parent.glob(f"{root.name}.new*"):  # left by a build that was interrupted
        shutil.rmtree(old)
    new = root.with_name(f"{root.name}.new")
    argv = ["mmdebstrap", f"--arch={arch}", "--variant=minbase", "--quiet"]
    argv += [f"--include={','.join(_PACKAGES)}", f'--customize-hook=chroot "$1" {_SETUP}']
    argv += [_SUITE, str(new), *archive_of_this_machine()]
    # In namespaces of its own, so that an interrupted build leaves neither mounts nor processes.
    isolated = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc"]
    try:
        result = run_command([*isolated, "--kill-child=KILL", *argv], timeout_s=_BUILD_TIMEOUT_S)
        if not result.ok:
            raise BoardError(
                f"the root of the emulated {arch} board cannot be built: {result.last_line()}",
                hint="check the network and this machine's Debian archive, then try again",
            )
        new.rename(root)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def archive_of_this_machine() -> list[str]:
    """Returns the archive line of apt for the suite, as this machine uses it; else an empty list.

    The main archive is enough for a throw-away board. With nothing given, mmdebstrap adds the
    security archive too, and fails whenever a mirror of that is half-way through an update.
    """
    result = run_command(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)"],
        timeout_s=30,
    )
    for line in result.stdout_text.splitlines():
        uri, _, rest = line.partition(" ")
        if rest == f"{_SUITE} main":
            return [f"deb {uri} {_SUITE} main"]
    return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Waits until the server greets on `port`; False when it ended instead."""
    for _ in _until(time.monotonic() + _START_TIMEOUT_S):
        if process.poll() is not None:
            return False
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as peer:
            if peer.recv(4) == b"SSH-":
                return process.poll() is None
    return False


def _until(deadline: float) -> Iterator[None]:
    while time.monotonic() < deadline:
        yield
        time.sleep(0.05)
