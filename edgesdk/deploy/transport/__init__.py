"""The ways to a device. `open_transport` picks the one that the device's entry names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgesdk.devices import Device

if TYPE_CHECKING:
    from edgesdk.deploy.transport.base import Transport


def open_transport(device: Device) -> Transport:
    """Connects to `device`.

    Raises DeviceUnreachableError when it does not answer, does not let the user in, or shows a host
    key that is not the known one; DeviceError when it has no usable work folder.
    """
    if device.transport == "local":
        from edgesdk.deploy.transport.local import LocalTransport

        return LocalTransport(device)
    if device.transport == "adb":
        from edgesdk.deploy.transport.adb import AdbTransport

        return AdbTransport(device)
    from edgesdk.deploy.transport.ssh import SshTransport

    return SshTransport(device)
