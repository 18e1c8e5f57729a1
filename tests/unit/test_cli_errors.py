"""Every wrong input that needs neither a model nor a device: its two lines and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Cli

from edgesdk.cli import build
from edgesdk.devices import Device, add_device
from edgesdk.errors import DeviceError, EdgeSdkError, UnsupportedModelError, UsageError

PROJECT = """\
model = "net.onnx"
[targets.local]
[targets.rpi4]
device = "pi"
"""


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("unknown-command", "compil net.onnx", 2),
        ("unknown-option", "compile net.onnx --tarjet rpi4", 2),
        ("missing-argument", "init", 2),
        ("bad-number", "bench --repeat 0", 2),
        ("no-number", "bench --repeat many", 2),
        ("no-model", "compile --target local", 2),
        ("no-target", "compile net.onnx", 2),
        ("no-bundle", "push --device pi", 2),
        ("missing-bundle", "run nothing", 3),
        ("unknown-target", "targets show rpi44", 2),
        ("family-as-target", "targets show jetson", 2),
        ("device-not-asked", "compile net.onnx --target local --device pi", 2),
        ("bad-choice", "quantize net.onnx --calibration samples --method best", 2),
        ("missing-profile", "targets show boards/mine.toml", 2),
        ("unknown-device", "devices check p1", 2),
        ("bad-address", "devices add pi2 --ssh pi@host:99999", 2),
        ("bad-device-name", "devices add pi/2 --ssh pi@host", 2),
        ("known-device", "devices add pi --ssh pi@host", 2),
        ("local-device", "devices add local --ssh pi@host", 2),
        ("other-address", "devices add pi --ssh other --accept-key", 2),
        ("unreachable-device", "devices check pi", 6),
        ("bad-shape", "compile net.onnx --target local --shape x=1x3xH", 2),
        ("bad-shape-without-name", "compile net.onnx --target local --shape 1x3", 2),
        ("shape-twice", "inspect net.onnx --shape x=1 --shape x=2", 2),
        (
            "shapes-contradict",
            "compile net.onnx --target local --shape x=1 --shape x=2 --shape y=1 --shape y=2"
            " --shape y=3",
            2,
        ),
        ("batch-syntax", "compile net.onnx --target local --batch 1,x", 2),
        ("bundle-and-target", "run bundle --target local", 2),
    ],
)
def test_wrong_arguments(cli: Cli, name: str, arguments: str, code: int) -> None:
    # Port 1 of this machine: nothing answers there.
    add_device(Device("pi", transport="ssh", host="127.0.0.1", port=1, user="pi", timeout_s=5))
    said = cli.golden(f"error-{name}", *arguments.split())
    assert said.code == code
    assert said.out == ""
    kinds = [line.partition(":")[0] for line in said.err.splitlines()]
    assert kinds == ["error", "hint"]
    assert list(cli.here.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text", "arguments", "code"),
    [
        ("project-key", "modell = 'net.onnx'\n", "compile", 3),
        ("project-target", "model = 'net.onnx'\n[targets.rpi44]\n", "compile", 3),
        ("project-without-targets", "model = 'net.onnx'\n", "compile", 2),
        ("project-which-target", PROJECT, "run", 2),
        ("project-other-target", PROJECT, "run --target rpi3", 2),
        ("project-not-compiled", PROJECT, "push --target rpi4", 3),
        ("project-one-output", PROJECT, "compile -o out", 2),
        ("project-exists", PROJECT, "init net.onnx", 2),
    ],
)
def test_wrong_project_files(cli: Cli, name: str, text: str, arguments: str, code: int) -> None:
    (cli.here / "edgesdk.toml").write_text(text, encoding="utf-8")
    assert cli.golden(f"error-{name}", *arguments.split()).code == code
    assert [p.name for p in cli.here.iterdir()] == ["edgesdk.toml"]


def test_a_model_is_not_a_bundle(cli: Cli) -> None:
    (cli.here / "net.onnx").write_bytes(b"a model")
    said = cli.golden("error-model-as-bundle", "run", "net.onnx")
    assert said.code == 3 and "edgesdk compile net.onnx" in said.err


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (UsageError("x"), "edgesdk devices show --help"),
        (DeviceError("x"), "edgesdk devices check NAME"),
        (DeviceError("x", hint="its own"), "its own"),
    ],
)
def test_there_is_always_a_next_thing_to_type(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: EdgeSdkError, hint: str
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr("edgesdk.devices.get_device", fail)
    said = cli("devices", "show", "pi", "--json")
    assert said.err == f"error: x\nhint: {hint}\n"
    assert said.json["error"]["hint"] == hint


def test_json_has_the_error_on_stdout(cli: Cli) -> None:
    said = cli.golden("error-as-json", "targets", "show", "rpi44", "--json")
    assert said.json["error"] == {
        "kind": "UsageError",
        "message": "unknown target 'rpi44'",
        "hint": "did you mean 'rpi4'?",
        "exit_code": 2,
    }
    assert said.err.startswith("error: unknown target 'rpi44'\n")


def test_json_of_a_usage_error(cli: Cli) -> None:
    assert cli("compile", "--jsno", "--json").json["error"]["hint"] == "did you mean --json?"


def test_json_before_the_command_is_not_lost_silently(cli: Cli) -> None:
    said = cli("devices", "--json", "show", "pi")
    assert said.code == 2
    assert said.json["error"]["hint"] == "edgesdk devices show ... --json"


def in_place_of_compile(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    monkeypatch.setattr(build, "plan_works", lambda *arguments, **options: action())


def test_an_interrupt_is_code_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    in_place_of_compile(monkeypatch, interrupt)
    said = cli("compile")
    assert (said.code, said.out, said.err) == (130, "", "error: interrupted\n")


def test_an_unexpected_error_is_one_line_and_a_traceback_only_on_request(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("two\nlines")

    in_place_of_compile(monkeypatch, fail)
    said = cli.golden("error-unexpected", "compile")
    assert said.code == 1 and "Traceback" not in said.err
    monkeypatch.setenv("EDGESDK_DEBUG", "1")
    assert 'raise RuntimeError("two' in cli("compile").err


def test_json_of_a_refusal_names_every_node(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UnsupportedModelError("refused", nodes=(("a", "LSTM", "why"), ("b", "GRU", "so")))

    in_place_of_compile(monkeypatch, refuse)
    assert cli("compile", "--json").json["error"]["nodes"] == [
        {"node": "a", "operator": "LSTM", "reason": "why"},
        {"node": "b", "operator": "GRU", "reason": "so"},
    ]


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("not-a-bundle", lambda folder: (folder / "manifest.json").unlink()),
        ("cut-manifest", lambda folder: (folder / "manifest.json").write_text('{"a": ')),
        ("newer-bundle", lambda folder: _set_schema(folder / "manifest.json", 99)),
        ("lost-file", lambda folder: (folder / "bin" / "edgesdk-run").unlink()),
        ("damaged-file", lambda folder: (folder / "lib" / "libnet.so").write_bytes(b"\x7fELF")),
    ],
)
def test_damaged_bundles(
    cli: Cli, fake_bundle: Callable[..., Path], name: str, spoil: Callable[[Path], None]
) -> None:
    spoil(fake_bundle(cli.here / "bundle"))
    said = cli.golden(f"error-{name}", "verify", "bundle")
    assert said.code == 3 and said.out == ""


def _set_schema(path: Path, version: int) -> None:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(manifest | {"schema_version": version}), encoding="utf-8")
