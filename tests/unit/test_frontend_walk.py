"""Refusals, names, hints and the tidy graph: what happens between ONNX and TVM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from edgesdk.errors import EdgeSdkError, ModelError, UnsupportedModelError, UsageError
from edgesdk.frontend import TensorSpec, ValueHint, draw_inputs
from edgesdk.frontend.graph import Graph
from edgesdk.frontend.importer import identifier, model_name
from edgesdk.frontend.load import load_onnx
from edgesdk.frontend.optimise import optimise
from edgesdk.frontend.shapes import fix_inputs
from edgesdk.frontend.walk import Walker


def walk(
    tmp_path: Path, body: str, inputs: str = "float[2,3] x", opset: int = 13, **weights: np.ndarray
) -> tuple[Graph, Walker]:
    text = (
        f'<ir_version: 8, opset_import: ["": {opset}, "mine": 1]>'
        f" g ({inputs}) => (float y) {{ {body} }}"
    )
    model = onnx.parser.parse_model(text)
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    loaded = load_onnx(path)
    walker = Walker(loaded)
    graph = walker.walk(fix_inputs(loaded.proto, set(loaded.weights), {}).values)
    optimise(graph)
    return graph, walker


def test_every_refused_node_is_named_at_once(tmp_path: Path) -> None:
    body = """a = NonZero (x)
              b = mine.Thing (x)
              c = Unique (x)
              d = Add (a, a)
              e = mine.Other (d)
              y = Neg (e)"""
    with pytest.raises(UnsupportedModelError) as error:
        walk(tmp_path, body)
    assert [(name, kind) for name, kind, _ in error.value.nodes] == [
        ("a", "NonZero"),
        ("b", "Thing"),
        ("c", "Unique"),
        ("e", "Other"),
    ]
    assert "run time" in error.value.nodes[0][2]
    assert "mine.Thing" in error.value.nodes[1][2]
    assert "and 3 more nodes" in error.value.message


@pytest.mark.parametrize(
    ("body", "inputs", "reason"),
    [
        ("y = Reshape (x, s)", "float[2,3] x, int64[2] s", "computed at run time"),
        ("y = Slice (x, s, s)", "float[2,3] x, int64[1] s", "computed at run time"),
        ("y = RandomNormal <shape=[2,3]> ()", "float[2,3] x", "random"),
        ("y = Reshape (x, s)", "float[2,3] x", "does not fill"),
        ("y = Gather (x, s)", "float[2,3] x", "outside the 2 elements"),
        ("y = DepthToSpace <blocksize=2, unheard_of=3> (z)", "float[1,4,2,2] z", "unheard_of=3"),
        ("y = Transpose <perm=[0]> (x)", "float[2,3] x", "does not fit"),
    ],
)
def test_reasons(tmp_path: Path, body: str, inputs: str, reason: str) -> None:
    weights = {} if " s" in inputs else {"s": np.asarray([5, 7])}
    with pytest.raises(UnsupportedModelError) as error:
        walk(tmp_path, body, inputs, **weights)
    assert reason in error.value.nodes[0][2]


def test_a_value_that_nothing_computes(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="reads 'nowhere', never computed"):
        walk(tmp_path, "y = Add (x, nowhere)")


def test_shape_arithmetic_vanishes(tmp_path: Path) -> None:
    body = """s = Shape (x)
              h = Gather (s, i)
              f = Cast <to=1> (h)
              k = Mul (f, t)
              l = Cast <to=7> (k)
              r = Reshape (l, o)
              y = Reshape (x, r)"""
    graph, _ = walk(
        tmp_path,
        body,
        i=np.asarray(0),
        t=np.asarray(3, np.float32),
        o=np.asarray([1]),
    )
    assert [n.op for n in graph.nodes] == ["Reshape"]
    assert graph.outputs[0].shape == (6,)


def test_normalisation_moves_into_the_convolution(tmp_path: Path) -> None:
    body = "c = Conv (x, w, b) n = BatchNormalization (c, s, t, m, v) y = Relu (n)"
    ones = np.ones(4, np.float32)
    graph, _ = walk(
        tmp_path,
        body,
        "float[1,3,5,5] x",
        w=np.ones((4, 3, 3, 3), np.float32),
        **dict.fromkeys("bstmv", ones * 2),
    )
    assert [n.op for n in graph.nodes] == ["Conv", "Add", "Relu"]


def test_a_scale_stays_where_the_convolution_is_used_twice(tmp_path: Path) -> None:
    body = "c = Conv (x, w) m = Mul (c, s) y = Add (c, m)"
    graph, _ = walk(
        tmp_path,
        body,
        "float[1,3,5,5] x",
        w=np.ones((4, 3, 3, 3), np.float32),
        s=np.full((4, 1, 1), 2, np.float32),
    )
    assert [n.op for n in graph.nodes] == ["Conv", "Mul", "Add"]


def test_integer_inputs_get_hints(tmp_path: Path) -> None:
    body = "u = Unsqueeze (i, a) y = Gather (x, u)"
    _, walker = walk(tmp_path, body, "float[9,3] x, int64[4] i", a=np.asarray([0]))
    assert list(walker.hints.values()) == [ValueHint(0, 8)]


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("gpu_0/data_0", "gpu_0_data_0"),
        ("a.b:0", "a_b_0"),
        ("0", "v0"),
        ("größe", "gr_e"),
        ("", "value"),
        ("日本", "value"),
        ("a__b", "a_b"),
    ],
)
def test_identifiers(name: str, safe: str) -> None:
    assert identifier(name) == safe


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("net.onnx", "net"),
        ("2d-net.onnx", "v2d_net"),
        ("my model (1).onnx", "my_model_1"),
        ("MobileNet.onnx", "MobileNet"),
        # Their header would stand in front of the C library's, or of our own.
        ("string.onnx", "string_net"),
        ("Math.onnx", "Math_net"),
        ("edgesdk_model.onnx", "edgesdk_model_net"),
        # sha256 of "模型" in UTF-8: two such models get two bundles.
        ("模型.onnx", "model_c98e118e"),
        ("a" * 250 + ".onnx", "a" * 55 + "_3f3e35e0"),
    ],
)
def test_names_of_models(file: str, name: str) -> None:
    assert model_name(Path("folder") / file) == name


def test_drawn_inputs_repeat_and_stay_in_range() -> None:
    specs = [
        TensorSpec("f", "f", (4, 5), "float32"),
        TensorSpec("i", "i", (100,), "int64"),
        TensorSpec("c", "c", (), "int64"),
        TensorSpec("u", "u", (500,), "uint8"),
        TensorSpec("b", "b", (50,), "bool"),
    ]
    hints = {"i": ValueHint(3, 5), "c": ValueHint(choices=(16000,))}
    drawn = draw_inputs(specs, seed=1, hints=hints)
    again = draw_inputs(specs, seed=1, hints=hints)
    assert all(np.array_equal(drawn[n], again[n]) for n in drawn)
    assert not np.array_equal(drawn["f"], draw_inputs(specs, seed=2)["f"])
    assert {n: (a.shape, a.dtype.name) for n, a in drawn.items()} == {
        s.name: (s.shape, s.dtype) for s in specs
    }
    assert set(drawn["i"]) == {3, 4, 5}
    assert drawn["c"] == 16000
    assert drawn["u"].max() > 200
    assert set(drawn["b"]) == {True, False}


def test_damaged_models_end_in_one_of_our_errors(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 13]> g (float[1,3,6,6] x) => (float y)'
        " { c = Conv <pads=[1,1,1,1]> (x, w) s = Shape (c) r = Reshape (c, s)"
        " p = MaxPool <kernel_shape=[2,2]> (r) y = Softmax <axis=1> (p) }"
    )
    model = onnx.parser.parse_model(text)
    weight = np.ones((4, 3, 3, 3), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    whole = model.SerializeToString()
    rng = np.random.default_rng(0)
    path = tmp_path / "m.onnx"
    outcomes = set()
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        path.write_bytes(bytes(damaged))
        try:
            loaded = load_onnx(path)
            Walker(loaded).walk(fix_inputs(loaded.proto, set(loaded.weights), {}).values)
            outcomes.add("ok")
        except EdgeSdkError as error:
            assert "\n" not in error.message
            outcomes.add("error")
    assert outcomes == {"ok", "error"}


@pytest.mark.parametrize(
    ("body", "inputs", "reason"),
    [
        (
            "y = Conv (x, w)",
            "float[1,2,2,9] x",
            "its window is larger than the padded input [1, 2, 2, 9]",
        ),
        ("y = Neg ()", "float[2] x", "all its inputs are missing"),
        (
            "y = Concat <axis = 0> (x, n)",
            "float[2] x, float[2,2] n",
            "its types do not fit",
        ),
        (
            "c = Equal (x, x) y = If (c) <then_branch = g () => (float t) { t = mine.Thing (x) },"
            " else_branch = h () => (float e) { e = Neg (x) }>",
            "float x",
            "operator mine.Thing is not supported, in a branch of 'y' (If) that is chosen at run"
            " time",
        ),
    ],
)
def test_reasons_are_sentences(tmp_path: Path, body: str, inputs: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        walk(tmp_path, body, inputs, w=np.zeros((3, 2, 3, 3), np.float32))
    assert error.value.nodes[0][2].startswith(reason)


@pytest.mark.parametrize(
    "body",
    [
        "y = Softmax <axis = [1]> (x)",
        f"s = Constant <value_ints = [{(35 * '1,')}1]> () y = Expand (x, s)",
        "a = Constant <value_ints = [0, 0]> () y = Unsqueeze (x, a)",
    ],
)
def test_what_python_says_of_a_malformed_node_is_not_shown(tmp_path: Path, body: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        walk(tmp_path, body)
    ((name, _, reason),) = error.value.nodes
    assert name == "y"
    assert reason.startswith(
        "its inputs or attributes do not fit the operator; it reads float32[2, 3]"
    )


def test_an_input_beyond_all_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the input 'x' takes 17179869184 GiB"):
        walk(tmp_path, "y = Neg (x)", f"float[{2**31},{2**31}] x")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, edgesdk.frontend; "
        "print([m for m in ('tvm', 'onnx', 'onnxruntime', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
