"""A TFLite file as it is: the objects of its schema, and the content of its tensors."""

from __future__ import annotations

import functools
import struct
from types import ModuleType
from typing import Any

import numpy as np

from edgesdk.errors import ModelError, ToolMissingError

Array = np.ndarray[Any, Any]

# What Python raises where a file breaks the schema or contradicts itself.
MALFORMED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, struct.error)


def parse_tflite(content: bytes, name: str) -> Any:
    """Returns the file's content as objects of the schema (`ModelT`).

    Raises ToolMissingError without the extra `tflite`, ModelError for a damaged file.
    """
    objects = schema().ModelT
    try:
        return objects.InitFromPackedBuf(content, 0)
    except MALFORMED as error:
        raise damaged(name, error) from error


def schema() -> ModuleType:
    """TFLite's schema, as the interpreter's package carries it. Raises ToolMissingError."""
    try:
        from ai_edge_litert import schema_py_generated
    except ImportError as error:
        raise missing_interpreter() from error
    return schema_py_generated


def missing_interpreter() -> ToolMissingError:
    return ToolMissingError(
        "TFLite files need the package ai-edge-litert, which has TFLite's schema and interpreter",
        hint="pip install 'edgesdk[tflite]'",
    )


def damaged(name: str, error: Exception) -> ModelError:
    text = " ".join(str(error).split())[:200]
    return ModelError(
        f"{name} is a damaged TFLite file ({type(error).__name__}: {text})",
        hint="export or download the model again",
    )


@functools.cache
def operator_names() -> dict[int, str]:
    """TFLite's operator names by their number in the schema."""
    table = vars(schema().BuiltinOperator)
    return {number: name for name, number in table.items() if isinstance(number, int)}


def text(raw: Any) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw or "")


def entries(raw: Any) -> Any:
    """A vector of the schema, which may be left out, and may be 0 then."""
    return () if raw is None or np.ndim(raw) == 0 else raw


def tensor_type(number: int) -> np.dtype[Any]:
    """The NumPy type of a tensor, by its number in the schema; `object` where there is none."""
    kinds = vars(schema().TensorType)
    kind = next((k for k, v in kinds.items() if isinstance(v, int) and v == number), "")
    # 4-bit integers are unpacked.
    plain = {"INT4": "int8", "UINT4": "uint8", "INT2": "int8"}.get(kind, kind.lower())
    try:
        return np.dtype(plain)
    except TypeError:
        # Never read: whatever touches it is refused by its own kind.
        return np.dtype(object)


def content_of(
    raw: Any, octets: Array, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array | None:
    """What the bytes `octets` of the tensor `raw` hold; None for types that cannot be read."""
    kinds = schema().TensorType
    if dtype.kind == "O":
        return None
    if raw.type in (kinds.INT4, kinds.UINT4):
        return _unpacked(octets, shape, dtype)
    if raw.type == kinds.INT2:
        return None
    values = octets[: octets.size // dtype.itemsize * dtype.itemsize].view(dtype)
    if raw.sparsity is not None:
        return _dense(raw.sparsity, values, shape)
    return values.reshape(shape)


def _unpacked(octets: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """4-bit integers, two in each byte, the lower half first."""
    halves = np.stack([octets & 15, octets >> 4], axis=-1).reshape(-1).astype(np.int16)
    if dtype == np.int8:
        halves = np.where(halves > 7, halves - 16, halves)
    return halves[: int(np.prod(shape))].astype(dtype).reshape(shape)


def _dense(sparsity: Any, values: Array, shape: tuple[int, ...]) -> Array:
    """A sparse tensor written out.

    TFLite's format (tensorflow/lite/schema, SparsityParameters): axes in `traversalOrder`, first
    those of the tensor, then those inside blocks (`blockMap` says of which axis); each is dense, or
    compressed as rows: segments of indices for every position on the axes before it.
    """
    order = [int(i) for i in sparsity.traversalOrder]
    blocks = [int(i) for i in entries(sparsity.blockMap)]
    levels = sparsity.dimMetadata
    rank = len(shape)
    sizes = {rank + i: int(levels[order.index(rank + i)].denseSize) for i in range(len(blocks))}
    positions = np.zeros((1, len(order)), np.int64)  # one row for each element so far
    cursor = np.zeros(1, np.int64)
    for level, axis in zip(levels, order, strict=True):
        if level.format == schema().DimensionType.DENSE:
            size = int(level.denseSize)
            index = np.tile(np.arange(size), len(cursor))
            parent = np.repeat(np.arange(len(cursor)), size)
            cursor = cursor[parent] * size + index
        else:
            segments = np.asarray(level.arraySegments.values, np.int64)
            indices = np.asarray(level.arrayIndices.values, np.int64)
            counts = segments[cursor + 1] - segments[cursor]
            parent = np.repeat(np.arange(len(cursor)), counts)
            first = np.repeat(
                segments[cursor] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts
            )
            cursor = np.arange(int(counts.sum())) + first
            index = indices[cursor]
        positions = positions[parent].copy()
        positions[:, axis] = index
    where = [positions[:, axis].copy() for axis in range(rank)]
    for i, axis in enumerate(blocks):
        where[axis] = where[axis] * sizes[rank + i] + positions[:, rank + i]
    dense = np.zeros(shape, values.dtype)
    dense[tuple(where)] = values[cursor]
    return dense
