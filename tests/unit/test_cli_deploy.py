"""run, verify and bench on this machine, with a launcher that says what a test wants it to say."""

from __future__ import annotations

import dataclasses
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Cli

from edgesdk.bundle import open_bundle
from edgesdk.cli.build import _warn
from edgesdk.cli.deploy import _save
from edgesdk.deploy.bench import Latencies, doubts
from edgesdk.deploy.facts import DeviceFacts

MakeBundle = Callable[..., Path]


def test_run_gives_the_outputs_by_name(cli: Cli, fake_bundle: MakeBundle) -> None:
    fake_bundle(cli.here / "b")
    said = cli.succeeds("run", "b", "--output", "out", "--json")
    assert said.json["device"] == "local" and said.json["latency_ms"] == 1.5
    (output,) = said.json["outputs"]
    assert (output["name"], output["dtype"], output["shape"]) == ("out:0", "float32", [2])
    # The launcher of the fixture doubles its input, which is golden here: 1 and 2.
    np.testing.assert_array_equal(np.load(output["file"]), np.array([1, 2], np.float32))


def test_run_reads_inputs_and_leaves_nothing_behind(cli: Cli, fake_bundle: MakeBundle) -> None:
    fake_bundle(cli.here / "b")
    np.save("mine.npy", np.array([5, 7], np.float32))
    said = cli.succeeds("run", "b", "--input", "a=b=mine.npy", "--json")
    assert said.json["outputs"][0]["values"] == [5, 7]
    runs = cli.here.parent / "cache" / "edgesdk" / "devices" / "local" / "runs"
    assert runs.is_dir() and list(runs.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("input-unknown", "--input c=x.npy"),
        ("input-syntax", "--input x.npy"),
        ("input-missing-file", "--input a=b=y.npy"),
        ("input-no-npy", "--input a=b=b/README.md"),
        ("input-shape", "--input a=b=x.npy"),
        ("input-dtype", "--input a=b=double.npy"),
        ("input-twice", "--input a=b=x.npy --input a=b=x.npy"),
        ("output-folder", "--output x.npy"),
    ],
)
def test_wrong_inputs(cli: Cli, fake_bundle: MakeBundle, name: str, arguments: str) -> None:
    fake_bundle(cli.here / "b")
    np.save("x.npy", np.zeros((2, 1), np.float32))
    np.save("double.npy", np.zeros(2))
    assert cli.golden(f"error-{name}", "run", "b", *arguments.split()).code == 2


@pytest.mark.parametrize(
    ("name", "script", "code"),
    [
        ("launcher-fails", "echo 'edgesdk-run: cannot load: no such symbol' >&2; exit 7", 7),
        ("launcher-usage", "echo 'edgesdk-run: unknown option' >&2; exit 2", 2),
        ("launcher-killed", "kill -KILL $$", 7),
        ("launcher-illegal", "kill -ILL $$", 7),
        ("launcher-crash", "kill -SEGV $$", 7),
        ("launcher-garbage", "echo '{'", 7),
        ("launcher-not-executable", None, 7),
    ],
)
def test_a_launcher_that_fails(
    cli: Cli, fake_bundle: MakeBundle, name: str, script: str | None, code: int
) -> None:
    folder = fake_bundle(cli.here / "b", script=script or "")
    if script is None:
        (folder / "bin" / "edgesdk-run").chmod(stat.S_IRUSR)
    said = cli.golden(f"error-{name}", "run", "b")
    assert said.code == code and said.out == ""
    runs = cli.here.parent / "cache" / "edgesdk" / "devices" / "local" / "runs"
    assert list(runs.iterdir()) == []


def test_a_bundle_for_another_machine(cli: Cli, fake_bundle: MakeBundle) -> None:
    fake_bundle(cli.here / "b", machine="z80")
    said = cli("run", "b")
    assert said.code == 7
    assert "hint: name the device that it is for with --device D\n" in said.err
    assert "hint: compile for a target of this board" in cli("run", "b", "--device", "local").err


def report(**changes: Any) -> str:
    base = {"threads": 2, "open_ms": 0.5, "latency_ms": [1.5], "memory": {"peak_rss_bytes": 1000}}
    selftest = {"ok": True, "max_abs_error": 1e-7, "max_relative_error": 2e-7, "tolerance": 1e-4}
    text = json.dumps({**base, "selftest": {**selftest, **changes}})
    return f"echo '{text}'"


def test_verify(cli: Cli, fake_bundle: MakeBundle) -> None:
    fake_bundle(cli.here / "b", script=report())
    assert cli.golden("verify", "verify", "b").code == 0
    said = cli.succeeds("verify", "b", "--json")
    assert said.json["checks"] == [
        {
            "name": "golden inputs",
            "max_abs_error": 1e-7,
            "max_relative_error": 2e-7,
            "cosine": None,
        }
    ]


@pytest.mark.parametrize("command", ["verify", "bench"])
@pytest.mark.parametrize("error", [0.25, None])  # null: a NaN
def test_a_result_that_differs_is_code_8(
    cli: Cli, fake_bundle: MakeBundle, command: str, error: float | None
) -> None:
    fake_bundle(cli.here / "b", script=report(ok=False, max_relative_error=error) + "; exit 8")
    said = cli(command, "b", "--json")
    assert said.code == 8 and said.json["error"]["kind"] == "VerificationError"
    assert f"differ by {error or 'inf'} of their largest value" in said.err


def test_bench_text(cli: Cli, fake_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = DeviceFacts("linux", "x86_64", cpu_model="A CPU", governor="powersave")
    monkeypatch.setattr("edgesdk.deploy.bench.read_facts", lambda transport: facts)
    layer = '"layers": [{"name": "first", "kernel": "k0", "mean_ms": 0.5}, ' + (
        '{"name": "second", "kernel": "k1", "mean_ms": 1.5}]'
    )
    script = report().replace('"threads"', f'{layer}, "threads"')
    fake_bundle(cli.here / "b", script=script)
    said = cli.golden("bench", "bench", "b", "--per-layer", "--repeat", "3")
    assert said.code == 0 and "governor is 'powersave'" in said.err


def test_bench_passes_its_options_on(cli: Cli, fake_bundle: MakeBundle) -> None:
    fake_bundle(cli.here / "b", script='echo "$@" >>"$(dirname "$0")/../../calls"; ' + report())
    cli.succeeds("bench", "b", "--repeat", "7", "--warmup", "3", "--threads", "2", "--json")
    calls = (cli.here / "calls").read_text(encoding="utf-8").splitlines()
    assert [c.partition("--repeat")[2] for c in calls] == [
        " 1 --warmup 3 --threads 2 --json",
        " 7 --warmup 3 --threads 2 --json",
    ]


def test_bench_without_repeat_fits_the_time(cli: Cli, fake_bundle: MakeBundle) -> None:
    fake_bundle(cli.here / "b", script='echo "$@" >>"$(dirname "$0")/../../calls"; ' + report())
    cli.succeeds("bench", "b", "--json")
    last = (cli.here / "calls").read_text(encoding="utf-8").splitlines()[-1]
    assert "--repeat 2000 " in last  # 3 s of 1.5 ms


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("against-unknown", "--against tensorrt"),
        ("against-without-model", "--against onnxruntime"),
        ("against-missing-model", "--against onnxruntime --model net.onnx"),
    ],
)
def test_wrong_comparisons(cli: Cli, fake_bundle: MakeBundle, name: str, arguments: str) -> None:
    fake_bundle(cli.here / "b", script=report())
    assert cli.golden(f"error-{name}", "bench", "b", *arguments.split()).code == 2


def test_the_numbers_of_latencies() -> None:
    found = Latencies.of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0, 7.0, 8.0, 9.0, 100.0])
    assert (found.runs, found.median_ms, found.min_ms, found.max_ms) == (10, 5.5, 1.0, 100.0)
    assert found.p90_ms == 9.0 and found.spread == pytest.approx(8 / 5.5)
    assert Latencies.of([2.0]) == Latencies(1, 2.0, 2.0, 2.0, 2.0, 0.0)


def facts(throttled: str | None = None, governor: str | None = "performance") -> DeviceFacts:
    return DeviceFacts("linux", "aarch64", governor=governor, throttled=throttled)


def test_what_makes_latencies_doubtful() -> None:
    calm = Latencies.of([1.0, 1.1, 1.2])
    assert doubts(facts(), facts(), calm) == ()
    assert doubts(facts(governor=None), facts(governor=None), calm) == ()
    # What happened before the measurement is no reason to doubt it.
    assert doubts(facts("0x50000"), facts("0x50000"), calm) == ()
    (slow,) = doubts(facts("0x0"), facts("0x50000"), calm)
    assert "low voltage, throttling" in slow
    (hot,) = doubts(facts("0x80008"), facts("0x80008"), calm)
    assert "the temperature limit" in hot
    (governor,) = doubts(facts(), facts(governor="ondemand"), calm)
    assert "'ondemand'" in governor
    (busy,) = doubts(facts(), facts(), Latencies.of([1.0, 2.0, 3.0]))
    assert "something else" in busy


def test_outputs_with_long_names_get_files_of_their_own(tmp_path: Path) -> None:
    names = ["scope/" * 1000 + end for end in "ab"]
    outputs = {name: np.full(2, index, np.float32) for index, name in enumerate(names)}
    files = _save(outputs, tmp_path)
    assert list(files) == names
    assert [np.load(files[name])[0] for name in names] == [0, 1]


def test_a_loose_comparison_is_told(
    fake_bundle: MakeBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = open_bundle(fake_bundle(tmp_path / "bundle"))
    for tolerance, told in ((1e-4, False), (2e-3, False), (0.01, True), (0.05, False)):
        verification = dataclasses.replace(bundle.manifest.verification, tolerance=tolerance)
        manifest = dataclasses.replace(
            bundle.manifest, verification=verification, build={"coverage": {"rungs": {}}}
        )
        _warn(dataclasses.replace(bundle, manifest=manifest))
        assert ("compared within 0.01 only" in capsys.readouterr().err) == told
