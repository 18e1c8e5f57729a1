"""Target profiles: what a model is compiled for, one TOML file per target, complete in itself.

The shipped profiles stand in `targets/`; a user's own in `targets/` of the configuration folder, or
anywhere when given as a path. docs/targets.md explains every key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from edgesdk.errors import ConfigError, UsageError
from edgesdk.resources import config_folder, data_folder
from edgesdk.settings import check_table, load_toml, suggestion

# On a 64-bit kernel /proc/cpuinfo has the 64-bit names even where the programs are 32-bit
# (Raspberry Pi OS 32-bit runs on a 64-bit kernel on Pi 4). Armv8 Advanced SIMD holds all of these.
_IMPLIED_FEATURES = {"asimd": ("neon", "vfpv3", "vfpv4", "vfpd32", "idiva", "idivt")}

# First part of the triple -> the name that `uname -m` and the ELF header's reader use.
_MACHINES = (
    ("aarch64", "aarch64"),
    ("arm64", "aarch64"),
    ("arm", "arm"),
    ("thumb", "arm"),
    ("x86_64", "x86_64"),
    ("riscv64", "riscv64"),
)


@dataclass(frozen=True)
class CpuInfo:
    """The CPU as the schedule templates see it.

    Cache sizes are what one core can reach (a shared cache counts whole), 0 = there is none.
    `vector_bits` and `vector_registers` are the width and number of the registers that the
    target's mcpu and mattr allow.
    """

    cores: int
    l1d_kib: int
    l2_kib: int
    vector_bits: int
    vector_registers: int
    l3_kib: int = 0
    cache_line_bytes: int = 64

    def __post_init__(self) -> None:
        for name in ("cores", "l1d_kib", "vector_bits", "vector_registers", "cache_line_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name.replace('_', '-')} is {getattr(self, name)}, must be > 0")
        for name in ("l2_kib", "l3_kib"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name.replace('_', '-')} is {getattr(self, name)}, must be >= 0")


@dataclass(frozen=True)
class GpuInfo:
    """The GPU as the schedule templates and the device compiler see it.

    `api` is the driver that runs it. CUDA: code is built for each of `architectures` (10 * major +
    minor of the compute capability), and as PTX for later ones if `ptx` names one.
    `multiprocessors` counts the cores that share an L2; `shared_kib` is what one block of threads
    may use of the fast memory of such a core, `registers` what all blocks on it share.
    `alignment_bytes`: a kernel takes tensors that begin at multiples of this (OpenCL:
    CL_DEVICE_MEM_BASE_ADDR_ALIGN / 8). `integrated`: CPU and GPU use the same memory. `cuda` is the
    CUDA version of the oldest driver among such devices: code is made by a compiler that is no
    newer, if one is installed.
    """

    api: Literal["cuda", "opencl", "metal"]
    multiprocessors: int
    shared_kib: int
    registers: int = 65536
    warp: int = 32
    max_threads: int = 1024
    alignment_bytes: int = 64
    architectures: tuple[int, ...] = ()
    ptx: int | None = None
    integrated: bool = False
    cuda: str | None = None

    def __post_init__(self) -> None:
        if self.cuda is not None and not re.fullmatch(r"\d+\.\d+", self.cuda):
            raise ValueError(f"cuda is {self.cuda!r}, not like '12.0'")
        for name in ("multiprocessors", "registers", "warp", "max_threads"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name.replace('_', '-')} is {getattr(self, name)}, must be > 0")
        if self.alignment_bytes % 64 or self.alignment_bytes <= 0:
            raise ValueError(f"alignment-bytes is {self.alignment_bytes}, no multiple of 64")
        if self.api == "cuda" and not self.architectures and self.ptx is None:
            raise ValueError("neither architectures nor ptx is given")


@dataclass(frozen=True)
class BoardInfo:
    """How such a board is recognised, and how it is set for measuring.

    `family` is a name that stands for whichever board of the family is connected.
    `compatible` are patterns ("*" stands for anything) of which one fits a string of
    /proc/device-tree/compatible. `system` is the oldest release of the vendor's system that the
    contract covers. `power_modes` are named as `nvpmodel -q` prints them, all that any release
    has; in `measuring_modes` nothing holds the clocks down.
    """

    family: str
    compatible: tuple[str, ...]
    system: str
    power_modes: tuple[str, ...] = ()
    measuring_modes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.compatible:
            raise ValueError("compatible is empty")
        for mode in self.measuring_modes:
            if mode not in self.power_modes:
                raise ValueError(f"measuring-modes has {mode!r}, which is none of power-modes")


@dataclass(frozen=True)
class Contract:
    """What the device promises, and so what a library built for it may need.

    `machine`: what `uname -m` may print. `libc_version`: the oldest libc among such devices, which
    the audit enforces (bionic: the API level). `cpu_features`: names as Linux prints them in
    /proc/cpuinfo, whatever the system. `libraries`: the libraries that one built for it may need,
    named as it names them. `symbols`: lists in `toolchains/` of what it may use of them; none where
    versions of the symbols tell. `page_bytes`: the largest pages of memory among such devices, if
    the file must fit them.
    """

    os: Literal["linux", "android", "windows", "macos", "ios"]
    machine: tuple[str, ...]
    cpu_features: tuple[str, ...]
    libraries: tuple[str, ...]
    libc: Literal["glibc", "musl", "bionic"] | None = None
    libc_version: str | None = None
    symbols: tuple[str, ...] = ()
    page_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.machine:
            raise ValueError("machine is empty")
        form, example = (r"\d+", "29") if self.libc == "bionic" else (r"\d+(\.\d+)+", "2.36")
        if self.libc_version is not None and not re.fullmatch(form, self.libc_version):
            raise ValueError(f"libc-version is {self.libc_version!r}, not like '{example}'")


@dataclass(frozen=True)
class Emulator:
    """How a result runs on a machine of another kind.

    "qemu" is `qemu-<qemu> -cpu <cpu>` in user mode; "wine" runs programs of Windows on other
    systems, with this machine's CPU.
    """

    kind: Literal["qemu", "wine"] = "qemu"
    qemu: str = ""
    cpu: str = ""

    def __post_init__(self) -> None:
        if self.kind == "qemu" and not (self.qemu and self.cpu):
            raise ValueError("qemu and cpu are needed, e.g. qemu = 'aarch64', cpu = 'cortex-a72'")

    @property
    def program(self) -> str:
        """What it is called in short: "aarch64" for that qemu, or "wine"."""
        return self.qemu or self.kind

    @property
    def emulates_cpu(self) -> bool:
        """Whether it runs code for a CPU that this machine does not have."""
        return self.kind == "qemu"

    def __str__(self) -> str:
        return f"qemu-{self.qemu} -cpu {self.cpu}" if self.kind == "qemu" else self.kind


@dataclass(frozen=True)
class TargetProfile:
    """A target. `tvm` is the [tvm] table, which goes to tvm.target.Target untouched. `precision` is
    what the kernels compute with, the name of one of `edgesdk.precision`; no file sets it."""

    name: str
    description: str
    toolchain: str
    tvm: dict[str, Any]
    cpu: CpuInfo
    contract: Contract
    emulator: Emulator | None = None
    gpu: GpuInfo | None = None
    board: BoardInfo | None = None
    path: Path | None = None
    precision: str = "fp32"

    def host(self) -> TargetProfile:
        """The same device without its GPU."""
        return replace(self, tvm=_cpu_table(self.tvm), gpu=None)

    @property
    def triple(self) -> str:
        """The triple of the CPU that runs the library: that of the `host` table if there is one."""
        return str(_cpu_table(self.tvm)["mtriple"])

    @property
    def machine(self) -> str:
        """The architecture of the ELF file: "aarch64", "arm", "x86_64" or "riscv64"."""
        return machine_of(self.triple)


@dataclass(frozen=True)
class _ThisMachine:
    """A profile whose numbers are found at run time (`detect = true`)."""

    description: str
    toolchain: str
    detect: Literal[True]


def load_target(name: str) -> TargetProfile:
    """Returns the target `name`: a profile's name, or the path of a .toml file.

    A user's own profile wins over a shipped one of the same name. Raises UsageError for an unknown
    name (its hint has the nearest one), ConfigError for a file that is wrong.
    """
    if name.endswith(".toml") or "/" in name:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UsageError(
                f"there is no target profile {name!r}",
                hint="give an existing .toml file, or a name from `edgesdk targets`",
            )
        return _load_profile(path)
    files = _profile_files()
    if name not in files:
        families = target_families()
        if name in families:
            raise UsageError(
                f"the target {name!r} is whichever board is connected, and none is asked here",
                hint=f"name the board: {', '.join(p.name for p in families[name])}",
            )
        known = [*files, *families]
        raise UsageError(
            f"unknown target {name!r}",
            hint=suggestion(name, known, otherwise="see `edgesdk targets` for the known ones"),
        )
    return _load_profile(files[name])


def target_names() -> list[str]:
    """Returns the names that `load_target` knows, sorted, with "local" first."""
    return sorted(_profile_files(), key=lambda name: (name != "local", name))


def target_families() -> dict[str, tuple[TargetProfile, ...]]:
    """Returns the names that stand for the connected board, with the boards that each may be."""
    families: dict[str, tuple[TargetProfile, ...]] = {}
    for path in _profile_files().values():
        profile = _load_profile(path)
        if profile.board is not None:
            family = profile.board.family
            families[family] = (*families.get(family, ()), profile)
    return families


def load_targets(name: str) -> tuple[TargetProfile, ...]:
    """As `load_target`, but takes the name of a family, too: all boards of it."""
    return target_families().get(name) or (load_target(name),)


def machine_of(triple: str) -> str:
    """Returns the ELF machine of `triple`, e.g. "arm" for "armv7l-linux-gnueabihf".

    Raises ConfigError for an architecture that edgesdk does not know.
    """
    for start, machine in _MACHINES:
        if triple.startswith(start):
            return machine
    raise ConfigError(
        f"edgesdk does not know the architecture of {triple!r}",
        hint="use a triple such as 'aarch64-linux-gnu'",
    )


def missing_cpu_features(required: Iterable[str], present: Iterable[str]) -> tuple[str, ...]:
    """Returns those of `required` that a device does not have; both as /proc/cpuinfo names them."""
    have = set(present)
    for feature, implied in _IMPLIED_FEATURES.items():
        if feature in have:
            have.update(implied)
    return tuple(feature for feature in required if feature not in have)


def _profile_files() -> dict[str, Path]:
    files: dict[str, Path] = {}
    for folder in (data_folder("targets"), config_folder() / "targets"):
        files |= {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return files


def _load_profile(path: Path) -> TargetProfile:
    data = load_toml(path)
    if "detect" in data:
        from edgesdk.host import detect_host  # only here: it reads /proc and /sys

        wanted = check_table(data, _ThisMachine, where=str(path))
        host = detect_host()
        return TargetProfile(
            name=path.stem,
            description=f"{wanted.description}: {host.cpu_name}",
            toolchain=wanted.toolchain,
            tvm=host.tvm,
            cpu=host.cpu,
            contract=host.contract,
            path=path,
        )
    given = {"name": path.stem, "path": path, "precision": "fp32"}
    profile = check_table(data, TargetProfile, where=str(path), given=given)
    if not isinstance(profile.tvm.get("kind"), str):
        raise ConfigError(f"{path}: the key 'tvm.kind' is missing", hint='add kind = "llvm"')
    if not isinstance(_cpu_table(profile.tvm).get("mtriple"), str):
        raise ConfigError(
            f"{path}: the key 'tvm.mtriple' is missing",
            hint='add mtriple = "aarch64-linux-gnu", or a [tvm.host] table that has one',
        )
    machine_of(profile.triple)
    return profile


def _cpu_table(tvm: dict[str, Any]) -> dict[str, Any]:
    host = tvm.get("host")
    return host if isinstance(host, dict) else tvm
