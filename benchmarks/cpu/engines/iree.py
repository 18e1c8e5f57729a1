"""IREE: compiled for this very CPU with -O3 and data tiling, run by its Python runtime."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

PACKAGES = ("iree-base-compiler[onnx]==3.13.0", "iree-base-runtime==3.13.0")
_COMPILE_LIMIT_S = 600.0


def version() -> str:
    from importlib.metadata import version

    return version("iree-base-compiler")


def load(
    model: Path, shapes: dict[str, tuple[int, ...]], threads: int
) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    from iree import runtime

    # A pool of one thread still hands over between threads; local-sync does not.
    driver = "local-sync" if threads == 1 else "local-task"
    runtime.flags.parse_flags(f"--task_topology_group_count={threads}")
    module = runtime.load_vm_flatbuffer_file(str(compiled(model)), driver=driver)
    function = module[_main(model)]
    names = list(shapes)

    def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        results = function(*(inputs[name] for name in names))
        results = results if isinstance(results, (tuple, list)) else (results,)
        return [result.to_host() for result in results]

    return run


def compiled(model: Path) -> Path:
    folder = model.parent / "iree"
    folder.mkdir(exist_ok=True)
    module = folder / f"{model.stem}.vmfb"
    if not module.exists():
        text = folder / f"{model.stem}.mlir"
        _tool("iree-import-onnx", model, "--opset-version", "17", "-o", text)
        _tool(
            "iree-compile",
            text,
            "--iree-hal-target-device=local",
            "--iree-hal-local-target-device-backends=llvm-cpu",
            "--iree-llvmcpu-target-cpu=host",
            "--iree-opt-level=O3",
            "-o",
            module,
        )
    return module


def _tool(name: str, *arguments: object) -> None:
    program = Path(sys.executable).with_name(name)
    result = subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=_COMPILE_LIMIT_S,
    )
    if result.returncode != 0:
        said = [line for line in result.stderr.splitlines() if "error" in line.lower()]
        raise RuntimeError(f"{name}: {(said or [result.stderr.strip()[-200:]])[0][-200:]}")


def _main(model: Path) -> str:
    import re

    import onnx

    # The importer names the function after the graph.
    name = onnx.load(model).graph.name
    return re.sub(r"[^A-Za-z0-9_]", "_", name)
