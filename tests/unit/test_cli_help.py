"""What the command line says of itself, and how little it imports for that."""

from __future__ import annotations

import subprocess
import sys

import pytest
from command_line import Cli

COMMANDS = (
    "init",
    "targets",
    "targets show",
    "devices",
    "devices add",
    "devices show",
    "devices remove",
    "devices check",
    "doctor",
    "inspect",
    "quantize",
    "compile",
    "tune",
    "push",
    "rollback",
    "run",
    "bench",
    "verify",
    "records",
    "records list",
    "records export",
    "records import",
    "records merge",
    "records prune",
)

_HEAVY = ("tvm", "onnx", "onnxruntime", "numpy", "paramiko", "rich")


def test_help(cli: Cli) -> None:
    assert cli.golden("help", "--help").code == 0


def test_without_a_command_the_help_is_shown(cli: Cli) -> None:
    assert cli() == cli("--help") == cli("-h")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(cli: Cli, command: str) -> None:
    said = cli.golden(f"help-{command.replace(' ', '-')}", *command.split(), "--help")
    assert said.code == 0 and said.err == ""


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c not in ("targets", "devices", "records")]
)
def test_every_command_takes_json(cli: Cli, command: str) -> None:
    assert "--json" in cli(*command.split(), "--help").out


def test_the_version(cli: Cli) -> None:
    import edgesdk

    assert cli("--version").out == f"edgesdk {edgesdk.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    ["--help", "compile --help", "--version", "targets", "targets show rpi4", "devices", "push"],
)
def test_nothing_heavy_is_imported(arguments: str) -> None:
    code = (
        "import sys; from edgesdk.cli import run; run(sys.argv[1:]);"
        f"print([m for m in {_HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()], capture_output=True, text=True, timeout=60
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_python_m_edgesdk_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edgesdk", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.startswith("edgesdk ")


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    # `head` has closed the pipe before the first line comes.
    done = subprocess.run(
        ["sh", "-c", '"$0" -m edgesdk targets | true', sys.executable],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
