"""PyTorch: exported programs (.pt2) become ONNX, and run in PyTorch itself as the reference.

`torch.export` fixes what a module computes, `torch.onnx` writes it down in ONNX's words. A module
given from Python is exported into a .pt2 file first, so there is one way for both.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgesdk.errors import EdgeSdkError, ModelError, ToolMissingError, UsageError
from edgesdk.frontend.graph import CORE_OPSET
from edgesdk.frontend.sources import Conversion, temporary_folder

if TYPE_CHECKING:
    import numpy as np
    import torch

    from edgesdk.frontend.sources import Source


def convert_program(path: Path) -> Conversion:
    """Returns the ONNX form of the exported program in `path`.

    Raises ToolMissingError without the extra `torch`, ModelError when PyTorch cannot read or
    convert the program.
    """
    program = _load(path)
    torch = _torch()
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise _missing("onnxscript") from error
    with _quiet(), _told(f"PyTorch cannot convert {path.name} to ONNX"):
        result = torch.onnx.export(program, dynamo=True, opset_version=CORE_OPSET, verbose=False)
        calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
        counts = Counter(name.removesuffix(".default") for name in calls)
        return Conversion(result.model_proto, operators=dict(counts.most_common()))


def export_module(module: torch.nn.Module, example_inputs: Sequence[Any] | None) -> Path:
    """Exports a module for inputs like `example_inputs` into a .pt2 file, gone with the process.

    The file has the name of the module's class. Raises UsageError for what is no module, is in
    training mode or has no example inputs, ModelError when it cannot be exported.
    """
    torch = _torch()
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"a model is a path or a torch.nn.Module, not {type(module).__name__}",
            hint="give the path of an .onnx, .tflite or .pt2 file",
        )
    name = type(module).__name__
    if not example_inputs:
        raise UsageError(
            f"{name} is a module: tracing it needs inputs",
            hint="add example_inputs=(torch.zeros(1, 3, 224, 224),), as its forward() takes them",
        )
    if module.training:
        raise UsageError(f"{name} is in training mode", hint=f"call {name}.eval() first")
    folder = tempfile.mkdtemp(dir=temporary_folder())
    path = Path(folder) / f"{re.sub('(?<=[a-z0-9])(?=[A-Z])', '_', name).lower()}.pt2"
    with _quiet(), _told(f"PyTorch cannot export {name}"):
        torch.export.save(torch.export.export(module, tuple(example_inputs)), path)
    return path


class TorchSession:
    """Runs an exported program in PyTorch on the CPU; names are those that its ONNX form has.

    `optimise=False` leaves oneDNN out, so that sums are in another order.
    """

    def __init__(self, source: Source, *, optimise: bool = True) -> None:
        import onnx
        from onnx import helper

        graph = onnx.load(source.onnx, load_external_data=False).graph
        self.outputs = tuple(o.name for o in graph.output)
        self.dtypes = {
            i.name: helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type).name
            for i in graph.input
        }
        self._optimise = optimise
        self._program = _load(source.path)
        with _quiet():
            self._module = self._program.module()

    def run(self, feeds: Mapping[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """Returns the outputs in the order of `outputs`."""
        import numpy as np

        torch = _torch()
        tree = torch.utils._pytree
        tensors = [torch.from_numpy(np.array(feeds[name])) for name in self.dtypes]
        args, kwargs = self._arguments(tensors)
        with _quiet(), torch.inference_mode(), torch.backends.mkldnn.flags(enabled=self._optimise):
            results = self._module(*args, **kwargs)
        flat = [r for r in tree.tree_leaves(results) if isinstance(r, torch.Tensor)]
        return [r.numpy() for r in flat]

    def _arguments(self, tensors: list[Any]) -> tuple[Any, Any]:
        """`tensors` in the places where the program was exported with tensors."""
        torch = _torch()
        tree = torch.utils._pytree
        examples = self._program.example_inputs
        if examples is None:
            return tuple(tensors), {}
        leaves, spec = tree.tree_flatten(examples)
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tree.tree_unflatten(filled, spec)


def _load(path: Path) -> Any:
    torch = _torch()
    hint = "it may be damaged, or of a newer PyTorch: export it again with this one"
    with _quiet(), _told(f"PyTorch cannot read {path.name}", hint):
        return torch.export.load(path)


def _torch() -> Any:
    try:
        import torch
        import torch.export
        import torch.onnx
    except ImportError as error:
        raise _missing("torch") from error
    return torch


def _missing(package: str) -> ToolMissingError:
    return ToolMissingError(
        f"PyTorch models need the package {package}", hint="pip install 'edgesdk[torch]'"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps PyTorch's remarks on itself off the user's screen."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


_WAYS = "PyTorch's documentation of torch.export has ways around it; or give an ONNX file"


@contextlib.contextmanager
def _told(what: str, hint: str = _WAYS) -> Iterator[None]:
    """Whatever PyTorch raises becomes a ModelError that says `what`."""
    try:
        yield
    except EdgeSdkError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # what went wrong comes last
            cause = cause.__cause__
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(cause))
        line = next((line for line in text.splitlines() if line.strip()), "")
        raise ModelError(
            f"{what}: {type(cause).__name__}: {' '.join(line.split())[:300]}",
            hint=hint,
        ) from error
