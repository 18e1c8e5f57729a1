"""ONNX Runtime, CPU provider, all graph optimisations (the default)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

PACKAGES = ("onnxruntime==1.32.0",)


def version() -> str:
    from importlib.metadata import version

    return version("onnxruntime")


def load(
    model: Path, shapes: dict[str, tuple[int, ...]], threads: int
) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)
