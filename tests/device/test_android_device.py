"""From a bundle for Android to tuning on a "phone": the files that a phone gets, emulated.

The phone is this machine's shell behind tests/fake_adb.py. Android's programs run through qemu,
with musl in the place of bionic and bionic_on_musl.c for what differs, the nearest to a phone that
runs without one.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import Cli
from onnx import TensorProto, helper, numpy_helper

from edgesdk.deploy.emulated_board import archive_of_this_machine, reason_unavailable
from edgesdk.proc import run_command
from edgesdk.resources import cache_folder

FAKE = Path(__file__).parent.parent / "fake_adb.py"

# What the phone's own programs say; the rest are this machine's.
PHONE = {
    "uname": "case $1 in -m) echo aarch64;; -r) echo 5.10.198-android13;; *) echo Linux;; esac",
    "getprop": "case $1 in *sdk) echo 33;; *release) echo 13;; *model) echo Pixel 7;; esac",
    # The first bytes of a 64-bit ARM program.
    "od": f"echo 7f 45 4c 46 02 01 01 00 {'00 ' * 8} 03 00 b7 00 {'00 ' * 20}",
}


@pytest.fixture(scope="module")
def musl() -> Path:
    """A folder for `qemu -L` with musl as Android's loader, and the layer between."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("the optional extra 'zig' is not installed")
    reason = reason_unavailable("arm64")
    if reason is not None:
        pytest.skip(reason)
    root = cache_folder() / "boards" / "musl-arm64"
    if not root.exists():
        new = root.with_name("musl-arm64.new")
        shutil.rmtree(new, ignore_errors=True)
        argv = ["mmdebstrap", "--arch=arm64", "--variant=extract", "--quiet", "--include=musl"]
        run = run_command([*argv, "bookworm", str(new), *archive_of_this_machine()], timeout_s=300)
        assert run.ok, run.stderr_text
        new.rename(root)
    loader = root / "system" / "bin" / "linker64"
    loader.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / "lib" / "aarch64-linux-musl" / "libc.so", loader)
    layer = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        "aarch64-linux-musl",
        "-shared",
        "-w",
    ]
    source = Path(__file__).parent / "bionic_on_musl.c"
    built = run_command([*layer, "-O1", "-fPIC", source, "-o", root / "layer.so"], timeout_s=600)
    assert built.ok, built.stderr_text
    return root


@pytest.fixture
def phone(musl: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """A command line for which `adb` reaches one phone, called "phone"."""
    for name, script in PHONE.items():
        program = tmp_path / "phone-bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    adb = tmp_path / "bin" / "adb"
    adb.parent.mkdir()
    adb.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(FAKE)])} "$@"\n')
    adb.chmod(0o755)
    monkeypatch.setenv("PATH", f"{adb.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_ADB_STATES", "A1=device")
    monkeypatch.setenv("FAKE_ADB_PATH", str(tmp_path / "phone-bin"))
    monkeypatch.setenv("FAKE_ADB_SET_QEMU_LD_PREFIX", str(musl))
    monkeypatch.setenv("FAKE_ADB_SET_QEMU_SET_ENV", f"LD_PRELOAD={musl / 'layer.so'}")
    cli.succeeds("devices", "add", "phone", "--adb", "A1")
    with (Path(os.environ["XDG_CONFIG_HOME"]) / "edgesdk" / "devices.toml").open("a") as file:
        file.write(f'work-dir = "{tmp_path / "work"}"\n')
    return cli


def test_from_the_model_to_tuning(phone: Cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    w = rng.normal(size=(8, 3, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 16, 16])],
        [numpy_helper.from_array(w, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "net.onnx")
    net, bundle = str(tmp_path / "net.onnx"), str(tmp_path / "bundle")
    phone.succeeds("compile", net, "--target", "android-arm64-cpu", "-o", bundle)

    facts = phone.succeeds("devices", "check", "phone", "--json").json
    assert facts["facts"]["board"] == "Pixel 7"
    assert (facts["facts"]["os"], facts["facts"]["libc_version"]) == ("android", "33")
    assert "android-arm64-cpu" in facts["targets"] and "rpi4" not in facts["targets"]

    phone.succeeds("push", bundle, "--device", "phone")
    x = rng.normal(size=(1, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    given = ("--input", f"x={tmp_path / 'x.npy'}", "--output", str(tmp_path / "out"))
    phone.succeeds("run", bundle, "--device", "phone", *given)
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    expected = np.einsum("nchwij,ocij->nohw", windows, w.astype(np.float64))
    np.testing.assert_allclose(np.load(tmp_path / "out" / "y.npy"), expected, atol=1e-4)
    phone.succeeds("verify", bundle, "--device", "phone")

    tuned = ("--target", "android-arm64-cpu", "--device", "phone", "--trials", "2")
    said = phone.succeeds("tune", net, *tuned, "-o", str(tmp_path / "tuned"), "--json").json
    (session,) = said["sessions"]
    assert (session["phase"], session["device"], session["trials"]) == ("finished", "phone", 2)
    assert phone.succeeds("verify", str(tmp_path / "tuned"), "--device", "phone").code == 0
