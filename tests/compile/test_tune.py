"""`edgesdk tune` from outside: whole sessions on this machine, and their bad ends."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from command_line import Cli
from tuning_place import save_network

from edgesdk.tuning.records import Records

LIMIT_S = 120.0
# Short samples: it is not speed that is tested.
QUICK = ("--repeat", "2", "--min-repeat-ms", "1")


@pytest.fixture
def tuned(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """The command line in a folder with a network; `local` keeps its files in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_network(cli.here / "net.onnx")
    return cli


def trials_of(database: Path) -> Counter[tuple[str, str, str]]:
    with Records.open(database) as records:
        import json

        return Counter(
            (t.session, t.workload, json.dumps(t.candidate, sort_keys=True))
            for t in records.trials()
        )


def database(tmp_path: Path) -> Path:
    return tmp_path / "data" / "edgesdk" / "records.db"


def test_a_whole_session_and_another(tuned: Cli, tmp_path: Path) -> None:
    command = ("tune", "net.onnx", "--target", "local", "--trials", "20", *QUICK, "--json")
    first = tuned.succeeds(*command).json["sessions"][0]
    assert first["trials"] == 20 and first["phase"] == "finished" and first["device"] == "local"
    tasks = [t for t in first["tasks"] if t["trials"]]
    assert tasks and all(t["best_ms"] > 0 and t["baseline_ms"] > 0 for t in tasks)
    assert sum(t["trials"] for t in tasks) == 20
    html = Path(first["report"]).read_text(encoding="utf-8")
    assert Path(first["report"]) == tuned.here / "bundles" / "net-local.tuning.html"
    assert all(t["name"] in html for t in first["tasks"])
    assert "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html
    bundle = Path(first["bundle"])
    rungs = first["coverage"]["rungs"]
    assert ("tuned" in rungs) == bool(first["final"] and first["final"]["shipped"])
    assert tuned("verify", str(bundle)).code == 0

    before = {key[1:] for key in trials_of(database(tmp_path))}
    second = tuned.succeeds(*command).json["sessions"][0]
    assert second["trials"] == 20
    after = {key[1:] for key in trials_of(database(tmp_path))}
    # All of its 20 trials are new, though the canary and the finalists were measured again.
    assert len(after - before) == 20


def test_kernels_of_a_gpu_are_measured_on_it(tuned: Cli, tmp_path: Path) -> None:
    """OpenCL on this machine's CPU: candidates are models of their own, as for every GPU."""
    said = tuned.succeeds(
        *("tune", "net.onnx", "--target", "linux-x86_64-opencl", "--trials", "3", *QUICK, "--json")
    )
    session = said.json["sessions"][0]
    assert session["phase"] == "finished" and session["trials"] == 3
    with Records.open(database(tmp_path)) as records:
        trials = list(records.trials())
    # Those whose knobs do not fit together cost nothing; the others were run and compared.
    measured = [t for t in trials if t.samples_s]
    assert measured and all(min(t.samples_s) > 0 for t in measured)
    assert {t.error_kind for t in trials} <= {"", "schedule"}
    assert all(t.candidate["template"].startswith("gpu_") for t in trials)
    assert tuned("verify", session["bundle"]).code == 0


def test_text_and_progress(tuned: Cli) -> None:
    said = tuned.succeeds("tune", "net.onnx", "--target", "local", "--trials", "8", *QUICK)
    assert [line.split()[0] for line in said.out.splitlines()] == [
        *("bundle", "trials", "latency", "kernels", "report")
    ]
    assert "tune: net.onnx for local on local: canary" in said.err
    assert said.err.rstrip().splitlines()[-1].startswith("tune: latency")


def test_a_project_needs_no_arguments(tuned: Cli) -> None:
    said = tuned("tune", "--target", "local")
    assert said.code == 2
    assert "no model is given, and there is no project file here" in said.err
    assert "edgesdk init MODEL" in said.err
    tuned.succeeds("init", "net.onnx", "--target", "local")
    said = tuned.succeeds("tune", "--target", "local", "--trials", "4", *QUICK)
    assert (tuned.here / "bundles" / "net-local" / "manifest.json").exists(), said.out


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--trials 0", 2, "--trials is 0"),
        ("--tuner best", 2, "unknown tuner 'best'"),
        ("--tracker 127.0.0.1:1", 2, "a tracker and a key belong together"),
        ("--tracker 127.0.0.1:1 --key k --device local", 2, "name two devices"),
        ("--tracker 127.0.0.1:1 --key k --trials 4", 6, "no RPC tracker answers"),
        ("--device nowhere --trials 4", 2, "nowhere"),
        ("--timeout 0.001 --trials 4", 5, "the canary failed (timeout)"),
        ("--build-timeout 0.001 --trials 4", 5, "the canary failed (timeout)"),
        ("--build-memory 1 --trials 4", 5, "the canary failed (memory)"),
    ],
)
def test_what_cannot_work_fails_at_once(tuned: Cli, options: str, code: int, said: str) -> None:
    result = tuned("tune", "net.onnx", "--target", "local", *options.split())
    assert result.code == code, result.err
    assert said in result.err
    assert "hint: " in result.err
    assert not (tuned.here / "bundles" / "net-local").exists()


def test_a_target_that_this_machine_is_not(tuned: Cli) -> None:
    said = tuned("tune", "net.onnx", "--target", "rpi4", "--device", "local", "--trials", "4")
    assert said.code in (4, 7), said.err  # 4: there is no cross compiler here
    assert said.err.count("error: ") == 1


def test_a_damaged_database(tuned: Cli, tmp_path: Path) -> None:
    database(tmp_path).parent.mkdir(parents=True)
    database(tmp_path).write_bytes(b"this is no database, but long enough to be one" * 100)
    said = tuned("tune", "net.onnx", "--target", "local", "--trials", "4")
    assert said.code == 3 and str(database(tmp_path)) in said.err


# Sessions in a process of their own, to be killed.


class Running:
    def __init__(self, process: subprocess.Popen[str], database: Path) -> None:
        self.process = process
        self.database = database

    def trials(self) -> int:
        if not self.database.exists():
            return 0
        try:
            with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as connection:
                return int(connection.execute("SELECT count(*) FROM trials").fetchone()[0])
        except sqlite3.OperationalError:  # not made yet
            return 0

    def wait_for_trials(self, count: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.trials() < count:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def start(tuned: Cli, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[subprocess.Popen[str]] = []

    def run(*command: str, text: str | None = None) -> Running:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        if text is not None:
            assert process.stdin is not None
            process.stdin.write(text)
            process.stdin.close()
            process.stdin = None
        return Running(process, database(tmp_path))

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


TUNE = ("-m", "edgesdk", "tune", "net.onnx", "--target", "local", "--trials", "20", *QUICK)


def all_end(family: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(family, timeout=20)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_kill_9_loses_nothing_and_leaves_nothing(
    tuned: Cli, tmp_path: Path, start: Callable[..., Running]
) -> None:
    running = start(*TUNE)
    running.wait_for_trials(8)
    family = running.family()
    assert len(family) >= 2  # the builders' parent and the agent
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    assert all_end(family)
    kept = trials_of(database(tmp_path))
    assert kept.total() >= 8
    work = tmp_path / "cache" / "edgesdk" / "devices" / "local" / "agents"
    assert list(work.iterdir()) == []

    resumed = tuned.succeeds(*TUNE[2:], "--json").json["sessions"][0]
    # What was measured before counts, in the same session: 20 in all, each once in the search.
    assert resumed["trials"] == 20
    everything = trials_of(database(tmp_path))
    assert len({key[0] for key in everything}) == 1
    assert len(everything) == 20
    assert kept <= everything


def test_ctrl_c_ends_in_seconds_with_a_bundle(tuned: Cli, start: Callable[..., Running]) -> None:
    running = start(*TUNE, "--trials", "5000")
    running.wait_for_trials(8)
    family = running.family()
    os.kill(running.process.pid, signal.SIGINT)
    out, err = running.process.communicate(timeout=60)
    assert running.process.returncode == 130, err
    assert "bundle" in out and "Traceback" not in err
    assert all_end(family)
    assert tuned("verify", "bundles/net-local").code == 0


def test_from_a_script_on_standard_input(start: Callable[..., Running]) -> None:
    # No __main__ guard, no file: what a notebook is, too.
    script = (
        "import edgesdk\n"
        "result = edgesdk.tune('net.onnx', trials=4, repeat=2, min_repeat_ms=1)\n"
        "print(result.state.phase, result.state.trials, result.bundle.path)\n"
    )
    running = start("-", text=script)
    out, err = running.process.communicate(timeout=LIMIT_S)
    assert out.split() == ["finished", "4", "bundles/net-local"], err


def test_behind_tvms_tracker(tuned: Cli, tmp_path: Path) -> None:
    from test_agent import KEY, RpcPlace

    folder = tmp_path / "rpc"
    folder.mkdir()
    place = RpcPlace(folder)
    try:
        command = ("tune", "net.onnx", "--target", "local", "--trials", "6", *QUICK, "--json")
        where = ("--tracker", place.address, "--key", KEY)
        session = tuned.succeeds(*command, *where).json["sessions"][0]
        wrong = tuned(*command, "--tracker", place.address, "--key", "bored")
    finally:
        place.close()
    assert session["trials"] == 6 and session["device"] == f"{KEY}@{place.address}"
    assert session["final"] is None or session["final"]["summed"]
    shares = [t["share"] for t in session["tasks"]]
    assert sum(shares) == pytest.approx(1.0)
    with Records.open(database(tmp_path)) as records:
        assert {t.device.model for t in records.trials()} == {f"tracker key {KEY}"}
    assert wrong.code == 7 and "no device of the key 'bored'" in wrong.json["error"]["message"]
