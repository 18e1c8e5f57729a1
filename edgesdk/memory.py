"""Gives memory back to the system between stages that hold copies of all weights."""

from __future__ import annotations

import ctypes
import gc


def release_memory() -> None:
    """Frees what is no longer used, so that the next stage begins with no more than it needs.

    TVM's passes keep graphs in reference cycles, which only the collector ends; and glibc keeps
    freed blocks of up to 32 MB for later, several hundred of them after ONNX Runtime.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it; others keep less
    if trim is not None:
        trim(0)
