"""OpenVINO, CPU plugin, with its precision hint at f32: bf16 would be another computation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

PACKAGES = ("openvino==2026.4.1",)


def version() -> str:
    from importlib.metadata import version

    return version("openvino")


def load(
    model: Path, shapes: dict[str, tuple[int, ...]], threads: int
) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(threads),
    }
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model), "CPU", settings)
    request = compiled.create_infer_request()
    order = list(shapes)

    def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        # By position: OpenVINO may drop or change names, never the order.
        request.infer([inputs[name] for name in order], share_inputs=True)
        return [np.copy(request.get_output_tensor(i).data) for i in range(len(compiled.outputs))]

    return run
