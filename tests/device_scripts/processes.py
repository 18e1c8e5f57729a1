"""Looks at the processes of this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path


def eventually(condition: Callable[[], bool], *, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def child_of(pid: int) -> int:
    assert eventually(lambda: bool(children(pid)))
    return children(pid)[0]
