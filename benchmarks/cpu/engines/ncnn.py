"""ncnn, converted by pnnx, in fp32 (its default stores and computes in fp16 or bf16)."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

PACKAGES = ("ncnn==1.0.20261020",)
# pnnx is a program of its own; its package asks for PyTorch, which only its Python part needs.
WITHOUT_DEPENDENCIES = ("pnnx==20261020",)
_CONVERT_LIMIT_S = 300.0


def version() -> str:
    from importlib.metadata import version

    return f"{version('ncnn')} (pnnx {version('pnnx')})"


def load(
    model: Path, shapes: dict[str, tuple[int, ...]], threads: int
) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    import ncnn

    parameters, weights = convert(model, shapes)
    net = ncnn.Net()
    net.opt.num_threads = threads
    for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic"):
        setattr(net.opt, option, False)
    net.opt.use_bf16_storage = False
    if net.load_param(str(parameters)) != 0 or net.load_model(str(weights)) != 0:
        raise RuntimeError("ncnn does not load what pnnx made of it")
    names = list(shapes)
    blobs = sorted(net.output_names(), key=lambda name: int(re.sub(r"\D", "", name) or 0))

    def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        extractor = net.create_extractor()
        for blob, name in zip(net.input_names(), names, strict=True):
            # ncnn knows no batch axis.
            extractor.input(blob, ncnn.Mat(np.ascontiguousarray(inputs[name][0])))
        results = []
        for blob in blobs:
            code, mat = extractor.extract(blob)
            if code != 0:
                raise RuntimeError(f"ncnn cannot compute {blob} (code {code})")
            results.append(np.array(mat)[None])
        return results

    return run


def convert(model: Path, shapes: dict[str, tuple[int, ...]]) -> tuple[Path, Path]:
    folder = model.parent / "ncnn"
    folder.mkdir(exist_ok=True)
    parameters, weights = folder / "net.param", folder / "net.bin"
    if not weights.exists():
        sizes = ",".join("[" + ",".join(map(str, shape)) + "]" for shape in shapes.values())
        program = Path(importlib.util.find_spec("pnnx").submodule_search_locations[0]) / "pnnx"
        program.chmod(0o755)
        command = [program, model, f"inputshape={sizes}", "fp16=0"]
        command += [f"ncnnparam={parameters}", f"ncnnbin={weights}", "optlevel=2"]
        command += [f"{kind}={folder / ('net.' + end)}" for kind, end in _OTHERS]
        result = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=_CONVERT_LIMIT_S
        )
        if result.returncode != 0 or not weights.exists():
            weights.unlink(missing_ok=True)
            raise RuntimeError(f"pnnx: {(result.stdout + result.stderr).strip()[-200:]}")
    return parameters, weights


_OTHERS = (
    ("pnnxparam", "pnnx.param"),
    ("pnnxbin", "pnnx.bin"),
    ("pnnxpy", "pnnx.py"),
    ("pnnxonnx", "pnnx.onnx"),
    ("ncnnpy", "ncnn.py"),
)
