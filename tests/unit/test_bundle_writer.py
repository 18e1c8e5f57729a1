"""A bundle's folder appears as a whole or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from edgesdk.bundle.manifest import MANIFEST_NAME
from edgesdk.bundle.writer import staged_folder
from edgesdk.errors import CompileError, UsageError


def write(output: Path, text: str) -> None:
    with staged_folder(output) as staging:
        (staging / MANIFEST_NAME).write_text(text)
        (staging / "library").write_text(text)


def test_takes_the_place_of_an_older_bundle(tmp_path: Path) -> None:
    output = tmp_path / "new" / "bundle"
    write(output, "first")
    (output / "left-over").write_text("")
    write(output, "second")
    assert {p.name: p.read_text() for p in output.iterdir()} == {
        MANIFEST_NAME: "second",
        "library": "second",
    }
    assert [p.name for p in output.parent.iterdir()] == ["bundle"]


def test_failure_leaves_the_older_bundle_and_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    write(output, "first")
    with pytest.raises(CompileError, match="No space left") as caught, staged_folder(output) as new:
        (new / MANIFEST_NAME).write_text("second")
        raise OSError(28, "No space left on device")
    assert caught.value.hint is not None
    assert (output / MANIFEST_NAME).read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_names_the_file_elsewhere_that_cannot_be_written(tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "object.o"
    told = pytest.raises(CompileError, match=f"cannot write {cache}: Permission denied")
    with told, staged_folder(tmp_path / "bundles" / "one"):
        raise PermissionError(13, "Permission denied", str(cache))


def test_keeps_what_is_no_bundle(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    output.mkdir()
    (output / "thesis.txt").write_text("years")
    with pytest.raises(UsageError, match="is not a bundle"), staged_folder(output):
        pass
    assert (output / "thesis.txt").read_text() == "years"


def test_keeps_what_came_while_it_worked(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    with pytest.raises(UsageError, match="is not a bundle"), staged_folder(output) as staging:
        (staging / MANIFEST_NAME).write_text("new")
        output.mkdir()
        (output / "thesis.txt").write_text("years")
    assert [p.name for p in tmp_path.rglob("*")] == ["bundle", "thesis.txt"]


@pytest.mark.parametrize("place", ["file/bundle", "n" * 300])
def test_says_where_it_cannot_write(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CompileError, match="cannot write to") as caught:
        write(tmp_path / place, "text")
    assert caught.value.hint is not None


def test_several_at_once_leave_one_whole_bundle(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    errors: list[BaseException] = []

    def many(text: str) -> None:
        try:
            for _ in range(100):
                write(output, text)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=many, args=(f"writer {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    texts = {p.read_text() for p in output.iterdir()}
    assert len(texts) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]
