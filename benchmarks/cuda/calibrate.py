"""Measures many tilings of convolutions and products on the GPU of this machine.

    python benchmarks/cuda/calibrate.py --tilings 40 --output timings.json
    python benchmarks/cuda/calibrate.py --products tf32 --output timings.json

The defaults of the GPU templates are chosen by formulas whose constants were fitted to such
measurements (fit.py). Needs an NVIDIA GPU with its driver, TVM, and a CUDA compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import itertools
import json
import math
import multiprocessing
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# (channels in, channels out, height = width of the input, window, stride), from ResNet-18 and 50,
# MobileNetV2, SqueezeNet 1.0 and Inception v1.
SHAPES = (
    (3, 64, 224, 7, 2), (64, 64, 56, 1, 1), (64, 64, 56, 3, 1), (64, 256, 56, 1, 1),
    (256, 64, 56, 1, 1), (256, 128, 56, 1, 1), (128, 128, 56, 3, 2), (128, 512, 28, 1, 1),
    (512, 128, 28, 1, 1), (128, 128, 28, 3, 1), (256, 512, 56, 1, 2), (512, 256, 28, 1, 1),
    (256, 256, 28, 3, 2), (256, 1024, 14, 1, 1), (1024, 256, 14, 1, 1), (256, 256, 14, 3, 1),
    (512, 1024, 28, 1, 2), (1024, 512, 14, 1, 1), (512, 512, 14, 3, 2), (512, 2048, 7, 1, 1),
    (2048, 512, 7, 1, 1), (512, 512, 7, 3, 1), (1024, 2048, 14, 1, 2), (64, 128, 56, 3, 2),
    (128, 256, 28, 3, 2), (256, 512, 14, 3, 2), (3, 32, 224, 3, 2), (32, 16, 112, 1, 1),
    (16, 96, 112, 1, 1), (96, 24, 56, 1, 1), (24, 144, 56, 1, 1), (144, 24, 56, 1, 1),
    (144, 32, 28, 1, 1), (32, 192, 28, 1, 1), (192, 64, 14, 1, 1), (64, 384, 14, 1, 1),
    (384, 96, 14, 1, 1), (96, 576, 14, 1, 1), (576, 160, 7, 1, 1), (160, 960, 7, 1, 1),
    (960, 160, 7, 1, 1), (960, 320, 7, 1, 1), (320, 1280, 7, 1, 1), (96, 16, 54, 1, 1),
    (16, 64, 54, 3, 1), (128, 32, 27, 1, 1), (32, 128, 27, 3, 1), (48, 192, 13, 3, 1),
    (64, 256, 13, 3, 1), (512, 1000, 13, 1, 1), (64, 192, 56, 3, 1), (96, 128, 28, 3, 1),
    (112, 224, 14, 3, 1), (160, 320, 14, 3, 1), (528, 128, 14, 1, 1), (192, 384, 7, 3, 1),
)  # fmt: skip
_LAUNCHES = 20
_ROUNDS = 7


# What multiplies -> the type of the data.
PRODUCTS = {"fp32": "float32", "tf32": "float32", "fp16": "float16"}


def function_of(shape: tuple[int, ...], products: str) -> tuple[Any, list[int]]:
    """The convolution of `shape` with bias and ReLU, and the bytes of its parameters."""
    import numpy as np
    from tvm import te, tirx

    from edgesdk.schedules.conv2d import Conv2d
    from edgesdk.schedules.gpu import gemm, tensor_cores

    channels, outputs, size, window, stride = shape
    pad = window // 2
    out = (size + 2 * pad - window) // stride + 1
    config = Conv2d(
        in_shape=(1, channels, size, size),
        out_shape=(1, outputs, out, out),
        window=(window, window),
        stride=(stride, stride),
        padding=(pad,) * 4,
        dilation=(1, 1),
        groups=1,
        block=gemm.VECTOR,
    )
    plain = channels < gemm.VECTOR
    data = (1, channels, size, size) if plain else (1, -(-channels // 4), size * size, 4)
    dtype = PRODUCTS[products]
    x = te.placeholder(data, dtype, name="x")
    weight = np.zeros((outputs, channels, window, window), dtype)
    if products == "fp32":
        packed, conv2d = gemm.pack_conv2d(weight, config, plain=plain), gemm.conv2d
    else:
        packed, conv2d = tensor_cores.pack_conv2d(weight, plain=plain), tensor_cores.conv2d
    w = te.placeholder(packed.shape, dtype, name="w")
    b = te.placeholder((1, -(-outputs // 4), 1, 4), dtype, name="b")
    y = conv2d(x, w, config)
    zero = tirx.const(0, "float32")
    z = te.compute(
        y.shape,
        lambda n, o, p, c: te.max(y[n, o, p, c] + b[n, o, 0, c].astype("float32"), zero).astype(
            dtype
        ),
        name="z",
    )
    parameters = [x, w, b, z]
    sizes = [np.dtype(dtype).itemsize * math.prod(map(int, p.shape)) for p in parameters]
    return te.create_prim_func(parameters), sizes


def build(job: tuple[int, tuple[int, ...], dict[str, int] | None, str, str]) -> dict[str, Any]:
    """One tiling (None: the default) to a cubin and its launches."""
    index, shape, knobs, target_name, products = job
    result: dict[str, Any] = {"index": index, "shape": shape, "knobs": knobs, "default": not knobs}
    try:
        import tvm

        from edgesdk.compiler import cuda, device_code
        from edgesdk.profiles import load_target
        from edgesdk.schedules import apply_candidate, kernel_space

        profile = load_target(target_name)
        function, sizes = function_of(shape, products)
        space = kernel_space(function, profile)
        knobs = knobs or space.default
        result["problem"] = dataclasses.astuple(problem_of(shape, products))
        scheduled = apply_candidate(function, profile, space.candidate(knobs))
        code = device_code.generate({"k": scheduled}, tvm.target.Target(profile.tvm))
        image = cuda.compile_images(code.source, profile.gpu)[0]
        kernel = code.kernels["k"]
        result |= {
            "knobs": knobs,
            "cubin": image.data,
            "launches": [(n.function, n.grid, n.block, n.args) for n in kernel.launches],
            "sizes": [*sizes, *kernel.workspaces],
            "registers": max(r.registers for r in image.resources),
            "spills": max(r.spill_bytes for r in image.resources),
        }
    except Exception as error:  # a tiling that does not fit is a result, too
        result["error"] = f"{type(error).__name__}: {str(error)[:160]}"
    return result


class Gpu:
    """The CUDA driver through ctypes: enough to time launches."""

    def __init__(self) -> None:
        self.d = ctypes.CDLL("libcuda.so.1")
        self._ok(self.d.cuInit(0))
        context = ctypes.c_void_p()
        self._ok(self.d.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self._ok(self.d.cuCtxSetCurrent(context))
        self.stream = ctypes.c_void_p()
        self._ok(self.d.cuStreamCreate(ctypes.byref(self.stream), 1))
        self.events = [ctypes.c_void_p(), ctypes.c_void_p()]
        for event in self.events:
            self._ok(self.d.cuEventCreate(ctypes.byref(event), 0))
        self.memory = ctypes.c_void_p()
        self._ok(self.d.cuMemAlloc_v2(ctypes.byref(self.memory), ctypes.c_size_t(1 << 30)))
        self._ok(self.d.cuMemsetD8_v2(self.memory, 0, ctypes.c_size_t(1 << 30)))

    def _ok(self, code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def time_us(self, built: dict[str, Any]) -> float:
        """Microseconds of all launches of a tiling, the median over graphs of several."""
        module = ctypes.c_void_p()
        self._ok(self.d.cuModuleLoadData(ctypes.byref(module), built["cubin"]))
        addresses, offset = [], 0
        for size in built["sizes"]:
            addresses.append(ctypes.c_void_p(self.memory.value + offset))
            offset += -(-size // 256) * 256
        calls = []
        for name, grid, block, args in built["launches"]:
            function = ctypes.c_void_p()
            self._ok(self.d.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
            values = [addresses[a] for a in args]
            pointers = (ctypes.c_void_p * len(values))(
                *(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values)
            )
            calls.append((function, grid, block, pointers, values))
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._ok(self.d.cuStreamBeginCapture_v2(self.stream, 2))
        for _ in range(_LAUNCHES):
            for function, grid, block, pointers, _ in calls:
                self._ok(
                    self.d.cuLaunchKernel(function, *grid, *block, 0, self.stream, pointers, None)
                )
        self._ok(self.d.cuStreamEndCapture(self.stream, ctypes.byref(graph)))
        self._ok(
            self.d.cuGraphInstantiateWithFlags(
                ctypes.byref(executable), graph, ctypes.c_ulonglong(0)
            )
        )
        times = []
        for _ in range(_ROUNDS):
            self.d.cuEventRecord(self.events[0], self.stream)
            self._ok(self.d.cuGraphLaunch(executable, self.stream))
            self.d.cuEventRecord(self.events[1], self.stream)
            self._ok(self.d.cuStreamSynchronize(self.stream))
            elapsed = ctypes.c_float()
            self.d.cuEventElapsedTime(ctypes.byref(elapsed), *self.events)
            times.append(elapsed.value * 1000 / _LAUNCHES)
        self.d.cuGraphExecDestroy(executable)
        self.d.cuGraphDestroy(graph)
        self.d.cuModuleUnload(module)
        return sorted(times)[len(times) // 2]


def tilings(
    shape: tuple[int, ...],
    count: int,
    target_name: str,
    products: str,
    rng: random.Random,
    *,
    ranked: bool = False,
) -> list[Any]:
    """Drawn at random, or with `ranked` those that the formula takes for the fastest; the default
    (None) is the first."""
    from edgesdk.profiles import load_target

    template = template_of(products)
    gpu = load_target(target_name).gpu
    assert gpu is not None
    problem = problem_of(shape, products)
    space = template.space_of(problem, gpu)
    found: list[Any] = [None]
    seen = set()
    if ranked:
        allowed = []
        for values in itertools.product(*space.values()):
            knobs = dict(zip(space, values, strict=True))
            with contextlib.suppress(ValueError):
                template.check(knobs, problem, gpu)
                allowed.append(knobs)
        best = sorted(allowed, key=lambda knobs: template.cost_of(knobs, problem, gpu))
        return [None, *best[1 : count + 1]]
    for _ in range(count * 500):
        knobs = {name: rng.choice(values) for name, values in space.items()}
        key = tuple(knobs.values())
        if key in seen or not plausible(knobs):
            continue
        seen.add(key)
        try:
            template.check(knobs, problem, gpu)
        except ValueError:
            continue
        found.append(knobs)
        if len(found) > count:
            break
    return found


def plausible(knobs: dict[str, int]) -> bool:
    if "warps_p" in knobs:
        return knobs["warps_p"] * knobs["warps_o"] <= 8
    threads = knobs["threads_p"] * knobs["threads_o"]
    return 64 <= threads <= 256 and knobs["pixels"] * knobs["blocks"] >= 4


def template_of(products: str) -> Any:
    """The module of the template."""
    from edgesdk.schedules.gpu import gemm, tensor_cores

    return gemm if products == "fp32" else tensor_cores


def problem_of(shape: tuple[int, ...], products: str) -> Any:
    import tvm
    from tvm.s_tir import Schedule

    sch = Schedule(tvm.IRModule({"main": function_of(shape, products)[0]}))
    return template_of(products).problem_of(sch, sch.get_sblock("product"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tilings", type=int, default=40)
    parser.add_argument("--products", choices=PRODUCTS, default="fp32", help="what multiplies")
    parser.add_argument("--ranked", action="store_true", help="those that the formula likes best")
    parser.add_argument("--target", default="cuda-sm_90")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--limit-s", type=float, default=400.0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rng = random.Random(0)
    start = time.monotonic()
    jobs = []
    per_shape = {
        shape: tilings(
            shape, options.tilings, options.target, options.products, rng, ranked=options.ranked
        )
        for shape in SHAPES
    }
    for turn in range(options.tilings + 1):  # all shapes get some, should the time run out
        for shape, found in per_shape.items():
            if turn < len(found):
                jobs.append((len(jobs), shape, found[turn], options.target, options.products))
    print(f"{len(jobs)} tilings", flush=True)
    context = multiprocessing.get_context("spawn")
    results = []
    with context.Pool(options.workers) as pool:
        gpu = Gpu()
        for built in pool.imap_unordered(build, jobs, chunksize=4):
            if "cubin" in built:
                try:
                    built["us"] = gpu.time_us(built)
                except RuntimeError as error:
                    built["error"] = str(error)
                del built["cubin"]
            results.append(built)
            if time.monotonic() - start > options.limit_s:
                pool.terminate()
                break
    options.output.write_text(json.dumps(results), encoding="utf-8")
    good = [r for r in results if "us" in r]
    print(f"{len(good)} of {len(results)} measured in {time.monotonic() - start:.0f} s")
    for shape in SHAPES:
        mine = [r for r in good if tuple(r["shape"]) == shape]
        if mine:
            best = min(mine, key=lambda r: r["us"])
            default = next((r["us"] for r in mine if r["default"]), float("nan"))
            print(shape, f"default {default:.1f} us, best {best['us']:.1f}", best["knobs"])
    errors = [r["error"] for r in results if "error" in r]
    for text in sorted(set(errors), key=errors.count, reverse=True)[:8]:
        print(errors.count(text), text)


if __name__ == "__main__":
    main()
