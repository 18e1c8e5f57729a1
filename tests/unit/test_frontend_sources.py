"""What kind of file a model is; other formats are refused with the way to ONNX."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from command_line import Cli

from edgesdk.errors import ModelError, ToolMissingError, UnsupportedModelError
from edgesdk.frontend.load import load_model
from edgesdk.frontend.sources import open_source

# File, content, a word of what it is called, and of the way to ONNX.
FOREIGN = {
    "net.h5": (b"\x89HDF\r\n\x1a\n", "Keras", "format='onnx'"),
    "weights.dat": (b"\x89HDF\r\n\x1a\n", "HDF5", "format='onnx'"),
    "frozen.pb": (b"\n\x10", "TensorFlow graph", "tf2onnx"),
    "net-symbol.json": (b'{"nodes": []}', "MXNet", "mxnet.onnx.export_model"),
    "net-0000.params": (b"\x12\x01", "MXNet", "mxnet.onnx.export_model"),
    "net.pth": (b"\x80\x02\x8a", "PyTorch", "torch.export.save"),
    "net.mlmodel": (b"\x08\x01", "Core ML", "export ONNX"),
    "net.engine": (b"ftrt", "TensorRT", "built from"),
    "net.plan": (b"\0\0", "TensorRT", "built from"),
    "net.ort": (b"\x18\0\0\0ORTM", "ONNX Runtime", "built from"),
    "net.pdmodel": (b"\n", "Paddle", "paddle2onnx"),
    "net.caffemodel": (b"\n", "Caffe", "export ONNX"),
    "net.xml": (b"<?xml", "OpenVINO", "export ONNX"),
    "net.param": (b"7767517", "ncnn", "export ONNX"),
    "net.gguf": (b"GGUF", "weights", "build the model"),
    "net.safetensors": (b"\0", "weights", "build the model"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_another_format_is_refused_with_the_way(name: str, tmp_path: Path) -> None:
    content, called, way = FOREIGN[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError) as caught:
        open_source(path)
    assert str(path) in caught.value.message
    assert called in caught.value.message
    assert way in str(caught.value.hint)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("name", "entries", "called"),
    [
        ("net.keras", ("config.json", "metadata.json"), "Keras"),
        ("net.pt", ("net/data.pkl", "net/version"), "PyTorch"),
        ("net.bin", ("net/data.pkl", "net/version"), "PyTorch"),
    ],
)
def test_archives_are_told_apart(
    name: str, entries: tuple[str, ...], called: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    with zipfile.ZipFile(path, "w") as archive:
        for entry in entries:
            archive.writestr(entry, "x")
    with pytest.raises(UnsupportedModelError, match=called):
        open_source(path)


def test_folders_of_other_frameworks(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "saved_model.pb").touch()
    with pytest.raises(UnsupportedModelError, match="SavedModel") as caught:
        open_source(saved)
    assert "--saved-model" in str(caught.value.hint)
    package = tmp_path / "net.mlpackage"
    package.mkdir()
    with pytest.raises(UnsupportedModelError, match="Core ML"):
        open_source(package)


def test_an_unknown_name_is_read_as_onnx(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"no model at all")
    assert open_source(path).kind == "ONNX"
    with pytest.raises(ModelError, match="not an ONNX file"):
        load_model(path)


def test_a_damaged_tflite_file(tmp_path: Path) -> None:
    from tflite_files import quantised_net

    content = quantised_net()
    path = tmp_path / "net.tflite"
    for damaged in (b"", b"\0" * 40, content[: len(content) // 2], content[:64]):
        path.write_bytes(damaged)
        with pytest.raises(ModelError) as caught:
            open_source(path)
        assert "net.tflite" in caught.value.message
        assert "\n" not in caught.value.message


def test_without_the_extra_the_hint_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.tflite"
    path.write_bytes(b"\x1c\0\0\0TFL3" + b"\0" * 64)
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    with pytest.raises(ToolMissingError) as caught:
        open_source(path)
    assert caught.value.hint == "pip install 'edgesdk[tflite]'"
    program = tmp_path / "net.pt2"
    with zipfile.ZipFile(program, "w") as archive:
        archive.writestr("net/archive_format", "pt2")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ToolMissingError) as caught:
        open_source(program)
    assert caught.value.hint == "pip install 'edgesdk[torch]'"


def test_the_commands_say_it_in_two_lines(cli: Cli) -> None:
    (cli.here / "net.h5").write_bytes(b"\x89HDF")
    for command in ("inspect", "compile", "init"):
        options = ["--target", "local"] if command != "inspect" else []
        said = cli(command, "net.h5", *options)
        assert said.code == 5
        lines = said.err.strip().splitlines()
        assert [line.split(":")[0] for line in lines[-2:]] == ["error", "hint"]
    assert [p.name for p in cli.here.iterdir()] == ["net.h5"]
