"""Each engine's packages, in a virtual environment of its own in the cache folder.

The project's environment never sees them, and engines cannot disagree about what they need. Another
set of pinned packages is another folder.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import venv
from importlib import import_module
from pathlib import Path

from edgesdk.proc import run_command
from edgesdk.resources import cache_folder

_INSTALL_LIMIT_S = 1800.0
_COMMON = ("numpy>=2", "onnx>=1.17")


def engine_python(engine: str) -> Path:
    """Returns a Python that has what `engine` needs; installs it the first time.

    Raises RuntimeError with pip's last line when it cannot be installed.
    """
    module = import_module(f"engines.{engine}")
    if not module.PACKAGES:
        return Path(sys.executable)
    wanted = sorted({*_COMMON, *module.PACKAGES})
    bare = sorted(getattr(module, "WITHOUT_DEPENDENCIES", ()))
    key = hashlib.sha256("\n".join([*wanted, "", *bare, sys.version]).encode()).hexdigest()[:12]
    folder = cache_folder() / "bench" / f"{engine}-{key}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"installing {', '.join(wanted + bare)} into {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True)
    for packages in (wanted, ["--no-deps", *bare] if bare else []):
        if not packages:
            continue
        command = [python, "-m", "pip", "install", "--quiet", *packages]
        result = run_command(command, timeout_s=_INSTALL_LIMIT_S)
        if not result.ok:
            raise RuntimeError(f"{engine} cannot be installed: {result.last_line()}")
    (folder / "complete").touch()
    return python
