"""edgesdk: a bundle's library through its C API, the way a program would use it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np

PACKAGES = ()
_ABI_VERSION = 1
_DTYPES = {
    1: np.float32, 2: np.float64, 3: np.float16, 5: np.int8, 6: np.int16, 7: np.int32,
    8: np.int64, 9: np.uint8, 10: np.uint16, 11: np.uint32, 12: np.uint64, 13: np.bool_,
}  # fmt: skip


class _Options(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("num_threads", ctypes.c_int32),
        ("error_buffer", ctypes.c_char_p),
        ("error_buffer_size", ctypes.c_size_t),
    )


class _TensorInfo(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("size_bytes", ctypes.c_size_t),
    )


def version() -> str:
    return "of the checkout"  # the harness, which imports edgesdk, knows it; this process does not


def load(
    model: Path, shapes: dict[str, tuple[int, ...]], threads: int
) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    library = ctypes.CDLL(str(model))
    library.edgesdk_model_last_error.restype = ctypes.c_char_p
    handle = ctypes.c_void_p()

    def check(status: int) -> None:
        if status != 0:
            raise RuntimeError(library.edgesdk_model_last_error(handle).decode())

    options = _Options(ctypes.sizeof(_Options), threads, None, 0)
    check(
        library.edgesdk_model_open(
            ctypes.c_uint32(_ABI_VERSION), ctypes.byref(options), ctypes.byref(handle)
        )
    )
    infos = []
    for index in range(library.edgesdk_model_num_outputs(handle)):
        info = _TensorInfo()
        check(library.edgesdk_model_output_info(handle, index, ctypes.byref(info)))
        infos.append((tuple(info.shape[: info.ndim]), _DTYPES[info.dtype]))
    names = []
    for index in range(library.edgesdk_model_num_inputs(handle)):
        info = _TensorInfo()
        check(library.edgesdk_model_input_info(handle, index, ctypes.byref(info)))
        names.append(info.name.decode())

    def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        for index, name in enumerate(names):
            array = inputs[name]
            data = ctypes.c_void_p(array.ctypes.data)
            check(
                library.edgesdk_model_set_input(handle, index, data, ctypes.c_size_t(array.nbytes))
            )
        outputs = [np.empty(shape, dtype) for shape, dtype in infos]
        for index, array in enumerate(outputs):
            data = ctypes.c_void_p(array.ctypes.data)
            check(
                library.edgesdk_model_set_output(handle, index, data, ctypes.c_size_t(array.nbytes))
            )
        check(library.edgesdk_model_run(handle))
        return outputs

    return run
