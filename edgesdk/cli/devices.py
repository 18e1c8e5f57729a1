"""targets, devices and doctor: what there is to build for and to run on, and what is missing."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgesdk import console
from edgesdk.cli.options import AsJson, Device, Target, goes_on
from edgesdk.deploy.opencl_facts import opencl_text
from edgesdk.errors import DeviceMismatchError, EdgeSdkError, UsageError

if TYPE_CHECKING:
    from edgesdk.deploy.doctor import Finding
    from edgesdk.deploy.facts import DeviceFacts
    from edgesdk.devices import Device as DeviceEntry
    from edgesdk.devices import SshAddress
    from edgesdk.profiles import TargetProfile

_TOOL_MISSING = 4
_FEATURES_WIDTH = 84

targets_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
devices_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""
    app.add_typer(targets_app, name="targets")
    app.add_typer(devices_app, name="devices")
    app.command()(doctor)


@targets_app.callback()
def targets(context: typer.Context, as_json: AsJson = False) -> None:
    """List the targets that a model can be compiled for."""
    from edgesdk.profiles import load_target, target_families, target_names

    if goes_on(context, as_json):
        return
    profiles = [load_target(name) for name in target_names()]
    families = {name: [p.name for p in boards] for name, boards in target_families().items()}
    if as_json:
        listed = [_profile_json(p) for p in profiles]
        console.print_json({"targets": listed, "families": families})
        return
    rows = [(p.name, p.machine, p.description) for p in profiles]
    rows += [
        (name, "", f"the one of these that is connected: {', '.join(boards)}")
        for name, boards in families.items()
    ]
    print(console.table(("TARGET", "MACHINE", "DESCRIPTION"), rows))


@targets_app.command("show")
def targets_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A target, or a .toml file.")],
    as_json: AsJson = False,
) -> None:
    """Show one target."""
    from edgesdk.profiles import load_target

    profile = load_target(name)
    if as_json:
        console.print_json({"target": _profile_json(profile)})
        return
    cpu, contract = profile.cpu, profile.contract
    libc = " ".join(w for w in (contract.libc, contract.libc_version) if w)
    system = [contract.os, " or ".join(contract.machine), *([f"{libc} or newer"] if libc else [])]
    l3 = f", L3 {cpu.l3_kib} KiB" if cpu.l3_kib else ""
    print(
        console.facts(
            [
                ("target", profile.name),
                ("description", profile.description),
                ("toolchain", profile.toolchain),
                *_gpu_rows(profile),
                ("tvm", " ".join(f"{k}={_tvm_text(v)}" for k, v in profile.tvm.items())),
                ("cores", str(cpu.cores)),
                ("caches", f"L1d {cpu.l1d_kib} KiB, L2 {cpu.l2_kib} KiB{l3}"),
                ("vectors", f"{cpu.vector_registers} registers of {cpu.vector_bits} bits"),
                ("system", ", ".join(system)),
                ("cpu features", " ".join(contract.cpu_features)),
                ("emulator", str(profile.emulator or "")),
                ("file", str(profile.path)),
            ]
        )
    )


@devices_app.callback()
def devices(context: typer.Context, as_json: AsJson = False) -> None:
    """List the devices; `local` is this machine."""
    from edgesdk.devices import load_devices

    if goes_on(context, as_json):
        return
    entries = list(load_devices().values())
    if as_json:
        console.print_json({"devices": [_device_json(d) for d in entries]})
        return
    rows = [(d.name, d.transport, _address(d), d.target or "") for d in entries]
    print(console.table(("DEVICE", "BY", "ADDRESS", "TARGET"), rows))
    if len(entries) == 1:
        console.note("add a board with: edgesdk devices add NAME --ssh user@host")


@devices_app.command("add")
def devices_add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it.")],
    ssh: Annotated[
        str | None,
        typer.Option(
            "--ssh", metavar="USER@HOST:PORT", help="Its address, or a name of ~/.ssh/config."
        ),
    ] = None,
    adb: Annotated[
        str | None,
        typer.Option("--adb", metavar="SERIAL", help="A phone's serial number, see `adb devices`."),
    ] = None,
    identity: Annotated[
        str | None, typer.Option("--identity", metavar="FILE", help="The private key to use.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="T", help="The target that it serves.")
    ] = None,
    accept_key: Annotated[
        bool,
        typer.Option(
            "--accept-key", help="Connect now and trust the host key that the board shows."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add a board that is reached over SSH, or a phone that is reached by adb.

    With --accept-key it may exist already, at the same address; then its key is accepted.
    """
    from edgesdk.devices import add_device, load_devices, parse_ssh_address, remove_device
    from edgesdk.profiles import load_targets

    if target is not None:
        load_targets(target)  # for its errors
    known = load_devices().get(name)
    if (ssh is None) == (adb is None):
        raise UsageError("give either --ssh or --adb", hint=f"edgesdk devices add {name} --help")
    if ssh is None:
        if identity is not None or accept_key:
            raise UsageError("--identity and --accept-key go with --ssh", hint="leave them out")
        _add_phone(name, str(adb), target, as_json=as_json)
        return
    address = parse_ssh_address(ssh)
    device = _entry(name, address, identity, target, known=known if accept_key else None)
    add_device(device, replace=accept_key and known is not None)
    accepted = []
    if accept_key:
        from edgesdk.deploy.transport.ssh_connect import accept_host_key

        try:
            accepted = [asdict(key) for key in accept_host_key(device)]
        except BaseException:
            # A device that was never reached would be in the way of the next try.
            if known is None:
                remove_device(name)
            else:
                add_device(known, replace=True)
            raise
    if as_json:
        console.print_json({"device": _device_json(device), "accepted": accepted})
        return
    print(f"added {name}: {_address(device)}")
    for key in accepted:
        print(f"accepted the host key {key['fingerprint']} of {key['host']} into {key['file']}")
    if accept_key and not accepted:
        print("its host key was known already")
    console.note(f"next: edgesdk devices check {name}")


@devices_app.command("show")
def devices_show(
    name: Annotated[str, typer.Argument(metavar="NAME")], as_json: AsJson = False
) -> None:
    """Show what is known of a device, without connecting."""
    from edgesdk.devices import get_device

    device = get_device(name)
    if as_json:
        console.print_json({"device": _device_json(device)})
        return
    shown = {key.replace("_", " "): value for key, value in asdict(device).items()}
    print(console.facts([(k, str(v)) for k, v in shown.items() if v is not None]))


@devices_app.command("remove")
def devices_remove(
    name: Annotated[str, typer.Argument(metavar="NAME")], as_json: AsJson = False
) -> None:
    """Forget a device; nothing on it changes."""
    from edgesdk.devices import remove_device

    remove_device(name)
    if as_json:
        console.print_json({"removed": name})
    else:
        print(f"removed {name}")


@devices_app.command("check")
def devices_check(
    name: Annotated[str, typer.Argument(metavar="NAME")], as_json: AsJson = False
) -> None:
    """Connect, and say what the device is, which targets suit it and which bundles it has."""
    from edgesdk.deploy.facts import read_facts
    from edgesdk.deploy.push import list_remote
    from edgesdk.deploy.transport import open_transport
    from edgesdk.devices import get_device

    device = get_device(name)
    with open_transport(device) as transport:
        facts = read_facts(transport)
        bundles = list_remote(transport)
    suitable = _suitable_targets(facts, name)
    if as_json:
        features = sorted(facts.cpu_features) if facts.cpu_features is not None else None
        console.print_json(
            {
                "device": name,
                "facts": asdict(facts) | {"cpu_features": features},
                "targets": suitable,
                "bundles": [asdict(b) for b in bundles],
            }
        )
    else:
        rows = _fact_rows(facts)
        rows.append(("targets", ", ".join(suitable) or "none of `edgesdk targets` suits it"))
        rows += [("bundle", f"{b.name} {b.version}") for b in bundles if b.current]
        print(console.facts(rows))
        for text in facts.notes:
            console.note(f"note: {text}")
    if device.target is not None and not _serves(device.target, facts, suitable):
        console.warn(f"{name} is to serve {device.target}, which does not suit it")


def doctor(target: Target = None, device: Device = None, as_json: AsJson = False) -> None:
    """Say what this machine lacks, and the command that cures it.

    With --device the way to it is tried too. Exit code 4 means that something needed is missing.
    """
    from edgesdk.deploy.doctor import diagnose
    from edgesdk.devices import get_device

    if device is not None:
        get_device(device)  # a wrong name is said at once
    with console.stages("doctor") as progress:
        progress("looking at this machine")
        findings = diagnose(target)
        lacking = any(f.required and not f.ok for f in findings)
        code = _TOOL_MISSING if lacking else 0
        if device is not None:
            progress(f"connecting to {device}")
            found, failed = _device_findings(device, target)
            findings += found
            code = code or failed
    if as_json:
        console.print_json({"ok": code == 0, "findings": [asdict(f) for f in findings]})
    else:
        marks = {(True, True): "ok", (True, False): "ok", (False, True): "MISSING"}
        rows = [(marks.get((f.ok, f.required), "optional"), f.name, f.detail) for f in findings]
        print(console.table((), rows))
        for fix in dict.fromkeys(f.fix for f in findings if f.fix and not f.ok):
            print(f"  fix: {fix}")
    if code:
        raise typer.Exit(code)


def _device_findings(name: str, target: str | None) -> tuple[list[Finding], int]:
    """What is to be said about a device, and the exit code of what is wrong with it."""
    from edgesdk.deploy.connected import target_on
    from edgesdk.deploy.doctor import Finding, power_finding
    from edgesdk.deploy.facts import check_device, contract_of, read_facts
    from edgesdk.deploy.transport import open_transport
    from edgesdk.devices import get_device
    from edgesdk.profiles import load_target

    entry = get_device(name)
    wanted = target or entry.target
    try:
        with open_transport(entry) as transport:
            facts = read_facts(transport)
        profile = None if wanted is None else load_target(target_on(wanted, facts, name=name))
        if profile is not None:
            check_device(contract_of(profile), facts, name=name)
    except EdgeSdkError as error:
        return [Finding(f"device {name}", False, error.message, error.hint)], error.exit_code
    said = [facts.board or facts.machine, facts.os_release, f"{facts.cores} cores"]
    suits = [f"suits {profile.name}"] if profile else []
    findings = [Finding(f"device {name}", True, ", ".join(s for s in [*said, *suits] if s))]
    power = power_finding(profile, facts, name=name) if profile else None
    return [*findings, *([power] if power else [])], 0


def _entry(
    name: str,
    address: SshAddress,
    identity: str | None,
    target: str | None,
    *,
    known: DeviceEntry | None,
) -> DeviceEntry:
    """The device to write; a `known` one at the same host keeps what is not given anew."""
    from edgesdk.devices import Device as DeviceEntry

    given = {
        key: value
        for key, value in (
            ("host", address.host),
            ("user", address.user),
            ("port", address.port),
            ("identity_file", identity),
            ("target", target),
        )
        if value is not None
    }
    if known is None:
        return DeviceEntry(name, transport="ssh", **given)  # type: ignore[arg-type]
    if known.host != address.host:
        raise UsageError(
            f"the device {name!r} is at {known.host}, not {address.host}",
            hint=f"edgesdk devices remove {name}, then add it again",
        )
    return replace(known, **given)  # type: ignore[arg-type]


def _add_phone(name: str, serial: str, target: str | None, *, as_json: bool) -> None:
    from edgesdk.devices import Device as DeviceEntry
    from edgesdk.devices import add_device

    try:
        device = DeviceEntry(name, transport="adb", serial=serial, target=target)
    except ValueError as error:
        raise UsageError(str(error), hint="see: adb devices") from None
    add_device(device)
    if as_json:
        console.print_json({"device": _device_json(device), "accepted": []})
        return
    print(f"added {name}: {_address(device)}")
    console.note(f"next: edgesdk devices check {name}")


def _suitable_targets(facts: DeviceFacts, name: str) -> list[str]:
    from edgesdk.deploy.facts import check_device, contract_of
    from edgesdk.profiles import load_target, target_names

    suitable = []
    for target in target_names():
        try:
            check_device(contract_of(load_target(target)), facts, name=name)
        except DeviceMismatchError:
            continue
        suitable.append(target)
    # "local" is this machine; for another device it says nothing.
    return [t for t in suitable if t != "local" or name == "local"]


def _serves(target: str, facts: DeviceFacts, suitable: list[str]) -> bool:
    """Whether `target`, or the board of that family which the device is, suits it."""
    from edgesdk.deploy.connected import target_on

    try:
        return target_on(target, facts, name="") in suitable
    except DeviceMismatchError:
        return False


def _gpu_rows(profile: TargetProfile) -> list[tuple[str, str]]:
    gpu, board = profile.gpu, profile.board
    rows = []
    if gpu is not None:
        code = [f"sm_{a}" for a in gpu.architectures] + (
            [f"PTX of sm_{gpu.ptx}"] if gpu.ptx else []
        )
        rows = [
            ("gpu", ", ".join([gpu.api, *code, f"{gpu.multiprocessors} multiprocessors"])),
            ("gpu memory", "the CPU's" if gpu.integrated else "its own"),
            ("driver", f"CUDA {gpu.cuda} or newer" if gpu.cuda else ""),
        ]
    if board is not None:
        modes = [
            f"{m} (to measure)" if m in board.measuring_modes else m for m in board.power_modes
        ]
        rows += [
            ("board system", f"{board.system} or newer"),
            ("power modes", ", ".join(modes)),
        ]
    return rows


def _gpu_text(facts: DeviceFacts) -> str:
    gpu = facts.gpu
    if gpu is None or (gpu.library is None and gpu.architecture is None):
        return ""
    parts = [
        gpu.name or "NVIDIA",
        f"sm_{gpu.architecture}" if gpu.architecture else "",
        f"{'Jetson Linux' if gpu.integrated else 'driver'} {gpu.driver}" if gpu.driver else "",
        f"CUDA {gpu.cuda}" if gpu.cuda else "",
        "" if gpu.library else "no driver's library (libcuda.so.1)",
    ]
    return ", ".join(p for p in parts if p)


def _fact_rows(facts: DeviceFacts) -> list[tuple[str, str]]:
    from edgesdk.deploy.transport.base import size_text

    def size(kib: int | None) -> str:
        return size_text(kib * 1024) if kib is not None else ""

    def megahertz(khz: int | None) -> str:
        return f"{khz // 1000} MHz" if khz else ""

    features = textwrap.wrap(" ".join(sorted(facts.cpu_features or ())), _FEATURES_WIDTH)
    memory = size(facts.memory_total_kib)
    available = size(facts.memory_available_kib)
    temperature = "" if facts.temperature_c is None else f"{facts.temperature_c:.0f} °C"
    return [
        ("board", facts.board or ""),
        ("system", ", ".join(w for w in (facts.os_release, facts.os, facts.kernel) if w)),
        ("machine", facts.machine),
        ("libc", " ".join(w for w in (facts.libc, facts.libc_version) if w)),
        ("cpu", facts.cpu_model or ""),
        ("cores", str(facts.cores or "")),
        *zip(("features", *[""] * len(features)), features, strict=False),
        ("memory", f"{memory}, {available} available" if memory and available else memory),
        ("disk", f"{size(facts.disk_available_kib)} free" if facts.disk_available_kib else ""),
        ("governor", facts.governor or ""),
        ("frequency", megahertz(facts.max_frequency_khz)),
        ("temperature", temperature),
        ("throttled", facts.throttled or ""),
        ("gpu", _gpu_text(facts)),
        ("opencl", opencl_text(facts.opencl)),
        ("power mode", facts.power_mode or ""),
    ]


def _address(device: DeviceEntry) -> str:
    if device.serial is not None:
        return device.serial
    if device.host is None:
        return "this machine"
    user = f"{device.user}@" if device.user else ""
    host = f"[{device.host}]" if ":" in device.host and device.port else device.host
    return f"{user}{host}" + (f":{device.port}" if device.port else "")


def _device_json(device: DeviceEntry) -> dict[str, Any]:
    return asdict(device)


def _profile_json(profile: TargetProfile) -> dict[str, Any]:
    return asdict(profile) | {"machine": profile.machine, "triple": profile.triple}


def _tvm_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
