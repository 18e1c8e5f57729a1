"""LiteRT (TensorFlow Lite's interpreter with XNNPACK, its default on CPUs)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

PACKAGES = ("ai-edge-litert==2.3.0",)


def version() -> str:
    from importlib.metadata import version

    return version("ai-edge-litert")


def load(
    model: Path, shapes: dict[str, tuple[int, ...]], threads: int
) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(model), num_threads=threads)
    interpreter.allocate_tensors()
    places = [detail["index"] for detail in interpreter.get_input_details()]
    results = [detail["index"] for detail in interpreter.get_output_details()]

    def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        for place, name in zip(places, shapes, strict=True):
            interpreter.set_tensor(place, inputs[name])
        interpreter.invoke()
        return [interpreter.get_tensor(index) for index in results]

    return run
