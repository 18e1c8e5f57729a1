"""targets, devices and doctor, as far as they need no board."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Cli

from edgesdk.deploy.doctor import Finding
from edgesdk.profiles import target_names


def test_targets_as_json_are_all_targets(cli: Cli) -> None:
    targets = cli.succeeds("targets", "--json").json["targets"]
    assert [t["name"] for t in targets] == target_names()
    assert cli.succeeds("targets", "show", "rpi4", "--json").json["target"] == next(
        t for t in targets if t["name"] == "rpi4"
    )


def test_a_target(cli: Cli) -> None:
    out = cli.succeeds("targets", "show", "rpi4").out
    assert "mcpu=cortex-a72" in out and "glibc" in out and "rpi4.toml" in out


def test_a_device_from_add_to_remove(cli: Cli) -> None:
    assert cli.succeeds("devices").out.splitlines()[1:] == ["local   local  this machine"]
    (cli.here / "key").write_text("a key", encoding="utf-8")
    options = ["--identity", "key", "--target", "rpi4"]
    cli.succeeds("devices", "add", "pi", "--ssh", "pi@[fe80::1]:2222", *options)
    assert cli.golden("devices", "devices").code == 0
    device = cli.succeeds("devices", "show", "pi", "--json").json["device"]
    assert device["host"] == "fe80::1" and device["port"] == 2222 and device["user"] == "pi"
    assert device["identity_file"] == str(cli.here / "key") and device["target"] == "rpi4"
    assert "fe80::1" in cli.succeeds("devices", "show", "pi").out
    cli.succeeds("devices", "remove", "pi")
    assert [d["name"] for d in cli.succeeds("devices", "--json").json["devices"]] == ["local"]


def test_a_device_that_was_never_reached_is_not_kept(cli: Cli) -> None:
    said = cli("devices", "add", "pi", "--ssh", "pi@127.0.0.1:1", "--accept-key")
    assert said.code == 6
    assert [d["name"] for d in cli.succeeds("devices", "--json").json["devices"]] == ["local"]


def test_a_known_device_stays_as_it_was_when_it_is_not_reached(cli: Cli) -> None:
    cli.succeeds("devices", "add", "pi", "--ssh", "pi@127.0.0.1:1", "--target", "rpi4")
    before = cli.succeeds("devices", "show", "pi", "--json").out
    arguments = "devices add pi --ssh 127.0.0.1 --target rpi3 --accept-key"
    assert cli(*arguments.split()).code == 6
    assert cli.succeeds("devices", "show", "pi", "--json").out == before


def test_this_machine_as_a_device(cli: Cli) -> None:
    said = cli.succeeds("devices", "check", "local", "--json")
    assert said.json["facts"]["os"] == "linux"
    assert "local" in said.json["targets"]
    text = cli.succeeds("devices", "check", "local").out
    assert max(len(line) for line in text.splitlines() if line.startswith(("features", " "))) <= 100


FINDINGS = [
    Finding("Python", True, "3.11"),
    Finding("toolchain gnu-armhf", False, "no compiler", "apt install armhf"),
    Finding("emulator qemu-arm", False, "none", "apt install qemu", required=False),
]


@pytest.mark.parametrize(("findings", "code"), [(FINDINGS, 4), ([FINDINGS[0], FINDINGS[2]], 0)])
def test_doctor_fails_only_for_what_is_needed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, findings: list[Finding], code: int
) -> None:
    monkeypatch.setattr("edgesdk.deploy.doctor.diagnose", lambda target: list(findings))
    said = cli.golden(f"doctor-{code}", "doctor")
    assert said.code == code
    said = cli("doctor", "--json")
    assert said.code == code and said.json["ok"] is (code == 0)
    assert len(said.json["findings"]) == len(findings)


def test_doctor_tries_the_device(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgesdk.deploy.doctor.diagnose", lambda target: [FINDINGS[0]])
    assert cli.succeeds("doctor", "--device", "local", "--json").json["ok"] is True
    cli.succeeds("devices", "add", "pi", "--ssh", "pi@127.0.0.1:1")
    said = cli("doctor", "--device", "pi")
    assert said.code == 6 and "MISSING  device pi" in said.out
    assert cli("doctor", "--device", "local", "--target", "rpi4").code == 7


def test_a_profile_of_ones_own(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "edgesdk" / "targets"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text("descripton = 'x'\n", encoding="utf-8")
    said = cli("targets", "show", "mine")
    assert said.code == 3 and "unknown key 'descripton'" in said.err


def test_a_phone_is_added_by_its_serial(cli: Cli) -> None:
    said = cli.succeeds("devices", "add", "phone", "--adb", "R58M1:5555", "--target", "rpi4")
    assert said.out == "added phone: R58M1:5555\n"
    assert "phone   adb    R58M1:5555" in cli.succeeds("devices").out
    shown = cli.succeeds("devices", "show", "phone", "--json").json["device"]
    assert (shown["transport"], shown["serial"], shown["host"]) == ("adb", "R58M1:5555", None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "give either --ssh or --adb"),
        (("--ssh", "pi@host", "--adb", "R58M1"), "give either --ssh or --adb"),
        (("--adb", "R58M1", "--accept-key"), "--identity and --accept-key go with --ssh"),
        (("--adb", "two words"), "serial is 'two words', not as `adb devices` prints it"),
    ],
)
def test_a_phone_that_cannot_be_meant(cli: Cli, options: tuple[str, ...], said: str) -> None:
    answer = cli("devices", "add", "phone", *options)
    assert answer.code == 2
    assert said in answer.err
    assert "phone" not in cli.succeeds("devices").out
