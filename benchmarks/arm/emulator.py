"""Counts the instructions of aarch64 programs under qemu-user, without a chroot.

Needs a qemu-user that can load plugins: Debian's dynamic `qemu-user` can (its `qemu-user-static`,
which edgesdk's emulated boards use, cannot). Where it is not installed, the package is unpacked
into the cache folder; so are a Debian arm64 root with Python and the aarch64 wheels of ONNX Runtime
and NumPy. Programs see the root in place of /usr and /lib (qemu's -L).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgesdk.proc import CommandResult, run_command
from edgesdk.resources import cache_folder

# 1.32.0 is the newest, but crashes while it is loaded under qemu-user 7.2 (see RESULTS.md).
WHEELS = ("onnxruntime==1.23.2", "numpy==2.4.6")
_PYTHON = "3.11"  # of the suite below
_SUITE = "bookworm"
_QEMU_PACKAGES = ("qemu-user", "libcapstone4", "liburing2")
_PLUGIN_SOURCE = Path(__file__).with_name("count.c")
_RUN_LIMIT_S = 600.0
_SETUP_LIMIT_S = 900.0


@dataclass(frozen=True)
class Emulator:
    """`qemu` with its shared libraries, the plugin, the arm64 `root`, and unpacked wheels."""

    qemu: Path
    libraries: Path
    plugin: Path
    root: Path
    wheels: Path
    cpu: str

    @property
    def python(self) -> Path:
        return self.root / "usr" / "bin" / f"python{_PYTHON}"

    def run(self, argv: Sequence[str | Path]) -> tuple[int, CommandResult]:
        """Runs an aarch64 program to its end; returns how many instructions it executed.

        Raises RuntimeError with the program's last line when it fails.
        """
        with tempfile.TemporaryDirectory() as temporary:
            count = Path(temporary) / "count"
            environment = {
                "LD_LIBRARY_PATH": str(self.libraries),
                # Without -U it would reach the emulated program as well.
                "PYTHONPATH": str(self.wheels),
                "OPENBLAS_NUM_THREADS": "1",
            }
            command: list[str | Path] = [self.qemu, "-cpu", self.cpu, "-U", "LD_LIBRARY_PATH"]
            command += ["-plugin", f"{self.plugin},out={count}", "-L", self.root, *argv]
            result = run_command(command, timeout_s=_RUN_LIMIT_S, env=environment)
            if not result.ok:
                raise RuntimeError(f"{argv[0]}: {result.last_line()}")
            return int(count.read_text(encoding="utf-8")), result

    def instructions(self, argv: Sequence[str | Path], runs: int) -> int:
        """The instructions of one run of the network: argv + [N] runs it N times.

        The difference of two programs that differ in nothing but N: what loading costs is in
        neither.
        """
        few, _ = self.run([*argv, "1"])
        many, _ = self.run([*argv, str(1 + runs)])
        return (many - few) // runs

    def version(self) -> str:
        result = run_command(
            [self.qemu, "--version"], timeout_s=30, env={"LD_LIBRARY_PATH": str(self.libraries)}
        )
        return result.stdout_text.partition("\n")[0]


def prepare(cpu: str) -> Emulator:
    """Finds or unpacks everything. Raises RuntimeError saying which step failed."""
    folder = cache_folder() / "bench" / "arm"
    folder.mkdir(parents=True, exist_ok=True)
    tools = _unpacked_qemu(folder)
    return Emulator(
        qemu=tools / "usr" / "bin" / "qemu-aarch64",
        libraries=tools / "usr" / "lib" / "x86_64-linux-gnu",
        plugin=_plugin(folder),
        root=_root(folder),
        wheels=_unpacked_wheels(folder),
        cpu=cpu,
    )


def _unpacked_qemu(folder: Path) -> Path:
    target = folder / "qemu"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            _check(["apt-get", "download", *_QEMU_PACKAGES], cwd=Path(temporary))
            unpacked = Path(temporary) / "root"
            for package in sorted(Path(temporary).glob("*.deb")):
                _check(["dpkg", "-x", package, unpacked])
            unpacked.rename(target)
    return target


def _plugin(folder: Path) -> Path:
    library = folder / "libcount.so"
    if not library.exists() or library.stat().st_mtime < _PLUGIN_SOURCE.stat().st_mtime:
        flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
        _check(["gcc", *flags, "-o", library, _PLUGIN_SOURCE])
    return library


def _root(folder: Path) -> Path:
    """A root whose packages are unpacked, not configured: nothing needs to be emulated for that."""
    root = folder / "root"
    if not root.exists():
        new = folder / "root.new"
        shutil.rmtree(new, ignore_errors=True)
        command: list[str | Path] = ["mmdebstrap", "--arch=arm64", "--variant=extract", "--quiet"]
        _check([*command, "--include=python3,libstdc++6", _SUITE, new])
        new.rename(root)
    return root


def _unpacked_wheels(folder: Path) -> Path:
    target = folder / ("wheels-" + "-".join(name.replace("==", "-") for name in WHEELS))
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
            command += ["--only-binary", ":all:", "--python-version", _PYTHON, "--dest", temporary]
            for tag in ("manylinux_2_28", "manylinux_2_27", "manylinux2014"):
                command += ["--platform", f"{tag}_aarch64"]
            _check([*command, *WHEELS])
            unpacked = Path(temporary) / "unpacked"
            for wheel in Path(temporary).glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(unpacked)
            unpacked.rename(target)
    return target


def _check(command: Sequence[str | Path], cwd: Path | None = None) -> None:
    environment = {"LC_ALL": "C", "PATH": os.environ["PATH"]}
    result = run_command(command, timeout_s=_SETUP_LIMIT_S, cwd=cwd, env=environment)
    if not result.ok:
        raise RuntimeError(f"{command[0]}: {result.last_line()}")
