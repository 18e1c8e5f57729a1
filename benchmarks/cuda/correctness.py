"""Compares the results of tensor-core kernels on the GPU of this machine with NumPy's float64.

    python benchmarks/cuda/correctness.py

Convolutions of several shapes, each with its default tiling and some drawn at random, in TF32 and
half precision. Ends with exit code 1 if one is off by more than 2e-3 of the largest value. Needs
what calibrate.py needs.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import calibrate

SHAPES = (
    (64, 128, 14, 3, 1), (24, 100, 13, 1, 1), (3, 64, 56, 7, 2), (256, 64, 28, 1, 1),
    (32, 48, 15, 3, 2), (512, 512, 7, 3, 1), (96, 24, 56, 1, 1),
)  # fmt: skip
_TILINGS = 6
_TARGET = "cuda-sm_90"
_LIMIT = 2e-3


def main() -> None:
    jobs = [
        (number, shape, knobs, _TARGET, products)
        for number, (shape, products, knobs) in enumerate(
            (shape, products, knobs)
            for shape in SHAPES
            for products in ("tf32", "fp16")
            for knobs in calibrate.tilings(shape, _TILINGS, _TARGET, products, random.Random(1))
        )
    ]
    with multiprocessing.get_context("spawn").Pool() as pool:
        built = pool.map(calibrate.build, jobs, chunksize=2)
    gpu = calibrate.Gpu()
    worst: dict[str, float] = {}
    for result, (_, shape, _, _, products) in zip(built, jobs, strict=True):
        if "cubin" not in result:
            sys.exit(f"{shape} {products} {result['knobs']}: {result['error']}")
        error = error_of(gpu, result, shape, products)
        worst[products] = max(worst.get(products, 0.0), error)
        print(f"{shape} {products} {result['knobs']}: {error:.2e}", flush=True)
    print(f"{len(jobs)} kernels; largest errors: {worst}")
    sys.exit(not max(worst.values()) <= _LIMIT)  # NaN, too


def error_of(gpu: Any, built: dict[str, Any], shape: tuple[int, ...], products: str) -> float:
    """The largest difference to the sums in float64, relative to the largest result."""
    from edgesdk.schedules.gpu import tensor_cores

    channels, outputs, size, window, stride = shape
    dtype = calibrate.PRODUCTS[products]
    draw = np.random.default_rng(0)
    x = draw.standard_normal((channels, size, size)).astype(dtype)
    fan = np.sqrt(channels * window * window)
    weight = (draw.standard_normal((outputs, channels, window, window)) / fan).astype(dtype)
    bias = draw.standard_normal(outputs).astype(dtype)
    plain = channels < 4
    packed = tensor_cores.pack_conv2d(weight, plain=plain)
    given = [x if plain else to_blocks(x), packed, to_blocks(bias[:, None, None])]
    want = convolved(x, weight, bias, stride)
    addresses, offset = [], 0
    for size_bytes in built["sizes"]:
        addresses.append(gpu.memory.value + offset)
        offset += -(-size_bytes // 256) * 256
    for address, array in zip(addresses, given, strict=False):
        pointer = array.ctypes.data_as(ctypes.c_void_p)
        gpu.d.cuMemcpyHtoD_v2(ctypes.c_uint64(address), pointer, ctypes.c_size_t(array.nbytes))
    gpu.time_us(built)
    result = np.empty(built["sizes"][3] // np.dtype(dtype).itemsize, dtype)
    pointer = result.ctypes.data_as(ctypes.c_void_p)
    gpu.d.cuMemcpyDtoH_v2(pointer, ctypes.c_uint64(addresses[3]), ctypes.c_size_t(result.nbytes))
    pixels = want.shape[1] * want.shape[2]
    blocks = result.reshape(-(-outputs // 4), pixels, 4).transpose(0, 2, 1)
    got = blocks.reshape(-1, *want.shape[1:])[:outputs].astype(np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


def to_blocks(x: np.ndarray) -> np.ndarray:
    """[C, H, W] -> [C/4, H*W, 4]."""
    channels = x.shape[0]
    wide = np.zeros((-(-channels // 4) * 4, x[0].size), x.dtype)
    wide[:channels] = x.reshape(channels, -1)
    return np.ascontiguousarray(wide.reshape(-1, 4, wide.shape[1]).transpose(0, 2, 1))


def convolved(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: int) -> np.ndarray:
    """With "same" padding, bias and ReLU."""
    _, size, _ = x.shape
    outputs, _, window, _ = weight.shape
    pad = window // 2
    out = (size + 2 * pad - window) // stride + 1
    wide = np.pad(x, ((0, 0), (pad, pad), (pad, pad))).astype(np.float64)
    sums = np.zeros((outputs, out, out))
    for i in range(window):
        for j in range(window):
            part = wide[:, i : i + out * stride : stride, j : j + out * stride : stride]
            taps = weight[:, :, i, j].astype(np.float64)
            sums += np.einsum("oc,chw->ohw", taps, part[:, :out, :out])
    return np.asarray(np.maximum(sums + bias[:, None, None].astype(np.float64), 0))


if __name__ == "__main__":
    main()
