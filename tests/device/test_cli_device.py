"""The command line with a board: the whole way there and back, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import Cli
from onnx import TensorProto, helper, numpy_helper

import edgesdk
from edgesdk.deploy.emulated_board import EmulatedBoard
from edgesdk.deploy.transport import open_transport
from edgesdk.devices import add_device

SHAPE = (1, 8)


@pytest.fixture
def project(cli: Cli, aarch64_board: EmulatedBoard) -> Cli:
    """A project with a small network, and the board as the device "pi", which serves "rpi4"."""
    add_device(dataclasses.replace(aarch64_board.device("pi"), target="rpi4", work_dir=".cli"))
    save_model(cli.here / "net.onnx", seed=0)
    cli.succeeds("init", "net.onnx", "--target", "rpi4", "--target", "local")
    return cli


def save_model(path: Path, *, seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((8, 5)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Tanh", ["m"], ["y/0"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(SHAPE))],
        [helper.make_tensor_value_info("y/0", TensorProto.FLOAT, [1, 5])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save_model(model, path)


def test_the_whole_way_to_a_board(project: Cli, aarch64_board: EmulatedBoard) -> None:
    cli = project
    (built,) = cli.succeeds("compile", "--target", "rpi4", "--json").json["bundles"]
    bundle = built["bundle"]
    first = cli.succeeds("push", "--target", "rpi4", "--json").json
    assert first["device"] == "pi" and first["copied"]
    assert "nothing: it is there already" in cli.succeeds("push", "--target", "rpi4").out

    x = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    np.save("x.npy", x)
    said = cli.succeeds("run", "--target", "rpi4", "--input", "x=x.npy", "--output", "o", "--json")
    (output,) = said.json["outputs"]
    assert said.json["device"] == "pi" and output["name"] == "y/0"
    weight = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32)
    np.testing.assert_allclose(np.load(output["file"]), np.tanh(x @ weight), rtol=1e-4, atol=1e-5)

    # A folder of inputs, one of them wrong; nothing of it stays on the board.
    (cli.here / "in").mkdir()
    for name, array in (("a", x), ("b", x[:, :4]), ("c", -x)):
        np.save(cli.here / "in" / f"{name}.npy", array)
    said = cli("run", "--target", "rpi4", "--input-dir", "in", "--output", "out")
    assert said.code == 2 and said.out == "2 of 3 inputs done on pi: out\n"
    for name, sign in (("a", 1), ("c", -1)):
        with np.load(cli.here / "out" / f"{name}.npz") as results:
            wanted = np.tanh(sign * x @ weight)
            np.testing.assert_allclose(results["y/0"], wanted, rtol=1e-4, atol=1e-5)
    with open_transport(aarch64_board.device()) as transport:
        left = transport.run(["ls", "/home/pi/.cli/runs"], timeout_s=60)
    assert left.ok and left.stdout == b""

    checks = cli.succeeds("verify", "--target", "rpi4", "--seeds", "1", "--json").json["checks"]
    assert len(checks) == 2
    report = cli.succeeds("bench", "--target", "rpi4", "--repeat", "3", "--json").json
    assert report["device"] == "pi" and report["latency"]["runs"] == 3

    # The same from Python, by the path of the bundle, and without a project.
    outputs = edgesdk.run(bundle, {"x": x}, device="pi")
    np.testing.assert_array_equal(outputs["y/0"], np.load(output["file"]))
    assert edgesdk.verify(bundle, device="pi").device == "pi"

    with open_transport(aarch64_board.device("pi")) as transport:
        left = transport.run(["ls", "-A", ".cli/runs"], timeout_s=20)
    assert (left.ok, left.stdout_text) == (True, "")


def test_rollback(project: Cli) -> None:
    cli = project
    versions = []
    for seed in (0, 1):
        save_model(cli.here / "net.onnx", seed=seed)
        cli.succeeds("compile", "--target", "rpi4")
        versions.append(cli.succeeds("push", "--target", "rpi4", "--json").json["version"])
    assert versions[0] != versions[1]
    assert f"net {versions[1]}" in cli.succeeds("devices", "check", "pi").out
    back = cli.succeeds("rollback", "--target", "rpi4", "--json").json
    assert back["version"] == versions[0] and back["device"] == "pi"
    assert f"net {versions[0]}" in cli.succeeds("devices", "check", "pi").out
    said = cli("rollback", "other", "--device", "pi")
    assert said.code == 7 and "has no bundle 'other'" in said.err


def test_a_bundle_of_this_machine_is_refused_before_it_is_copied(project: Cli) -> None:
    cli = project
    cli.succeeds("compile", "--target", "local")
    for command in ("push", "run", "verify", "bench"):
        said = cli(command, "bundles/net-local", "--device", "pi", "--json")
        assert said.code == 7
        assert said.json["error"]["kind"] == "DeviceMismatchError"
        assert "aarch64" in said.json["error"]["message"]


def test_a_comparison_on_a_board_is_refused(project: Cli) -> None:
    project.succeeds("compile", "--target", "rpi4")
    said = project("bench", "--target", "rpi4", "--against", "onnxruntime")
    assert said.code == 2 and "on this machine, not on pi" in said.err


def test_what_check_and_doctor_say_of_a_board(project: Cli) -> None:
    facts = project.succeeds("devices", "check", "pi", "--json").json
    assert facts["facts"]["machine"] == "aarch64" and facts["facts"]["libc"] == "glibc"
    assert "rpi4" in facts["targets"] and "local" not in facts["targets"]
    found = project("doctor", "--target", "rpi4", "--device", "pi", "--json").json["findings"]
    assert found[-1]["name"] == "device pi" and "suits rpi4" in found[-1]["detail"]


def test_an_unknown_key_is_accepted_by_the_command_that_the_hint_names(
    cli: Cli, aarch64_board: EmulatedBoard, tmp_path: Path
) -> None:
    # An ssh_config of its own, with an empty known_hosts beside it.
    text = aarch64_board.ssh_config.read_text(encoding="utf-8")
    config = tmp_path / "ssh_config"
    hosts = tmp_path / "known_hosts"
    config.write_text(text.replace(str(aarch64_board.known_hosts), str(hosts)), encoding="utf-8")
    add_device(dataclasses.replace(aarch64_board.device("pi"), ssh_config=str(config)))
    said = cli("devices", "check", "pi")
    assert said.code == 6 and "SHA256:" in said.err
    hint = said.err.splitlines()[-1].partition("edgesdk ")[2]
    assert hint.startswith("devices add pi --ssh ") and hint.endswith(" --accept-key")
    accepted = cli.succeeds(*hint.split(), "--json").json
    assert accepted["accepted"][0]["fingerprint"] in said.err
    assert accepted["device"]["port"] == aarch64_board.port
    assert hosts.read_text(encoding="utf-8").count("ssh-ed25519") == 1
    cli.succeeds("devices", "check", "pi")
    assert cli.succeeds(*hint.split(), "--json").json["accepted"] == []
