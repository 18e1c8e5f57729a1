"""What this machine lacks for compiling, emulating and deploying, with the command that cures it.

Pure data: the command line prints it. Nothing heavy is imported, nothing is changed.
"""

from __future__ import annotations

import importlib.metadata
import shlex
import shutil
import sys
import tempfile
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import edgesdk
from edgesdk.deploy.facts import DeviceFacts, power_mode_note
from edgesdk.errors import EdgeSdkError
from edgesdk.profiles import GpuInfo, TargetProfile, load_target, load_targets, target_names
from edgesdk.resources import cache_folder
from edgesdk.toolchain import Toolchain, apt_command, emulator_command, load_toolchain

# A tuned ResNet-50 keeps about this much in objects and records.
_CACHE_NEEDS_BYTES = 1 << 30

_BINFMT = Path("/proc/sys/fs/binfmt_misc")

# Threads, dlopen and the C++ library: what edgert and the launcher need of a toolchain. On Windows
# they use neither POSIX threads nor the C++ library.
_PROBE = """\
#ifdef _WIN32
#include <windows.h>
int main() { return LoadLibraryW(L"kernel32.dll") == nullptr; }
#else
#include <dlfcn.h>
#include <string>
#include <thread>
int main(int argc, char** argv) {
  std::string text;
  std::thread([&] { text = argv[0]; }).join();
  return dlopen(text.c_str(), RTLD_NOW) == nullptr && argc > 1;
}
#endif
"""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `fix` is the command that cures it, None when `ok`.

    What is not `required` stops nothing but the thing that `detail` names.
    """

    name: str
    ok: bool
    detail: str
    fix: str | None = None
    required: bool = True


def diagnose(target: str | None = None) -> list[Finding]:
    """Returns what was found, for `target` or else for every shipped and user target.

    The name of a family means all its boards. Raises UsageError for an unknown target and
    ConfigError for a wrong profile or toolchain file.
    """
    if target is None:
        profiles = [load_target(name) for name in target_names()]
    else:
        profiles = [*load_targets(target)]
    toolchains = {
        name: load_toolchain(name) for name in dict.fromkeys(p.toolchain for p in profiles)
    }
    findings = [_python(), *_packages()]
    findings += [
        replace(_compiler(t), required=target is not None or t.machine == "native")
        for t in toolchains.values()
    ]
    findings += _cuda_compilers(profiles, required=target is not None)
    findings += _emulators(profiles, toolchains)
    findings += [_cache_space(), _ssh()]
    return findings


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Finding("Python", ok, version, None if ok else apt_command("python3.11"))


def _packages() -> list[Finding]:
    """One finding for each package that edgesdk itself asks for; extras are left out."""
    from packaging.requirements import Requirement

    findings = []
    for line in _requirements():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            detail, ok = "not installed", False
        else:
            ok = wanted.specifier.contains(version, prereleases=True)
            detail = version if ok else f"{version}, but {wanted.specifier} is needed"
        fix = None if ok else f"pip install {shlex.quote(f'{wanted.name}{wanted.specifier}')}"
        findings.append(Finding(f"package {wanted.name}", ok, detail, fix))
    return findings


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("edgesdk") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout, not installed
        pyproject = Path(edgesdk.__file__).resolve().parent.parent / "pyproject.toml"
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        return list(project["dependencies"])


def _compiler(toolchain: Toolchain) -> Finding:
    name = f"toolchain {toolchain.name}"
    try:
        detail = toolchain.version()
        if toolchain.python_module is None:  # zig's first link takes minutes: not for a look
            with tempfile.TemporaryDirectory(prefix="edgesdk-") as folder:
                source = Path(folder) / "probe.cc"
                source.write_text(_PROBE, encoding="utf-8")
                built = toolchain.compile_object(source, Path(folder) / "probe.o")
                program = toolchain.object_format.program
                if program is not None:
                    toolchain.link_executable([built], Path(folder) / program.format("probe"))
    except EdgeSdkError as error:
        return Finding(name, False, error.message, toolchain.install_command)
    return Finding(name, True, detail)


def _cuda_compilers(profiles: list[TargetProfile], *, required: bool) -> list[Finding]:
    """Who compiles the code of the profiles' GPUs, one finding for all with the same answer."""
    answers: dict[Finding, list[str]] = {}
    for profile in profiles:
        if profile.gpu is not None and profile.gpu.api == "cuda":
            for finding in _cuda_answers(profile.gpu, required=required):
                architectures = answers.setdefault(finding, [])
                architectures += [f"sm_{a}" for a in profile.gpu.architectures]
    return [
        replace(finding, name=f"{finding.name} {', '.join(dict.fromkeys(architectures))}")
        for finding, architectures in answers.items()
    ]


def _cuda_answers(gpu: GpuInfo, *, required: bool) -> list[Finding]:
    from edgesdk.compiler import cuda  # only here: it loads TVM

    try:
        detail = ", ".join(cuda.require_compiler(gpu))
        newer = cuda.too_new(gpu)
    except EdgeSdkError as error:
        return [Finding("CUDA for", False, error.message, error.hint, required=required)]
    found = Finding("CUDA for", True, detail, required=required)
    if newer is None:
        return [found]
    why, fix = newer
    return [found, Finding("old drivers of", fix is None, why, fix, required=False)]


def power_finding(profile: TargetProfile, facts: DeviceFacts, *, name: str) -> Finding | None:
    """What is to be said about the power mode of the device `name`, if there are such modes."""
    if facts.power_mode is None or profile.board is None:
        return None
    note = power_mode_note(profile, facts)
    if note is None:
        return Finding(f"power mode of {name}", True, facts.power_mode, required=False)
    return Finding(
        f"power mode of {name}",
        False,
        note,
        "on the board: sudo nvpmodel -p --verbose, then sudo nvpmodel -m ID",
        required=False,
    )


def _emulators(profiles: list[TargetProfile], toolchains: dict[str, Toolchain]) -> list[Finding]:
    """What runs results here, and for qemu its binfmt entry, which emulated boards need."""
    findings: dict[str, Finding] = {}
    for profile in profiles:
        emulator = profile.emulator
        if emulator is None or emulator.program in findings:
            continue
        program = emulator.program
        try:
            command = emulator_command(profile, toolchains[profile.toolchain])
        except EdgeSdkError as error:
            findings[program] = Finding(
                f"emulator {program}",
                False,
                f"{error.message}: no check of results here",
                error.hint,
                required=False,
            )
            continue
        # "env" with settings goes before Wine's path, options after qemu's.
        detail = next(word for word in command if word.startswith("/"))
        findings[program] = Finding(f"emulator {program}", True, detail, required=False)
        if emulator.kind == "qemu":
            findings[f"{program} binfmt"] = _binfmt(program)
    return list(findings.values())


def _binfmt(qemu: str) -> Finding:
    name = f"binfmt {qemu}"
    try:
        enabled = (_BINFMT / f"qemu-{qemu}").read_text(encoding="utf-8").startswith("enabled")
    except OSError:
        enabled = False
    if enabled:
        return Finding(name, True, f"{_BINFMT}/qemu-{qemu} is enabled", required=False)
    fix = (
        apt_command("binfmt-support", "qemu-user-static")
        if (_BINFMT / "register").exists()
        else f"mount -t binfmt_misc none {_BINFMT}"
    )
    return Finding(name, False, "not registered: no emulated boards", fix, required=False)


def _cache_space() -> Finding:
    folder = cache_folder()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    ok = free >= _CACHE_NEEDS_BYTES
    return Finding(
        "cache folder",
        ok,
        f"{folder}, {free / 2**30:.1f} GiB free" + ("" if ok else ", 1 GiB is needed"),
        # The cache may be deleted any time, so it is what goes first.
        None if ok else f"rm -rf {shlex.quote(str(folder))}",
    )


def _ssh() -> Finding:
    folder = Path.home() / ".ssh"
    keys = sorted(p.name for p in folder.glob("id_*") if p.suffix != ".pub")
    parts = [*(["config"] if (folder / "config").is_file() else []), *keys]
    if parts:
        return Finding("SSH", True, f"{folder}: {', '.join(parts)}", required=False)
    return Finding(
        "SSH",
        False,
        f"{folder} has neither config nor key: no way to a device but a password",
        "ssh-keygen -t ed25519",
        required=False,
    )
