"""edgesdk.toml: finding, checking, writing, and whose path is relative to what."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgesdk.errors import ConfigError, UsageError
from edgesdk.project import find_project, load_project, write_project

GOOD = """\
model = "models/net.v2.onnx"

[shapes]
"input:0" = [1, 3, 224, 224]

[targets.local]
[targets.rpi4]
device = "pi"
output = "for-pi"
"""


def write(folder: Path, text: str = GOOD) -> Path:
    path = folder / "edgesdk.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_it_is_found_from_the_current_folder_upwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert (found := find_project(inner)) is not None and found.path == path
    monkeypatch.chdir(inner)
    assert (found := find_project()) is not None and found.path == path
    write(inner, 'model = "other.onnx"\n')
    assert (found := find_project()) is not None and found.model_path == inner / "other.onnx"


def test_no_project_file_is_no_error(tmp_path: Path) -> None:
    assert find_project(tmp_path) is None


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    project = load_project(write(tmp_path))
    assert project.model_path == tmp_path / "models" / "net.v2.onnx"
    assert project.bundle_path("local") == tmp_path / "bundles" / "net_v2-local"
    assert project.bundle_path("rpi4") == tmp_path / "for-pi"
    # A target that is only named on the command line.
    assert project.bundle_path("rpi5") == tmp_path / "bundles" / "net_v2-rpi5"
    assert project.shapes == {"input:0": (1, 3, 224, 224)}
    assert project.options("rpi4").device == "pi"


def test_a_profile_of_ones_own_is_relative_to_the_file_too(tmp_path: Path) -> None:
    text = 'model = "m.onnx"\noutput = "../out"\n[targets."boards/mine.toml"]\n'
    project = load_project(write(tmp_path, text))
    assert project.profile("boards/mine.toml") == str(tmp_path / "boards" / "mine.toml")
    assert project.profile("rpi4") == "rpi4"
    assert project.bundle_path("boards/mine.toml") == tmp_path.parent / "out" / "m-mine"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("modle = 'm.onnx'\n", "unknown key 'modle'", "did you mean 'model'?"),
        ("[targets.rpi4]\n", "the key 'model' is missing", "add 'model' to it"),
        ("model = 3\n", "'model' is 3, not a string", "make 'model' a string"),
        ("model = 'm'\n[targets.rpi44]\n", "unknown target 'targets.rpi44'", "did you mean 'rpi4'"),
        (
            "model = 'm'\n[targets.rpi4]\ndevcie = 'pi'\n",
            "unknown key 'targets.rpi4.devcie'",
            "did you mean 'device'?",
        ),
        (
            "model = 'm'\n[targets.rpi4]\nprecision = 'fp23'\n",
            "'targets.rpi4.precision' is 'fp23'",
            "fp32",
        ),
        ("model = 'm'\n[shapes]\nx = '1x3'\n", "'shapes.x' is '1x3', not a list", "a list"),
        ("model = 'm'\n[shapes]\nx = [1, 0]\n", "'shapes.x' is [1, 0]", "at least 1"),
        ("model = \n", "is not valid TOML", "edit"),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    tmp_path: Path, text: str, message: str, hint: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_project(path)
    assert str(path) in caught.value.message
    assert message in caught.value.message
    assert caught.value.hint is not None and hint in caught.value.hint


def test_an_unknown_target_is_a_wrong_argument_with_a_suggestion(tmp_path: Path) -> None:
    project = load_project(write(tmp_path))
    with pytest.raises(UsageError) as caught:
        project.options("rpi")
    assert caught.value.hint == "did you mean 'rpi4'?"


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    project = write_project(
        tmp_path,
        model=tmp_path / "models" / "net.onnx",
        shapes={"input:0": (1, 3, 8, 8), "x": (2,)},
        targets={"local": None, "rpi3-32": 'the "old" one'},
    )
    assert project == load_project(tmp_path / "edgesdk.toml")
    assert project.model == "models/net.onnx"
    assert project.shapes == {"input:0": (1, 3, 8, 8), "x": (2,)}
    assert list(project.targets) == ["local", "rpi3-32"]
    assert project.options("rpi3-32").device == 'the "old" one'
    # Comments are the point of the file: every key is explained where it stands.
    text = (tmp_path / "edgesdk.toml").read_text(encoding="utf-8")
    assert all(word in text for word in ("# Bundles go here", "#   device =", "#   precision ="))


def test_a_model_outside_of_the_folder_keeps_its_whole_path(tmp_path: Path) -> None:
    inner = tmp_path / "project"
    inner.mkdir()
    project = write_project(inner, model=tmp_path / "net.onnx", shapes={}, targets={"local": None})
    assert project.model == str(tmp_path / "net.onnx")


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(UsageError, match="exists already"):
        write_project(tmp_path, model=tmp_path / "x.onnx", shapes={}, targets={"local": None})
    assert path.read_text(encoding="utf-8") == GOOD
