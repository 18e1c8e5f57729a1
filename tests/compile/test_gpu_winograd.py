"""Winograd's method on a GPU: the three kernels together give the convolution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te

from edgesdk.compiler import cuda, device_code
from edgesdk.profiles import load_target
from edgesdk.schedules import schedule_kernels
from edgesdk.schedules.conv2d import Conv2d
from edgesdk.schedules.gpu import winograd


def convolution(channels: int, outputs: int, height: int, width: int, stride: int = 1) -> Conv2d:
    return Conv2d(
        in_shape=(1, channels, height, width),
        out_shape=(1, outputs, height, width),
        window=(3, 3),
        stride=(stride, stride),
        padding=(1, 1, 1, 1),
        dilation=(1, 1),
        groups=1,
        block=4,
    )


def kernels_of(config: Conv2d, weight: np.ndarray) -> dict[str, Any]:
    even = winograd.even(config)
    _, channels, height, width = config.in_shape
    x = te.placeholder((1, channels // 4, height * width, 4), name="x")
    tiles = winograd.transform_input(x, even)
    given = te.placeholder(tiles.shape, name="tiles")
    w = te.placeholder(winograd.pack_weight(weight).shape, name="w")
    products = winograd.multiply(given, w)
    sums = te.placeholder(products.shape, name="sums")
    out = winograd.transform_output(sums, even, *config.out_shape[2:])
    return {
        "input": te.create_prim_func([x, tiles]),
        "products": te.create_prim_func([given, w, products]),
        "output": te.create_prim_func([sums, out]),
    }


@pytest.mark.parametrize(
    ("channels", "outputs", "height", "width"), [(8, 12, 6, 8), (4, 7, 7, 7), (12, 8, 13, 9)]
)
def test_values(channels: int, outputs: int, height: int, width: int) -> None:
    """By plain loops, against sums in float64; odd sizes have a row or column of tiles cut."""
    draw = np.random.default_rng(height)
    config = convolution(channels, outputs, height, width)
    x = draw.standard_normal(config.in_shape).astype(np.float32)
    weight = draw.standard_normal((outputs, channels, 3, 3)).astype(np.float32)
    blocks = x.reshape(1, channels // 4, 4, -1).transpose(0, 1, 3, 2)
    value = np.ascontiguousarray(blocks)
    for name, function in kernels_of(config, weight).items():
        module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        built = tvm.compile(module, "llvm")
        shape = [int(d) for d in function.params[-1].ty.shape]
        more = [winograd.pack_weight(weight)] if name == "products" else []
        tensors = [tvm.runtime.tensor(a) for a in (value, *more, np.zeros(shape, np.float32))]
        built["main"](*tensors)
        value = tensors[-1].numpy()
    got = value.transpose(0, 1, 3, 2).reshape(1, -1, height, width)[:, :outputs]
    wide = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    want = sum(
        np.einsum("oc,nchw->nohw", weight[:, :, i, j], wide[:, :, i : i + height, j : j + width])
        for i in range(3)
        for j in range(3)
    )
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_kernels_have_templates() -> None:
    """Transform and products are scheduled, and the CUDA compiler takes all three kernels."""
    profile = load_target("cuda-sm_90")
    assert profile.gpu is not None
    config = convolution(64, 64, 27, 27)
    kernels = kernels_of(config, np.zeros((64, 64, 3, 3), np.float32))
    scheduled, coverage = schedule_kernels(kernels, profile)
    assert coverage.problems == ()
    assert set(coverage.rungs["template"]) == {"input", "products"}
    assert coverage.rungs["generic"] == ("output",)
    code = device_code.generate(scheduled, tvm.target.Target(profile.tvm))
    image = cuda.compile_images(code.source, profile.gpu)[0]
    assert all(r.spill_bytes == 0 for r in image.resources)


def test_where_it_is_used() -> None:
    """The products must save more than two more launches cost."""
    gpu = load_target("cuda-sm_90").gpu
    assert gpu is not None
    assert winograd.pays(convolution(128, 128, 28, 28), gpu)
    assert not winograd.pays(convolution(16, 64, 54, 54), gpu)
    assert not winograd.pays(convolution(128, 128, 28, 28, stride=2), gpu)
    assert not winograd.pays(convolution(126, 128, 28, 28), gpu)
    mali = load_target("linux-aarch64-mali").gpu
    assert mali is not None
    assert not winograd.pays(convolution(128, 128, 28, 28), mali)
