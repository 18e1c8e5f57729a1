"""What a device is, asked from the device, and whether a bundle can run on it.

The questions are a shell script (`device_scripts/device_facts.sh`) that is piped into the device's
shell; nothing is copied. The answers are compared with the bundle's contract before anything is.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from edgesdk.bundle.audit import version_key
from edgesdk.bundle.manifest import ContractInfo, GpuContract
from edgesdk.deploy.opencl_facts import OpenclFacts, opencl_problem, parse_opencl
from edgesdk.deploy.transport.base import Transport
from edgesdk.errors import DeviceError, DeviceMismatchError
from edgesdk.profiles import TargetProfile, load_target, missing_cpu_features, target_names
from edgesdk.resources import data_folder

_SCRIPT = "device_facts.sh"
_TIMEOUT_S = 60.0

# ELF: e_machine -> the name of the architecture, in 32 and 64 bits (EI_CLASS).
_ELF_MACHINES = {
    (1, 0x03): "x86",
    (1, 0x28): "arm",
    (2, 0x3E): "x86_64",
    (2, 0xB7): "aarch64",
    (2, 0xF3): "riscv64",
}
_ELF_ARM_SOFT_FLOAT = 0x200

# (implementer, part) of Arm's MIDR_EL1 -> name; as in lscpu (util-linux, sys-utils/lscpu-arm.c).
_CORES = {
    ("0x41", "0xb76"): "ARM1176",
    ("0x41", "0xc05"): "Cortex-A5",
    ("0x41", "0xc07"): "Cortex-A7",
    ("0x41", "0xc08"): "Cortex-A8",
    ("0x41", "0xc09"): "Cortex-A9",
    ("0x41", "0xc0f"): "Cortex-A15",
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd04"): "Cortex-A35",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd09"): "Cortex-A73",
    ("0x41", "0xd0a"): "Cortex-A75",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd0d"): "Cortex-A77",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd41"): "Cortex-A78",
    ("0x41", "0xd42"): "Cortex-A78AE",
    ("0x41", "0xd44"): "Cortex-X1",
    ("0x41", "0xd46"): "Cortex-A510",
    ("0x41", "0xd47"): "Cortex-A710",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4d"): "Cortex-A715",
    ("0x41", "0xd80"): "Cortex-A520",
    ("0x41", "0xd81"): "Cortex-A720",
    ("0x41", "0xd83"): "Neoverse-V3AE",
    ("0x4e", "0x003"): "Denver 2",
    ("0x4e", "0x004"): "Carmel",
}


# NVIDIA's systems on chips -> compute capability of their GPU, 10 * major + minor. CUDA C++
# Programming Guide, "CUDA-Enabled GPUs", and the developer guides of Jetson Linux.
_TEGRA = {
    "nvidia,tegra210": 53,
    "nvidia,tegra186": 62,
    "nvidia,tegra194": 72,
    "nvidia,tegra234": 87,
    "nvidia,tegra264": 110,
}

# The oldest driver for Linux that supports a version of CUDA: CUDA Toolkit release notes, "CUDA
# Toolkit and Corresponding Driver Versions".
_CUDA_OF_DRIVER = (
    ("580", "13.0"),
    ("575", "12.9"),
    ("570", "12.8"),
    ("560", "12.6"),
    ("555", "12.5"),
    ("550", "12.4"),
    ("545", "12.3"),
    ("535", "12.2"),
    ("530", "12.1"),
    ("525", "12.0"),
    ("520", "11.8"),
    ("470", "11.4"),
    ("450", "11.0"),
    ("440", "10.2"),
)
# The first release of Jetson Linux (L4T) with a version of CUDA: release notes of JetPack.
_CUDA_OF_L4T = (
    ("39.2", "13.2"),
    ("38.2", "13.0"),
    ("36.4", "12.6"),
    ("36.2", "12.2"),
    ("34.1", "11.4"),
    ("32.4", "10.2"),
)
# CUDA 13 makes machine code in files of another format (ABI version 8 in the ELF header) than
# those before; drivers since this version of CUDA know it, for Blackwell.
_NEW_FORMAT, _KNOWS_NEW_FORMAT = "13.0", "12.8"


@dataclass(frozen=True)
class GpuFacts:
    """An NVIDIA GPU, the first if there are several; None where the device could not tell.

    `library` is the path of the driver's library, None if there is none. `driver` is its version,
    on a Jetson that of Jetson Linux; `cuda` the version of CUDA that it supports. `architecture`
    is 10 * major + minor of the compute capability. `integrated`: a part of the CPU's chip.
    """

    library: str | None
    name: str | None = None
    driver: str | None = None
    cuda: str | None = None
    architecture: int | None = None
    integrated: bool = False


@dataclass(frozen=True)
class DeviceFacts:
    """What a device said about itself; None where it could not tell.

    `machine` is `uname -m`, `programs` the architecture of the system's own programs ("arm",
    "aarch64", "x86_64", ...), which differs where a 64-bit kernel carries a 32-bit system.
    `soft_float` marks 32-bit ARM systems without floating-point registers in calls.
    `cpu_features` are those that all cores have, as the kernel names them. `libc` is "glibc",
    "musl" or "bionic"; bionic's version is the Android API level. `throttled` is the Raspberry Pi
    firmware's bit field. `compatible` are the device tree's names of the board, `power_mode` is
    what `nvpmodel -q` prints on a Jetson. `opencl` is None if the device did not look. `notes` says
    what is unusual, one sentence each.
    """

    os: str
    machine: str
    kernel: str | None = None
    os_release: str | None = None
    programs: str | None = None
    soft_float: bool = False
    libc: Literal["glibc", "musl", "bionic"] | None = None
    libc_version: str | None = None
    board: str | None = None
    cpu_model: str | None = None
    cpu_features: frozenset[str] | None = None
    cores: int | None = None
    memory_total_kib: int | None = None
    memory_available_kib: int | None = None
    disk_available_kib: int | None = None
    governor: str | None = None
    frequency_khz: int | None = None
    max_frequency_khz: int | None = None
    temperature_c: float | None = None
    throttled: str | None = None
    compatible: tuple[str, ...] = ()
    power_mode: str | None = None
    gpu: GpuFacts | None = None
    opencl: OpenclFacts | None = None
    notes: tuple[str, ...] = ()


def read_facts(transport: Transport) -> DeviceFacts:
    """Asks the device behind `transport`. Raises DeviceError when it cannot answer."""
    script = (data_folder("device_scripts") / _SCRIPT).read_bytes()
    result = transport.run(
        ["sh", "-s", "--", transport.work_dir], timeout_s=_TIMEOUT_S, input_bytes=script
    )
    if not result.ok:
        raise DeviceError(f"{transport.name} cannot say what it is: {result.last_line()}")
    try:
        return parse_facts(result.stdout_text)
    except ValueError as error:
        raise DeviceError(f"{transport.name} cannot say what it is: {error}") from error


def parse_facts(text: str) -> DeviceFacts:
    """Reads the script's output. Raises ValueError when it is cut off or is something else."""
    said: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            said.setdefault(key, []).append(value.strip())
    if "end" not in said or "machine" not in said or "system" not in said:
        raise ValueError("the answer of the device is incomplete")

    def first(key: str) -> str | None:
        return said.get(key, [None])[0]

    def number(key: str) -> int | None:
        # The largest, where there are several: the fast cores, the hottest sensor.
        return max((int(v) for v in said.get(key, ()) if v.lstrip("-").isdigit()), default=None)

    machine = said["machine"][0]
    arm = machine.startswith(("arm", "aarch64"))
    features = said.get("features" if arm else "flags")
    if machine.startswith("riscv"):
        features = [_isa_features(isa) for isa in said.get("isa", ())] or None
    programs, soft_float = _programs(first("elf"))
    libc, libc_version = _libc(first("libc") or "", first("android_sdk"))
    temperature_mc = number("temperature_mc")
    notes = []
    if features is None:
        emulated = arm and "flags" in said
        why = "it is emulated on another CPU" if emulated else "the kernel does not list them"
        notes.append(f"its CPU features are unknown: {why}")
    if programs is not None and not _same_architecture(machine, programs):
        notes.append(f"its kernel is {machine}, its programs are {programs}")
    governors = said.get("governor", [])
    return DeviceFacts(
        os="android" if first("android_sdk") else said["system"][0].lower(),
        machine=machine,
        kernel=first("kernel"),
        os_release=_os_release(said),
        programs=programs,
        soft_float=soft_float,
        libc=libc,
        libc_version=libc_version,
        board=first("board"),
        # An emulated ARM device shows the CPU of the machine that emulates it.
        cpu_model=_cpu_model(said) if features is not None else None,
        cpu_features=None if features is None else _in_all(features),
        cores=_count(first("cores_online")) or number("processors"),
        memory_total_kib=number("memory_total_kib"),
        memory_available_kib=number("memory_available_kib"),
        disk_available_kib=number("disk_available_kib"),
        governor="/".join(dict.fromkeys(governors)) or None,
        frequency_khz=number("frequency_khz"),
        max_frequency_khz=number("max_frequency_khz"),
        temperature_c=None if temperature_mc is None else temperature_mc / 1000,
        throttled=first("throttled"),
        compatible=tuple((first("compatible") or "").split()),
        power_mode=first("power_mode"),
        gpu=_gpu(said),
        opencl=parse_opencl(said),
        notes=tuple(notes),
    )


def check_device(contract: ContractInfo, facts: DeviceFacts, *, name: str) -> None:
    """Raises DeviceMismatchError when a bundle with `contract` cannot run on the device `name`.

    What the device could not tell counts as fine: the check is there to say early and in words what
    would fail anyway, not to keep unusual systems out.
    """
    problem = (
        _architecture_problem(contract, facts)
        or _gpu_problem(contract.gpu, facts)
        or _libc_problem(contract, facts)
    )
    if problem is None and facts.cpu_features is not None:
        missing = missing_cpu_features(contract.cpu_features, facts.cpu_features)
        if missing:
            cpu = f"its CPU ({facts.cpu_model})" if facts.cpu_model else "its CPU"
            problem = (
                f"{cpu} has no {', '.join(missing)}, which the bundle uses",
                "compile for a target of this board: edgesdk targets",
            )
    if problem is not None:
        message, hint = problem
        raise DeviceMismatchError(f"the bundle cannot run on {name}: {message}", hint=hint)


def contract_of(profile: TargetProfile) -> ContractInfo:
    """Returns what a bundle for `profile` asks of a device, before one is compiled."""
    contract, gpu = profile.contract, profile.gpu
    return ContractInfo(
        os=contract.os,
        machine=contract.machine,
        libc=contract.libc,
        libc_version=contract.libc_version,
        cpu_features=contract.cpu_features,
        gpu=None if gpu is None else GpuContract(gpu.api, gpu.architectures, gpu.ptx, gpu.cuda),
    )


def target_of(facts: DeviceFacts) -> TargetProfile | None:
    """Returns the target whose [board] the device is, or None."""
    for name in target_names():
        profile = load_target(name)
        if profile.board is not None and any(
            fnmatchcase(found, pattern)
            for found in facts.compatible
            for pattern in profile.board.compatible
        ):
            return profile
    return None


def power_mode_note(profile: TargetProfile, facts: DeviceFacts) -> str | None:
    """Returns a sentence if the device is set to save power, so that it measures slow."""
    board, mode = profile.board, facts.power_mode
    if board is None or mode is None or not board.measuring_modes or mode in board.measuring_modes:
        return None
    wanted = " or ".join(board.measuring_modes)
    return f"its power mode is {mode}; measure in {wanted}"


def _architecture_problem(contract: ContractInfo, facts: DeviceFacts) -> tuple[str, str] | None:
    if facts.os != contract.os:
        return (
            f"it runs {facts.os}, and the bundle is for {contract.os}",
            "compile for a target of that system: edgesdk targets",
        )
    # Contracts of 32-bit ARM also list "aarch64", for 64-bit kernels that carry a 32-bit system.
    needed = "arm" if any(m.startswith("arm") for m in contract.machine) else contract.machine[0]
    hint = "compile for a target of this board: edgesdk targets"
    if facts.machine not in contract.machine:
        return f"it is {facts.machine}, and the bundle is for {contract.machine[0]}", hint
    if facts.programs is not None and facts.programs != needed:
        bits = {"arm": "32-bit ARM", "x86": "32-bit x86", "aarch64": "64-bit ARM"}
        theirs = bits.get(facts.programs, facts.programs)
        ours = bits.get(needed, needed)
        return (
            f"its kernel is {facts.machine}, but its system runs {theirs} programs, "
            f"and the bundle is {ours}",
            f"compile for a {theirs} target (edgesdk targets), or install a system of the other "
            "kind on the board",
        )
    if needed == "arm" and facts.soft_float:
        return (
            "its system passes floating-point numbers in software (armel), "
            "and the bundle needs hard float (armhf)",
            "install an armhf system on the board",
        )
    return None


def _libc_problem(contract: ContractInfo, facts: DeviceFacts) -> tuple[str, str] | None:
    if contract.libc is None or facts.libc is None:
        return None
    if facts.libc != contract.libc:
        return (
            f"its C library is {facts.libc}, and the bundle needs {contract.libc}",
            f"compile for a target with {facts.libc}: edgesdk targets",
        )
    if contract.libc_version is None or facts.libc_version is None:
        return None
    if version_key(facts.libc_version) < version_key(contract.libc_version):
        return (
            f"it has {facts.libc} {facts.libc_version}, "
            f"and the bundle needs {contract.libc_version} or newer",
            f"compile for a target with libc-version {facts.libc_version}, "
            "or update the board's system",
        )
    return None


def _gpu_problem(gpu: GpuContract | None, facts: DeviceFacts) -> tuple[str, str] | None:
    if gpu is not None and gpu.api == "opencl":
        return opencl_problem(gpu, facts.opencl)
    if gpu is None or gpu.api != "cuda" or facts.gpu is None:
        return None
    if facts.gpu.library is None:
        return (
            "it has no driver for an NVIDIA GPU (libcuda.so.1)",
            "install NVIDIA's driver there, or compile for its CPU: edgesdk targets",
        )
    here = facts.gpu.architecture
    if here is None:
        return None
    if any(_runs(code, here, integrated=facts.gpu.integrated) for code in gpu.architectures):
        if (
            _older(facts.gpu.cuda, _KNOWS_NEW_FORMAT)
            and gpu.cuda is not None
            and version_key(gpu.cuda) >= version_key(_NEW_FORMAT)
        ):
            return (
                f"its driver supports CUDA {facts.gpu.cuda}, and the code was made by CUDA"
                f" {gpu.cuda.partition('.')[0]}, whose files it cannot read",
                "update the driver, or compile again with pip install 'edgesdk[cuda]'",
            )
        return None
    if gpu.ptx is not None and gpu.ptx <= here:
        if gpu.ptx_cuda is not None and _older(facts.gpu.cuda, gpu.ptx_cuda):
            return (
                f"only its PTX serves this GPU (sm_{here}), and needs a driver of CUDA"
                f" {gpu.ptx_cuda}; the one there has {facts.gpu.cuda}",
                _target_hint(facts, here),
            )
        return None
    built = ", ".join(f"sm_{code}" for code in gpu.architectures) or f"sm_{gpu.ptx} and later"
    return f"built for {built}, this GPU is sm_{here}", _target_hint(facts, here)


def _runs(code: int, here: int, *, integrated: bool) -> bool:
    """Whether machine code runs: CUDA C++ Programming Guide, "Binary Compatibility"."""
    return code == here if integrated else code // 10 == here // 10 and code <= here


def _older(have: str | None, needed: str) -> bool:
    return have is not None and version_key(have) < version_key(needed)


def _target_hint(facts: DeviceFacts, architecture: int) -> str:
    board = target_of(facts)
    if board is not None:
        return f"compile with --target {board.name}"
    for profile in map(load_target, target_names()):
        gpu = profile.gpu
        if gpu is not None and architecture in gpu.architectures and profile.board is None:
            return f"compile with --target {profile.name}"
    return f"copy a target and set its architecture to sm_{architecture}: docs/targets.md"


def _gpu(said: dict[str, list[str]]) -> GpuFacts | None:
    if "nvidia_library" not in said:
        return None
    library = said["nvidia_library"][0]
    compatible = said.get("compatible", [""])[0].split()
    chip = next((_TEGRA[word] for word in compatible if word in _TEGRA), None)
    if chip is not None:
        # "# R36 (release), REVISION: 4.3, GCID: ...": the driver comes with the system.
        release = re.match(r"# R(\d+) .*REVISION: ([\d.]+)", said.get("l4t", [""])[0])
        driver = f"{release[1]}.{release[2]}" if release else None
        return GpuFacts(
            library=None if library == "none" else library,
            driver=driver,
            cuda=_first_since(driver, _CUDA_OF_L4T),
            architecture=chip,
            integrated=True,
        )
    # "NVIDIA H200, 570.86.15, 9.0"; drivers before 510 leave the last out.
    found = re.fullmatch(
        r"([^,]+), (\d+\.[\d.]+)(?:, (\d+)\.(\d))?", said.get("gpu", [""])[0].strip()
    )
    if found is None:
        return GpuFacts(library=None if library == "none" else library)
    name, driver, major, minor = found.groups()
    return GpuFacts(
        library=None if library == "none" else library,
        name=name,
        driver=driver,
        cuda=_first_since(driver, _CUDA_OF_DRIVER),
        architecture=10 * int(major) + int(minor) if major else None,
    )


def _first_since(have: str | None, table: tuple[tuple[str, str], ...]) -> str | None:
    """The value of the first row, newest first, whose version `have` has reached."""
    if have is None:
        return None
    return next((v for since, v in table if version_key(since) <= version_key(have)), None)


def _programs(elf: str | None) -> tuple[str | None, bool]:
    """Reads the first 40 bytes of an ELF file, in hex: the architecture, and ARM's soft float."""
    try:
        header = bytes.fromhex(elf or "")
    except ValueError:
        return None, False
    if len(header) < 40 or not header.startswith(b"\x7fELF"):
        return None, False
    order: Literal["little", "big"] = "little" if header[5] == 1 else "big"
    name = _ELF_MACHINES.get((header[4], int.from_bytes(header[18:20], order)))
    flags = int.from_bytes(header[36:40], order)
    return name, name == "arm" and bool(flags & _ELF_ARM_SOFT_FLOAT)


def _same_architecture(machine: str, programs: str) -> bool:
    if programs == "arm":
        return machine.startswith("arm")
    if programs == "x86":
        return machine in ("i386", "i486", "i586", "i686")
    return machine == programs


def _libc(
    text: str, android_sdk: str | None
) -> tuple[Literal["glibc", "musl", "bionic"] | None, str | None]:
    if android_sdk:
        return "bionic", android_sdk
    if "musl" in text:
        # "musl libc (aarch64) Version 1.2.4"
        return "musl", _version_after(text, "Version ")
    if not text:
        return None, None
    # "glibc 2.36", "ldd (Debian GLIBC 2.36-9) 2.36", "... release version 2.36."
    for before in ("glibc ", "release version ", ") "):
        version = _version_after(text, before)
        if version is not None:
            return "glibc", version
    return "glibc", None


def _version_after(text: str, before: str) -> str | None:
    words = text.partition(before)[2].split()
    version = words[0].rstrip(".,") if words else ""
    return version if version[:1].isdigit() and "." in version else None


def _os_release(said: dict[str, list[str]]) -> str | None:
    if "android_release" in said:
        return f"Android {said['android_release'][0]}"
    words = [said[key][0] for key in ("os_id", "os_version") if key in said]
    return " ".join(words) or None


def _cpu_model(said: dict[str, list[str]]) -> str | None:
    parts = list(zip(said.get("implementer", ()), said.get("part", ()), strict=False))
    if parts:
        # "4x Cortex-A53 + 2x Cortex-A72"; a core without a name shows its numbers.
        counted = Counter(_CORES.get(p, f"implementer {p[0]} part {p[1]}") for p in parts)
        return " + ".join(f"{count}x {core}" for core, count in counted.items())
    return said.get("model_name", [None])[0]


def _isa_features(isa: str) -> str:
    """The extensions of "rv64imafdc_zicsr_zba", each a word: letters, and the names behind them.

    RISC-V Instruction Set Manual, "ISA Extension Naming Conventions".
    """
    letters, *names = isa.lower().split("_")
    return " ".join([*letters.removeprefix("rv64"), *names])


def _in_all(lines: list[str]) -> frozenset[str]:
    return frozenset.intersection(*(frozenset(line.split()) for line in lines))


def _count(ranges: str | None) -> int | None:
    """Counts the cores of e.g. "0-3,6"."""
    total = 0
    for part in (ranges or "").split(","):
        start, _, end = part.partition("-")
        if start.isdigit():
            total += (int(end) if end.isdigit() else int(start)) - int(start) + 1
    return total or None
