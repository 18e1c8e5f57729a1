"""Reads a model's file: one clear error for each way in which it can be none.

Weights leave the protobuf as NumPy arrays (external data as memory maps), and the protobuf that
held them is let go, so that a model is in memory once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import helper, numpy_helper

from edgesdk.errors import ModelError, UnsupportedModelError, UsageError
from edgesdk.frontend.sources import open_source

OLDEST_OPSET = 7
# Operator sets younger than this were unknown when this file was written; see _check_opset.
YOUNGEST_OPSET = onnx.defs.onnx_opset_version()


@dataclass
class LoadedModel:
    """An ONNX model without its weights, and the weights by name."""

    proto: onnx.ModelProto
    weights: dict[str, np.ndarray[Any, Any]]
    opset: int
    sha256: str


def load_model(path: Path) -> LoadedModel:
    """Reads `path`, a model in any format that can be compiled, as ONNX.

    Its `sha256` is that of the original. Raises what `load_onnx` and `open_source` raise.
    """
    source = open_source(path)
    loaded = load_onnx(source.onnx)
    if source.sha256 is not None:
        loaded.sha256 = source.sha256
    return loaded


def load_onnx(path: Path) -> LoadedModel:
    """Reads `path` and the external data beside it.

    Raises UsageError when there is no such file, ModelError when it is not a readable ONNX model,
    UnsupportedModelError when its operator set is too old or too young.
    """
    proto = _parse(path)
    files = _resolve_external(proto, path)
    opset = _check_opset(proto, path)
    digest = _digest([path, *sorted(files)])
    weights: dict[str, np.ndarray[Any, Any]] = {}
    for tensor in proto.graph.initializer:
        weights[tensor.name] = _array(tensor, path)
    for sparse in proto.graph.sparse_initializer:
        weights[sparse.values.name] = dense_array(sparse)
    del proto.graph.initializer[:]
    del proto.graph.sparse_initializer[:]
    # Deleting fields frees nothing inside protobuf's arena; a copy without them does.
    light = onnx.ModelProto.FromString(proto.SerializeToString())
    return LoadedModel(light, weights, opset, digest)


def _parse(path: Path) -> onnx.ModelProto:
    if not path.exists():
        raise UsageError(f"there is no file {path}", hint="give the path of a model's file")
    if path.is_dir():
        raise ModelError(f"{path} is a folder, not an ONNX file", hint="give the .onnx file in it")
    hint = "export or download the model again"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if not content:
        raise ModelError(f"{path} is empty", hint=hint)
    if content.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path} is a Git LFS pointer, not the model", hint="run: git lfs pull")
    try:
        proto = onnx.ModelProto.FromString(content)
    except DecodeError:
        raise ModelError(f"{path} is not an ONNX file, or is truncated", hint=hint) from None
    if not proto.opset_import and not proto.graph.node:
        raise ModelError(f"{path} is not an ONNX file", hint=hint)
    if not proto.graph.output:
        raise ModelError(f"{path} has no graph with outputs; it may be truncated", hint=hint)
    # Protobuf hands out text that is not UTF-8 as bytes.
    damaged = next((text for text in _texts(proto) if not isinstance(text, str)), None)
    if damaged is not None:
        raise ModelError(f"{path} is damaged: {damaged!r} is no name", hint=hint)
    return proto


def _texts(proto: onnx.ModelProto) -> Iterator[str | bytes]:
    """The names in a model, those of operators and dimensions included."""
    yield from (proto.producer_name, proto.producer_version)
    for opset in proto.opset_import:
        yield opset.domain
    yield from _graph_texts(proto.graph)
    for function in proto.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
        yield from _node_texts(function.node)


def _graph_texts(graph: onnx.GraphProto) -> Iterator[str | bytes]:
    for info in (*graph.input, *graph.output):
        yield info.name
        for dim in info.type.tensor_type.shape.dim:
            yield dim.dim_param
    for tensor in graph.initializer:
        yield tensor.name
    yield from _node_texts(graph.node)


def _node_texts(nodes: Iterable[onnx.NodeProto]) -> Iterator[str | bytes]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
        for attribute in node.attribute:
            yield from (attribute.name, attribute.ref_attr_name)
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _graph_texts(graph)


def _check_opset(proto: onnx.ModelProto, path: Path) -> int:
    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if not opset:  # a model of functions or contributed operators only
        return YOUNGEST_OPSET
    if opset < OLDEST_OPSET:
        raise UnsupportedModelError(
            f"{path.name} uses operator set {opset}; the oldest supported is {OLDEST_OPSET}",
            hint=f"export it again with opset_version={max(OLDEST_OPSET, 17)}",
        )
    if opset > YOUNGEST_OPSET:
        raise UnsupportedModelError(
            f"{path.name} uses operator set {opset}; the youngest supported is {YOUNGEST_OPSET}",
            hint="export it with an older opset_version, or update the onnx package",
        )
    return opset


def _resolve_external(proto: onnx.ModelProto, path: Path) -> set[Path]:
    """Makes the locations of external data absolute; returns the files."""
    files = set()
    for tensor in _all_tensors(proto):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        info = {entry.key: entry for entry in tensor.external_data}
        location = info["location"].value if "location" in info else ""
        folder = path.resolve().parent
        file = (folder / location).resolve()
        if not location or not file.is_relative_to(folder):
            raise ModelError(
                f"{path.name}: weight {tensor.name!r} points outside the model's folder"
                f" ({location!r})",
                hint="put the data file beside the model",
            )
        if not file.is_file():
            raise ModelError(
                f"{path.name}: its external data file {location} is missing",
                hint=f"put {location} beside {path.name}",
            )
        info["location"].value = str(file)
        files.add(file)
    return files


def _all_tensors(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    found: list[onnx.TensorProto] = []

    def in_nodes(nodes: Any) -> None:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    found.append(attribute.t)
                found.extend(attribute.tensors)
                for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                    in_graph(graph)

    def in_graph(graph: onnx.GraphProto) -> None:
        found.extend(graph.initializer)
        in_nodes(graph.node)

    in_graph(proto.graph)
    for function in proto.functions:
        in_nodes(function.node)
    return found


def _array(tensor: onnx.TensorProto, path: Path) -> np.ndarray[Any, Any]:
    try:
        return to_array(tensor)
    except (ValueError, TypeError, KeyError, OSError, OverflowError) as error:
        text = " ".join(str(error).split())
        raise ModelError(
            f"{path.name}: weight {tensor.name!r} is damaged: {text}",
            hint="export or download the model again",
        ) from error


def to_array(tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
    """Returns a tensor's content; external data is mapped, not read (its location is absolute).

    Raises ValueError when the file or the field is shorter than the shape asks for.
    """
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return np.asarray(numpy_helper.to_array(tensor))
    info = {entry.key: entry.value for entry in tensor.external_data}
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    if tensor.data_type in _PACKED:  # two elements in a byte: let ONNX unpack them
        copy = onnx.TensorProto()
        copy.CopyFrom(tensor)
        return np.asarray(numpy_helper.to_array(copy, base_dir="/"))
    shape = tuple(tensor.dims)
    if int(np.prod(shape, dtype=np.int64)) == 0:
        return np.empty(shape, dtype)
    offset = int(info.get("offset", "0"))
    return np.memmap(info["location"], dtype, "r", offset, shape)


_PACKED = {
    getattr(onnx.TensorProto, name)
    for name in ("INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2")
    if hasattr(onnx.TensorProto, name)
}


def dense_array(sparse: onnx.SparseTensorProto) -> np.ndarray[Any, Any]:
    values = to_array(sparse.values)
    indices = to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return dense


def _digest(files: list[Path]) -> str:
    hasher = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                hasher.update(block)
    return hasher.hexdigest()
