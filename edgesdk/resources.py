"""Where the data folders are: `targets/`, `toolchains/`, `device_scripts/`.

In a checkout they stand beside the package; in an installed wheel inside it, under `_data/`.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_folder(name: str) -> Path:
    """Returns the folder `name` ("targets", "toolchains" or "device_scripts").

    Raises FileNotFoundError when the installation is incomplete.
    """
    for candidate in (_PACKAGE / "_data" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"edgesdk is installed without its folder {name!r}")


def cache_folder() -> Path:
    """Returns the user's cache folder, `$XDG_CACHE_HOME/edgesdk`; it may be deleted any time."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "edgesdk"


def config_folder() -> Path:
    """Returns the user's configuration folder (`$XDG_CONFIG_HOME/edgesdk`)."""
    root = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(root) / "edgesdk"


def data_home() -> Path:
    """Returns the user's data folder (`$XDG_DATA_HOME/edgesdk`), for what took long to make."""
    root = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(root) / "edgesdk"
