"""A fault put into one layer is named, and the reproducer beside it shows it again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import edgesdk
import edgesdk.cli
from edgesdk.errors import VerificationError

# Two ways from x to y; every tensor is a layer of its own.
_NET = """
<ir_version: 8, opset_import: ["": 17]>
net (float[4,8] x) => (float[4,8] y) {
    [first] a = Abs (x)
    [bend] b = Sigmoid (a)
    [scaled] c = Mul (b, share)
    [other] d = Neg (a)
    [joined] e = Add (c, d)
    [last] y = Abs (e)
}
"""


def write_net(folder: Path) -> Path:
    model = onnx.parser.parse_model(_NET)
    share = np.asarray(0.4375, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(share, "share"))
    path = folder / "net.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the emitter of one operator compute 1.01 times what it should, in one layer."""

    def inject(operator: str, layer: str) -> None:
        from tvm import relax
        from tvm.relax import op

        from edgesdk.frontend import emit

        right = emit._EMITTERS[operator]

        def wrong(emitter: Any, node: Any, args: list[Any]) -> Any:
            result = right(emitter, node, args)
            if node.origin != layer:
                return result
            return op.multiply(result, relax.const(1.01, "float32"))

        monkeypatch.setitem(emit._EMITTERS, operator, wrong)

    return inject


def differs_by_one_percent(folder: Path) -> None:
    expected, actual = np.load(folder / "expected.npy"), np.load(folder / "actual.npy")
    np.testing.assert_allclose(actual, 1.01 * expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("operator", "layer", "kind"), [("Sigmoid", "bend", "Sigmoid"), ("Mul", "scaled", "Mul")]
)
def test_the_layer_with_the_fault_is_named(
    fault: Any, tmp_path: Path, operator: str, layer: str, kind: str
) -> None:
    fault(operator, layer)
    with pytest.raises(VerificationError) as caught:
        edgesdk.compile(write_net(tmp_path), output=tmp_path / "out")
    assert f"first in the layer {layer!r} ({kind})" in caught.value.message
    reproducer = tmp_path / "out.mismatch"
    assert str(reproducer) in str(caught.value.hint) and "one layer" in str(caught.value.hint)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.onnx", "out.mismatch"]
    cut = onnx.load(reproducer / "model.onnx")
    assert [n.name for n in cut.graph.node] == [layer]
    assert "input_0.npy --target local" in (reproducer / "README.md").read_text()
    differs_by_one_percent(reproducer)


def readme_command(folder: Path) -> list[str]:
    """The arguments of the command line in a reproducer's README."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    line = next(line.strip() for line in text.splitlines() if line.startswith("    edgesdk "))
    return line.split()[1:]


def test_the_reproducers_command_shows_the_difference_and_then_no_more(
    fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net = write_net(tmp_path)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context():
        fault("Abs", "last")
        assert edgesdk.cli.run(["compile", str(net), "--target", "local", "-o", "out"]) == 8
        assert "first in the layer 'last' (Abs)" in capsys.readouterr().err
        monkeypatch.chdir("out.mismatch")
        command = readme_command(Path())
        assert edgesdk.cli.run(command) == 8
        assert "'y' differs by 0.01 " in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path / "out.mismatch")
    assert edgesdk.cli.run([*command, "--json"]) == 0


@pytest.fixture
def fused_fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Changes a constant in every kernel in which a Sigmoid and the Mul after it are fused."""
    import tvm

    import edgesdk.compiler

    right = edgesdk.compiler.schedule_kernels

    def wrong(kernels: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        changed = {}
        for name, function in kernels.items():
            text = function.script(show_meta=False)
            if "sigmoid" in name and "multiply" in name:
                assert text.count("T.float32(0.4375)") == 1
                text = text.replace("T.float32(0.4375)", "T.float32(0.5)")
                attributes = function.attrs
                function = tvm.script.from_source(text).with_attrs(attributes)
            changed[name] = function
        return right(changed, *args, **kwargs)

    monkeypatch.setattr(edgesdk.compiler, "schedule_kernels", wrong)
    yield


def test_a_fault_of_fused_kernels_is_found_by_cutting(fused_fault: None, tmp_path: Path) -> None:
    with pytest.raises(VerificationError) as caught:
        edgesdk.compile(write_net(tmp_path), output=tmp_path / "out")
    assert "first in the layer 'scaled' (Mul)" in caught.value.message
    cut = onnx.load(tmp_path / "out.mismatch" / "model.onnx")
    assert [n.name for n in cut.graph.node] == ["bend", "scaled"]
    expected = np.load(tmp_path / "out.mismatch" / "expected.npy")
    np.testing.assert_allclose(
        np.load(tmp_path / "out.mismatch" / "actual.npy"), (0.5 / 0.4375) * expected, rtol=1e-5
    )


def test_every_layer_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = write_net(tmp_path)
    out = str(tmp_path / "out")
    edgesdk.compile(net, output=out)
    assert edgesdk.cli.run(["verify", out, "--model", str(net), "--layers", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    names = ["first", "bend", "scaled", "other", "joined", "last"]
    assert [layer["layer"] for layer in layers] == names
    assert [layer["tensor"] for layer in layers] == ["a", "b", "c", "d", "e", "y"]
    for layer in layers:
        assert layer["ok"] and layer["max_relative_error"] < 1e-6 and layer["cosine"] > 1 - 1e-9
    assert edgesdk.cli.run(["verify", out, "--layers"]) == 2
    assert "--layers needs the model" in capsys.readouterr().err


def test_a_layer_that_differs_on_the_device_is_named(
    fault: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = write_net(tmp_path)
    out = str(tmp_path / "out")
    edgesdk.compile(net, output=out)
    fault("Neg", "other")
    command = ["verify", out, "--model", str(net), "--layers"]
    assert edgesdk.cli.run(command) == 8
    said = capsys.readouterr()
    assert "first that of the layer 'other' (Neg): 'd' differs by 0.01 of" in said.err
    rows = {line.split()[1]: line.split()[0] for line in said.out.splitlines()[1:]}
    assert rows == {
        "first": "ok", "bend": "ok", "scaled": "ok", "other": "no", "joined": "no", "last": "no",
    }  # fmt: skip
    assert edgesdk.cli.run([*command, "--json"]) == 8
    error = json.loads(capsys.readouterr().out)["error"]
    assert [layer["ok"] for layer in error["layers"]] == [True, True, True, False, False, False]
