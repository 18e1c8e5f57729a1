"""Nothing heavy is imported before it is used: what stays light, and what would weigh it down."""

from __future__ import annotations

import sys

import pytest

from edgesdk.proc import run_command

HEAVY = ("tvm", "tvm_ffi", "onnx", "onnxruntime", "numpy", "paramiko", "xgboost", "elftools")

LIGHT = {
    "the package": "import edgesdk",
    "its names": "import edgesdk; edgesdk.compile, edgesdk.run, edgesdk.open_bundle",
    "profiles": "from edgesdk.profiles import load_target; load_target('rpi4')",
    "this machine": "from edgesdk.profiles import load_target; load_target('local')",
    "toolchains": "from edgesdk.toolchain import load_toolchain as load; load('native').require()",
    "devices": "from edgesdk.devices import load_devices; load_devices()",
    "transports": "import edgesdk.deploy.transport",
    "help": "from edgesdk.cli import run; assert run(['--help']) == 0",
    "targets": "from edgesdk.cli import run; assert run(['targets']) == 0",
    "devices command": "from edgesdk.cli import run; assert run(['devices']) == 0",
    "push": "from edgesdk.cli import run; assert run(['push', 'none', '--device', 'pi']) == 3",
}


@pytest.mark.parametrize("what", LIGHT)
def test_stays_light(what: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("here")
    code = f"{LIGHT[what]}\nimport sys\nprint('loaded:', *[m for m in {HEAVY} if m in sys.modules])"
    result = run_command(
        [sys.executable, "-c", code],
        timeout_s=60,
        cwd=folder,
        env={"XDG_CONFIG_HOME": str(folder / "config")},
    )
    assert result.ok, result.stderr_text
    assert result.stdout_text.splitlines()[-1].split() == ["loaded:"]


def test_the_check_would_notice() -> None:
    result = run_command(
        [sys.executable, "-c", "import numpy, sys; print('numpy' in sys.modules)"], timeout_s=60
    )
    assert result.stdout_text.strip() == "True"
