"""The library called from C++, Python and C#, each as a bundle's own files offer it.

One network with inputs and outputs of several types; NumPy says what they should be.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import edgesdk
from edgesdk.bundle.faces import module_name, write_faces
from edgesdk.bundle.manifest import TensorInfo, read_manifest
from edgesdk.compiler import emit
from edgesdk.proc import run_command
from edgesdk.resources import data_folder

X = np.array([[1.5, -2, 3], [-4, 5.25, -6]], np.float32)
N = np.array([7, -(2**40)], np.int64)
SUM = X + np.float32(1)  # "sum/y"
POSITIVE = X > 0  # "positive"
DOUBLED = N * 2  # "int"

CPP = """\
#include <net.hpp>

#include <cstdio>
#include <type_traits>
#include <utility>
#include <vector>

using Model = edgesdk_net::Model;
static_assert(!std::is_copy_constructible_v<Model> && std::is_nothrow_move_constructible_v<Model>);
static_assert(Model::input_x_shape[0] == 2 && Model::input_x_shape[1] == 3);
static_assert(Model::output_int_shape.size() == 1);

template <typename T>
void Print(const char* name, edgesdk::Span<const T> values) {
  std::printf("%s", name);
  for (T value : values) std::printf(" %.17g", static_cast<double>(value));
  std::printf("\\n");
}

int main() {
  edgesdk::Options wrong;
  wrong.num_threads = -1;
  Model closed(wrong);
  std::printf("closed %d %d %s\\n", bool(closed), closed.run(), closed.error());

  Model model;
  std::printf("open %d %d [%s] %s\\n", bool(model), model.status(), model.error(), model.name());
  bool ran = model.run();
  bool missing = model.status() == EDGESDK_ERROR_INPUT_MISSING;
  std::printf("early %d %d %s\\n", ran, missing, model.error());
  std::printf("type %d %s\\n", int(model.input<double>(0).size()), model.error());
  std::printf("index %d %s\\n", int(model.output<float>(9).size()), model.error());

  const float x[6] = {1.5f, -2, 3, -4, 5.25f, -6};
  edgesdk::Span<float> own = model.input_x();
  for (std::size_t i = 0; i < own.size(); ++i) own[i] = x[i];
  std::vector<std::int64_t> n = {7, -(std::int64_t{1} << 40)};
  if (!model.bind_input_n_0(n)) return 1;
  if (!model.bind_input_n_0(edgesdk::Span<const std::int64_t>(n))) return 1;
  ran = model.bind_input_n_0(edgesdk::Span<const std::int64_t>(n.data(), 1));
  std::printf("size %d %s\\n", ran, model.error());

  Model moved(std::move(model));
  std::printf("moved %d %d %s\\n", bool(model), model.run(), model.error());
  model = std::move(moved);
  alignas(edgesdk::kAlignment) bool positive[6] = {};
  if (!model.bind_output_positive(positive)) return 1;
  if (!model.run() || !model) return 1;
  std::printf("same %d\\n", own.data() == model.input_x().data());
  Print<float>("sum/y", model.output_sum_y());
  Print<bool>("positive", edgesdk::Span<const bool>(positive));
  Print<std::int64_t>("int", model.output_int());
  return 0;
}
"""

CMAKE = """\
cmake_minimum_required(VERSION 3.16)
project(app CXX)
find_package(net CONFIG REQUIRED)
set(CMAKE_CXX_STANDARD 17)
add_executable(app app.cc)
target_compile_options(app PRIVATE -Wall -Wextra -pedantic -Werror -fno-exceptions -fno-rtti)
target_link_libraries(app PRIVATE net::net)
"""

PYTHON = """\
import json, sys
import numpy as np
from net import Model, ModelError

x = np.array([[1.5, -2, 3], [-4, 5.25, -6]], np.float32)
n = np.array([7, -(2**40)], np.int64)
said = {}

def refused(name, call):
    try:
        call()
    except (TypeError, ValueError, ModelError) as error:
        said[name] = [type(error).__name__, str(error)]

model = Model(num_threads=1)
said["inputs"] = [[t.name, list(t.shape), t.dtype.name] for t in model.inputs]
said["threads"] = model.num_threads
outputs = model(x, **{"n:0": n})
said["outputs"] = {k: [v.dtype.name, list(v.shape), v.tolist()] for k, v in outputs.items()}
said["transposed"] = model(np.asfortranarray(x), n)["sum/y"].tolist()
again = model(np.zeros_like(x), n)
said["fresh"] = outputs["sum/y"].tolist() != again["sum/y"].tolist()

def io_bytes():
    import ctypes
    info = (ctypes.c_size_t * 16)()
    model._api.edgesdk_model_memory(model._handle, info)
    return info[2]

model = Model()
aligned = model.empty_input(0), model.empty_input(1)
aligned[0][:], aligned[1][:] = x, n
model(*aligned)
said["copied aligned"] = io_bytes()
odd = np.empty(x.nbytes + 64, np.uint8)
start = (4 - odd.ctypes.data) % 64
odd = odd[start : start + x.nbytes].view(np.float32).reshape(x.shape)
model(odd, aligned[1])
said["copied unaligned"] = io_bytes()

refused("shape", lambda: model(x[:1], n))
refused("dtype", lambda: model(x.astype(np.float64), n))
refused("missing", lambda: model(x))
refused("unknown", lambda: model(x, m=n))
refused("twice", lambda: model(x, n, x=x))
refused("open", lambda: Model(num_threads=-1))
with model:
    pass
refused("closed", lambda: model(x, n))
said["modules"] = sorted(m for m in ("edgesdk", "tvm", "onnx") if m in sys.modules)
print(json.dumps(said))
"""

CSHARP = """\
using System;
using System.Globalization;

static class Program {
  static void Print<T>(string name, T[] values) {
    Console.Write(name);
    foreach (T value in values) {
      double number = Convert.ToDouble(value, CultureInfo.InvariantCulture);
      Console.Write(" " + number.ToString("R", CultureInfo.InvariantCulture));
    }
    Console.WriteLine();
  }

  static void Main() {
    try {
      new net.Model(-1);
    } catch (net.ModelException error) {
      Console.WriteLine("closed " + error.Status + " " + error.Message);
    }
    using (var model = new net.Model()) {
      Console.WriteLine(
          "input " + model.Inputs[1].Name + " " + string.Join("x", model.Inputs[0].Shape));
      try {
        model.SetInput(0, new float[5]);
      } catch (ArgumentException error) {
        Console.WriteLine("size " + error.Message);
      }
      try {
        model.Run();
      } catch (net.ModelException error) {
        Console.WriteLine("early " + error.Status);
      }
      model.SetInput(0, new float[] {1.5f, -2, 3, -4, 5.25f, -6});
      model.SetInput(1, new long[] {7, -(1L << 40)});
      model.Run();
      Print("sum/y", model.GetOutput<float>(0));
      Print("positive", model.GetOutput<byte>(1));
      Print("int", model.GetOutput<long>(2));
    }
  }
}
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faces")
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["x", "one"], ["sum/y"]),
            helper.make_node("Greater", ["x", "zero"], ["positive"]),
            helper.make_node("Add", ["n:0", "n:0"], ["int"]),
        ],
        "net",
        [_info("x", TensorProto.FLOAT, [2, 3]), _info("n:0", TensorProto.INT64, [2])],
        [
            _info("sum/y", TensorProto.FLOAT, [2, 3]),
            _info("positive", TensorProto.BOOL, [2, 3]),
            _info("int", TensorProto.INT64, [2]),
        ],
        [
            helper.make_tensor("one", TensorProto.FLOAT, [], [1]),
            helper.make_tensor("zero", TensorProto.FLOAT, [], [0]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, folder / "net.onnx")
    return edgesdk.compile(folder / "net.onnx", output=folder / "bundle").path


def test_cpp_without_exceptions(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "app.cc").write_text(CPP)
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    _succeeds(["cmake", "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={bundle}"], tmp_path)
    _succeeds(["cmake", "--build", "build"], tmp_path)
    said = _lines(_succeeds([tmp_path / "build" / "app"], tmp_path))
    assert said["closed"] == "0 0 num_threads is -1"
    assert said["open"] == "1 0 [] net"
    assert said["early"].startswith("0 1 ") and "'x'" in said["early"]
    assert said["type"] == "0 input 0 has elements of another type"
    assert said["index"].startswith("0 ") and "9" in said["index"]
    assert said["size"].startswith("0 ") and "16" in said["size"] and "8" in said["size"]
    assert said["moved"] == "0 0 the model was moved away"
    assert said["same"] == "1"
    _check_results(said)


def test_python_with_numpy_alone(bundle: Path, tmp_path: Path) -> None:
    said = _python(bundle, tmp_path)
    assert said["inputs"] == [["x", [2, 3], "float32"], ["n:0", [2], "int64"]]
    assert said["threads"] == 1
    assert said["outputs"] == {
        "sum/y": ["float32", [2, 3], SUM.tolist()],
        "positive": ["bool", [2, 3], POSITIVE.tolist()],
        "int": ["int64", [2], DOUBLED.tolist()],
    }
    assert said["transposed"] == SUM.tolist()
    assert said["fresh"] and said["modules"] == []
    # What is not aligned takes a copy of its own in the library; aligned arrays take none.
    assert said["copied unaligned"] >= said["copied aligned"] + X.nbytes


def test_python_says_what_does_not_fit(bundle: Path, tmp_path: Path) -> None:
    said = _python(bundle, tmp_path)
    assert said["shape"] == ["ValueError", "the input 'x' is float32 [1, 3], not float32 [2, 3]"]
    assert said["dtype"] == ["ValueError", "the input 'x' is float64 [2, 3], not float32 [2, 3]"]
    assert said["missing"] == ["TypeError", "missing inputs: n:0"]
    assert said["unknown"] == ["TypeError", "there is no input 'm'; the inputs: x, n:0"]
    assert said["twice"] == ["TypeError", "the input 'x' is given twice"]
    assert said["open"] == ["ModelError", "num_threads is -1"]
    assert said["closed"] == ["ModelError", "the model is closed"]


def test_csharp(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "app.cs").write_text(CSHARP)
    source = bundle / "csharp" / "net.cs"
    _succeeds(["mcs", "-langversion:5", "-warnaserror", "-out:app.exe", "app.cs", source], tmp_path)
    where = {"LD_LIBRARY_PATH": str(bundle / "lib")}
    said = _lines(_succeeds(["mono", "app.exe"], tmp_path, where))
    assert said["closed"] == "2 num_threads is -1"
    assert said["input"] == "n:0 2x3"
    assert said["early"] == "5"
    assert said["size"] == "x has 24 bytes, the array 20"
    _check_results(said)


# Names that want the same identifier, that end comments and strings, or that are no letters.
AWKWARD = (
    TensorInfo("x", (1, 2), "float32"),
    TensorInfo("x_shape", (), "float64"),
    TensorInfo("x:shape", (0, 3), "int8"),
    TensorInfo('a*/b/*c"d\\', (4,), "float16"),
    TensorInfo("輸入", (2,), "bfloat16"),
    TensorInfo("class", (2,), "bool"),
)


def test_awkward_names_compile(tmp_path: Path, fake_bundle: Callable[..., Path]) -> None:
    manifest = read_manifest(fake_bundle(tmp_path / "net"))
    manifest = dataclasses.replace(manifest, name="json", inputs=AWKWARD, outputs=AWKWARD[::-1])
    include = tmp_path / "include"
    include.mkdir()
    write_faces(tmp_path, manifest)
    ports = [emit.Port(t.name, t.shape, t.dtype) for t in AWKWARD]
    (include / "json.h").write_text(emit.model_header("json", [(tuple(ports), tuple(ports[::-1]))]))
    shutil.copy(data_folder("device_scripts") / "include" / "edgesdk_model.h", include)
    (tmp_path / "app.cc").write_text(
        "#include <json.hpp>\n"
        "static_assert(edgesdk_json::Model::input_x_shape.size() == 2);\n"
        "bool Bind(edgesdk_json::Model* model, edgesdk::Span<const double> data) {\n"
        "  return model->bind_input_x_shape_1(data) && !model->input_class().empty();\n"
        "}\n"
    )
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-pedantic", "-Werror"]
    _succeeds(["g++", *flags, f"-I{include}", "app.cc"], tmp_path)
    python = tmp_path / "python" / "json_net" / "__init__.py"
    compile(python.read_text(encoding="utf-8"), "json_net", "exec")
    _succeeds(["mcs", "-target:library", "-out:net.dll", "csharp/json_net.cs"], tmp_path)


def test_an_archive_has_no_face_that_would_load_it(
    tmp_path: Path, fake_bundle: Callable[..., Path]
) -> None:
    manifest = read_manifest(fake_bundle(tmp_path / "net"))
    (tmp_path / "include").mkdir()
    write_faces(tmp_path, dataclasses.replace(manifest, library="lib/libnet.a"))
    assert (tmp_path / "include" / "net.hpp").exists()
    assert not any((tmp_path / name).exists() for name in ("python", "csharp", "java"))


@pytest.mark.parametrize(
    ("name", "module"), [("net", "net"), ("json", "json_net"), ("lambda", "lambda_net")]
)
def test_a_module_takes_no_name_of_the_language(name: str, module: str) -> None:
    assert module_name(name) == module


def _python(bundle: Path, here: Path) -> dict[str, Any]:
    """What the program says; it sees NumPy, the bundle, and no other package."""
    packages = here / "packages"
    packages.mkdir()
    installed = Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        (packages / name).symlink_to(installed / name)
    (here / "program.py").write_text(PYTHON)
    path = os.pathsep.join((str(bundle / "python"), str(packages)))
    # -S: without the site-packages of this Python. -B: nothing is written into the bundle.
    result = _succeeds([sys.executable, "-S", "-B", "program.py"], here, {"PYTHONPATH": path})
    said: dict[str, Any] = json.loads(result)
    return said


def _check_results(said: dict[str, str]) -> None:
    np.testing.assert_array_equal(np.array(said["sum/y"].split(), np.float32), SUM.ravel())
    np.testing.assert_array_equal(np.array(said["positive"].split(), int), POSITIVE.ravel())
    np.testing.assert_array_equal([int(float(v)) for v in said["int"].split()], DOUBLED)


def _lines(text: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in text.splitlines())


def _succeeds(argv: list[Any], here: Path, env: dict[str, str] | None = None) -> str:
    assert shutil.which(str(argv[0])), f"{argv[0]} is not installed: make test installs it"
    result = run_command(argv, timeout_s=300, cwd=here, env=env)
    assert result.ok, result.stdout_text + result.stderr_text
    return result.stdout_text


def _info(name: str, dtype: int, shape: list[int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)
