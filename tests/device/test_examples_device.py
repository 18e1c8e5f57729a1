"""An example on an emulated board, cross-compiled by the commands of its README."""

from __future__ import annotations

from pathlib import Path

from example_programs import (
    commands,
    compare_faces,
    parse_faces,
    reference_faces,
    run_here,
    two_faces,
    workshop,
)
from PIL import Image

from edgesdk.deploy.transport.base import Transport


def test_finds_faces_on_a_board(transport: Transport, tmp_path: Path) -> None:
    here = workshop(tmp_path, "face")
    lines = commands("face_detection_cpp", section=1)
    assert lines[-1].startswith("scp -r faces-pi ")  # below, over the transport
    run_here(lines[:-1], here)
    installed = sorted((here / "faces-pi").iterdir())
    assert [file.name for file in installed] == ["face_detection", "libblazeface.so"]
    picture = two_faces()
    picture.save(here / "picture.png")

    folder = f"{transport.work_dir}/faces-pi"
    for file in (*installed, here / "picture.png"):
        transport.upload(file, f"{folder}/{file.name}", executable=True)
    program = [f"{folder}/{name}" for name in ("face_detection", "picture.png", "faces.png")]
    result = transport.run(program, timeout_s=300)
    assert result.ok, result.stderr_text
    transport.download(f"{folder}/faces.png", here / "faces.png")
    transport.run(["rm", "-rf", folder], timeout_s=60)

    expected = reference_faces(picture, here / "blazeface.onnx")
    compare_faces(parse_faces(result.stdout_text), expected, pixels=0.3)
    assert Image.open(here / "faces.png").size == picture.size
