"""A bundle called from Java through its JNI files, in this machine's own Java."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import edgesdk
from edgesdk.proc import run_command

X = np.array([[1.5, -2, 3], [-4, 5.25, -6]], np.float32)
N = np.array([7, -(2**40)], np.int64)

APP = """\
import java.nio.BufferOverflowException;
import java.util.Arrays;
import net.Model;

public final class App {
  public static void main(String[] arguments) {
    try {
      new Model(-1, null).close();
    } catch (Model.ModelException error) {
      System.out.println("open " + error.status + " " + error.getMessage());
    }
    Model model = new Model(1, null);
    for (Model.Tensor t : model.inputs()) {
      String shape = Arrays.toString(t.shape);
      System.out.println("input " + t.name + shape + t.dtype + " " + t.sizeBytes);
    }
    try {
      model.run();
    } catch (Model.ModelException error) {
      System.out.println("early " + error.status + " " + error.getMessage());
    }
    float[] x = {1.5f, -2f, 3f, -4f, 5.25f, -6f};
    try {
      model.input(0).asFloatBuffer().put(x).put(0f);
    } catch (BufferOverflowException error) {
      System.out.println("size refused");
    }
    model.input(1).asLongBuffer().put(new long[] {7, -(1L << 40)});
    model.run();
    float[] sum = new float[6];
    model.output(0).asFloatBuffer().get(sum);
    System.out.println("sum " + Arrays.toString(sum));
    long[] doubled = new long[2];
    model.output(1).asLongBuffer().get(doubled);
    System.out.println("doubled " + Arrays.toString(doubled));
    System.out.println("kind " + model.output(0).isDirect() + " " + model.output(0).isReadOnly());
    try {
      model.input(2);
    } catch (Model.ModelException error) {
      System.out.println("index " + error.status + " " + error.getMessage());
    }
    model.close();
    model.close();
    try {
      model.run();
    } catch (IllegalStateException error) {
      System.out.println("closed " + error.getMessage());
    }
  }
}
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("java")
    nodes = [
        helper.make_node("Add", ["x", "one"], ["sum"]),
        helper.make_node("Add", ["ñ", "ñ"], ["d"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3]),
            helper.make_tensor_value_info("ñ", TensorProto.INT64, [2]),
        ],
        [
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, [2, 3]),
            helper.make_tensor_value_info("d", TensorProto.INT64, [2]),
        ],
        [helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "net.onnx")
    edgesdk.compile(folder / "net.onnx", target="local", output=folder / "bundle")
    return folder / "bundle"


def test_java(bundle: Path, tmp_path: Path) -> None:
    include = Path(str(shutil.which("javac"))).resolve().parent.parent / "include"
    folders = (include, include / "linux", bundle / "include")
    _succeeds(
        ["gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
        + [f"-I{folder}" for folder in folders]
        + [str(bundle / "java" / "net" / "model_jni.c"), str(bundle / "lib" / "libnet.so")]
        + ["-Wl,-rpath,$ORIGIN", "-o", "libnet_jni.so"],
        tmp_path,
    )
    shutil.copy(bundle / "lib" / "libnet.so", tmp_path)
    (tmp_path / "App.java").write_text(APP)
    javac = [
        "javac",
        "--release",
        "8",
        "-Xlint:all,-options",
        "-Werror",
        "-encoding",
        "UTF-8",
        "-d",
        ".",
    ]
    _succeeds([*javac, "App.java", str(bundle / "java" / "net" / "Model.java")], tmp_path)
    java = [
        "java",
        "-Xcheck:jni",
        "-Xmx64m",
        "-Dfile.encoding=UTF-8",
        "-Djava.library.path=.",
        "App",
    ]
    said = _succeeds(java, tmp_path).splitlines()
    doubled = (N * 2).tolist()
    assert said == [
        "open 2 num_threads is -1",
        "input x[2, 3]1 24",
        "input ñ[2]8 16",
        "early 5 input 'x' was never set",
        "size refused",
        f"sum {(X + np.float32(1)).ravel().tolist()}",
        f"doubled {doubled}",
        "kind true true",
        "index 2 there is no input 2: the model has 2",
        "closed the model is closed",
    ]


def _succeeds(argv: list[str], folder: Path) -> str:
    result = run_command(argv, timeout_s=120, cwd=folder)
    assert result.ok, result.stdout_text + result.stderr_text
    return result.stdout_text
