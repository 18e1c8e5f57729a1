"""Every template over shapes, strides, dilations, groups, tails and padding, drawn by hypothesis.

The reference is NumPy in double precision, written here. Many cases share a library, with edgert
and the launcher, so that emulated ARM costs one process for all of them. Half of the libraries take
the default decisions, the others draw each kernel's from its space.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edgesdk.compiler import compile_model
from edgesdk.compiler.gate import run_launcher
from edgesdk.frontend import import_model
from edgesdk.profiles import TargetProfile, load_target
from edgesdk.schedules import kernel_space, workload_of
from edgesdk.toolchain import emulator_command, load_toolchain

# Relative to an output's largest magnitude.
TOLERANCE = 2e-5
CASES = 14


@dataclass(frozen=True)
class Part:
    """A case as a piece of a graph: `expected` is what "out" should be, in double precision."""

    nodes: list[onnx.NodeProto]
    inputs: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    expected: np.ndarray


def draw_array(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Conv:
    """A convolution, its bias, and a residual or an activation; then a pooling, if any."""

    batch: int
    groups: int
    channels: int  # of a group
    out_channels: int  # of a group
    size: tuple[int, int]
    window: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[int, int, int, int]
    after: str  # "", "Relu", "Sigmoid", "Add", "MaxPool", "AveragePool", "GlobalAveragePool"

    def part(self, name: str) -> Part:
        x = draw_array(1, self.batch, self.groups * self.channels, *self.size)
        w = draw_array(2, self.groups * self.out_channels, self.channels, *self.window)
        b = draw_array(3, self.groups * self.out_channels)
        conv = helper.make_node(
            "Conv",
            [f"{name}x", f"{name}w", f"{name}b"],
            [f"{name}c"],
            name=f"{name}conv",
            group=self.groups,
            strides=self.strides,
            dilations=self.dilations,
            pads=self.pads,
        )
        result = convolved(x, w, self) + b.reshape(1, -1, 1, 1)
        inputs = {f"{name}x": x}
        operands = [f"{name}c"]
        attributes: dict[str, Any] = {}
        if self.after == "":
            return Part([conv], inputs, {f"{name}w": w, f"{name}b": b}, result)
        if self.after == "Add":
            inputs[f"{name}r"] = draw_array(4, *result.shape)
            operands.append(f"{name}r")
            result = result + inputs[f"{name}r"]
        elif self.after == "Relu":
            result = np.maximum(result, 0)
        elif self.after == "Sigmoid":
            result = 1 / (1 + np.exp(-result))
        elif self.after == "GlobalAveragePool":
            result = result.mean((2, 3), keepdims=True)
        else:
            attributes = {"kernel_shape": (2, 3), "strides": (2, 1), "pads": (0, 1, 1, 1)}
            result = pooled(result, (2, 3), (2, 1), (0, 1, 1, 1), self.after == "MaxPool")
        after = helper.make_node(
            self.after, operands, [f"{name}out"], name=f"{name}after", **attributes
        )
        return Part([conv, after], inputs, {f"{name}w": w, f"{name}b": b}, result)


@dataclass(frozen=True)
class Dense:
    """A matrix product with constant weights, and a bias."""

    rows: int
    terms: int
    columns: int

    def part(self, name: str) -> Part:
        x, w = draw_array(1, self.rows, self.terms), draw_array(2, self.terms, self.columns)
        b = draw_array(3, self.columns)
        node = helper.make_node("Gemm", [f"{name}x", f"{name}w", f"{name}b"], [f"{name}out"])
        expected = x.astype(np.float64) @ w + b
        return Part([node], {f"{name}x": x}, {f"{name}w": w, f"{name}b": b}, expected)


@dataclass(frozen=True)
class Transposed:
    """A transposed convolution: each pixel adds a window, `strides` apart, to the output."""

    channels: int
    out_channels: int
    size: tuple[int, int]
    window: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int, int, int]
    more: tuple[int, int]  # output_padding

    def part(self, name: str) -> Part:
        x = draw_array(1, 1, self.channels, *self.size)
        w = draw_array(2, self.channels, self.out_channels, *self.window)
        node = helper.make_node(
            "ConvTranspose",
            [f"{name}x", f"{name}w"],
            [f"{name}out"],
            strides=self.strides,
            pads=self.pads,
            output_padding=self.more,
        )
        sizes = zip(self.size, self.window, self.strides, self.more, strict=True)
        whole = np.zeros((1, self.out_channels, *((n - 1) * s + k + m for n, k, s, m in sizes)))
        (sy, sx), (h, width) = self.strides, self.size
        for i, j in itertools.product(*map(range, self.window)):
            added = np.einsum("ncyx,co->noyx", x.astype(np.float64), w[:, :, i, j])
            whole[:, :, i : i + h * sy : sy, j : j + width * sx : sx][:, :, :h, :width] += added
        top, left, bottom, right = self.pads
        expected = whole[:, :, top : whole.shape[2] - bottom, left : whole.shape[3] - right]
        return Part([node], {f"{name}x": x}, {f"{name}w": w}, expected)


def convolved(x: np.ndarray, w: np.ndarray, case: Conv) -> np.ndarray:
    """The sum over the window, one place of it after the other."""
    (sy, sx), (dy, dx) = case.strides, case.dilations
    top, left, bottom, right = case.pads
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (top, bottom), (left, right)))
    kh, kw = case.window
    out_h = (padded.shape[2] - (kh - 1) * dy - 1) // sy + 1
    out_w = (padded.shape[3] - (kw - 1) * dx - 1) // sx + 1
    total = np.zeros((case.batch, case.groups, case.out_channels, out_h, out_w))
    split = padded.reshape(case.batch, case.groups, case.channels, *padded.shape[2:])
    weights = w.astype(np.float64).reshape(case.groups, case.out_channels, *w.shape[1:])
    for i, j in itertools.product(range(kh), range(kw)):
        seen = split[..., i * dy :: sy, j * dx :: sx][..., :out_h, :out_w]
        total += np.einsum("ngcyx,goc->ngoyx", seen, weights[..., i, j])
    return total.reshape(case.batch, -1, out_h, out_w)


def pooled(
    x: np.ndarray,
    window: tuple[int, int],
    strides: tuple[int, int],
    pads: tuple[int, int, int, int],
    largest: bool,
) -> np.ndarray:
    """The largest value or the mean of what lies inside of the picture."""
    top, left, bottom, right = pads
    around = ((0, 0), (0, 0), (top, bottom), (left, right))
    padded = np.pad(x, around, constant_values=np.nan)
    out_h = (padded.shape[2] - window[0]) // strides[0] + 1
    out_w = (padded.shape[3] - window[1]) // strides[1] + 1
    places = [
        padded[:, :, i :: strides[0], j :: strides[1]][:, :, :out_h, :out_w]
        for i, j in itertools.product(*map(range, window))
    ]
    return (np.nanmax if largest else np.nanmean)(np.stack(places), axis=0)


AFTER = ("", "Relu", "Sigmoid", "Add", "MaxPool", "AveragePool", "GlobalAveragePool")


@st.composite
def convolutions(draw: st.DrawFn) -> Conv:
    """Direct, grouped, depthwise and pointwise ones, and those that Winograd's method takes."""
    kind = draw(st.sampled_from(("direct", "pointwise", "depthwise", "grouped", "winograd")))
    few = partial(st.integers, 1)
    window = (1, 1) if kind == "pointwise" else draw(st.tuples(few(5), few(5)))
    strides = draw(st.sampled_from(((1, 1), (1, 1), (2, 2), (1, 2), (3, 1))))
    dilations = draw(st.sampled_from(((1, 1), (1, 1), (2, 1), (1, 3))))
    pads = draw(st.sampled_from(((0,) * 4, (1,) * 4, (2, 0, 1, 3))))
    groups, channels, out_channels = 1, draw(few(40)), draw(few(40))
    if kind == "depthwise":
        groups, channels, out_channels = draw(few(40)), 1, 1
    elif kind == "grouped":
        groups = draw(st.integers(2, 4))
        channels, out_channels = draw(st.tuples(few(34), few(34)))
    elif kind == "winograd":
        window, strides, dilations, pads = (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)
        channels, out_channels = draw(st.sampled_from(((128, 128), (136, 130))))
    reach = [(k - 1) * d + 1 for k, d in zip(window, dilations, strict=True)]
    sizes = [st.integers(max(2, k - 2 * pads[0] * (pads[0] < 2)), k + 26) for k in reach]
    size = (draw(sizes[0]), draw(sizes[1]))
    if kind == "winograd":
        size = (draw(st.sampled_from((4, 6))), draw(st.sampled_from((8, 14))))
    conv = Conv(
        batch=draw(st.sampled_from((1, 1, 1, 2))),
        groups=groups,
        channels=channels,
        out_channels=out_channels,
        size=size,
        window=window,
        strides=strides,
        dilations=dilations,
        pads=pads,
        after="",
    )
    # A pooling needs room for its window of 2 x 3 over what its padding leaves.
    afters = AFTER if all(out >= 3 for out in output_size(conv)) else AFTER[:4]
    return dataclasses.replace(conv, after=draw(st.sampled_from(afters)))


def output_size(conv: Conv) -> tuple[int, int]:
    return tuple(
        (n + low + high - (k - 1) * d - 1) // s + 1
        for n, low, high, k, d, s in zip(
            conv.size,
            conv.pads[:2],
            conv.pads[2:],
            conv.window,
            conv.dilations,
            conv.strides,
            strict=True,
        )
    )


possible = convolutions().filter(lambda conv: min(output_size(conv)) >= 1)
products = st.builds(Dense, st.integers(1, 30), st.integers(1, 70), st.integers(1, 70))


@st.composite
def transposed(draw: st.DrawFn) -> Transposed:
    window, strides = draw(st.tuples(pairs(1, 5), pairs(1, 3)))
    # Without an empty output, and with less output padding than a stride, as ONNX wants it.
    pads = draw(st.sampled_from(((0,) * 4, (1, 0, 0, 1), (1, 1, 1, 1))))
    size = draw(pairs(3, 9))
    more = draw(st.tuples(*(st.integers(0, s - 1) for s in strides)))
    few = st.integers(1, 24)
    return Transposed(draw(few), draw(few), size, window, strides, pads, more)


def pairs(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high))


cases = st.one_of(possible, possible, possible, products, transposed())


def profile(name: str) -> TargetProfile:
    """A shipped target, or this machine's code for vectors of another width ("x86 x 16 lanes": two
    registers of AVX2 for each vector, where the machine has no wider ones)."""
    if not name.startswith("x86 x "):
        return load_target(name)
    lanes = int(name.split()[2])
    base = load_target("linux-x86_64")
    return dataclasses.replace(
        base,
        name=f"x86-{lanes}",
        tvm={**base.tvm, "mcpu": "x86-64-v2" if lanes == 4 else "x86-64-v3"},
        cpu=dataclasses.replace(
            base.cpu, vector_bits=32 * lanes, vector_registers=32 if lanes == 16 else 16
        ),
    )


def check(target: TargetProfile, drawn: Sequence[Any], folder: Path, *, seed: int | None) -> None:
    """Compiles the cases into one library, runs it, and compares each output.

    `seed` draws each kernel's decision; None: the default ones.
    """
    parts = [case.part(f"k{index}_") for index, case in enumerate(drawn)]
    inputs = {name: a for part in parts for name, a in part.inputs.items()}
    outputs = [part.nodes[-1].output[0] for part in parts]
    graph = helper.make_graph(
        [node for part in parts for node in part.nodes],
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(a, n) for part in parts for n, a in part.weights.items()],
    )
    path = folder / "cases.onnx"
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    build = folder / "build"
    build.mkdir()
    compiled = compile_model(
        import_model(path),
        target,
        build=build,
        lookup=None if seed is None else any_decision(target, seed),
        name_build=lambda: "properties",
    )
    assert "plain" not in compiled.coverage.rungs
    assert seed is not None or compiled.coverage.problems == ()
    prefix = emulator_command(target, load_toolchain(target.toolchain)) if target.emulator else ()
    results = run_launcher(
        prefix, library=compiled.library, launcher=compiled.launcher, inputs=list(inputs.values())
    )
    assert len(results) == len(parts)
    for case, part, actual in zip(drawn, parts, results, strict=True):
        largest = max(np.abs(part.expected).max(), 1e-3)
        np.testing.assert_allclose(
            actual, part.expected, rtol=0, atol=TOLERANCE * largest, err_msg=str(case)
        )


def any_decision(target: TargetProfile, seed: int) -> Callable[[Any], Any]:
    """A lookup that draws a decision for each kernel, as a record might hold it."""

    def lookup(function: Any) -> tuple[dict[str, Any], str] | None:
        draw = random.Random(f"{seed}/{workload_of(function)}")
        space = kernel_space(function, target)
        return space.candidate({k: draw.choice(v) for k, v in space.knobs.items()}), "tuned"

    return lookup


# Which target, how many libraries, and whether decisions are drawn for every second one.
LIBRARIES = (
    ("linux-x86_64", 5),
    ("x86 x 4 lanes", 4),
    ("x86 x 16 lanes", 4),
    ("rpi4", 4),
    ("rpi4-32", 3),
)


@pytest.mark.parametrize(("name", "libraries"), LIBRARIES)
def test_templates_compute_what_numpy_does(
    name: str, libraries: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = profile(name)
    numbers = itertools.count()

    @settings(
        max_examples=libraries,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(cases, min_size=CASES, max_size=CASES))
    def run(drawn: list[Any]) -> None:
        number = next(numbers)
        seed = number if number % 2 else None
        check(target, drawn, tmp_path_factory.mktemp("library"), seed=seed)

    run()
