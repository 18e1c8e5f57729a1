"""import_model as a whole: names, order of inputs and outputs, and a whole network."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from conformance import difference, run_in_tvm, runtime_calls
from onnx import numpy_helper

from edgesdk.errors import ModelError, UsageError
from edgesdk.frontend import Reference, draw_inputs, import_model

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def test_awkward_names_become_identifiers(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 13]> g (float[2] a, float[2] b) => (float[2] y,'
        " float[2] z) { t = Add (a, b) y = Neg (t) z = Abs (t) }"
    )
    model = onnx.parser.parse_model(text)
    renamed = {"a": "gpu_0/data_0", "b": "gpu_0.data:0", "t": "int", "y": "größe", "z": "größe_2"}
    for value in (*model.graph.input, *model.graph.output):
        value.name = renamed[value.name]
    for node in model.graph.node:
        node.input[:] = [renamed[i] for i in node.input]
        node.output[:] = [renamed[o] for o in node.output]
    path = tmp_path / "0 mein-Modell.onnx"
    path.write_bytes(model.SerializeToString())
    imported = import_model(path)
    assert imported.name == "v0_mein_Modell"
    assert [s.name for s in imported.inputs] == ["gpu_0/data_0", "gpu_0.data:0"]
    assert [s.name for s in imported.outputs] == ["größe", "größe_2"]
    params = [p.name for p in imported.module["main"].params]
    assert params == [s.identifier for s in imported.inputs]
    identifiers = [*params, *(s.identifier for s in imported.outputs)]
    assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", i) for i in identifiers)
    assert len(set(params)) == 2
    inputs = draw_inputs(imported.inputs, seed=0)
    got = run_in_tvm(imported, inputs)
    want = Reference(path, imported.shapes).run(inputs)
    assert {n: difference(got[n], w) for n, w in want.items()} == dict.fromkeys(want, "")


def test_a_network_whose_weights_are_listed_as_inputs() -> None:
    path = LIGHT / "light_squeezenet.onnx"
    model = import_model(path)
    assert [s.name for s in model.inputs] == ["data_0"]
    assert runtime_calls(model) == set()
    inputs = draw_inputs(model.inputs, seed=5)
    got = run_in_tvm(model, inputs)
    for name, want in Reference(path, model.shapes).run(inputs).items():
        assert difference(got[name], want) == ""


def test_reference_refuses_other_inputs_than_the_models(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 13]> g (float[N,2] x) => (float y) { y = Neg (x) }'
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    reference = Reference(path, {"x": (3, 2)})
    array = np.ones((3, 2), np.float32)
    assert np.array_equal(reference.run({"x": array})["y"], -array)
    with pytest.raises(UsageError, match="'x' is missing"):
        reference.run({})
    with pytest.raises(UsageError, match="float32\\[2, 2\\]"):
        reference.run({"x": array[:2]})
    with pytest.raises(UsageError, match="float64"):
        reference.run({"x": array.astype(np.float64)})


def test_reference_says_what_onnx_runtime_says(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"ONNX Runtime refuses m\.onnx"):
        Reference(path, {})


def test_what_the_model_says_of_itself(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 13]> g (float[N,8] x) => (float y)'
        " { h = MatMul (x, w) y = Elu (h) }"
    )
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    imported = import_model(path)
    assert imported.source == path
    assert imported.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert imported.opset == 13
    assert imported.shapes == {"x": (1, 8)}
    assert imported.repairs == ("input 'x': open batch dimension ('N') fixed to 1",)
    assert len(imported.module["main"].params) == 1
    assert import_model(path, shapes={"x": (5, 8)}).outputs[0].shape == (5, 4)
