"""Runs one model through the front end and TVM's own virtual machine, against a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgesdk.errors import EdgeSdkError, UnsupportedModelError
from edgesdk.frontend import ImportedModel, import_model

Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Outcome:
    """`status` is "ok", "refused" (by name, with the reason in `detail`) or "wrong"."""

    status: str
    detail: str = ""


def run_in_tvm(model: ImportedModel, inputs: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    """Compiles `model` for this machine and runs it; outputs by the model's own names."""
    import tvm
    from tvm import relax

    with tvm.transform.PassContext(opt_level=3):
        built = tvm.compile(model.module, tvm.target.Target({"kind": "llvm", "num-cores": 2}))
    machine = relax.VirtualMachine(built, tvm.cpu())
    arguments = [tvm.runtime.tensor(np.array(inputs[s.name], order="C")) for s in model.inputs]
    result = machine["main"](*arguments)
    tensors = [result] if len(model.outputs) == 1 else list(result)
    return {s.name: t.numpy() for s, t in zip(model.outputs, tensors, strict=True)}


def difference(
    got: np.ndarray[Any, Any],
    want: np.ndarray[Any, Any],
    relative: float = 1e-4,
    absolute: float = 1e-5,
) -> str:
    """Says how `got` differs from `want`, or nothing when it does not."""
    if got.shape != want.shape:
        return f"shape {list(got.shape)} instead of {list(want.shape)}"
    if got.dtype != want.dtype:
        return f"type {got.dtype} instead of {want.dtype}"
    if want.size == 0:
        return ""
    if want.dtype.kind in "iub":
        wrong = np.count_nonzero(got != want)
        return f"{wrong} of {want.size} integers differ" if wrong else ""
    a, b = got.astype(np.float64), want.astype(np.float64)
    special = ~np.isfinite(b)
    if not np.array_equal(np.isnan(a), np.isnan(b)) or np.any(
        a[special & ~np.isnan(b)] != b[special & ~np.isnan(b)]
    ):
        return "NaN or infinity where there is none, or the reverse"
    gap = np.abs(a[~special] - b[~special])
    scale = np.max(np.abs(b[~special]), initial=0.0)
    half = 2e-3 if want.dtype.itemsize == 2 else 0.0
    bound = absolute + max(relative, half) * scale
    worst = float(gap.max(initial=0.0))
    return f"off by {worst:.3g} where {scale:.3g} is the largest" if worst > bound else ""


def check_model(
    path: Path,
    inputs: Arrays,
    expected: Arrays | Sequence[np.ndarray[Any, Any]],
    relative: float = 1e-4,
    absolute: float = 1e-5,
) -> Outcome:
    """Imports, compiles and runs `path` on `inputs`, and compares with `expected`."""
    shapes = {name: array.shape for name, array in inputs.items()}
    try:
        model = import_model(path, shapes=shapes)
    except UnsupportedModelError as error:
        return Outcome("refused", "; ".join(f"{kind}: {why}" for _, kind, why in error.nodes))
    except EdgeSdkError as error:
        return Outcome("refused", f"{type(error).__name__}: {error.message}")
    got = run_in_tvm(model, inputs)
    if not isinstance(expected, Mapping):
        expected = {s.name: a for s, a in zip(model.outputs, expected, strict=True)}
    for name, want in expected.items():
        text = difference(got[name], want, relative, absolute)
        if text:
            return Outcome("wrong", f"{name}: {text}")
    return Outcome("ok")
