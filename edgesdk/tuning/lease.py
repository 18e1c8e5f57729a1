"""One tuning session at a time on a device: two would measure each other."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edgesdk.errors import ConfigError
from edgesdk.resources import data_home


@contextmanager
def device_lease(device: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds `device` among the user's sessions on this machine; a killed process lets go of it.

    Calls `waiting` once when another session has it, then waits as long as that takes. Raises
    ConfigError when the lock file cannot be made.
    """
    folder = data_home() / "leases"
    path = folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', device)}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made: {error.strerror}", hint="set XDG_DATA_HOME to another folder"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
