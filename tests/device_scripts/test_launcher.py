"""The launcher: arguments, files, self-test, reports and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from device_build import Build

from edgesdk.proc import CommandResult

DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32"),
    *("int64", "uint8", "uint16", "uint32", "uint64", "bool"),
)
NAME = 'x=1:"0'  # an input's name may hold anything


@pytest.fixture
def run(build: Callable[[str], Build]) -> Callable[..., CommandResult]:
    """run(model, argument...): the launcher, under AddressSanitizer, on a test model."""
    made = build("asan")
    return lambda model, *argv, **kwargs: made.run(
        made.launcher, made.library(model), *argv, **kwargs
    )


@pytest.fixture
def x(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.standard_normal((10, 100)).astype("float32"))
    return tmp_path / "x.npy"


def expected(x: Path) -> np.ndarray:
    weight = np.arange(1000, dtype="float32").reshape(10, 100)
    return np.maximum(np.float32(2) * weight * np.load(x), np.float32(0)) + np.float32(1)


def complaint(result: CommandResult, code: int) -> str:
    """The one line that a refusal prints."""
    assert result.returncode == code, result.stderr_text
    assert result.stdout == b""
    (line,) = result.stderr_text.splitlines()
    assert line.startswith("edgesdk-run: ")
    return line.removeprefix("edgesdk-run: ")


@pytest.mark.parametrize("key", [NAME, "0"])
def test_runs_on_a_file(run: Callable[..., CommandResult], x: Path, key: str) -> None:
    result = run("model_a", "--input", f"{key}={x}", "--output", x.parent, "--json")
    assert result.ok, result.stderr_text
    report = json.loads(result.stdout)
    assert report["model"] == "model_a"
    assert report["inputs"] == [{"name": NAME, "dtype": "float32", "shape": [10, 100]}]
    assert len(report["latency_ms"]) == 1
    np.testing.assert_array_equal(np.load(x.parent / "output_0.npy"), expected(x))


def test_every_type_passes_through(run: Callable[..., CommandResult], tmp_path: Path) -> None:
    import ml_dtypes

    arrays = []
    for index, name in enumerate(DTYPES):
        dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
        array = (np.arange(6).reshape(2, 3) * 17 % 5).astype(dtype)
        np.save(tmp_path / f"{index}.npy", array)
        arrays.append(array)
    inputs = [
        part for i in range(13) for part in ("--input", f"{DTYPES[i]}={tmp_path / f'{i}.npy'}")
    ]
    result = run("model_dtypes", *inputs, "--output", tmp_path)
    assert result.ok, result.stderr_text
    for index, array in enumerate(arrays):
        back = np.load(tmp_path / f"output_{index}.npy")
        assert back.shape == (2, 3)
        assert back.tobytes() == array.tobytes()
        if DTYPES[index] != "bfloat16":  # NumPy reads that as raw two-byte values
            assert back.dtype == array.dtype


def test_without_inputs_it_says_what_the_model_is(run: Callable[..., CommandResult]) -> None:
    result = run("model_a")
    assert result.ok
    lines = result.stdout_text.splitlines()
    assert lines[0].startswith("model_a for test, build 0123456789abcdef, ")
    assert lines[1:] == [f"input 0: {NAME} float32 10x100", "output 0: y float32 10x100"]


def test_a_model_without_inputs_runs_at_once(
    run: Callable[..., CommandResult], tmp_path: Path
) -> None:
    result = run("model_no_inputs", "--output", tmp_path)
    assert result.ok
    np.testing.assert_array_equal(
        np.load(tmp_path / "output_0.npy"), np.array([1, 2, 3, 4], dtype="int32")
    )
    line = complaint(run("model_no_inputs", "--input", f"x={tmp_path}/x.npy"), 2)
    assert line == "the model has no inputs; leave --input out"


def test_times_and_layers(run: Callable[..., CommandResult], x: Path) -> None:
    arguments = ("--input", f"0={x}", "--repeat", "5", "--warmup", "2", "--per-layer")
    result = run("model_a", *arguments, "--json", "--threads", "1")
    report = json.loads(result.stdout)
    assert report["threads"] == 1
    assert len(report["latency_ms"]) == 5
    layers = [(layer["name"], layer["kernel"]) for layer in report["layers"]]
    assert layers == [("scale of x", "multiply"), ("copy", "copy"), ("shift", "add_one")]
    assert report["memory"]["weights_bytes"] == 4000
    assert report["memory"]["peak_rss_bytes"] > 4000
    text = run("model_a", *arguments).stdout_text
    assert "scale of x" in text and "(5 runs)" in text


def test_peak_memory_is_its_own(build: Callable[[str], Build]) -> None:
    """Whoever starts it may be large: this process is, for a moment."""
    made = build("plain")
    ballast = np.ones(200_000_000, np.uint8)
    report = json.loads(made.run(made.launcher, made.library("model_no_inputs"), "--json").stdout)
    assert ballast.nbytes > 10 * report["memory"]["peak_rss_bytes"] > 10_000_000


def golden(folder: Path, x: Path, y: np.ndarray) -> Path:
    np.save(folder / "input_0.npy", np.load(x))
    np.save(folder / "output_0.npy", y)
    return folder


def test_selftest(run: Callable[..., CommandResult], x: Path) -> None:
    y = expected(x)
    result = run("model_a", "--selftest", golden(x.parent, x, y), "--json")
    assert result.ok
    assert json.loads(result.stdout)["selftest"]["ok"] is True
    y[3, 4] += np.abs(y).max() * 1e-3
    folder = golden(x.parent, x, y)
    result = run("model_a", "--selftest", folder, "--json")
    assert result.returncode == 8
    found = json.loads(result.stdout)["selftest"]
    assert found["ok"] is False
    assert found["max_relative_error"] == pytest.approx(1e-3, rel=1e-2)
    assert "DIFFERS" in run("model_a", "--selftest", folder).stdout_text
    assert run("model_a", "--selftest", folder, "--tolerance", "1e-2").ok
    for bad in (np.nan, np.inf):
        y = expected(x)
        y[0, 0] = bad
        # No tolerance makes a number out of these.
        result = run("model_a", "--selftest", golden(x.parent, x, y), "--tolerance", "1e30")
        assert result.returncode == 8


def test_selftest_wants_integers_equal(run: Callable[..., CommandResult], tmp_path: Path) -> None:
    np.save(tmp_path / "output_0.npy", np.array([1, 2, 3, 4], dtype="int32"))
    assert run("model_no_inputs", "--selftest", tmp_path).ok
    np.save(tmp_path / "output_0.npy", np.array([1, 2, 3, 5], dtype="int32"))
    assert run("model_no_inputs", "--selftest", tmp_path, "--tolerance", "9").returncode == 8


def test_selftest_needs_fitting_files(run: Callable[..., CommandResult], x: Path) -> None:
    folder = golden(x.parent, x, np.zeros((10, 99), dtype="float32"))
    assert "does not fit output 'y'" in complaint(run("model_a", "--selftest", folder), 7)
    (folder / "output_0.npy").unlink()
    assert "No such file" in complaint(run("model_a", "--selftest", folder), 7)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--bogus"], "unknown option '--bogus'; see --help"),
        (["--repeat", "0"], "--repeat does not take '0'; see --help"),
        (["--repeat", "1x"], "--repeat does not take '1x'; see --help"),
        (["--repeat", "99999999999999999999"], None),
        (["--repeat"], "--repeat does not take ''; see --help"),
        (["--warmup", "-1"], "--warmup does not take '-1'; see --help"),
        (["--threads", "0"], "--threads does not take '0'; see --help"),
        (["--tolerance", "small"], "--tolerance does not take 'small'; see --help"),
        (["--input", "x"], "--input does not take 'x'; see --help"),
        (["other.so"], "one library, please: got 'other.so' too"),
        (
            ["--selftest", ".", "--input", "0=x.npy"],
            "--selftest brings its own inputs; leave --input out",
        ),
        (
            ["--input", "nope=x.npy"],
            f"the model has no input for 'nope=x.npy'; the first is '{NAME}'",
        ),
    ],
)
def test_wrong_arguments(
    run: Callable[..., CommandResult], arguments: list[str], line: str | None
) -> None:
    found = complaint(run("model_a", *arguments), 2)
    assert line is None or found == line


def test_help_and_no_library(build: Callable[[str], Build]) -> None:
    made = build("asan")
    result = made.run(made.launcher, "--help")
    assert result.ok and result.stdout_text.startswith("usage: edgesdk-run LIBRARY")
    assert complaint(made.run(made.launcher), 2) == "which library? see --help"


def test_too_many_inputs(run: Callable[..., CommandResult]) -> None:
    result = run("model_a", *(part for _ in range(300) for part in ("--input", "0=x.npy")))
    assert "--input does not take" in complaint(result, 2)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((10, 99), dtype="float32"),
        np.zeros((10, 100), dtype="float64"),
        np.zeros((1, 10, 100), dtype="float32"),
        np.zeros((10, 100), dtype=">f4"),
        np.asfortranarray(np.zeros((10, 100), dtype="float32")),
    ],
)
def test_inputs_that_do_not_fit(
    run: Callable[..., CommandResult], tmp_path: Path, array: np.ndarray
) -> None:
    np.save(tmp_path / "x.npy", array)
    line = complaint(run("model_a", "--input", f"0={tmp_path / 'x.npy'}"), 7)
    assert str(tmp_path / "x.npy") in line


def test_unset_inputs_are_named(run: Callable[..., CommandResult], tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.zeros((2, 3), dtype="float32"))
    line = complaint(run("model_dtypes", "--input", f"float32={tmp_path / '0.npy'}"), 7)
    assert line == "input 'float64' was never set"


def test_a_failing_kernel_is_told(run: Callable[..., CommandResult], x: Path) -> None:
    values = np.load(x)
    values[-1, -1] = np.nan
    np.save(x, values)
    result = run("model_a", "--input", f"0={x}", env={"EDGESDK_NUM_THREADS": "4"})
    assert complaint(result, 7) == "multiply failed: ValueError: x holds a NaN"


def test_files_that_are_no_model(build: Callable[[str], Build], tmp_path: Path) -> None:
    made = build("asan")
    assert "cannot load: " in complaint(made.run(made.launcher, tmp_path / "none.so"), 7)
    (tmp_path / "text.so").write_text("not a library")
    assert "cannot load: " in complaint(made.run(made.launcher, tmp_path / "text.so"), 7)


def test_output_folders_must_exist_and_have_room(
    run: Callable[..., CommandResult], x: Path
) -> None:
    line = complaint(run("model_a", "--input", f"0={x}", "--output", x.parent / "none"), 7)
    assert line.endswith("none/output_0.npy: No such file or directory")
    (x.parent / "output_0.npy").symlink_to("/dev/full")
    line = complaint(run("model_a", "--input", f"0={x}", "--output", x.parent), 7)
    assert line.endswith("output_0.npy: No space left on device")
    assert not (x.parent / "output_0.npy").is_symlink()


def test_a_report_that_cannot_be_written_is_an_error(build: Callable[[str], Build]) -> None:
    made = build("plain")
    command = f"'{made.launcher}' '{made.library('model_a')}' > /dev/full"
    result = made.run("sh", "-c", command)
    assert complaint(result, 7) == "cannot write the report"
