"""The examples on this machine, built and run by the commands of their READMEs."""

from __future__ import annotations

import os
import re
import shlex
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from example_programs import (
    ASTRONAUT,
    attempt,
    commands,
    compare_faces,
    parse_faces,
    reference_faces,
    run_here,
    two_faces,
    workshop,
)
from PIL import Image, ImageDraw, ImageFont
from real_models import fetch

from edgesdk.proc import run_command
from edgesdk.profiles import load_target
from edgesdk.toolchain import emulator_command, load_toolchain

FACES = "build/faces/face_detection"
CAMERA = "build/camera/camera_loop"


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which face_detection_cpp was built and run as its README says."""
    here = workshop(tmp_path_factory.mktemp("faces"), "face")
    two_faces().save(here / "picture.jpg", quality=95)
    run_here(commands("face_detection_cpp"), here)
    return here


def test_finds_both_faces(faces: Path) -> None:
    picture = two_faces()
    picture.save(faces / "two.png")
    found = parse_faces(run_here([f"{FACES} two.png shown.png"], faces))
    expected = reference_faces(picture, faces / "blazeface.onnx")
    assert len(expected) == 2
    # A picture's pixels are whole numbers for the one and the other, rounded at times differently.
    compare_faces(found, expected, pixels=0.3)
    # Where the faces are, by eye: in the astronaut's picture from (175, 80) to (275, 185).
    for face, (left, top, right, bottom) in zip(
        sorted(found, key=lambda face: face.left),
        [(125, 140, 225, 245), (440, 84, 520, 168)],
        strict=True,
    ):
        center = (face.left + face.right) / 2, (face.top + face.bottom) / 2
        assert left < center[0] < right and top < center[1] < bottom


def test_draws_what_it_found(faces: Path) -> None:
    picture = Image.open(fetch(ASTRONAUT)).convert("RGB")
    picture.save(faces / "one.png")
    (face,) = parse_faces(run_here([f"{FACES} one.png one-shown.png"], faces))
    shown = Image.open(faces / "one-shown.png")
    assert shown.size == picture.size
    changed = np.any(np.asarray(shown) != np.asarray(picture), axis=2)
    rows, columns = np.nonzero(changed)
    # The points of the face lie within or beside the box, ears too.
    assert abs(rows.min() - face.top) < 4 and abs(rows.max() - face.bottom) < 4
    assert abs(columns.min() - face.left) < 8 and abs(columns.max() - face.right) < 8
    assert shown.getpixel((round(face.left), round((face.top + face.bottom) / 2))) == (40, 220, 60)


def test_reads_and_writes_jpeg(faces: Path) -> None:
    """picture.jpg of the README: decoders of JPEG differ in how they enlarge colours."""
    said = run_here([f"{FACES} picture.jpg shown.jpg"], faces)
    expected = reference_faces(Image.open(faces / "picture.jpg"), faces / "blazeface.onnx")
    compare_faces(parse_faces(said), expected, pixels=1.5)
    assert Image.open(faces / "faces.png").format == "PNG"  # the README's own command
    assert Image.open(faces / "shown.jpg").format == "JPEG"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("nothing.png out.png", "nothing.png cannot be read"),
        ("blazeface.onnx out.png", "blazeface.onnx cannot be read"),
        ("picture.jpg no/such/folder/out.png", "cannot be written"),
        ("picture.jpg", "usage"),
        ("picture.jpg out.png 7", "THRESHOLD"),
    ],
)
def test_says_what_is_wrong(faces: Path, arguments: str, reason: str) -> None:
    result = attempt([f"{FACES} {arguments}"], faces)
    assert result.returncode == 1
    (line,) = result.stderr_text.splitlines()
    assert line.startswith("face_detection: ") and reason in line


def test_finds_faces_on_windows(faces: Path) -> None:
    """The same source, built and run by the README's commands for Windows."""
    lines = commands("face_detection_cpp", section=2)
    assert lines[-1].startswith("wine ")
    profile = load_target("windows-x86_64")
    wine = shlex.join(emulator_command(profile, load_toolchain(profile.toolchain)))
    said = run_here([*lines[:-1], lines[-1].replace("wine", wine, 1)], faces).splitlines()
    found = parse_faces("\n".join(said[-2:]))
    expected = reference_faces(Image.open(faces / "picture.jpg"), faces / "blazeface.onnx")
    compare_faces(found, expected, pixels=1.5)
    assert Image.open(faces / "faces-windows.png").size == two_faces().size


def test_runs_behind_a_camera(faces: Path) -> None:
    lines = commands("camera_loop_cpp")
    # The network is there from the other example.
    run_here([line for line in lines if not line.startswith("edgesdk compile")], faces)
    (faces / "pictures").mkdir()
    Image.open(fetch(ASTRONAUT)).save(faces / "pictures" / "a.png")
    Image.new("RGB", (200, 100), (40, 90, 60)).save(faces / "pictures" / "b.png")
    cpu = min(os.sched_getaffinity(0))
    options = f"--fps 0 --frames 40 --pictures pictures --network-cpus {cpu} --camera-cpu {cpu}"
    said = run_here([f"{CAMERA} {options}"], faces).splitlines()
    assert said[0] == "40 frames: 40 processed, 0 dropped, 20 with a face"
    assert sum(int(line.split()[2]) for line in said[1:-1]) == 40
    assert re.fullmatch(r"median [\d.]+ ms, p99 [\d.]+ ms, worst [\d.]+ ms", said[-1])


def test_a_camera_that_is_too_fast_drops_frames(faces: Path) -> None:
    said = run_here([f"{CAMERA} --frames 3000 --fps 1000000"], faces)
    found = re.match(r"3000 frames: (\d+) processed, (\d+) dropped, 0 with a face\n", said)
    assert found is not None
    assert int(found[1]) + int(found[2]) == 3000
    assert int(found[1]) > 0 and int(found[2]) > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--camera-cpu 1000", "CPU 1000"),
        ("--network-cpus 1000", "CPU 1000"),
        ("--pictures no/such", "no/such"),
        ("--fast yes", "usage"),
    ],
)
def test_a_camera_loop_that_cannot_start(faces: Path, options: str, reason: str) -> None:
    result = attempt([f"{CAMERA} {options}"], faces)
    assert result.returncode == 1 and reason in result.stderr_text


def test_reads_text(tmp_path: Path) -> None:
    """Lines side by side, upside down and slanted."""
    here = workshop(tmp_path, "text")
    background, font = (245, 245, 235), ImageFont.load_default(48)
    picture = Image.new("RGB", (900, 600), background)
    draw = ImageDraw.Draw(picture)
    draw.text((60, 60), "Edge devices 2026", font=font, fill=(20, 20, 60))
    draw.text((60, 160), "Turn left", font=font, fill=(120, 20, 20))
    draw.text((500, 160), "Platform 9", font=font, fill=(20, 80, 20))
    for text, angle, place in (("Hello World", 180, (60, 260)), ("Slanted text", 15, (300, 350))):
        line = Image.new("RGB", (500, 90), background)
        ImageDraw.Draw(line).text((20, 15), text, font=font, fill=(0, 0, 0))
        turned = line.rotate(angle, Image.Resampling.BICUBIC, expand=True, fillcolor=background)
        picture.paste(turned, place)
    picture.save(here / "picture.png")
    said = run_here(commands("text_reader_cpp"), here)
    found = [line.split("\t") for line in said.splitlines() if "\t" in line]
    assert [text for _, text in found] == [
        "Edge devices 2026",
        "Turn left",
        "Platform 9",
        "Hello World",
        "Slanted text",
    ]
    assert all(0.9 < float(probability) <= 1 for probability, _ in found)
    shown = np.asarray(Image.open(here / "shown.png"))
    assert (np.all(shown == (230, 40, 40), axis=2)).sum() > 1000
    refused = attempt(["build/text/text_reader examples/README.md picture.png"], here)
    assert refused.returncode == 1 and "list of characters" in refused.stderr_text


def test_hears_a_word(tmp_path: Path) -> None:
    """A word of one voice, found in the speech of others."""
    here = workshop(tmp_path, "keyword")
    write_wav(here / "word.wav", speech("computer", "en-us", here))
    rng = np.random.default_rng(1)
    parts, wanted, end = [np.zeros(16000)], [], 16000
    for word, voice in (
        ("banana", "en-us"),
        ("computer", "en-gb+m7"),
        ("window", "en-gb+f3"),
        ("open the door please", "en-us+m3"),
        ("computer", "en-us+m3"),
        ("window", "en-us"),
    ):
        sound = speech(word, voice, here)
        if word == "computer":
            wanted.append((end / 16000, (end + len(sound) + 12000) / 16000))
        parts += [sound, np.zeros(12000)]
        end += len(sound) + 12000
    quiet = np.concatenate(parts)
    write_wav(here / "sound.wav", quiet + rng.normal(0, 30, len(quiet)))
    *_, first, second = run_here(commands("keyword_python"), here).splitlines()
    said = [float(line.split()[0]) for line in (first, second)]
    assert all(start < at < end for at, (start, end) in zip(said, wanted, strict=True))

    # The same sound raw, as from a microphone, and with a word that nobody says.
    spotter = "python examples/keyword_python/keyword_spotter.py"
    path = commands("keyword_python")[-2]
    assert path.startswith("export PYTHONPATH=")
    raw = run_here([path, f"tail -c +45 sound.wav | {spotter} word.wav --listen -"], here)
    assert raw.splitlines() == [first, second]
    write_wav(here / "other.wav", speech("elephant", "en-us", here))
    assert run_here([path, f"{spotter} other.wav --listen sound.wav"], here) == ""
    write_wav(here / "silence.wav", np.zeros(8000))
    refused = attempt([path, f"{spotter} silence.wav --listen sound.wav"], here)
    assert refused.returncode == 1
    assert refused.stderr_text == "keyword_spotter: a recording of the word is empty or silent\n"


def speech(text: str, voice: str, here: Path) -> np.ndarray:
    """The text as espeak-ng says it, at 16 kHz."""
    file = here / "speech.wav"
    said = run_command(["espeak-ng", "-v", voice, "-s", "160", "-w", file, text], timeout_s=60)
    assert said.ok, said.stderr_text
    with wave.open(str(file)) as opened:
        rate = opened.getframerate()
        sound = np.frombuffer(opened.readframes(opened.getnframes()), "<i2")
    times = np.arange(int(len(sound) * 16000 / rate)) * rate / 16000
    return np.interp(times, np.arange(len(sound)), sound)


def write_wav(path: Path, sound: Sequence[float] | np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(np.clip(sound, -32768, 32767).astype("<i2").tobytes())
