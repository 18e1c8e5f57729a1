"""Tuning records: what they say of a device, what wins, and that nothing is lost or doubled."""

from __future__ import annotations

import io
import json
import math
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgesdk.deploy.facts import DeviceFacts, parse_facts
from edgesdk.errors import UsageError
from edgesdk.tuning import database
from edgesdk.tuning.devicekey import DeviceKey, device_key, level_of
from edgesdk.tuning.exchange import (
    export_records,
    from_json,
    import_records,
    merge_records,
    to_json,
)
from edgesdk.tuning.files import replacing
from edgesdk.tuning.records import (
    Records,
    RecordsError,
    Session,
    TrialRecord,
    Where,
    canonical,
    records_path,
    target_key,
)

FACTS = Path(__file__).parents[1] / "golden" / "facts"

PI = DeviceKey("Raspberry Pi 4 Model B Rev 1.4", "Cortex-A72", 4, "aarch64 asimd fp", "0.27.0")
WORKLOAD = "c0ffee" * 8
TARGET = target_key({"kind": "llvm", "mcpu": "cortex-a72"})


def trial(
    *samples_s: float, tile: int = 1, device: DeviceKey = PI, created: float = 100.0, **more: Any
) -> TrialRecord:
    """A trial of the candidate that `tile` stands for."""
    values: dict[str, Any] = {
        "workload": WORKLOAD,
        "target": TARGET,
        "candidate": {"template": "dense", "knobs": {"tile": tile}},
        "session": "s1",
        "kernel": "fused_dense",
    }
    return TrialRecord(device=device, samples_s=samples_s, created=created, **values | more)


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    with Records.open(tmp_path / "records.db") as opened:
        yield opened


# ---- the key of a device ----


def _facts(name: str, **changes: Any) -> DeviceFacts:
    return replace(parse_facts((FACTS / f"{name}.txt").read_text("utf-8")), **changes)


def test_a_board_and_its_key() -> None:
    key = device_key(_facts("raspberry-pi-os-12-aarch64"))
    assert (key.model, key.cpu, key.cores) == ("Raspberry Pi 4 Model B Rev 1.4", "Cortex-A72", 4)
    assert key.isa.split()[0] == "aarch64" and "asimd" in key.isa
    assert "crc32" not in key.isa and "evtstrm" not in key.isa
    assert key.tvm.startswith("0.27") and key.title == key.model


def test_the_key_outlives_a_reboot_and_an_update() -> None:
    before = _facts("raspberry-pi-os-12-aarch64")
    after = replace(
        before,
        kernel="9.9",
        os_release="debian 13",
        libc_version="2.41",
        temperature_c=81.5,
        throttled="0x50005",
        frequency_khz=600000,
        governor="powersave",
        memory_available_kib=1,
        disk_available_kib=1,
        cpu_features=frozenset({*(before.cpu_features or ()), "evtstrm2", "cpuid", "bti"}),
    )
    assert device_key(after).fingerprint == device_key(before).fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"board": "Raspberry Pi 5"},
        {"cores": 2},
        {"cpu_features": frozenset({"fp"})},
        {"cpu_model": "4x Cortex-A76"},
        {"programs": "arm"},
    ],
)
def test_another_device_has_another_fingerprint(change: dict[str, Any]) -> None:
    before = _facts("raspberry-pi-os-12-aarch64")
    assert device_key(replace(before, **change)).fingerprint != device_key(before).fingerprint


def test_the_accelerator_and_its_driver_are_part_of_the_key() -> None:
    facts = _facts("debian-12-x86_64")
    keys = [device_key(facts, gpu=g, driver=d) for g, d in [("", ""), ("H200", "1"), ("H200", "2")]]
    assert len({k.fingerprint for k in keys}) == 3
    assert level_of(keys[1], keys[2]) == "cpu" and level_of(keys[0], keys[1]) is None
    assert keys[1].title == "H200"


def test_mixed_cores_are_the_same_in_any_order() -> None:
    facts = _facts("mixed-cores-rk3399", cpu_model="4x Cortex-A53 + 2x Cortex-A72")
    assert device_key(facts).cpu == "4x Cortex-A53 + 2x Cortex-A72"
    turned = replace(facts, cpu_model="2x Cortex-A72 + 4x Cortex-A53")
    assert device_key(turned) == device_key(facts)


def test_every_recorded_device_has_its_own_key() -> None:
    names = [p.stem for p in FACTS.glob("*.txt")]
    keys = {name: device_key(_facts(name)) for name in names}
    assert len(names) >= 9 and len({k.fingerprint for k in keys.values()}) == len(names)
    assert all(k.title and k.isa for k in keys.values())
    assert keys["emulated-debian-12-arm64"].title == "unknown aarch64 device"


OTHER_REVISION = replace(PI, model="Raspberry Pi 400")
UNKNOWN = DeviceKey("", "", 2, "aarch64", "0.27.0")


@pytest.mark.parametrize(
    ("other", "level"),
    [
        (PI, "device"),
        (replace(PI, tvm="0.28.0"), "model"),
        (replace(PI, cores=3), "model"),
        (OTHER_REVISION, "cpu"),
        (replace(OTHER_REVISION, cores=8), "cpu"),
        (replace(OTHER_REVISION, isa="aarch64 fp"), None),
        (replace(PI, model="Raspberry Pi 5", cpu="Cortex-A76"), None),
        (replace(PI, gpu="VideoCore"), None),
        (UNKNOWN, None),
    ],
)
def test_how_near_a_device_is(other: DeviceKey, level: str | None) -> None:
    assert level_of(PI, other) == level


def test_devices_that_say_nothing_of_themselves_are_not_alike() -> None:
    assert level_of(UNKNOWN, replace(UNKNOWN, cores=4)) is None
    assert level_of(UNKNOWN, UNKNOWN) == "device"


# ---- cost and winner ----


@pytest.mark.parametrize(
    ("samples", "cost"),
    [
        ((3e-3, 1e-3, 2e-3), 2e-3),
        ((1e-3, 3e-3), 2e-3),
        ((0.0, 2e-3, 2.1e-3), 2.1e-3),
        ((1e9, 2e-3, 2.1e-3), 2.1e-3),
        ((0.0, 0.0, 2e-3), math.inf),
        ((0.0,), math.inf),
        ((-1.0,), math.inf),
        ((1e9,), math.inf),
        ((math.nan,), math.inf),
        ((math.inf, 1e-3), math.inf),
        ((), math.inf),
    ],
)
def test_cost(samples: tuple[float, ...], cost: float) -> None:
    assert trial(*samples).cost_s == pytest.approx(cost)
    assert trial(*samples).ok is math.isfinite(cost)
    assert trial(*samples, error_kind="wrong").cost_s == math.inf


def _best_tile(records: Records, device: DeviceKey = PI) -> int | None:
    found = records.best(WORKLOAD, TARGET, device)
    return None if found is None else found[0].candidate["knobs"]["tile"]


def test_the_fastest_wins(records: Records) -> None:
    for tile, cost in ((1, 3e-3), (2, 1e-3), (3, 2e-3)):
        records.add(trial(cost, tile=tile))
    found = records.best(WORKLOAD, TARGET, PI)
    assert found is not None and found[1] == "device" and found[0].cost_s == 1e-3
    assert _best_tile(records) == 2


def test_what_failed_or_cannot_be_true_never_wins(records: Records) -> None:
    records.add(trial(1e-6, tile=1, error_kind="wrong", error="3.1 instead of 2"))
    for tile, sample in enumerate((0.0, 1e9, math.nan, math.inf, -1.0, 5e-324), start=2):
        assert records.add(trial(sample, sample, sample, tile=tile))
    records.add(trial(tile=99, error_kind="crash"))
    assert records.best(WORKLOAD, TARGET, PI) is None
    records.add(trial(0.5, tile=100))
    assert _best_tile(records) == 100


def test_measuring_again_corrects_a_lucky_candidate(records: Records) -> None:
    records.add(trial(1e-3, tile=1, created=1))
    records.add(trial(2e-3, tile=2, created=2))
    records.add(trial(3e-3, 3e-3, 3e-3, tile=1, created=3))
    records.add(trial(2e-3, tile=2, created=4))
    assert _best_tile(records) == 2


def test_a_candidate_that_failed_when_measured_again_is_out(records: Records) -> None:
    records.add(trial(1e-3, tile=1, created=1))
    records.add(trial(2e-3, tile=2, created=2))
    records.add(trial(tile=1, created=3, error_kind="device", error="rebooted"))
    records.add(trial(0.0, 0.0, tile=1, created=3.5))
    assert _best_tile(records) == 1
    records.add(trial(tile=1, created=4, error_kind="wrong"))
    assert _best_tile(records) == 2


def test_other_workloads_and_targets_have_no_say(records: Records) -> None:
    records.add(trial(1e-3, tile=1, workload="ab" * 16))
    records.add(trial(1e-3, tile=2, target=target_key({"kind": "llvm", "mcpu": "cortex-a53"})))
    assert records.best(WORKLOAD, TARGET, PI) is None
    assert records.tried(WORKLOAD, TARGET, PI) == set()


def test_the_ladder_takes_the_nearest_device(records: Records) -> None:
    cpu = replace(PI, model="CM4")
    model = replace(PI, cores=3)
    nearer = replace(PI, tvm="0.28.0")
    for tile, device in ((1, cpu), (2, model), (3, nearer), (4, PI)):
        # The farther, the faster: costs of different devices must not be compared.
        records.add(trial(tile * 1e-3, tile=tile, device=device))
        found = records.best(WORKLOAD, TARGET, PI)
        assert found is not None and found[0].candidate["knobs"]["tile"] == tile
        assert found[1] == ("cpu", "model", "model", "device")[tile - 1]
    assert records.best(WORKLOAD, TARGET, UNKNOWN) is None


def test_a_device_where_all_failed_is_passed_over(records: Records) -> None:
    records.add(trial(tile=1, error_kind="crash"))
    records.add(trial(1e-3, tile=2, created=1, device=replace(PI, cores=3)))
    records.add(trial(tile=2, created=2, error_kind="wrong", device=replace(PI, cores=3)))
    records.add(trial(4e-3, tile=3, device=replace(PI, model="CM4")))
    assert _best_tile(records) == 3


def test_tried(records: Records) -> None:
    records.add(trial(1e-3, tile=1))
    records.add(trial(tile=2, error_kind="timeout"))
    records.add(trial(tile=3, error_kind="device"))
    records.add(trial(1e-3, tile=4, device=replace(PI, cores=3)))
    assert records.tried(WORKLOAD, TARGET, PI) == {
        canonical({"knobs": {"tile": t}, "template": "dense"}) for t in (1, 2)
    }


# ---- the database ----


def test_a_record_comes_back_as_it_was(records: Records) -> None:
    given = trial(
        1e-3,
        2e-3,
        error="the résumé \x00\n",
        error_kind="wrong",
        extra={"features": [1, 2.5, None], "clock_khz": {"before": 1500000}},
    )
    assert records.add(given) is True
    assert list(records.trials()) == [given]
    assert records.add(given) is False and records.count() == 1
    assert records.add(replace(given, created=101.0)) is True


def test_bytes_that_are_no_text_are_kept_out(records: Records) -> None:
    records.add(trial(error_kind="crash", error="died: \udcff"))
    assert next(records.trials()).error == "died: ?"


@pytest.mark.parametrize("bad", [{"x": math.nan}, {"x": {1, 2}}, {"x": object()}])
def test_only_plain_data_is_taken(records: Records, bad: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        records.add(trial(1e-3, extra=bad))
    assert records.count() == 0


def test_where(records: Records) -> None:
    records.add(trial(1e-3, created=1, session="a"))
    records.add(trial(error_kind="crash", created=2, session="b"))
    records.add(trial(1e-3, created=3, device=replace(PI, model="Jetson Nano", cpu="Cortex-A57")))
    assert records.count(Where(failed=True)) == 1 and records.count(Where(failed=False)) == 2
    assert records.count(Where(before=3)) == 2 and records.count(Where(session="b")) == 1
    for text, number in (("JETSON", 1), ("cortex-a", 3), (PI.fingerprint[:8], 2), ("%", 0)):
        assert records.count(Where(device_text=text)) == number
    assert records.count(Where(target=TARGET, failed=False, before=2)) == 1


def test_summaries(records: Records) -> None:
    records.add(trial(2e-3, tile=1, created=1))
    records.add(trial(tile=2, error_kind="crash", created=2))
    records.add(trial(tile=1, error_kind="crash", created=9, workload="ab" * 16, kernel="other"))
    other, dense = records.summaries()
    assert (dense.kernel, dense.trials, dense.failed, dense.best_s) == ("fused_dense", 2, 1, 2e-3)
    assert (other.kernel, other.best_s, other.newest) == ("other", None, 9)


def test_prune(records: Records, tmp_path: Path) -> None:
    with records.transaction():
        for number in range(2000):
            records.add(trial(1e-3, created=number, extra={"x": "y" * 500}))
    records.add(trial(error_kind="crash", created=5000, device=UNKNOWN))
    (big,) = records._connection.execute("PRAGMA page_count").fetchone()
    assert records.prune(Where(before=1990)) == 1990
    assert records.prune(Where(failed=True)) == 1
    assert records.count() == 10
    records.close()
    assert (tmp_path / "records.db").stat().st_size < big * 4096 / 10


def test_sessions(records: Records) -> None:
    first = Session("s1", "net.onnx", "aa", TARGET, PI.fingerprint, {"trials": 64}, started=1.0)
    assert records.unfinished("aa", TARGET, PI) is None
    records.start_session(first)
    assert records.unfinished("aa", TARGET, PI) == first
    for other in (("ab", TARGET, PI), ("aa", "{}", PI), ("aa", TARGET, UNKNOWN)):
        assert records.unfinished(*other) is None
    records.end_session("s1", "interrupted")
    found = records.unfinished("aa", TARGET, PI)
    assert found is not None and found.state == "interrupted" and found.finished is not None
    records.start_session(found)
    assert records.unfinished("aa", TARGET, PI) == first
    records.end_session("s1", "finished")
    assert records.unfinished("aa", TARGET, PI) is None
    records.start_session(replace(first, id="s2", started=2.0))
    records.end_session("s2", "failed")
    assert [s.id for s in records.sessions("aa")] == ["s2", "s1"]
    assert records.unfinished("aa", TARGET, PI) == records.sessions()[0]


def test_prune_forgets_finished_sessions_without_trials(records: Records) -> None:
    for name in ("s1", "s2", "s3"):
        records.start_session(Session(name, "m", "aa", TARGET, PI.fingerprint, {}))
        records.add(trial(1e-3, session=name, created=2.0 if name == "s3" else 1.0))
    records.end_session("s1", "finished")
    records.end_session("s3", "finished")
    records.prune(Where(before=1.5))
    assert sorted(s.id for s in records.sessions()) == ["s2", "s3"]


def test_the_user_has_one_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert records_path() == tmp_path / "edgesdk" / "records.db"
    with Records.open() as records:
        assert records.path == records_path() and records.path.exists()
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert records_path() == tmp_path / ".local" / "share" / "edgesdk" / "records.db"


# ---- damaged, foreign, newer, locked ----


def _refused(path: Path, **how: bool) -> RecordsError:
    """Opens what must be refused, and must not change by that."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(RecordsError) as caught:
        Records.open(path, **how)
    assert before is None or path.read_bytes() == before
    assert "\n" not in caught.value.message and caught.value.hint
    assert str(path) in caught.value.message and caught.value.exit_code == 3
    return caught.value


def _filled(path: Path) -> Path:
    with Records.open(path) as records, records.transaction():
        for number in range(300):
            records.add(trial(1e-3, tile=number, extra={"x": "y" * 200}))
    return path


@pytest.mark.parametrize("damage", ["header", "middle", "half"])
def test_a_damaged_file_is_left_alone(tmp_path: Path, damage: str) -> None:
    path = _filled(tmp_path / "records.db")
    content = bytearray(path.read_bytes())
    if damage == "half":
        del content[len(content) // 2 :]
    else:
        start = 0 if damage == "header" else len(content) // 8192 * 4096
        content[start : start + 4096] = b"\xa5" * 4096
    path.write_bytes(content)
    error = _refused(path)
    assert "damaged" in error.message and f"mv {path}" in (error.hint or "")


def test_damage_that_comes_while_it_is_open(tmp_path: Path) -> None:
    path = _filled(tmp_path / "records.db")
    with Records.open(path) as records:
        records._connection.execute("PRAGMA shrink_memory")  # or it would not read again
        with path.open("r+b") as stream:
            stream.seek(4096)
            stream.write(b"\xa5" * (path.stat().st_size - 4096))
        with pytest.raises(RecordsError, match="damaged"):
            list(records.trials())


def test_a_text_file_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    path.write_text("these are not the records\n" * 100, "utf-8")
    assert "damaged" in _refused(path).message


def test_the_database_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE places (url TEXT)")
    connection.close()
    assert "none of tuning records" in _refused(path).message


def test_records_of_a_newer_edgesdk(tmp_path: Path) -> None:
    path = _filled(tmp_path / "records.db")
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {database.SCHEMA_VERSION + 1}")
    connection.close()
    error = _refused(path)
    assert "newer edgesdk" in error.message and "update edgesdk" in (error.hint or "")


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    assert "folder" in _refused(tmp_path).message


def test_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _refused(tmp_path / "file" / "records.db")


def test_what_is_not_there_is_not_made_for_reading(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "records.db"
    for how in ({"create": False}, {"read_only": True}):
        assert "no tuning records" in _refused(path, **how).message
    assert not path.parent.exists()


def test_read_only_writes_nothing(tmp_path: Path) -> None:
    path = _filled(tmp_path / "records.db")
    with Records.open(path, read_only=True) as records:
        assert records.count() == 300
        with pytest.raises(RecordsError, match="readonly"):
            records.add(trial(1.0))


def test_a_locked_database_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_S", 0.05)
    path = _filled(tmp_path / "records.db")
    with Records.open(path) as records, Records.open(path) as other, other.transaction():
        other.add(trial(1.0, tile=1000))
        assert records.count() == 300
        with pytest.raises(RecordsError, match="locked"):
            records.add(trial(1.0, tile=1001))


def test_a_full_disk(records: Records) -> None:
    records.add(trial(1e-3))
    limit = records._connection.execute("PRAGMA page_count").fetchone()[0] + 2
    records._connection.execute(f"PRAGMA max_page_count = {limit}")
    with pytest.raises(RecordsError, match="no space"), records.transaction():
        for number in range(1000):
            records.add(trial(1e-3, tile=number, extra={"x": "y" * 500}))
    assert records.count() == 1
    records._connection.execute("PRAGMA max_page_count = 1000000")
    assert records.add(trial(2e-3)) is True


# ---- several processes ----

_WRITER = """
import sys
from pathlib import Path
from edgesdk.tuning.records import DeviceKey, Records, TrialRecord
path, name, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
with Records.open(path) as records:
    for i in range(number):
        candidate = {"template": "dense", "knobs": {"tile": i}}
        device = DeviceKey("Pi", "Cortex-A72", 4, "aarch64", "0.27.0")
        records.add(TrialRecord("ab" * 16, "{}", device, candidate, (1e-3,), session=name))
        print(i, flush=True)
"""


def _writer(path: Path, name: str, number: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path), name, str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _say_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.db"
    writers = [_writer(path, name, 150) for name in ("a", "b", "c")]
    for process in writers:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in writers:
        _say_go(process)
    for process in writers:
        process.communicate(timeout=60)
        assert process.returncode == 0
    with Records.open(path, create=False) as records:
        assert [records.count(Where(session=name)) for name in ("a", "b", "c")] == [150] * 3


@pytest.mark.parametrize("after", [0, 1, 37, 200])
def test_a_killed_process_loses_only_the_trial_in_flight(tmp_path: Path, after: int) -> None:
    path = tmp_path / "records.db"
    process = _writer(path, "a", 10_000_000)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    _say_go(process)
    for _ in range(after):
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    told = after + len(process.stdout.readlines())
    process.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL
    with Records.open(path) as records:
        trials = list(records.trials())
        assert len(trials) - told in (0, 1)
        assert [t.candidate["knobs"]["tile"] for t in trials] == list(range(len(trials)))
        assert records.add(trial(1e-3)) is True


# ---- export, import, merge ----


def _exported(records: Records, where: Where | None = None) -> bytes:
    stream = io.StringIO()
    assert export_records(records, stream, where) == records.count(where)
    return stream.getvalue().encode()


def test_export_and_import_are_the_same_records(records: Records, tmp_path: Path) -> None:
    with records.transaction():
        for number in range(1200):
            records.add(trial(1e-3 * (number + 1), tile=number, extra={"n": number}))
    records.add(trial(math.inf, 0.0, 1e9, tile=5000))
    records.add(trial(tile=5001, error_kind="crash", error="signal 11\nin é", device=UNKNOWN))
    text = _exported(records)
    assert all(json.loads(line)["format"] == 1 for line in text.splitlines())
    with Records.open(tmp_path / "copy.db") as copy:
        done = import_records(copy, io.BytesIO(text))
        assert (done.added, done.duplicates, done.skipped) == (1202, 0, {})
        assert _exported(copy) == text
        again = import_records(copy, io.BytesIO(text))
        assert (again.added, again.duplicates, again.skipped) == (0, 1202, {})
        assert copy.count() == 1202


def _changed(**changes: Any) -> bytes:
    data = to_json(trial(1e-3)) | changes
    return json.dumps({k: v for k, v in data.items() if v is not ...}).encode()


DEVICE = to_json(trial())["device"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b'{"format": NaN}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[1]", "not a JSON object"),
        (b"{}", "no record"),
        (_changed(format=2), "made by another version of edgesdk"),
        (_changed(workload=...), "workload is missing"),
        (_changed(workload="../../x"), "workload is no hash"),
        (_changed(target=5), "target is not a text"),
        (_changed(device=None), "device is not a table"),
        (_changed(device={**DEVICE, "cores": "4"}), "device.cores is not a whole number"),
        (_changed(device={**DEVICE, "cores": True}), "device.cores is not a whole number"),
        (_changed(device={**DEVICE, "cores": 10**30}), "a number is none or out of range"),
        (_changed(device={**DEVICE, "host": "pi"}), "unknown key in device"),
        (_changed(samples_s=["1"]), "a number is none or out of range"),
        (_changed(samples_s=[10**400]), "a value is out of range"),
        (_changed(samples_s=1), "samples_s is not a list"),
        (_changed(created="today"), "created is not a number"),
        (_changed().replace(b"100.0", b"1e999"), "a value is out of range"),
        (_changed(extra={"x": "\ud800"}), "a value is out of range"),
        (_changed(candidate={}), "candidate has no template and knobs"),
        (_changed(candidate={"template": "x", "knobs": 1}), "candidate has no template and knobs"),
        (_changed(error_kind="a b"), "error_kind is no word"),
        (_changed(surprise=1), "unknown key in the record"),
        (b'"' + b"x" * 5_000_000 + b'"', "longer than 1 MiB"),
    ],
)
def test_a_bad_line_is_counted_and_the_others_are_taken(
    records: Records, line: bytes, reason: str
) -> None:
    good = _changed(), _changed(created=7.0)
    text = b"\n".join([good[0], line, b"", line, good[1]])
    done = import_records(records, io.BytesIO(text))
    assert (done.added, done.duplicates) == (2, 0)
    assert done.skipped == {reason: 2} and done.examples == {reason: 2}
    assert records.count() == 2


def test_a_sample_that_json_cannot_say() -> None:
    back = from_json(json.loads(canonical(to_json(trial(math.nan, 1e-3)))))
    assert math.isnan(back.samples_s[0]) and back.samples_s[1] == 1e-3


def test_merge(records: Records, tmp_path: Path) -> None:
    both, mine, theirs = (trial(1e-3, tile=n) for n in (1, 2, 3))
    records.add(both)
    records.add(mine)
    with Records.open(tmp_path / "other.db") as other:
        other.add(both)
        other.add(theirs)
        other.start_session(Session("s1", "m", "aa", TARGET, PI.fingerprint, {}))
    with Records.open(tmp_path / "other.db", read_only=True) as other:
        done = merge_records(records, other)
    assert (done.added, done.duplicates) == (1, 1)
    assert list(records.trials()) == [both, mine, theirs]
    assert records.sessions() == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    with replacing(path) as stream:
        stream.write("first")
    with pytest.raises(KeyError), replacing(path) as stream:
        stream.write("second")
        raise KeyError
    assert path.read_text("utf-8") == "first" and list(path.parent.iterdir()) == [path]
    with pytest.raises(UsageError, match="cannot write"), replacing(path / "below"):
        pass
