"""Fixes the input shapes: what the model says, what the user says, and a batch of one."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from edgesdk.errors import ModelError, UnsupportedModelError, UsageError
from edgesdk.frontend.graph import LARGEST_TENSOR_BYTES, Value
from edgesdk.frontend.importer import identifier

# Names that exporters give to a batch dimension, beside none at all.
_BATCH = re.compile(r"(?i)^(n|b|bs|-1|\?|none|unk__\d+|.*batch.*|(.*\W)?dynamicdimension\.0)$")


@dataclass(frozen=True)
class FixedInputs:
    """The model's inputs with static shapes, in its order, and what was assumed for them."""

    values: dict[str, Value]
    assumed: tuple[str, ...]


@dataclass
class _Input:
    name: str
    dtype: np.dtype
    dims: list[int | str]  # a number, or the name of an open dimension ("" where it has none)


def fix_inputs(
    proto: onnx.ModelProto, weights: set[str], shapes: Mapping[str, Sequence[int]]
) -> FixedInputs:
    """Returns the inputs of `proto` (those that are not `weights`) with static shapes.

    Raises UsageError when `shapes` names no input, contradicts the model, or leaves a dimension
    open that is not a batch, or when an input is too large; UnsupportedModelError for inputs that
    are not tensors of numbers.
    """
    inputs = [_declared(i) for i in proto.graph.input if i.name not in weights]
    given = _given(inputs, weights, shapes)
    symbols: dict[str, tuple[int, str]] = {}
    for entry in inputs:
        if entry.name in given:
            _apply(entry, given[entry.name], symbols)
    for entry in inputs:  # the same name means the same number everywhere
        entry.dims = [
            symbols[d][0] if isinstance(d, str) and d in symbols else d for d in entry.dims
        ]
    assumed = _assume_batch(inputs)
    _refuse_open(inputs)
    values = {e.name: Value(e.name, tuple(int(d) for d in e.dims), e.dtype) for e in inputs}
    for value in values.values():
        size_bytes = math.prod(value.shape) * value.dtype.itemsize
        if size_bytes > LARGEST_TENSOR_BYTES:
            raise UsageError(
                f"the input {value.label!r} takes {size_bytes / 2**30:.0f} GiB",
                hint=f"give it a smaller shape with --shape {value.label}=...",
            )
        if value.size == 0:  # there is only one tensor without elements
            value.const = np.empty(value.shape, value.dtype)
    return FixedInputs(values, tuple(assumed))


def open_batches(proto: onnx.ModelProto, weights: set[str]) -> dict[str, tuple[int, ...] | None]:
    """Returns the inputs whose first dimension the model leaves open, and their other dimensions;
    None where those are open, too."""
    found: dict[str, tuple[int, ...] | None] = {}
    for entry in (_declared(i) for i in proto.graph.input if i.name not in weights):
        if entry.dims and isinstance(entry.dims[0], str):
            rest = tuple(d for d in entry.dims[1:] if isinstance(d, int))
            whole = entry.dims != ["?rank"] and len(rest) == len(entry.dims) - 1
            found[entry.name] = rest if whole else None
    return found


def _declared(info: onnx.ValueInfoProto) -> _Input:
    kind = info.type.WhichOneof("value")
    if kind not in ("tensor_type", None):
        raise UnsupportedModelError(
            f"input {info.name!r} is no tensor but a {kind.removesuffix('_type')}",
            nodes=((info.name, "input", "only tensors can be inputs"),),
        )
    tensor = info.type.tensor_type
    if not tensor.elem_type:
        raise ModelError(f"input {info.name!r} has no element type")
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError:
        raise ModelError(f"input {info.name!r} has the unknown type {tensor.elem_type}") from None
    if dtype.isbuiltin != 1 or dtype.kind not in "fiub":
        raise UnsupportedModelError(
            f"input {info.name!r} holds {dtype.name}, which is not supported",
            nodes=((info.name, "input", f"its type {dtype.name} is not supported"),),
        )
    if not tensor.HasField("shape"):
        return _Input(info.name, dtype, ["?rank"])
    dims: list[int | str] = []
    for dim in tensor.shape.dim:
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            dims.append(dim.dim_value)
        else:
            dims.append(dim.dim_param)
    return _Input(info.name, dtype, dims)


def _given(
    inputs: list[_Input], weights: set[str], shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    by_name = {identifier(i.name): i.name for i in inputs} | {i.name: i.name for i in inputs}
    given: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if name not in by_name:
            close = difflib.get_close_matches(name, list(by_name), 1, 0.5)
            known = ", ".join(repr(i.name) for i in inputs) or "none"
            raise UsageError(
                f"the model has no input {name!r}"
                + (", it is a weight" if name in weights else f"; its inputs are {known}"),
                hint=f"did you mean --shape {by_name[close[0]]}=...?" if close else None,
            )
        given[by_name[name]] = tuple(int(d) for d in shape)
    return given


def _apply(entry: _Input, shape: tuple[int, ...], symbols: dict[str, tuple[int, str]]) -> None:
    text = "x".join(map(str, shape)) or "scalar"
    if entry.dims == ["?rank"]:
        entry.dims = [""] * len(shape)
    declared = "x".join(str(d) if d != "" else "?" for d in entry.dims) or "scalar"
    if len(shape) != len(entry.dims):
        raise UsageError(
            f"the shape {text} of {entry.name!r} has {len(shape)} dimensions;"
            f" the model says {declared}",
            hint=f"give {len(entry.dims)} numbers: --shape {entry.name}={declared}",
        )
    for axis, (dim, number) in enumerate(zip(entry.dims, shape, strict=True)):
        if isinstance(dim, int) and dim != number:
            raise UsageError(
                f"the shape {text} of {entry.name!r} has {number} at axis {axis};"
                f" the model fixes {dim}",
                hint=f"the model says {declared}",
            )
        if number < 0 or (number == 0 and dim != 0):
            raise UsageError(
                f"the shape {text} of {entry.name!r} has {number} at axis {axis}",
                hint="dimensions are at least 1",
            )
        if isinstance(dim, str) and _is_symbol(dim):
            known = symbols.setdefault(dim, (number, entry.name))
            if known[0] != number:
                raise UsageError(
                    f"dimension {dim!r} is {known[0]} in {known[1]!r}"
                    f" but {number} in {entry.name!r}",
                    hint="give both inputs the same number there",
                )
    entry.dims = list(shape)


def _is_symbol(dim: str) -> bool:
    """Whether a dimension's name means one number wherever it stands."""
    return dim not in ("", "?", "-1", "None")


def _assume_batch(inputs: list[_Input]) -> list[str]:
    assumed, symbols = [], set()
    for entry in inputs:
        for axis, dim in enumerate(entry.dims):
            if not isinstance(dim, str) or dim == "?rank":
                continue
            leading = axis == 0 and len(entry.dims) > 1 and (dim == "" or _BATCH.match(dim))
            if leading and dim == "" and len([d for d in entry.dims if d == ""]) > 1:
                leading = False  # nothing tells the batch from the other unnamed dimensions
            if leading or "batch" in dim.lower() or dim in symbols:
                if _is_symbol(dim):
                    symbols.add(dim)
                entry.dims[axis] = 1
                called = f" ({dim!r})" if dim else ""
                assumed.append(f"input {entry.name!r}: open batch dimension{called} fixed to 1")
    for entry in inputs:
        entry.dims = [1 if d in symbols else d for d in entry.dims]
    return assumed


def _refuse_open(inputs: list[_Input]) -> None:
    open_inputs = [e for e in inputs if any(isinstance(d, str) for d in e.dims)]
    if not open_inputs:
        return
    parts, flags = [], []
    for entry in open_inputs:
        if entry.dims == ["?rank"]:
            parts.append(f"{entry.name!r} has no shape")
            flags.append(f"--shape {entry.name}=...")
            continue
        free = [
            f"axis {i}" + (f" ({d!r})" if _is_symbol(d) else "")
            for i, d in enumerate(entry.dims)
            if isinstance(d, str)
        ]
        parts.append(f"{entry.name!r} leaves {', '.join(free)} open")
        flags.append(f"--shape {entry.name}={_pattern(entry.dims)}")
    raise UsageError(
        f"input {'; input '.join(parts)}",
        hint=f"add {' '.join(flags)} with numbers for the letters",
    )


def _pattern(dims: list[int | str]) -> str:
    """The shape as a person would type it, with a letter where a number is wanted."""
    usual = {4: "NCHW", 3: "NTC", 2: "NT", 5: "NCDHW"}.get(len(dims), "ABCDEFGHIJ")
    return "x".join(
        str(d) if isinstance(d, int) else usual[i % len(usual)] for i, d in enumerate(dims)
    )
