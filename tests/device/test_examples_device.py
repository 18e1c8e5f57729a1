"""Examples on an emulated board, cross-compiled by the commands of a README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from example_programs import (
    ASTRONAUT,
    commands,
    compare_faces,
    parse_faces,
    reference_faces,
    run_here,
    two_faces,
    workshop,
)
from PIL import Image
from real_models import fetch

from edgesdk.deploy.transport.base import Transport


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with BlazeFace, compiled for the board."""
    folder = workshop(tmp_path_factory.mktemp("board"), "face")
    (compile_line, *_) = commands("face_detection_cpp", section=1)
    run_here([compile_line], folder)
    return folder


def build_lines() -> list[str]:
    """The README's lines that build for the board, without those before and after."""
    _, *lines, last = commands("face_detection_cpp", section=1)
    assert last.startswith("scp -r faces-pi ")  # below, over the transport
    return lines


def copy(transport: Transport, files: list[Path], folder: str) -> None:
    for file in files:
        transport.upload(file, f"{folder}/{file.name}", executable=True)


def test_finds_faces(transport: Transport, here: Path) -> None:
    run_here(build_lines(), here)
    installed = sorted((here / "faces-pi").iterdir())
    assert [file.name for file in installed] == ["face_detection", "libblazeface.so"]
    picture = two_faces()
    picture.save(here / "picture.png")

    folder = f"{transport.work_dir}/faces-pi"
    copy(transport, [*installed, here / "picture.png"], folder)
    program = [f"{folder}/{name}" for name in ("face_detection", "picture.png", "faces.png")]
    result = transport.run(program, timeout_s=300)
    assert result.ok, result.stderr_text
    transport.download(f"{folder}/faces.png", here / "faces.png")
    transport.run(["rm", "-rf", folder], timeout_s=60)

    expected = reference_faces(picture, here / "blazeface.onnx")
    compare_faces(parse_faces(result.stdout_text), expected, pixels=0.3)
    assert Image.open(here / "faces.png").size == picture.size


def test_runs_behind_a_camera(transport: Transport, here: Path) -> None:
    """The same commands build the other example."""
    names = (("face_detection_cpp", "camera_loop_cpp"), ("faces-pi", "camera-pi"))
    lines = "\n".join(build_lines())
    for old, new in names:
        lines = lines.replace(old, new)
    run_here(lines.splitlines(), here)
    Image.open(fetch(ASTRONAUT)).save(here / "astronaut.png")

    folder = f"{transport.work_dir}/camera-pi"
    copy(transport, list((here / "camera-pi").iterdir()), folder)
    copy(transport, [here / "astronaut.png"], f"{folder}/pictures")
    options = "--fps 0 --frames 4 --network-cpus 0 --camera-cpu 0 --pictures"
    program = [f"{folder}/camera_loop", *options.split(), f"{folder}/pictures"]
    result = transport.run(program, timeout_s=300)
    assert result.ok, result.stderr_text
    transport.run(["rm", "-rf", folder], timeout_s=60)
    first, *_, last = result.stdout_text.splitlines()
    assert first == "4 frames: 4 processed, 0 dropped, 4 with a face"
    assert re.match(r"median [\d.]+ ms", last)
