"""The candidates of candidates.c, built for a device, and requests to measure them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgesdk.compiler import link
from edgesdk.toolchain import Toolchain
from edgesdk.tuning.measure import Measurer, MeasureRequest, TensorArgument

SOURCE = Path(__file__).with_suffix(".c")

X = np.linspace(-1, 1, 1000, dtype="float32")
Y = 2 * X + 1


def build_candidates(toolchain: Toolchain, folder: Path) -> Path:
    """Builds the library with all of them, as the tuner's builder links candidates."""
    made = toolchain.compile_object(SOURCE, folder / "c.o", include=link.include_folders())
    return toolchain.link_shared(
        [made], folder / "candidates.so", soname="candidates.so", flags=("-Wl,-z,undefs",)
    )


def request(
    measurer: Measurer,
    library: Path,
    symbol: str,
    *,
    x: np.ndarray = X,
    y: np.ndarray = Y,
    candidate: int = 0,
    **options: Any,
) -> MeasureRequest:
    """A quick request: samples of a millisecond, a short limit."""
    arguments = (
        TensorArgument(x.shape, x.dtype.name, measurer.put(x.tobytes()), is_output=False),
        TensorArgument(y.shape, y.dtype.name, measurer.put(y.tobytes()), is_output=True),
    )
    settings: dict[str, Any] = {
        "tolerance": 1e-6,
        "min_repeat_ms": 1.0,
        "timeout_s": 30.0,
        "memory_limit_bytes": 256 << 20,
        **options,
    }
    return MeasureRequest(candidate, library, symbol, arguments, **settings)
