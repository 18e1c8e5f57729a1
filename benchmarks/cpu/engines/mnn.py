"""MNN, CPU backend, precision "high": its "normal" may compute in less than fp32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("MNN==3.6.1",)
_CONVERT_LIMIT_S = 300.0
_TYPES = {"float32": "Halide_Type_Float", "int32": "Halide_Type_Int", "int64": "Halide_Type_Int64"}


def version() -> str:
    from importlib.metadata import version

    return version("MNN")


def load(
    model: Path, shapes: dict[str, tuple[int, ...]], threads: int
) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    import MNN
    import onnx

    outputs = {
        output.name: onnx.helper.tensor_dtype_to_np_dtype(output.type.tensor_type.elem_type)
        for output in onnx.load(model).graph.output
    }
    net = MNN.Interpreter(str(convert(model)))
    session = net.createSession({"backend": "CPU", "precision": "high", "numThread": threads})
    places = net.getSessionInputAll(session)
    results = net.getSessionOutputAll(session)
    unknown = set(shapes) - set(places) | set(outputs) - set(results)
    if unknown:
        raise RuntimeError(f"the converted model lacks {', '.join(sorted(unknown))}")

    if any(0 in results[name].getShape() for name in outputs):
        raise RuntimeError("MNN does not find the shapes of the outputs")

    def tensor(array: np.ndarray) -> Any:
        # "Caffe" is MNN's word for NCHW, that is, for an array as it is.
        kind = _TYPES[array.dtype.name]
        return MNN.Tensor(array.shape, getattr(MNN, kind), array, MNN.Tensor_DimensionType_Caffe)

    hosts = {k: tensor(np.zeros(results[k].getShape(), dtype)) for k, dtype in outputs.items()}

    def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        for name in shapes:
            places[name].copyFrom(tensor(inputs[name]))
        code = net.runSession(session)
        if code != 0:
            raise RuntimeError(f"MNN cannot run it (code {code})")
        for name, host in hosts.items():
            results[name].copyToHostTensor(host)
        return [np.array(host.getNumpyData(), copy=True) for host in hosts.values()]

    return run


def convert(model: Path) -> Path:
    folder = model.parent / "mnn"
    folder.mkdir(exist_ok=True)
    converted = folder / f"{model.stem}.mnn"
    if not converted.exists():
        program = Path(sys.executable).with_name("mnnconvert")
        command = [program, "-f", "ONNX", "--modelFile", model, "--MNNModel", converted]
        result = subprocess.run(
            [*map(str, command), "--bizCode", "bench"],
            capture_output=True,
            text=True,
            timeout=_CONVERT_LIMIT_S,
        )
        if not converted.exists():
            raise RuntimeError(f"mnnconvert: {(result.stdout + result.stderr).strip()[-200:]}")
    return converted
