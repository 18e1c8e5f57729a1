"""Products on tensor cores: a warp's arithmetic, emulated, and the kernels around it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx

from edgesdk.compiler import cuda, device_code
from edgesdk.profiles import load_target
from edgesdk.schedules import apply_candidate, kernel_space
from edgesdk.schedules.conv2d import Conv2d
from edgesdk.schedules.gpu import tensor_cores, warp_products
from edgesdk.schedules.gpu.tensor_cores import Problem

TARGET = "cuda-sm_90"

# A warp on the host. The instructions only record their operands, since each needs those of all 32
# threads; afterwards they are done as the PTX ISA says, "Matrix fragments for mma.m16n8k8" and
# "mma.m16n8k16".
WARP = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <vector>
#define __device__
#define __forceinline__ inline
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct { int x; } threadIdx;
static float2 make_float2(float x, float y) { return {x, y}; }
static uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
static float as_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static float half_as_float(uint32_t bits) {  // whole numbers up to 2048, no others are in the test
  uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 0) return 0;
  float value = (1024.0f + mantissa) / 1024.0f;
  for (int e = 15; e < (int)exponent; ++e) value *= 2;
  return bits >> 15 & 1 ? -value : value;
}
struct Done { float* sums; uint32_t a[4], b[2]; };
static std::vector<Done> done[32];
static void edgesdk_mma_tf32(float* d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                             uint32_t b0, uint32_t b1) {
  done[threadIdx.x].push_back({d, {a0, a1, a2, a3}, {b0, b1}});
}
static void edgesdk_mma_f16(float* d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                            uint32_t b0, uint32_t b1) {
  edgesdk_mma_tf32(d, a0, a1, a2, a3, b0, b1);
}
static uint32_t edgesdk_tf32(float value) { return __float_as_uint(value) & 0xffffe000u; }
static uint32_t edgesdk_halves(float first, float second) {
  return (uint32_t)(int)first & 0xffff | (uint32_t)(int)second << 16;  // compared as integers
}
FRAGMENTS
using Fragment = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;

static void multiply_all(bool halves) {
  for (size_t n = 0; n < done[0].size(); ++n) {
    float a[16][16] = {}, b[16][8] = {};
    for (int lane = 0; lane < 32; ++lane) {
      const Done& one = done[lane][n];
      int group = lane >> 2, in_group = lane & 3;
      for (int i = 0; i < 4; ++i) {
        int row = group + (i & 1) * 8;
        if (!halves) { a[row][in_group + (i >> 1) * 4] = as_float(one.a[i]); continue; }
        int column = in_group * 2 + (i >> 1) * 8;
        a[row][column] = half_as_float(one.a[i] & 0xffff);
        a[row][column + 1] = half_as_float(one.a[i] >> 16);
      }
      for (int i = 0; i < 2; ++i) {
        if (!halves) { b[in_group + i * 4][group] = as_float(one.b[i]); continue; }
        int row = in_group * 2 + i * 8;
        b[row][group] = half_as_float(one.b[i] & 0xffff);
        b[row + 1][group] = half_as_float(one.b[i] >> 16);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        int row = (lane >> 2) + (i >> 1) * 8, column = (lane & 3) * 2 + (i & 1);
        for (int k = 0; k < 16; ++k) done[lane][n].sums[i] += a[row][k] * b[k][column];
      }
    }
  }
}

int main() {
  constexpr int kRows = ROWS, kColumns = COLUMNS;
  constexpr int pixels = 16 * kRows, channels = 16 * kColumns;
  constexpr int left_step = 4 * pixels + PADDING, right_step = 4 * channels + PADDING;
  static TYPE left[4 * left_step] = {LEFT};
  static TYPE right[4 * right_step] = {RIGHT};
  static OUT out[channels * pixels];
  static Fragment sums[32][kRows * kColumns];
  for (int lane = 0; lane < 32; ++lane) {
    threadIdx.x = lane;
    for (Fragment& fragment : sums[lane]) nvcuda::wmma::fill_fragment(fragment, 0.0f);
    edgesdk_multiply<kRows, kColumns>(sums[lane], left, left_step, right, right_step);
  }
  multiply_all(sizeof(TYPE) == 2);
  for (int lane = 0; lane < 32; ++lane) {
    threadIdx.x = lane;
    edgesdk_store<kRows, kColumns>(out, 4 * pixels, sums[lane]);
  }
  for (OUT value : out) printf("%d ", (int)(NUMBER)value);
}
"""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 3), (4, 2)])
def test_warp_multiplies(dtype: str, rows: int, columns: int, tmp_path: Path) -> None:
    """Whole numbers, so that every result is exact: equal to the product of the matrices."""
    draw = np.random.default_rng(rows * 10 + columns)
    left = draw.integers(-9, 10, (16, 16 * rows))
    right = draw.integers(-9, 10, (16, 16 * columns))

    def blocks(matrix: np.ndarray) -> str:
        """[K, X] -> blocks of 4 terms, [K/4, X, 4] with padding behind each block."""
        split = matrix.reshape(4, 4, -1).transpose(0, 2, 1).reshape(4, -1)
        padded = np.pad(split, ((0, 0), (0, 8)), constant_values=7).ravel()
        if dtype == "float32":
            return ", ".join(map(str, padded))
        return ", ".join(map(str, padded.astype(np.float16).view(np.uint16)))

    halves = dtype == "float16"
    text = WARP.replace("FRAGMENTS", warp_products.FRAGMENTS)
    for name, value in {
        "LEFT": blocks(left),
        "RIGHT": blocks(right),
        "ROWS": rows,
        "COLUMNS": columns,
        "PADDING": 8,
        "TYPE": "uint16_t" if halves else "float",
        "OUT": "uint16_t" if halves else "float",
        "NUMBER": "int16_t" if halves else "int",
    }.items():
        # Not within the templates' own parameters of the same names.
        head, tail = text.split("int main()")
        text = head + "int main()" + re.sub(rf"\b{name}\b", str(value), tail)
    text = re.sub(r"sizeof\(TYPE\)", "0", text)
    source = tmp_path / "warp.cc"
    source.write_text(text, encoding="utf-8")
    command = ["g++", "-std=c++17", "-O1", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]
    subprocess.run([*command, source, "-o", tmp_path / "warp"], check=True, timeout=120)
    printed = subprocess.run(
        [tmp_path / "warp"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    got = np.array(printed.split(), np.int64).reshape(4 * columns, 16 * rows, 4)
    want = (right.T @ left).reshape(4 * columns, 4, 16 * rows).transpose(0, 2, 1)
    np.testing.assert_array_equal(got, want)


def convolution(
    dtype: str, channels: int, outputs: int, size: int, window: int, stride: int = 1
) -> tuple[Any, Conv2d]:
    """A convolution with bias and ReLU, "same" padding."""
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
        block=4,
    )
    plain = channels < 4
    weight = tensor_cores.pack_conv2d(
        np.zeros((outputs, channels, window, window), dtype), plain=plain
    )
    shape = (1, channels, size, size) if plain else (1, -(-channels // 4), size * size, 4)
    x = te.placeholder(shape, dtype, name="x")
    w = te.placeholder(weight.shape, dtype, name="w")
    b = te.placeholder((1, -(-outputs // 4), 1, 4), dtype, name="b")
    y = tensor_cores.conv2d(x, w, config)
    zero = tirx.const(0, "float32")
    z = te.compute(
        y.shape,
        lambda n, o, p, c: te.max(y[n, o, p, c] + b[n, o, 0, c].astype("float32"), zero).astype(
            dtype
        ),
        name="z",
    )
    return te.create_prim_func([x, w, b, z]), config


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("channels", "outputs", "size", "window", "stride", "split"),
    [
        (64, 128, 14, 3, 1, False),
        (64, 128, 14, 3, 1, True),
        (24, 100, 13, 1, 1, False),
        (3, 16, 20, 7, 2, False),
        (3, 16, 20, 7, 2, True),
        (20, 20, 9, 3, 2, True),
    ],
)
def test_kernels_compile(
    dtype: str, channels: int, outputs: int, size: int, window: int, stride: int, split: bool
) -> None:
    """The template takes the kernel, and the compiler its code; nothing is spilled."""
    profile = load_target(TARGET)
    assert profile.gpu is not None
    function, _ = convolution(dtype, channels, outputs, size, window, stride)
    space = kernel_space(function, profile)
    assert space.template == tensor_cores.NAME
    knobs = dict(space.default)
    if split:
        knobs["step"] = 1
        knobs["split"] = next(
            s for s in space.knobs["split"] if s > 1 and space.allows({**knobs, "split": s})
        )
    scheduled = apply_candidate(function, profile, space.candidate(knobs))
    code = device_code.generate({"k": scheduled}, tvm.target.Target(profile.tvm))
    assert len(code.kernels["k"].launches) == (2 if knobs["split"] > 1 else 1)
    first = code.kernels["k"].launches[0]
    assert first.block == (32, knobs["warps_p"] * knobs["warps_o"], 1)
    image = cuda.compile_images(code.source, profile.gpu)[0]
    assert all(r.spill_bytes == 0 for r in image.resources)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("channels", "outputs", "size", "window", "stride"),
    [(8, 20, 7, 3, 1), (6, 5, 6, 1, 1), (3, 16, 9, 7, 2), (20, 20, 9, 3, 2)],
)
def test_convolution_values(
    dtype: str, channels: int, outputs: int, size: int, window: int, stride: int
) -> None:
    """The definition with its packed weights, by plain loops, against sums in float64."""
    draw = np.random.default_rng(size)
    function, config = convolution(dtype, channels, outputs, size, window, stride)
    x = draw.standard_normal(config.in_shape).astype(dtype)
    weight = draw.standard_normal((outputs, channels, window, window)).astype(dtype)
    bias = draw.standard_normal(outputs).astype(dtype)
    plain = channels < 4
    packed = tensor_cores.pack_conv2d(weight, plain=plain)
    given = [x if plain else to_blocks(x), packed, to_blocks(bias.reshape(1, -1, 1, 1))]
    out_h, out_w = config.out_shape[2:]
    result = np.full((1, -(-outputs // 4), out_h * out_w, 4), np.nan, dtype)
    built = tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), "llvm")
    tensors = [tvm.runtime.tensor(a) for a in (*given, result)]
    built["main"](*tensors)
    got = tensors[-1].numpy().transpose(0, 1, 3, 2).reshape(1, -1, out_h, out_w)[:, :outputs]
    used = tensor_cores.round_tf32(weight) if dtype == "float32" else weight
    want = np.zeros(config.out_shape)
    pad = window // 2
    wide = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    for dy in range(window):
        for dx in range(window):
            part = wide[:, :, dy : dy + out_h * stride : stride, dx : dx + out_w * stride : stride]
            part = part[:, :, :out_h, :out_w]
            want += np.einsum("oc,nchw->nohw", used[:, :, dy, dx].astype(np.float64), part)
    want = np.maximum(want + bias.astype(np.float64).reshape(1, -1, 1, 1), 0)
    # Half precision rounds the result: to half a unit of 2^-10.
    limit = 1e-5 if dtype == "float32" else 2.0**-11
    assert np.abs(got - want).max() <= limit * np.abs(want).max()


def to_blocks(x: np.ndarray) -> np.ndarray:
    """[N, C, H, W] -> [N, C/4, H*W, 4]."""
    n, c, h, w = x.shape
    wide = np.zeros((n, -(-c // 4) * 4, h * w), x.dtype)
    wide[:, :c] = x.reshape(n, c, h * w)
    return np.ascontiguousarray(wide.reshape(n, -1, 4, h * w).transpose(0, 1, 3, 2))


def test_products_of_matrices() -> None:
    profile = load_target(TARGET)
    assert profile.gpu is not None
    draw = np.random.default_rng(1)
    weight = draw.integers(-8, 9, (70, 50)).astype(np.float32)
    data = draw.integers(-8, 9, (100, 70)).astype(np.float32)
    packed = tensor_cores.pack_dense(weight)
    x = te.placeholder(data.shape, name="x")
    w = te.placeholder(packed.shape, name="w")
    function = te.create_prim_func([x, w, tensor_cores.dense(x, w, 50)])
    built = tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), "llvm")
    tensors = [tvm.runtime.tensor(a) for a in (data, packed, np.zeros((100, 50), np.float32))]
    built["main"](*tensors)
    np.testing.assert_array_equal(tensors[-1].numpy(), data @ weight)
    space = kernel_space(function, profile)
    scheduled = apply_candidate(function, profile, space.candidate(space.default))
    code = device_code.generate({"k": scheduled}, tvm.target.Target(profile.tvm))
    assert warp_products.MULTIPLY in code.source
    assert cuda.compile_images(code.source, profile.gpu)[0].resources[0].spill_bytes == 0


def test_tf32_is_rounded_to_nearest() -> None:
    """10 bits behind the leading one; halves away from zero (PTX ISA, cvt.rna)."""
    unit = 2.0**-10
    given = np.array([1, 1 + unit / 2, 1 + 0.49 * unit, -1 - unit / 2, 3e38, 0], np.float32)
    want = np.array([1, 1 + unit, 1, -1 - unit, 3e38, 0], np.float32)
    got = tensor_cores.round_tf32(given)
    np.testing.assert_array_equal(got[[0, 1, 2, 3, 5]], want[[0, 1, 2, 3, 5]])
    assert abs(got[4] / 3e38 - 1) <= unit / 2


@given(
    st.integers(1, 40), st.integers(1, 60), st.integers(1, 80), st.sampled_from([4, 2]), st.data()
)
@settings(max_examples=30, deadline=None)
def test_default_fits(blocks: int, pixels: int, steps: int, size: int, data: st.DataObject) -> None:
    gpu = load_target(TARGET).gpu
    assert gpu is not None
    dtype = "float32" if size == 4 else "float16"
    problem = Problem(1, 4 * blocks, 16 * pixels, 4 * steps, dtype)
    knobs = tensor_cores.default_of(problem, gpu)
    tensor_cores.check(knobs, problem, gpu)
    values = tensor_cores.space_of(problem, gpu)
    assert all(knobs[name] in values[name] for name in values)
    assert tensor_cores.shared_bytes(knobs, problem) <= gpu.shared_kib * 1024


def test_old_gpus_have_none() -> None:
    """TF32 and copies that run ahead begin with sm_80 (CUDA programming guide)."""
    for name, expected in {"cuda-sm_75": False, "cuda-sm_80": True, "jetson-nano": False}.items():
        gpu = load_target(name).gpu
        assert gpu is not None
        assert tensor_cores.has_tensor_cores(gpu) is expected
    gpu = load_target("linux-aarch64-mali").gpu
    assert gpu is not None
    assert not tensor_cores.has_tensor_cores(gpu)
