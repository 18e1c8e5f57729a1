"""The adb transport, against a program that plays the adb command line (tests/fake_adb.py)."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesdk.deploy.transport import open_transport
from edgesdk.deploy.transport.base import DeviceTimeoutError, Transport
from edgesdk.devices import Device
from edgesdk.errors import DeviceError, DeviceUnreachableError, ToolMissingError

FAKE = Path(__file__).parent.parent / "fake_adb.py"


def phone(work: Path, serial: str = "A1") -> Device:
    return Device("phone", transport="adb", serial=serial, work_dir=str(work), timeout_s=10)


@pytest.fixture(autouse=True)
def adb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four phones; `adb` is the first in the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "adb").write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(FAKE)])} "$@"\n')
    (folder / "adb").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_ADB_STATES", "A1=device B2=unauthorized C3=offline D4=old")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Transport]:
    with open_transport(phone(tmp_path / "work")) as transport:
        yield transport


def test_output_errors_and_exit_code_come_apart_and_unchanged(opened: Transport) -> None:
    result = opened.run(
        ["sh", "-c", "cat; printf 'a\\r\\nb' >&2; exit 7"],
        timeout_s=20,
        input_bytes=b"\0\n\r\n\xff",
    )
    assert (result.returncode, result.stdout, result.stderr) == (7, b"\0\n\r\n\xff", b"a\r\nb")


@pytest.mark.parametrize("code", [0, 1, 127, 255])
def test_exit_codes_are_the_programs(opened: Transport, code: int) -> None:
    assert opened.run(["sh", "-c", f"exit {code}"], timeout_s=20).returncode == code


def test_words_arrive_as_they_are(opened: Transport) -> None:
    words = ["two words", "a'b\"c", "$HOME", "*", "", "ä;&|"]
    result = opened.run(["printf", "<%s>", *words], timeout_s=20)
    assert result.stdout_text == "".join(f"<{w}>" for w in words)


def test_a_signal_is_told(opened: Transport) -> None:
    assert opened.run(["sh", "-c", "kill -11 $$"], timeout_s=20).returncode == -11


def test_a_program_past_its_limit_is_ended_with_its_children(
    opened: Transport, tmp_path: Path
) -> None:
    note = tmp_path / "pids"
    script = f"sleep 300 & echo $$ $! >{note}; wait"
    with pytest.raises(DeviceTimeoutError, match="did not finish within 1 s"):
        opened.run(["sh", "-c", script], timeout_s=1)
    for pid in map(int, note.read_text().split()):
        for _ in range(100):  # the kernel takes a moment
            state = Path(f"/proc/{pid}/stat")
            if not state.exists() or ") Z " in state.read_text():
                break
            time.sleep(0.05)
        else:
            pytest.fail(f"{pid} still runs")


def test_files_travel_whole_and_programs_can_be_started(opened: Transport, tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000 + b"\r\n\0"
    (tmp_path / "data").write_bytes(data)
    moved: list[int] = []
    opened.upload(tmp_path / "data", "in/there.bin", progress=moved.append)
    assert (tmp_path / "work" / "in" / "there.bin").read_bytes() == data
    assert moved[-1] == len(data)
    opened.download("in/there.bin", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    (tmp_path / "program").write_text("#!/bin/sh\necho started\n")
    opened.upload(tmp_path / "program", "program", executable=True)
    started = opened.run([f"{opened.work_dir}/program"], timeout_s=20)
    assert started.stdout == b"started\n"
    assert sorted(p.name for p in (tmp_path / "work").iterdir()) == ["in", "program"]


def test_a_file_that_cannot_be_written_is_explained(opened: Transport, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "taken").mkdir()
    (tmp_path / "data").write_bytes(b"1")
    with pytest.raises(DeviceError, match="is a folder there, not a file"):
        opened.upload(tmp_path / "data", "taken")
    with pytest.raises(DeviceError, match=r"cannot read .*/missing"):
        opened.download("missing", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_stream_carries_bytes_both_ways(opened: Transport) -> None:
    with opened.open_stream(["sh", "-c", "echo ready >&2; exec cat"]) as stream:
        stream.write(b"\0\r\n\x04")
        assert stream.read(100, timeout_s=20) == b"\0\r\n\x04"
        stream.close_input()
        assert stream.read(100, timeout_s=20) == b""
        assert stream.stderr_text() == "ready\n"


def test_a_silent_stream_runs_into_its_limit(opened: Transport) -> None:
    with opened.open_stream(["sleep", "300"]) as stream, pytest.raises(DeviceTimeoutError):
        stream.read(1, timeout_s=0.2)


@pytest.mark.parametrize(
    ("serial", "said"),
    [
        ("Z9", "it is not connected"),
        ("B2", "has not been allowed yet"),
        ("C3", "it is offline"),
    ],
)
def test_what_adb_says_is_told_in_words(tmp_path: Path, serial: str, said: str) -> None:
    with pytest.raises(DeviceUnreachableError, match=said) as caught:
        open_transport(phone(tmp_path, serial))
    assert caught.value.exit_code == 6
    assert caught.value.hint


def test_an_old_android_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="Android before 7"):
        open_transport(phone(tmp_path, "D4"))


def test_a_phone_that_is_lost_is_no_failed_program(
    opened: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ADB_STATES", "B2=device")
    with pytest.raises(DeviceUnreachableError, match="it is not connected"):
        opened.run(["true"], timeout_s=20)


def test_without_adb_its_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ANDROID_HOME", raising=False)
    with pytest.raises(ToolMissingError, match="adb is not installed") as caught:
        open_transport(phone(tmp_path))
    assert str(caught.value.hint).endswith("apt-get install adb")


def test_the_work_folder_is_where_programs_may_be_started() -> None:
    device = dataclasses.replace(phone(Path("/")), work_dir=Device.work_dir)
    with open_transport(device) as transport:
        assert transport.work_dir == "/data/local/tmp/.edgesdk"
