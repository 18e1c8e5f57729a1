"""records: list, export, import, merge and prune, on a database of the test's own."""

from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

from edgesdk.profiles import load_target
from edgesdk.tuning.devicekey import DeviceKey
from edgesdk.tuning.exchange import to_json
from edgesdk.tuning.records import Records, TrialRecord, Where, records_path, target_key

PI = DeviceKey("Raspberry Pi 4 Model B Rev 1.4", "Cortex-A72", 4, "aarch64 asimd fp", "0.27.0")
NANO = DeviceKey("NVIDIA Jetson Nano", "Cortex-A57", 4, "aarch64 asimd fp", "0.27.0")
DAY_S = 86_400.0


def _trial(
    tile: int, *, age_days: float = 0.0, failed: bool = False, **changes: Any
) -> TrialRecord:
    record = TrialRecord(
        workload="c0ffee" * 8,
        target=target_key(load_target("rpi4").tvm),
        device=PI,
        candidate={"template": "dense", "knobs": {"tile": tile}},
        samples_s=() if failed else (tile * 1e-3,),
        error_kind="crash" if failed else "",
        error="signal 11" if failed else "",
        kernel="fused_dense",
        created=time.time() - age_days * DAY_S,
    )
    return replace(record, **changes)


@pytest.fixture
def filled(cli: Cli) -> Cli:
    """The command line, with five trials in the user's database."""
    with Records.open() as records:
        for record in (
            _trial(3, age_days=100),
            _trial(2, age_days=1.5),
            _trial(4, failed=True),
            _trial(1, device=NANO, workload="ab" * 24, kernel="fused_conv2d"),
            _trial(9, age_days=3, target='{"kind":"llvm"}', failed=True, kernel="gone"),
        ):
            records.add(record)
    return cli


def _count(where: Where | None = None) -> int:
    with Records.open(create=False) as records:
        return records.count(where)


def test_list(filled: Cli) -> None:
    lines = filled.succeeds("records", "list").out.splitlines()
    assert lines[0].split() == ["KERNEL", "TARGET", "DEVICE", "TRIALS", "FAILED", "BEST", "AGE"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert rows.keys() == {"fused_dense", "fused_conv2d", "gone"}
    assert "rpi4" in rows["fused_dense"] and PI.model in rows["fused_dense"]
    assert rows["fused_dense"].split()[-5:] == ["3", "1", "2.00", "ms", "now"]
    assert rows["gone"].split()[-4:] == ["1", "1", "3", "d"] and "(no profile)" in rows["gone"]
    assert filled.succeeds("records").out.splitlines() == lines


def test_list_of_one_target_and_device(filled: Cli) -> None:
    def kernels(*arguments: str) -> set[str]:
        listed = filled.succeeds("records", "list", *arguments, "--json").json["records"]
        return {record["kernel"] for record in listed}

    assert kernels() == {"fused_dense", "fused_conv2d", "gone"}
    assert kernels("--target", "rpi4") == {"fused_dense", "fused_conv2d"}
    assert kernels("--device", "jetson") == {"fused_conv2d"}
    assert kernels("--target", "rpi4", "--device", PI.fingerprint) == {"fused_dense"}
    assert kernels("--target", "rpi3") == set()


def test_list_says_what_it_leaves_out(filled: Cli) -> None:
    said = filled.succeeds("records", "list", "--limit", "1")
    assert len(said.out.splitlines()) == 2 and "and 2 older ones: --limit 3" in said.err


def test_list_without_records_makes_none(cli: Cli) -> None:
    said = cli.succeeds("records", "list")
    assert said.out == "" and "no records" in said.err and "edgesdk tune" in said.err
    assert cli.succeeds("records", "--json").json["records"] == []
    assert not records_path().exists()


def test_export_and_import(filled: Cli, tmp_path: Path) -> None:
    filled.succeeds("records", "export", "-o", "out/mine.jsonl", "--target", "rpi4")
    text = (filled.here / "out" / "mine.jsonl").read_text("utf-8")
    assert len(text.splitlines()) == 4
    assert filled.succeeds("records", "export", "--target", "rpi4").out == text
    other = str(tmp_path / "other.db")
    said = filled.succeeds("records", "import", "out/mine.jsonl", "--records", other)
    assert said.out == "4 records added, 0 were there already\n" and said.err == ""
    assert filled.succeeds("records", "export", "--records", other).out == text
    said = filled.succeeds("records", "import", "out/mine.jsonl", "--records", other, "--json")
    assert said.json == {"added": 0, "duplicates": 4, "skipped": {}, "examples": {}}


def test_import_from_stdin(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps(to_json(_trial(1)))
    stdin = io.TextIOWrapper(io.BytesIO(f"{line}\n{{\n".encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    said = cli.succeeds("records", "import", "-")
    assert said.out.startswith("1 records added")
    assert said.err == "warning: skipped line 2: not JSON\n"
    assert _count() == 1


def test_a_file_without_records_is_an_error(cli: Cli) -> None:
    (cli.here / "notes.txt").write_text("nothing\nof use\n", "utf-8")
    said = cli("records", "import", "notes.txt")
    assert said.code == 2 and "skipped 2 lines, the first is line 1: not JSON" in said.err
    assert "notes.txt has no records" in said.err


def test_export_as_json_needs_a_file(filled: Cli) -> None:
    assert filled("records", "export", "--json").code == 2
    said = filled.succeeds("records", "export", "--json", "-o", "x.jsonl")
    assert said.json == {"file": "x.jsonl", "records": 5}


def test_merge(filled: Cli, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with Records.open(other) as records:
        records.add(_trial(7))
    filled.succeeds("records", "merge", str(other))
    assert _count() == 6
    said = filled.succeeds("records", "merge", str(other), "--json")
    assert (said.json["added"], said.json["duplicates"]) == (0, 1)
    assert _count() == 6


def test_merge_needs_another_database(filled: Cli) -> None:
    assert filled("records", "merge", str(records_path())).code == 2
    assert filled("records", "merge", "missing.db").code == 2
    (filled.here / "text.db").write_text("no database" * 100, "utf-8")
    said = filled("records", "merge", "text.db")
    assert said.code == 3 and "damaged" in said.err and _count() == 5


@pytest.mark.parametrize(
    ("arguments", "gone"),
    [
        ("--older-than 90", 1),
        ("--older-than 1", 3),
        ("--failed", 2),
        ("--failed --older-than 1", 1),
        ("--target rpi4", 4),
        ("--device jetson", 1),
        ("--target rpi4 --device jetson --failed", 0),
    ],
)
def test_prune(filled: Cli, arguments: str, gone: int) -> None:
    said = filled.succeeds("records", "prune", *arguments.split(), "--dry-run")
    assert said.out == f"{gone} records would go, {5 - gone} stay\n" and _count() == 5
    said = filled.succeeds("records", "prune", *arguments.split(), "--json")
    assert said.json == {"deleted": gone, "left": 5 - gone, "dry_run": False}
    assert _count() == 5 - gone


def test_prune_of_everything_must_be_said(filled: Cli) -> None:
    said = filled("records", "prune")
    assert said.code == 2 and "which records" in said.err and _count() == 5


@pytest.mark.parametrize("command", ["list", "export", "prune --failed", "import x.jsonl"])
def test_a_damaged_database(cli: Cli, command: str) -> None:
    (cli.here / "x.jsonl").write_text("", "utf-8")
    path = records_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xa5" * 8192)
    said = cli("records", *command.split())
    assert said.code == 3 and len(said.err.splitlines()) == 2
    assert "damaged" in said.err and f"mv {path}" in said.err
    assert path.read_bytes() == b"\xa5" * 8192


@pytest.mark.parametrize(
    "arguments",
    [
        "list --records missing.db",
        "export",
        "prune --failed",
    ],
)
def test_no_database(cli: Cli, arguments: str) -> None:
    said = cli("records", *arguments.split())
    assert said.code == 3 and "no tuning records" in said.err and list(cli.here.iterdir()) == []


def test_an_unknown_target(filled: Cli) -> None:
    said = filled("records", "list", "--target", "rpi44")
    assert said.code == 2
    assert "did you mean 'rpi4'?" in said.err


def test_a_file_that_is_missing_or_cannot_be_written(filled: Cli) -> None:
    assert "cannot read" in filled("records", "import", "missing.jsonl").err
    (filled.here / "file").touch()
    said = filled("records", "export", "-o", "file/below.jsonl")
    assert said.code == 2 and "cannot write" in said.err
