"""Every error that edgesdk raises on purpose, with the exit code of its kind.

`message` says what failed and on which value; `hint` is the next thing to type. Both are one line.
They are caught once, in `cli.py`, which prints them and exits with `exit_code`.
"""

from __future__ import annotations

from typing import Any


class EdgeSdkError(Exception):
    """Base of all errors of edgesdk (exit code 1: unexpected)."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(EdgeSdkError):
    """An argument has a value that cannot be meant (exit code 2)."""

    exit_code = 2


class ConfigError(EdgeSdkError):
    """A profile, toolchain, device, project file or bundle is wrong (exit code 3)."""

    exit_code = 3


class BundleError(ConfigError):
    """A bundle is not one, is damaged, or was written by a newer edgesdk (exit code 3)."""


class ToolMissingError(EdgeSdkError):
    """A program that this machine needs is not installed (exit code 4)."""

    exit_code = 4


class ModelError(EdgeSdkError):
    """The model cannot be imported, compiled or tuned (exit code 5)."""

    exit_code = 5


class UnsupportedModelError(ModelError):
    """The model is valid but asks for something edgesdk refuses; names the nodes and the reason.

    `nodes` holds one (node name, operator, reason) triple per refused node.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        nodes: tuple[tuple[str, str, str], ...] = (),
    ) -> None:
        super().__init__(message, hint=hint)
        self.nodes = nodes


class CompileError(ModelError):
    """Lowering, code generation or linking failed (exit code 5)."""


class ContractError(CompileError):
    """The linked library breaks the target's contract, found by the audit (exit code 5)."""


class DeviceUnreachableError(EdgeSdkError):
    """No connection, or the device refuses us (exit code 6)."""

    exit_code = 6


class DeviceError(EdgeSdkError):
    """The device was reached, and something failed there (exit code 7)."""

    exit_code = 7


class DeviceMismatchError(DeviceError):
    """The bundle was built for another architecture, libc or CPU; found before copying."""


class VerificationError(EdgeSdkError):
    """A result differs from the reference by more than the tolerance (exit code 8).

    `layers` holds one table per layer that was compared, if they were.
    """

    exit_code = 8

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        layers: tuple[dict[str, Any], ...] = (),
    ) -> None:
        super().__init__(message, hint=hint)
        self.layers = layers
