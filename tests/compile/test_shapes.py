"""Several shapes in one bundle, and batches of any size: right numbers, one set of weights."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import edgesdk
from edgesdk.bundle import Bundle
from edgesdk.bundle.manifest import read_manifest
from edgesdk.cli.options import parse_variants
from edgesdk.deploy.run import placed_bundle
from edgesdk.deploy.verify import verify_placed
from edgesdk.errors import UnsupportedModelError, UsageError
from edgesdk.frontend.variants import MAX_VARIANTS, import_variants
from edgesdk.rows import Piece, split_rows

SMALL, LARGE = (1, 3, 16, 16), (1, 3, 20, 24)


def _network(path: Path, *, mixes_rows: bool = False, whole: bool = False) -> Path:
    """Convolutions, a pool and a product. `mixes_rows`: each row sees the others; `whole`: the
    output has no axis of the batch."""
    random = np.random.default_rng(3)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        values = random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        return numpy_helper.from_array(values.astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], kernel_shape=[3, 3], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w1"], ["c"], kernel_shape=[3, 3], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["c"], ["d"]),
        helper.make_node("Flatten", ["d"], ["e"]),
        helper.make_node("MatMul", ["e", "w2"], ["f"]),
        helper.make_node("Softmax", ["f"], ["g"], axis=0 if mixes_rows else 1),
    ]
    shape: list[str | int] = ["N", 40]
    if whole:
        nodes.append(helper.make_node("ReduceMean", ["g"], ["h"], axes=[0, 1], keepdims=0))
        shape = []
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, "H", "W"])],
        [helper.make_tensor_value_info("h" if whole else "g", TensorProto.FLOAT, shape)],
        [weight("w0", 32, 3, 3, 3), weight("w1", 64, 32, 3, 3), weight("w2", 64, 40)],
    )
    opsets = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _network(tmp_path_factory.mktemp("shapes") / "net.onnx")


@pytest.fixture(scope="module")
def two_shapes(net: Path) -> Bundle:
    return edgesdk.compile(net, shapes=[{"x": SMALL}, {"x": LARGE}], output=net.parent / "two")


@pytest.fixture(scope="module")
def batches(net: Path) -> Bundle:
    return edgesdk.compile(
        net, shapes={"x": SMALL}, batches=[8, 1, 4], output=net.parent / "batches"
    )


def _drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _expected(net: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(net), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_both_shapes_give_the_right_numbers(
    net: Path, two_shapes: Bundle, shape: tuple[int, ...]
) -> None:
    x = _drawn(*shape)
    outputs = edgesdk.run(two_shapes, {"x": x})
    np.testing.assert_allclose(outputs["g"], _expected(net, x), rtol=1e-4, atol=1e-6)


def test_weights_are_there_once(net: Path, two_shapes: Bundle, batches: Bundle) -> None:
    one = edgesdk.compile(net, shapes={"x": SMALL}, output=net.parent / "one")
    for bundle in (two_shapes, batches):
        assert bundle.manifest.weights_bytes == one.manifest.weights_bytes
        added = bundle.library.stat().st_size - one.library.stat().st_size
        kernels_and_plans = 60_000 * len(bundle.manifest.other_variants)
        assert added < kernels_and_plans


# 1, 4 and 8 are compiled; others are padded, or take several runs.
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8, 11, 17])
def test_any_batch_gives_the_right_numbers(net: Path, batches: Bundle, rows: int) -> None:
    x = _drawn(rows, *SMALL[1:])
    outputs = edgesdk.run(batches, {"x": x})
    assert outputs["g"].shape == (rows, 40)
    np.testing.assert_allclose(outputs["g"], _expected(net, x), rtol=1e-4, atol=1e-6)


def test_rows_take_the_fewest_runs() -> None:
    assert split_rows(3, (1, 4, 8)) == [Piece(0, 3, 4)]
    assert split_rows(8, (1, 4, 8)) == [Piece(0, 8, 8)]
    assert split_rows(17, (1, 4, 8)) == [Piece(0, 8, 8), Piece(8, 8, 8), Piece(16, 1, 1)]


def test_each_file_of_a_folder_picks_its_shape(
    net: Path, two_shapes: Bundle, tmp_path: Path
) -> None:
    files = {"small": SMALL, "large": LARGE, "none": (1, 3, 9, 9)}
    (tmp_path / "in").mkdir()
    for name, shape in files.items():
        np.save(tmp_path / "in" / f"{name}.npy", _drawn(*shape))
    report = edgesdk.run_folder(two_shapes, tmp_path / "in", tmp_path / "out")
    assert [(failure.file, failure.exit_code) for failure in report.failed] == [("none.npy", 2)]
    for name in ("small", "large"):
        with np.load(tmp_path / "out" / f"{name}.npz") as results:
            wanted = _expected(net, _drawn(*files[name]))
            np.testing.assert_allclose(results["g"], wanted, rtol=1e-4, atol=1e-6)


def test_verify_and_bench_cover_each_shape(net: Path, two_shapes: Bundle) -> None:
    with placed_bundle(two_shapes, "local") as placed:
        report = verify_placed(placed, model=net, seeds=1)
    assert [check.name for check in report.checks] == [
        "golden inputs x=1x3x16x16",
        "golden inputs x=1x3x20x24",
        "drawn inputs 1",
        "drawn inputs 1 x=1x3x20x24",
    ]
    measured = edgesdk.bench(two_shapes, variant=1, repeat=1)
    assert (measured.latency.runs, measured.shapes) == (1, "x=1x3x20x24")
    with pytest.raises(UsageError, match="no variant 2"):
        edgesdk.bench(two_shapes, variant=2)


def test_the_manifest_survives_reading(batches: Bundle) -> None:
    manifest = read_manifest(batches.path)
    assert manifest == batches.manifest
    assert manifest.batch is not None
    assert (manifest.batch.sizes, manifest.batch.inputs) == ((1, 4, 8), ("x",))
    assert [v.inputs[0].shape[0] for v in manifest.variants] == [1, 4, 8]


def test_bundles_from_before_have_one_shape(two_shapes: Bundle, tmp_path: Path) -> None:
    data = json.loads((two_shapes.path / "manifest.json").read_text())
    del data["other_variants"], data["batch"]
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    manifest = read_manifest(tmp_path)
    assert [v.inputs[0].shape for v in manifest.variants] == [SMALL]


def test_the_bundle_tells_its_shapes(two_shapes: Bundle) -> None:
    readme = (two_shapes.path / "README.md").read_text()
    assert "- variant 1: x=1x3x20x24, golden files in `golden/variant_1/`\n" in readme
    header = (two_shapes.path / "include/net.h").read_text()
    assert " * variant 1:\n * input 0: x, float32, 1x3x20x24\n" in header


def test_a_python_program_uses_each_shape(
    net: Path, two_shapes: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(two_shapes.path / "python"))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with importlib.import_module("net").Model() as model:
        for shape in (SMALL, LARGE, SMALL):
            x = _drawn(*shape)
            np.testing.assert_allclose(model(x)["g"], _expected(net, x), rtol=1e-4, atol=1e-6)
        with pytest.raises(ValueError, match="no variant has"):
            model(_drawn(1, 3, 9, 9))


def test_the_launcher_lists_the_shapes_that_it_has(two_shapes: Bundle, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", _drawn(1, 3, 9, 9))
    launcher, library = two_shapes.launcher, two_shapes.library
    said = subprocess.run(
        [launcher, library, "--input", f"x={tmp_path / 'x.npy'}"], capture_output=True, text=True
    )
    assert said.returncode == 7
    assert said.stderr == (
        "edgesdk-run: the inputs fit none of the shapes that were compiled:"
        " x=1x3x16x16, x=1x3x20x24\n"
    )


def test_inputs_of_no_shape_are_refused(two_shapes: Bundle, batches: Bundle) -> None:
    with pytest.raises(UsageError, match="fits x=1x3x9x9") as refused:
        edgesdk.run(two_shapes, {"x": _drawn(1, 3, 9, 9)})
    assert refused.value.hint == "compiled are x=1x3x16x16, x=1x3x20x24"
    with pytest.raises(UsageError, match="fits x=2x3x9x9"):
        edgesdk.run(batches, {"x": _drawn(2, 3, 9, 9)})
    with pytest.raises(UsageError, match="fits x=0x3x16x16"):
        edgesdk.run(batches, {"x": _drawn(0, 3, 16, 16)})


@pytest.mark.parametrize(
    ("shapes", "sizes", "said"),
    [
        ([{"x": SMALL}, {"x": SMALL}], (), "given twice"),
        ([{"x": (1, 3, 8, 8 + i)} for i in range(MAX_VARIANTS + 1)], (), "at most 16"),
        ([{"x": SMALL}, {"x": LARGE}], (1, 2), "exclude each other"),
        ([{"x": SMALL}], (1, 1), "the batches are 1, 1"),
        ([{"x": SMALL}], (0, 1), "the batches are 0, 1"),
        ([{}], (1, 2), "leaves more open than its batch"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    net: Path, shapes: list[dict[str, tuple[int, ...]]], sizes: tuple[int, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        import_variants(net, shapes, sizes)


def test_rows_that_depend_on_each_other_are_refused(tmp_path: Path) -> None:
    mixed = _network(tmp_path / "mixed.onnx", mixes_rows=True)
    with pytest.raises(UnsupportedModelError, match="rows of a batch depend on each other"):
        edgesdk.compile(mixed, shapes={"x": SMALL}, batches=[1, 2], output=tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()
    whole = _network(tmp_path / "whole.onnx", whole=True)
    with pytest.raises(UnsupportedModelError, match="its first axis is no batch"):
        import_variants(whole, [{"x": SMALL}], (1, 2))


def test_shapes_of_several_inputs_belong_together_in_order() -> None:
    assert parse_variants(["x=1x2", "y=3", "x=4x5"]) == [
        {"x": (1, 2), "y": (3,)},
        {"x": (4, 5), "y": (3,)},
    ]


def test_a_cpp_program_selects_by_shape(two_shapes: Bundle, net: Path, tmp_path: Path) -> None:
    for name, shape in (("small", SMALL), ("large", LARGE)):
        _drawn(*shape).tofile(tmp_path / f"{name}.bin")
    (tmp_path / "app.cc").write_text(
        """\
#include <net.hpp>
#include <cstdint>
#include <fstream>
#include <string>

template <std::size_t N>
bool Run(edgesdk_net::Model& model, const std::int64_t (&shape)[N], const char* name) {
  if (!model.select_shape(0, shape)) return false;
  edgesdk::Span<float> x = model.input<float>(0);
  std::ifstream(std::string(name) + ".bin").read(reinterpret_cast<char*>(x.data()), x.size_bytes());
  if (!model.run()) return false;
  auto y = model.output<float>(0);
  std::ofstream(std::string(name) + ".out")
      .write(reinterpret_cast<const char*>(y.data()), y.size_bytes());
  return true;
}

int main() {
  edgesdk_net::Model model;
  const std::int64_t none[] = {1, 2};
  if (!model || model.num_variants() != 2 || model.select_shape(0, none)) return 1;
  const std::int64_t large[] = {1, 3, 20, 24}, small[] = {1, 3, 16, 16};
  return Run(model, large, "large") && Run(model, small, "small") ? 0 : 2;
}
""",
        encoding="utf-8",
    )
    build = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "app.cc"]
    library = two_shapes.library
    flags = [f"-I{two_shapes.path / 'include'}", str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run([*build, *flags, "-o", "app"], cwd=tmp_path, check=True)
    subprocess.run(["./app"], cwd=tmp_path, check=True)
    for name, shape in (("small", SMALL), ("large", LARGE)):
        found = np.fromfile(tmp_path / f"{name}.out", np.float32)
        wanted = _expected(net, _drawn(*shape)).reshape(-1)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_csharp_program_selects_a_variant(two_shapes: Bundle, net: Path, tmp_path: Path) -> None:
    x = _drawn(*LARGE)
    x.tofile(tmp_path / "x.bin")
    (tmp_path / "app.cs").write_text(
        """\
using System;
using System.IO;

class App {
  static void Main() {
    using (var model = new net.Model()) {
      model.SelectVariant(model.NumVariants - 1);
      byte[] bytes = File.ReadAllBytes("x.bin");
      var x = new float[bytes.Length / 4];
      Buffer.BlockCopy(bytes, 0, x, 0, bytes.Length);
      model.SetInput(0, x);
      model.Run();
      float[] y = model.GetOutput<float>(0);
      bytes = new byte[4 * y.Length];
      Buffer.BlockCopy(y, 0, bytes, 0, bytes.Length);
      File.WriteAllBytes("y.bin", bytes);
      try {
        model.SelectVariant(2);
      } catch (net.ModelException error) {
        Console.WriteLine(model.Inputs[0].Shape[3] + ": " + error.Message);
      }
    }
  }
}
""",
        encoding="utf-8",
    )
    source = two_shapes.path / "csharp/net.cs"
    subprocess.run(["mcs", "-out:app.exe", "app.cs", source], cwd=tmp_path, check=True)
    where = {**os.environ, "LD_LIBRARY_PATH": str(two_shapes.library.parent)}
    said = subprocess.run(
        ["mono", "app.exe"], cwd=tmp_path, env=where, check=True, capture_output=True, text=True
    )
    assert said.stdout == "24: there is no variant 2: the model has 2\n"
    found = np.fromfile(tmp_path / "y.bin", np.float32)
    np.testing.assert_allclose(found, _expected(net, x).reshape(-1), rtol=1e-4, atol=1e-6)
