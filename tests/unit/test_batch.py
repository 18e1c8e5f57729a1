"""A folder of inputs: results of all that can be run, a line for each that cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import Cli

import edgesdk
from edgesdk import console

Bundles = Callable[..., Path]

# Fails for inputs whose last element is negative (the sign is the highest bit), as a kernel might.
PICKY = """
while [ $# -gt 0 ]; do
    case $1 in --input) input=${2#*=}; shift ;; --output) output=$2; shift ;; esac
    shift
done
last=$(tail -c 1 "$input" | od -An -tu1 | tr -d ' ')
if [ "$last" -ge 128 ]; then echo "edgesdk-run: kernel 3 failed" >&2; exit 7; fi
cp "$input" "$output/output_0.npy"
echo '{"threads": 2, "latency_ms": [1.5]}'
"""


@pytest.fixture
def inputs(cli: Cli) -> Path:
    """Two that can be run, four that cannot, and a file that is none of them."""
    folder = cli.here / "in"
    folder.mkdir()
    np.save(folder / "a.npy", np.array([1, 2], np.float32))
    np.savez(folder / "b.npz", **{"a=b": np.array([3, np.nan], np.float32)})
    np.save(folder / "c.npy", np.array([1, 2, 3], np.float32))
    np.savez(folder / "d.npz", other=np.array([1, 2], np.float32))
    (folder / "e.npz").write_bytes(b"PK no archive")
    (folder / "f.npy").write_bytes(b"")
    (folder / "notes.txt").write_text("not an input")
    return folder


FAILED = {
    "c.npy": "the input 'a=b' is float32 3, not float32 2",
    "d.npz": "net has no input 'other'",
    "e.npz": "in/e.npz is not a .npz file of numbers",
    "f.npy": "in/f.npy is not a .npy file of numbers",
}


def test_writes_a_file_for_each_input(cli: Cli, fake_bundle: Bundles, inputs: Path) -> None:
    fake_bundle(cli.here / "net")
    said = cli("run", "net", "--input-dir", "in", "--output", "out")
    assert said.code == 2
    assert said.out == "2 of 6 inputs done on local: out\n"
    for name, message in FAILED.items():
        assert f"warning: {name}: {message}\n" in said.err
    assert "error: 4 of 6 inputs failed, first c.npy: the input 'a=b' is float32 3" in said.err
    assert "hint: the results of the others are in out\n" in said.err
    assert sorted(f.name for f in (cli.here / "out").iterdir()) == ["a.npz", "b.npz"]
    for name, values in (("a", [1, 2]), ("b", [3, np.nan])):
        with np.load(cli.here / "out" / f"{name}.npz") as result:
            assert result.files == ["out:0"]
            np.testing.assert_array_equal(result["out:0"], np.array(values, np.float32))


def test_writes_a_line_for_each_input(cli: Cli, fake_bundle: Bundles, inputs: Path) -> None:
    fake_bundle(cli.here / "net")
    assert cli("run", "net", "--input-dir", "in", "--output", "new/out.jsonl").code == 2
    lines = (cli.here / "new" / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"input": "a.npy", "outputs": {"out:0": [1.0, 2.0]}},
        {"input": "b.npz", "outputs": {"out:0": [3.0, None]}},
        *({"input": name, "error": message} for name, message in FAILED.items()),
    ]


def test_goes_on_past_a_run_that_fails(cli: Cli, fake_bundle: Bundles) -> None:
    fake_bundle(cli.here / "net", script=PICKY)
    (cli.here / "in").mkdir()
    for name, value in (("a", 1), ("b", -1), ("c", 2)):
        np.save(cli.here / "in" / f"{name}.npy", np.array([0, value], np.float32))
    said = cli("run", "net", "--input-dir", "in", "--output", "out")
    assert said.code == 7
    assert "error: 1 of 3 inputs failed, first b.npy: local: kernel 3 failed\n" in said.err
    assert sorted(f.name for f in (cli.here / "out").iterdir()) == ["a.npz", "c.npz"]


def test_all_well(cli: Cli, fake_bundle: Bundles, inputs: Path) -> None:
    fake_bundle(cli.here / "net")
    for name in FAILED:
        (inputs / name).unlink()
    said = cli.succeeds("run", "net", "--input-dir", "in", "--output", "out", "--json")
    assert said.json["done"] == 2 and said.json["failed"] == []
    assert said.json["latencies_ms"] == [1.5, 1.5]
    assert said.err.splitlines() == ["run: 1 of 2", "run: 2 of 2"]
    assert not list((cli.here / ".edgesdk").glob("runs/*"))


def test_from_python(cli: Cli, fake_bundle: Bundles, inputs: Path) -> None:
    bundle = fake_bundle(cli.here / "net")
    heard: list[tuple[int, str]] = []
    report = edgesdk.run_folder(
        bundle, inputs, cli.here / "out", progress=lambda done, name: heard.append((done, name))
    )
    assert (report.bundle, report.device, report.done) == ("net", "local", 2)
    assert [failure.file for failure in report.failed] == list(FAILED)
    assert [failure.exit_code for failure in report.failed] == [2, 2, 2, 2]
    assert heard[0] == (0, "a.npy") and heard[-1] == (6, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input-dir", "in"], "--input-dir needs a place for the results"),
        (["--input-dir", "nothing", "--output", "out"], "nothing cannot be read"),
        (["--input-dir", "empty", "--output", "out"], "empty has no .npy or .npz files"),
        (["--input-dir", "twice", "--output", "out"], "twice has x.npy and x.npz"),
        (["--input-dir", "in", "--output", "in/a.npy/out"], "cannot write in/a.npy/out"),
        (["--input-dir", "in", "--output", "in/a.npy/out.jsonl"], "cannot write in/a.npy"),
        (
            ["--input-dir", "in", "--output", "out", "--input", "a=b=in/a.npy"],
            "--input and --input-dir exclude each other",
        ),
    ],
)
def test_what_cannot_be_meant(
    cli: Cli, fake_bundle: Bundles, inputs: Path, arguments: list[str], message: str
) -> None:
    fake_bundle(cli.here / "net")
    (cli.here / "empty").mkdir()
    (cli.here / "twice").mkdir()
    for name in ("x.npy", "x.npz"):
        (cli.here / "twice" / name).write_bytes(b"")
    said = cli("run", "net", *arguments)
    assert said.code == 2 and said.out == ""
    assert said.err.startswith(f"error: {message}") and "\nhint: " in said.err


def test_progress_is_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with console.counting("run", 40) as progress:
        for done in range(41):
            progress(done, "x.npy")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"run: {done} of 40" for done in range(4, 41, 4)]
