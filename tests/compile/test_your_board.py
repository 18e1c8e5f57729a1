"""docs/your-board.md, followed to the letter."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import numpy as np
import onnx
from command_line import Cli
from onnx import TensorProto, helper, numpy_helper

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "your-board.md"


def test_a_board_from_the_documents_own_listing(cli: Cli) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    profile = text.split("```toml\n")[1].split("```")[0]
    commands = text.split("```sh\n")[1].split("```")[0].strip().splitlines()
    assert [shlex.split(command)[:2] for command in commands] == [
        ["edgesdk", "targets"],
        ["edgesdk", "doctor"],
        ["edgesdk", "compile"],
    ]
    assert "`~/.config/edgesdk/targets/orangepi5.toml`" in text
    folder = Path(os.environ["XDG_CONFIG_HOME"]) / "edgesdk" / "targets"
    folder.mkdir(parents=True)
    (folder / "orangepi5.toml").write_text(profile, encoding="utf-8")
    _save_model(cli.here / "net.onnx")

    shown, doctor, compiled = (cli.succeeds(*shlex.split(c)[1:]) for c in commands)
    assert "RK3588" in shown.out
    assert "gnu-aarch64" in doctor.out and "qemu-aarch64" in doctor.out
    assert "bundles/net-orangepi5" in compiled.out
    assert "verified     emulated" in compiled.out
    assert "orangepi5" in cli.succeeds("targets").out

    # "A wrong key in the file is an error that names it and the nearest known one."
    (folder / "orangepi5.toml").write_text(profile.replace("l1d-kib", "l1-kib"), encoding="utf-8")
    said = cli(*shlex.split(commands[0])[1:])
    assert said.code == 3 and "'cpu.l1-kib'" in said.err and "l1d-kib" in said.err


def _save_model(path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 16]) for n in "xy")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Relu", ["m"], ["y"])],
        "net",
        [x],
        [y],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
