"""Files that are no model, each told apart in one line; external data; weights as inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper

from edgesdk.errors import ModelError, UnsupportedModelError, UsageError
from edgesdk.frontend.load import load_onnx

TEXT = '<ir_version: 8, opset_import: ["": 13]> g (float[2,3] x) => (float[2,4] y) {{ {body} }}'


def write(path: Path, body: str = "y = MatMul (x, w)", opset: int = 13) -> Path:
    model = onnx.parser.parse_model(TEXT.format(body=body).replace("13", str(opset)))
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    path.write_bytes(model.SerializeToString())
    return path


def test_reads_weights_opset_and_digest(tmp_path: Path) -> None:
    loaded = load_onnx(write(tmp_path / "m.onnx"))
    assert loaded.opset == 13
    assert np.array_equal(loaded.weights["w"], np.arange(12).reshape(3, 4))
    assert len(loaded.sha256) == 64
    assert not loaded.proto.graph.initializer


def test_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        load_onnx(tmp_path / "none.onnx")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"not a model at all, only text", "not an ONNX file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"\x89PNG\r\n\x1a\n" + bytes(200), "not an ONNX file"),
    ],
)
def test_other_files_are_told_apart(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_onnx(path)


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a folder"):
        load_onnx(tmp_path)


def test_truncated_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ModelError, match="truncated"):
        load_onnx(path)


@pytest.mark.parametrize(("opset", "word"), [(6, "oldest"), (999, "youngest")])
def test_operator_set_out_of_range(tmp_path: Path, opset: int, word: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"operator set {opset}; the {word}"):
        load_onnx(write(tmp_path / "m.onnx", opset=opset))


def external(tmp_path: Path, location: str = "w.bin") -> Path:
    path = write(tmp_path / "m.onnx")
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(tensor, location, length=48)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data_is_mapped_and_part_of_the_digest(tmp_path: Path) -> None:
    path = external(tmp_path)
    data = tmp_path / "w.bin"
    data.write_bytes(np.arange(12, dtype=np.float32).tobytes())
    first = load_onnx(path)
    assert isinstance(first.weights["w"], np.memmap)
    assert first.weights["w"][2, 3] == 11
    data.write_bytes(np.zeros(12, np.float32).tobytes())
    assert load_onnx(path).sha256 != first.sha256


def test_missing_external_data_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"external data file w\.bin is missing"):
        load_onnx(external(tmp_path))


def test_short_external_data(tmp_path: Path) -> None:
    path = external(tmp_path)
    (tmp_path / "w.bin").write_bytes(b"1234")
    with pytest.raises(ModelError, match="weight 'w' is damaged"):
        load_onnx(path)


def test_external_data_outside_the_folder_is_refused(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(48))
    with pytest.raises(ModelError, match="outside the model's folder"):
        load_onnx(external(inner, "../w.bin"))


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"], name="hereitis")],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (2,))],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (2,))],
    )
    content = helper.make_model(graph).SerializeToString()
    path.write_bytes(content.replace(b"hereitis", b"here\xff\xfeis"))
    with pytest.raises(ModelError, match=r"m\.onnx is damaged: b'here.*' is no name"):
        load_onnx(path)
