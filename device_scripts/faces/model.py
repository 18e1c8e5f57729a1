"""The C API of edgesdk_model.h for Python: ctypes and NumPy, nothing to compile or install.

A bundle's `python/NAME/` holds this file and an `__init__.py` with a class for its own network;
that is what programs import. Python 3.8 and newer.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np

# edgesdk_dtype -> NumPy. NumPy has no bfloat16, so its bits travel as unsigned integers.
_DTYPES = {
    1: np.dtype(np.float32),
    2: np.dtype(np.float64),
    3: np.dtype(np.float16),
    4: np.dtype(np.uint16),
    5: np.dtype(np.int8),
    6: np.dtype(np.int16),
    7: np.dtype(np.int32),
    8: np.dtype(np.int64),
    9: np.dtype(np.uint8),
    10: np.dtype(np.uint16),
    11: np.dtype(np.uint32),
    12: np.dtype(np.uint64),
    13: np.dtype(np.bool_),
}
# Where data begins that the library uses in place; elsewhere each run copies it first.
_ALIGNMENT = 64


class ModelError(RuntimeError):
    """The library refused a call; `status` is its edgesdk_status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Tensor(NamedTuple):
    """An input or output: its name in the original model, shape and NumPy type."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


class Variant(NamedTuple):
    """One of the fixed shapes that the network was compiled for."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Model:
    """An open network. `inputs` and `outputs` are those of the first of its `variants`.

    Calls from several threads take turns; open one model for each thread to run them at once.
    """

    # Set by the network's own class; `abi_version` is that of edgesdk_model.h.
    library: Path
    open_function: str
    abi_version: int

    def __init__(self, *, num_threads: int = 0) -> None:
        """Opens the network with at most `num_threads` threads (0: all CPUs of this process).

        Raises OSError when the library cannot be loaded here, ModelError when it cannot be opened.
        """
        self._handle = ctypes.c_void_p()
        self._lock = threading.Lock()
        self._api = _declared(ctypes.CDLL(str(self.library)))
        reason = ctypes.create_string_buffer(1024)
        options = _Options(
            struct_size=ctypes.sizeof(_Options),
            num_threads=num_threads,
            error_buffer=ctypes.addressof(reason),
            error_buffer_size=len(reason),
        )
        open_model = getattr(self._api, self.open_function)
        open_model.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p]
        status = open_model(self.abi_version, ctypes.byref(options), ctypes.byref(self._handle))
        if status != 0:
            raise ModelError(reason.value.decode("utf-8", "replace"), status)
        self.variants = tuple(
            Variant(
                self._tensors(
                    number,
                    self._api.edgesdk_model_num_inputs,
                    self._api.edgesdk_model_variant_input_info,
                ),
                self._tensors(
                    number,
                    self._api.edgesdk_model_num_outputs,
                    self._api.edgesdk_model_variant_output_info,
                ),
            )
            for number in range(self._api.edgesdk_model_num_variants(self._handle))
        )
        self.inputs, self.outputs = self.variants[0]

    @property
    def num_threads(self) -> int:
        """The threads that a run may use."""
        return int(self._api.edgesdk_model_num_threads(self._handle))

    def empty_input(self, index: int = 0, *, variant: int = 0) -> np.ndarray:
        """Returns memory for an input that runs use in place: fill it and call with it."""
        tensor = self.variants[variant].inputs[index]
        return _aligned(tensor.shape, tensor.dtype)

    def __call__(self, *arrays: np.ndarray, **named: np.ndarray) -> dict[str, np.ndarray]:
        """Runs the network once; returns fresh arrays, by the outputs' names in the model.

        Of a network with several variants that is run whose shapes the inputs have.
        Inputs are given in order, or by name: `model(x=array)`, `model(**{"input:0": array})`.
        Raises TypeError or ValueError for inputs that do not fit, ModelError when the run fails.
        """
        given = self._given(arrays, named)
        number = self._variant_of(given)
        variant = self.variants[number]
        inputs = [_fitting(given[tensor.name], tensor) for tensor in variant.inputs]
        outputs = [_aligned(tensor.shape, tensor.dtype) for tensor in variant.outputs]
        with self._lock:
            if not self._handle:
                raise ModelError("the model is closed", 2)
            self._check(self._api.edgesdk_model_select_variant(self._handle, number))
            for index, array in enumerate(inputs):
                self._check(
                    self._api.edgesdk_model_set_input(
                        self._handle, index, array.ctypes.data, array.nbytes
                    )
                )
            for index, array in enumerate(outputs):
                self._check(
                    self._api.edgesdk_model_set_output(
                        self._handle, index, array.ctypes.data, array.nbytes
                    )
                )
            self._check(self._api.edgesdk_model_run(self._handle))
        return {tensor.name: array for tensor, array in zip(self.outputs, outputs)}  # noqa: B905

    def close(self) -> None:
        """Releases the network's memory; a second call does nothing."""
        with self._lock:
            self._api.edgesdk_model_close(self._handle)
            self._handle = ctypes.c_void_p()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_api", None) is not None:
            self.close()

    def _given(self, arrays: tuple, named: dict) -> dict[str, np.ndarray]:
        names = [tensor.name for tensor in self.inputs]
        if len(arrays) > len(names):
            raise TypeError(f"{len(arrays)} inputs are given, the model has {len(names)}")
        given = dict(zip(names, arrays))  # noqa: B905
        for name, array in named.items():
            if name not in names:
                raise TypeError(f"there is no input {name!r}; the inputs: {', '.join(names)}")
            if name in given:
                raise TypeError(f"the input {name!r} is given twice")
            given[name] = array
        missing = [name for name in names if name not in given]
        if missing:
            raise TypeError(f"missing inputs: {', '.join(missing)}")
        return {name: np.asarray(array) for name, array in given.items()}

    def _variant_of(self, given: dict[str, np.ndarray]) -> int:
        for number, variant in enumerate(self.variants):
            if all(given[tensor.name].shape == tensor.shape for tensor in variant.inputs):
                return number
        if len(self.variants) == 1:
            return 0  # and `_fitting` says what is wrong
        shapes = {name: list(array.shape) for name, array in given.items()}
        known = [{t.name: list(t.shape) for t in variant.inputs} for variant in self.variants]
        raise ValueError(f"no variant has the inputs {shapes}; there are {known}")

    def _tensors(self, variant, count, info) -> tuple[Tensor, ...]:
        tensors = []
        for index in range(count(self._handle)):
            found = _TensorInfo()
            self._check(info(self._handle, variant, index, ctypes.byref(found)))
            shape = tuple(found.shape[axis] for axis in range(found.ndim))
            tensors.append(Tensor(found.name.decode("utf-8"), shape, _DTYPES[found.dtype]))
        return tuple(tensors)

    def _check(self, status: int) -> None:
        if status != 0:
            reason = self._api.edgesdk_model_last_error(self._handle)
            raise ModelError(reason.decode("utf-8", "replace"), status)


class _Options(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("num_threads", ctypes.c_int32),
        ("error_buffer", ctypes.c_void_p),
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


def _declared(api: ctypes.CDLL) -> ctypes.CDLL:
    handle, pointer, index = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
    for name, result, arguments in (
        ("close", None, [handle]),
        ("last_error", ctypes.c_char_p, [handle]),
        ("num_inputs", ctypes.c_int32, [handle]),
        ("num_outputs", ctypes.c_int32, [handle]),
        ("num_variants", ctypes.c_int32, [handle]),
        ("variant_input_info", ctypes.c_int, [handle, index, index, pointer]),
        ("variant_output_info", ctypes.c_int, [handle, index, index, pointer]),
        ("select_variant", ctypes.c_int, [handle, index]),
        ("set_input", ctypes.c_int, [handle, index, pointer, ctypes.c_size_t]),
        ("set_output", ctypes.c_int, [handle, index, pointer, ctypes.c_size_t]),
        ("run", ctypes.c_int, [handle]),
        ("num_threads", ctypes.c_int32, [handle]),
    ):
        function = getattr(api, f"edgesdk_model_{name}")
        function.restype, function.argtypes = result, arguments
    return api


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size_bytes].view(dtype).reshape(shape)


def _fitting(array: np.ndarray, tensor: Tensor) -> np.ndarray:
    if array.shape != tensor.shape or array.dtype != tensor.dtype:
        raise ValueError(
            f"the input {tensor.name!r} is {array.dtype} {list(array.shape)},"
            f" not {tensor.dtype} {list(tensor.shape)}"
        )
    # Not ascontiguousarray: it turns a scalar into one dimension.
    return np.asarray(array, order="C")
