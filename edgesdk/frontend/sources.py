"""What kind of file a model is. Every kind that can be compiled has a form in ONNX: `open_source`.

ONNX files are taken as they are. TFLite files and exported PyTorch programs are converted once in a
process, into a temporary file that is gone with it. Other formats are refused, and the error says
how to get from there to ONNX.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgesdk.errors import ModelError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    import onnx

# The domain of a node that stands for an operator which cannot be converted; its doc_string says
# why. The walker refuses it.
REFUSED_DOMAIN = "refused"

Kind = Literal["ONNX", "TFLite", "PyTorch"]


@dataclass(frozen=True)
class Conversion:
    """A model in ONNX: `proto` without its weights, and the weights by name.

    `operators` counts the operators of the original by their own names; None where they are those
    of `proto`. `notes` says, a line each, what was rewritten.
    """

    proto: onnx.ModelProto
    weights: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    operators: dict[str, int] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """The model file `path`, and `onnx`, the same network as an ONNX file (maybe the same file).

    `quantised` says that a TFLite file computes with integers, see `tflite.runtime`.
    """

    path: Path
    kind: Kind
    onnx: Path
    sha256: str | None = None
    quantised: bool = False
    operators: dict[str, int] | None = None
    notes: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """What results are compared with: the program that the model's format belongs to."""
        if self.quantised:
            return f"{REFERENCES['ONNX']}, which {REFERENCES['TFLite']}, confirms by steps"
        return REFERENCES[self.kind]


REFERENCES: dict[Kind, str] = {
    "ONNX": "ONNX Runtime, CPU, fp32",
    "TFLite": "TFLite's interpreter, CPU",
    "PyTorch": "PyTorch, CPU, fp32",
}


def open_source(path: Path) -> Source:
    """Returns what kind of model `path` is and its form in ONNX.

    Raises UnsupportedModelError for another format, ToolMissingError when the extra for its format
    is not installed, ModelError when it is damaged. A path that is no file counts as ONNX.
    """
    path = Path(path)
    kind = _kind(path)
    if kind == "ONNX":
        return Source(path, kind, path)
    state = path.stat()
    return _converted(path, kind, (state.st_mtime_ns, state.st_size, state.st_ino))


def _kind(path: Path) -> Kind:
    if path.is_dir() and (path / "saved_model.pb").exists():
        raise _refusal(path, "a TensorFlow SavedModel", _FROM_SAVED_MODEL)
    if path.is_dir() and path.suffix == ".mlpackage":
        raise _refusal(path, "a Core ML package", _FROM_SOURCE)
    if not path.is_file():
        return "ONNX"  # whose reader says what is wrong
    suffix = path.suffix.lower()
    head = _head(path)
    if head[4:8] == b"TFL3" or suffix == ".tflite":
        return "TFLite"
    if head.startswith(b"PK") and suffix != ".onnx":
        if _is_exported_program(path):
            return "PyTorch"
        if suffix == ".keras":
            raise _refusal(path, "a Keras model", _FROM_KERAS)
        raise _refusal(path, "weights or a script of PyTorch, not an exported program", _FROM_TORCH)
    for what, suffixes, magic, way in _FOREIGN:
        if suffix in suffixes or (magic and head[magic[0] :].startswith(magic[1])):
            raise _refusal(path, what, way)
    return "ONNX"


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def _is_exported_program(path: Path) -> bool:
    """Whether a zip file is one that torch.export.save wrote."""
    try:
        names = zipfile.ZipFile(path).namelist()
    except (zipfile.BadZipFile, OSError):
        return path.suffix.lower() == ".pt2"
    inside = {name.split("/", 1)[-1] for name in names}
    return "archive_format" in inside or "serialized_exported_program.json" in names


_FROM_SAVED_MODEL = (
    "convert it first: pip install tf2onnx; python -m tf2onnx.convert --saved-model DIR"
    " --output model.onnx"
)
_FROM_GRAPH = (
    "convert it first: pip install tf2onnx; python -m tf2onnx.convert --graphdef FILE"
    " --inputs x:0 --outputs y:0 --output model.onnx"
)
_FROM_KERAS = (
    "load it in Keras 3 and write ONNX: keras.saving.load_model(FILE).export('model.onnx',"
    " format='onnx')"
)
_FROM_TORCH = (
    "build the module, load the weights, then"
    " torch.export.save(torch.export.export(module, inputs), 'model.pt2')"
)
_FROM_MXNET = (
    "convert it where MXNet 1.9 is installed: mxnet.onnx.export_model('x-symbol.json',"
    " 'x-0000.params', in_shapes=[(1, 3, 224, 224)], onnx_file_path='model.onnx')"
)
_FROM_PADDLE = (
    "convert it first: pip install paddle2onnx; paddle2onnx --model_dir DIR --model_filename FILE"
    " --params_filename PARAMS --save_file model.onnx"
)
_FROM_SOURCE = "go back to the framework that it was converted from, and export ONNX there"
_FROM_BUILD = "it is compiled for one machine; give the ONNX file that it was built from"
_FROM_WEIGHTS = "it holds weights without a network: build the model from them and export ONNX"

# What it is, its suffixes, what it begins with (offset, bytes), and the way to ONNX.
_FOREIGN: tuple[tuple[str, tuple[str, ...], tuple[int, bytes] | None, str], ...] = (
    ("a Keras model or weights in HDF5", (".h5", ".hdf5"), (0, b"\x89HDF"), _FROM_KERAS),
    ("a TensorFlow graph", (".pb", ".pbtxt", ".meta", ".ckpt"), None, _FROM_GRAPH),
    ("an MXNet model", (".params", ".json"), None, _FROM_MXNET),
    ("a PyTorch checkpoint", (".pt", ".pth", ".ckpt", ".bin"), (0, b"\x80\x02"), _FROM_TORCH),
    ("a Paddle model", (".pdmodel", ".pdiparams", ".pdparams"), None, _FROM_PADDLE),
    ("a Core ML model", (".mlmodel",), None, _FROM_SOURCE),
    ("a TensorRT engine", (".engine", ".plan", ".trt"), (0, b"ftrt"), _FROM_BUILD),
    ("ONNX Runtime's own format", (".ort",), (4, b"ORTM"), _FROM_BUILD),
    ("a Caffe model", (".caffemodel", ".prototxt"), None, _FROM_SOURCE),
    ("an OpenVINO model", (".xml",), None, _FROM_SOURCE),
    ("an ncnn model", (".param",), None, _FROM_SOURCE),
    ("an MNN model", (".mnn",), None, _FROM_SOURCE),
    ("a file of weights", (".safetensors", ".gguf", ".npz"), (0, b"GGUF"), _FROM_WEIGHTS),
)


def _refusal(path: Path, what: str, way: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{path} is {what}, which cannot be compiled directly", hint=way)


@functools.lru_cache(maxsize=4)
def _converted(path: Path, kind: Kind, state: tuple[int, ...]) -> Source:
    """The source of a file in this very state."""
    converters: dict[Kind, Callable[[Path], Conversion]] = {
        "TFLite": _convert_tflite,
        "PyTorch": _convert_torch,
    }
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    conversion = converters[kind](path)
    file = Path(tempfile.mkdtemp(dir=temporary_folder())) / "model.onnx"
    _write(conversion, file)
    quantised = kind == "TFLite" and any(
        node.op_type == "DequantizeLinear" for node in conversion.proto.graph.node
    )
    return Source(path, kind, file, digest, quantised, conversion.operators, conversion.notes)


def _convert_tflite(path: Path) -> Conversion:
    from edgesdk.frontend.tflite import convert_tflite

    return convert_tflite(path.read_bytes(), path.name)


def _convert_torch(path: Path) -> Conversion:
    from edgesdk.frontend.torch_export import convert_program

    return convert_program(path)


@functools.cache
def temporary_folder() -> Path:
    """A folder that is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="edgesdk-onnx-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# A protobuf message holds less than 2 GB; beyond this the weights get a file of their own.
_LARGEST_MESSAGE_BYTES = 1 << 30


def _write(conversion: Conversion, file: Path) -> None:
    import numpy as np
    import onnx
    from onnx import numpy_helper

    proto = onnx.ModelProto()
    proto.CopyFrom(conversion.proto)
    for name, array in conversion.weights.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    large = proto.ByteSize() > _LARGEST_MESSAGE_BYTES
    try:
        onnx.save_model(
            proto,
            file,
            save_as_external_data=large,
            location=f"{file.name}.data" if large else None,
        )
    except OSError as error:
        raise ModelError(
            f"cannot write the converted model to {file.parent}: {error.strerror or error}",
            hint="free some space there, or set TMPDIR to another folder",
        ) from error
