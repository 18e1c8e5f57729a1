"""A Python with PyTorch for the tests that need one: this one, or an environment in the cache.

PyTorch takes 0.2 to 3 GB to download, so the environment is made in CI only, or when
EDGESDK_TEST_TORCH is set. It sees all packages of this Python.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import site
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from edgesdk.proc import run_command
from edgesdk.resources import cache_folder

WHY_NOT = (
    "PyTorch (0.2 to 3 GB) is not installed; pip install 'edgesdk[torch]', or set"
    " EDGESDK_TEST_TORCH=1 for an environment in the cache folder"
)
_PACKAGES = ("torch==2.13.0", "onnxscript==0.7.2", "onnx-ir==1.1.0")
_INSTALL_LIMIT_S = 1200.0


def torch_python() -> Path | None:
    """The Python to use, or None where none is wanted. Made once."""
    if importlib.util.find_spec("torch") and importlib.util.find_spec("onnxscript"):
        return Path(sys.executable)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache_folder() / "torch" / f"{_PACKAGES[0].replace('==', '-')}-python{version}"
    python = folder / "bin" / "python"
    if python.exists():
        return python
    if not (os.environ.get("CI") or os.environ.get("EDGESDK_TEST_TORCH")):
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "venv"
        venv.create(made, with_pip=True)
        scheme = sysconfig.get_path("purelib", vars={"base": str(made)})
        # Behind the environment's own packages: those of this Python, and edgesdk.
        here = [*site.getsitepackages(), str(Path(__file__).parents[1])]
        (Path(scheme) / "tests.pth").write_text("\n".join(here), encoding="utf-8")
        pip = [made / "bin" / "python", "-m", "pip", "install", "-qq", *_PACKAGES]
        result = run_command(pip, timeout_s=_INSTALL_LIMIT_S)
        assert result.ok, result.stderr_text
        shutil.rmtree(folder, ignore_errors=True)
        made.replace(folder)
    return python
