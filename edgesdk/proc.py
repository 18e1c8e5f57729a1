"""The one way to run a program on this machine: a list of arguments, a time limit, no shell."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgesdk.errors import EdgeSdkError, ToolMissingError


@dataclass(frozen=True)
class CommandResult:
    """What a finished program left: its output, and `returncode` (negative: a signal ended it)."""

    argv: tuple[str, ...]
    returncode: int
    stdout: bytes
    stderr: bytes

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    @property
    def stdout_text(self) -> str:
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        return self.stderr.decode("utf-8", "replace")

    def last_line(self) -> str:
        """The last line the program said, stderr first: usually the reason of a failure."""
        for text in (self.stderr_text, self.stdout_text):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            if lines:
                return lines[-1]
        return f"exit code {self.returncode}"


class CommandTimeout(EdgeSdkError):
    """A local program ran longer than its limit and was ended with its children."""


def run_command(
    argv: Sequence[str | Path],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input_bytes: bytes | None = None,
) -> CommandResult:
    """Runs `argv` and returns what it left; a non-zero exit code is not an error here.

    `env` is added to this process's environment. Raises ToolMissingError when the program does not
    exist and CommandTimeout (after ending the whole process group) past `timeout_s` seconds.
    """
    args = [str(a) for a in argv]
    try:
        process = subprocess.Popen(
            args,
            stdin=subprocess.PIPE if input_bytes is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    except (FileNotFoundError, PermissionError, OSError) as error:
        raise ToolMissingError(f"cannot start {args[0]!r}: {error.strerror or error}") from error
    try:
        stdout, stderr = process.communicate(input_bytes, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end_group(process)
        raise CommandTimeout(
            f"{args[0]} did not finish within {timeout_s:g} s and was ended"
        ) from None
    except BaseException:
        _end_group(process)
        raise
    return CommandResult(tuple(args), process.returncode, stdout, stderr)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended in this very moment
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
