"""The target of the board that is connected, for names that stand for a family of boards.

`--target jetson` is whichever Jetson the device is: it is asked, and its answer compared with the
`[board]` tables of the family's profiles.
"""

from __future__ import annotations

from edgesdk.deploy.facts import DeviceFacts, read_facts, target_of
from edgesdk.deploy.transport import open_transport
from edgesdk.devices import LOCAL_NAME, get_device, load_devices
from edgesdk.errors import DeviceMismatchError, UsageError
from edgesdk.profiles import target_families


def connected_target(target: str, device: str | None) -> str:
    """Returns `target`, or if it is the name of a family, the board's profile that `device` is.

    Without `device` the one that `devices.toml` has for the family is asked, or the only one that
    there is. Raises UsageError when it is not clear which to ask, DeviceMismatchError for a board
    that is none of the family, DeviceUnreachableError and DeviceError.
    """
    families = target_families()
    if target not in families:
        return target
    name = device or serving_device(target)
    with open_transport(get_device(name)) as transport:
        return target_on(target, read_facts(transport), name=name)


def target_on(target: str, facts: DeviceFacts, *, name: str) -> str:
    """As `connected_target`, for the device `name` that has answered."""
    families = target_families()
    if target not in families:
        return target
    boards = [p.name for p in families[target]]
    profile = target_of(facts)
    if profile is not None and profile.name in boards:
        return profile.name
    said = facts.board or facts.machine
    if facts.compatible:
        said += f" ({' '.join(facts.compatible)})"
    raise DeviceMismatchError(
        f"{name} is none of the boards that {target!r} stands for: it is {said}",
        hint=f"name its target, if it is like one of {', '.join(boards)}",
    )


def serving_device(family: str) -> str:
    """Returns the device that is asked which board of `family` it is.

    That is the one that `devices.toml` has for the family, or the only one. Raises UsageError when
    there is none, or more than one.
    """
    devices = [d for d in load_devices().values() if d.name != LOCAL_NAME]
    serving = [d.name for d in devices if d.target == family] or [d.name for d in devices]
    if len(serving) == 1:
        return serving[0]
    if not serving:
        raise UsageError(
            f"the target {family!r} asks the connected board, and there is no device",
            hint=f"edgesdk devices add board --ssh user@host --target {family}",
        )
    raise UsageError(
        f"the target {family!r} asks the connected board: which of {', '.join(serving)}?",
        hint=f"add --device {serving[0]}",
    )
