"""The command line as tests use it: in this process, with a configuration of its own."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden" / "cli"

# Set to 1, golden tests write what they see instead of comparing; read the diff before committing.
RECORD = "EDGESDK_RECORD_GOLDEN"


@dataclass(frozen=True)
class Said:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Runs `edgesdk ...` in the folder `here`, which is the current one."""

    def __init__(self, here: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.here = here
        self._capture = capture

    def __call__(self, *arguments: str) -> Said:
        from edgesdk.cli import run

        self._capture.readouterr()
        code = run(arguments)
        captured = self._capture.readouterr()
        return Said(code, captured.out, captured.err)

    def succeeds(self, *arguments: str) -> Said:
        """Runs a command that must not fail."""
        said = self(*arguments)
        assert said.code == 0, said.err
        return said

    def golden(self, name: str, *arguments: str) -> Said:
        """Compares everything that a command says with golden/cli/NAME.txt."""
        said = self(*arguments)
        parts = [f"$ edgesdk {' '.join(arguments)}\n", said.out, said.err, f"exit {said.code}\n"]
        # Where the folder is must not matter.
        text = "".join(parts).replace(str(self.here), "<here>")
        path = GOLDEN / f"{name}.txt"
        if os.environ.get(RECORD) == "1":
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")
        return said


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line in an empty folder, without devices, profiles and records of the user."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("EDGESDK_DEBUG", raising=False)
    return Cli(here, capsys)


# A launcher in shell. What it is asked to run it copies from the first input to the first output.
_LAUNCHER = """#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in
        --input) input=${2#*=}; shift ;;
        --output) output=$2; shift ;;
    esac
    shift
done
cp "$input" "$output/output_0.npy"
echo '{"threads": 2, "latency_ms": [1.5]}'
"""


@pytest.fixture
def fake_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a bundle whose launcher is a shell script; its input is called "a=b".

    `script` replaces what the launcher does, `machine` what the bundle is for.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(folder: Path, *, script: str | None = None, machine: str | None = None) -> Path:
        import numpy as np

        from edgesdk.bundle.manifest import (
            ContractInfo,
            Manifest,
            TensorInfo,
            VerificationInfo,
        )
        from edgesdk.bundle.writer import write_bundle

        library, launcher = tmp_path / "libnet.so", tmp_path / "launcher"
        library.write_bytes(b"\x7fELF and more")
        launcher.write_text(_LAUNCHER if script is None else f"#!/bin/sh\n{script}\n", "utf-8")
        manifest = Manifest(
            name="net",
            target="local",
            description="a network of tests",
            library="lib/libnet.so",
            launcher="bin/edgesdk-run",
            contract=ContractInfo("linux", (machine or platform.machine(),), None, None, ()),
            inputs=(TensorInfo("a=b", (2,), "float32"),),
            outputs=(TensorInfo("out:0", (2,), "float32"),),
            golden_inputs=("golden/input_0.npy",),
            golden_outputs=("golden/output_0.npy",),
            verification=VerificationInfo("native", "ONNX Runtime, CPU, fp32", 0.0, 0.0, 1e-4),
            model_sha256="0" * 64,
            abi_version=1,
            precision="fp32",
            weights_bytes=0,
            arena_bytes=0,
            files={},
            tools={},
        )
        values = [np.array([1, 2], np.float32)]
        folder.mkdir()
        write_bundle(
            folder,
            manifest,
            library=library,
            launcher=launcher,
            header="",
            golden=[(values, values)],
        )
        return folder

    return make
