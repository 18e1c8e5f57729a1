"""Every template, at its default and at all its knobs, against NumPy in double precision."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from edgesdk.compiler.lower import lower
from edgesdk.frontend import Reference, import_model
from edgesdk.profiles import TargetProfile, load_target
from edgesdk.schedules import (
    KernelSpace,
    apply_candidate,
    kernel_space,
    schedule_kernels,
    workload_of,
)

# What the host runs, in three vector widths: 16, 8 and 4 lanes.
PROFILES = ("local", "linux-x86_64", "sse")


def profile(name: str) -> TargetProfile:
    import dataclasses

    if name != "sse":
        return load_target(name)
    base = load_target("linux-x86_64")
    return dataclasses.replace(
        base,
        name="sse",
        tvm={**base.tvm, "mcpu": "x86-64-v2"},
        cpu=dataclasses.replace(base.cpu, vector_bits=128),
    )


def save_model(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, ...]],
    weights: dict[str, np.ndarray],
) -> Path:
    """A graph from float inputs to "out", as a file."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    path = folder / "model.onnx"
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


def random_weights(seed: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def single_node_model(
    folder: Path, op: str, inputs: dict[str, tuple[int, ...]], weights: dict, **attributes: object
) -> Path:
    """One operator between a plain input and a ReLU, as a file."""
    node = helper.make_node(op, [*inputs, *weights], ["y"], name="node", **attributes)
    relu = helper.make_node("Relu", ["y"], ["out"], name="relu")
    return save_model(folder, [node, relu], inputs, weights)


def conv_case(
    folder: Path,
    *,
    channels: int,
    size: tuple[int, int],
    out_channels: int,
    window: tuple[int, int] = (3, 3),
    group: int = 1,
    batch: int = 1,
    **attributes: object,
) -> Path:
    weights = random_weights(1, w=(out_channels, channels // group, *window), b=(out_channels,))
    return single_node_model(
        folder, "Conv", {"x": (batch, channels, *size)}, weights, group=group, **attributes
    )


CONVOLUTIONS = {
    "picture": {"channels": 3, "size": (17, 23), "out_channels": 20, "strides": [2, 2]},
    "3x3": {"channels": 32, "size": (14, 14), "out_channels": 48, "pads": [1, 1, 1, 1]},
    "channels that fill no block": {"channels": 19, "size": (9, 9), "out_channels": 21},
    "one channel out": {"channels": 24, "size": (10, 10), "out_channels": 1},
    "1x1": {"channels": 64, "size": (13, 13), "out_channels": 40, "window": (1, 1)},
    "1x1 stride 2": {
        "channels": 32,
        "size": (14, 14),
        "out_channels": 32,
        "window": (1, 1),
        "strides": [2, 2],
    },
    "odd padding": {
        "channels": 16,
        "size": (11, 12),
        "out_channels": 16,
        "window": (2, 4),
        "pads": [0, 1, 1, 2],
    },
    "dilated": {
        "channels": 16,
        "size": (15, 15),
        "out_channels": 16,
        "dilations": [2, 3],
        "pads": [2, 3, 2, 3],
    },
    "one wide": {"channels": 32, "size": (50, 1), "out_channels": 32, "window": (5, 1)},
    "one wide, few channels": {
        "channels": 2,
        "size": (50, 1),
        "out_channels": 8,
        "window": (3, 1),
        "pads": [1, 0, 1, 0],
    },
    "depthwise": {
        "channels": 40,
        "size": (14, 14),
        "out_channels": 40,
        "group": 40,
        "pads": [1, 1, 1, 1],
    },
    "depthwise stride 2, 5x5": {
        "channels": 32,
        "size": (15, 15),
        "out_channels": 32,
        "group": 32,
        "window": (5, 5),
        "strides": [2, 2],
        "pads": [2, 2, 2, 2],
    },
    "groups of whole blocks": {
        "channels": 64,
        "size": (8, 8),
        "out_channels": 32,
        "group": 2,
    },
    "groups that fill no block": {
        "channels": 30,
        "size": (8, 8),
        "out_channels": 12,
        "group": 3,
        "pads": [1, 1, 1, 1],
    },
    "Winograd": {"channels": 128, "size": (8, 10), "out_channels": 136, "pads": [1, 1, 1, 1]},
    "Winograd, odd padding, two pictures": {
        "channels": 128,
        "size": (7, 9),
        "out_channels": 128,
        "pads": [1, 2, 0, 1],
        "batch": 2,
    },
    "too odd for Winograd": {
        "channels": 128,
        "size": (7, 7),
        "out_channels": 128,
        "pads": [1, 1, 1, 1],
    },
    "a prime number of columns": {
        "channels": 16,
        "size": (3, 39),
        "out_channels": 20,
        "pads": [1, 0, 1, 0],
    },
    "a prime number of columns of a signal": {
        "channels": 1,
        "size": (1, 800),
        "out_channels": 18,
        "window": (1, 32),
        "strides": [1, 8],
    },
    "two pictures": {"channels": 16, "size": (7, 7), "out_channels": 32, "batch": 2},
}


def kernels_of(path: Path, target: TargetProfile) -> dict[str, object]:
    model = import_model(path)
    with tvm.target.Target(target.tvm):
        module = lower(model.module, target)
    return {
        gv.name_hint: f for gv, f in module.functions.items() if isinstance(f, tvm.tirx.PrimFunc)
    }


def run_function(function: object, arrays: list[np.ndarray], target: TargetProfile) -> np.ndarray:
    """Runs a kernel whose last parameter is its output; returns that."""
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    tensors = [tvm.runtime.tensor(a) for a in arrays]
    tvm.compile(module, target=tvm.target.Target(target.tvm))["main"](*tensors)
    return tensors[-1].numpy()


def arguments(function: object) -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    arrays = [
        draw.standard_normal([int(d) for d in p.ty.shape]).astype(np.float32)
        for p in function.params
    ]
    arrays[-1] = np.full_like(arrays[-1], np.nan)
    return arrays


@pytest.mark.parametrize("target", PROFILES)
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_match_onnx_runtime(case: str, target: str, tmp_path: Path) -> None:
    path = conv_case(tmp_path, **CONVOLUTIONS[case])
    check_against_onnx_runtime(path, profile(target), template=True)


def execute_plan(plan, scheduled, inputs, target):
    """Runs a plan with TVM's runtime: each tensor an array of its own."""
    module = tvm.IRModule({n: f.with_attr("global_symbol", n) for n, f in scheduled.items()})
    built = tvm.compile(module, target=tvm.target.Target(target.tvm)) if scheduled else None
    arena = np.zeros(plan.arena_bytes + 64, np.uint8)
    offset = -arena.ctypes.data % 64
    outputs: dict[int, np.ndarray] = {}
    weights = dict(zip(plan.weight_offsets, plan.weights, strict=True))

    def array(tensor):
        if tensor.storage == "weight":
            return weights[tensor.offset].reshape(tensor.shape)
        if tensor.storage == "input":
            return inputs[tensor.index].reshape(tensor.shape)
        if tensor.storage == "output":
            fresh = np.full(tensor.size_bytes, 0xFF, np.uint8).view(tensor.dtype)
            return outputs.setdefault(tensor.index, fresh).reshape(tensor.shape)
        start = offset + tensor.offset
        return arena[start : start + tensor.size_bytes].view(tensor.dtype).reshape(tensor.shape)

    for step in plan.steps:
        views = [array(plan.tensors[i]) for i in step.args]
        if step.kernel is None:
            views[1][...] = views[0]
            continue
        tensors = [tvm.runtime.tensor(v) for v in views]
        built[step.kernel](*tensors)
        # Whatever the kernel may have written to.
        for view, tensor, index in zip(views, tensors, step.args, strict=True):
            if plan.tensors[index].storage in ("arena", "output"):
                view[...] = tensor.numpy()
    return [
        outputs[t.index].reshape(t.shape)
        for t in sorted({t for t in plan.tensors if t.storage == "output"}, key=lambda t: t.index)
    ]


def decisions(space: KernelSpace, count: int) -> Iterator[dict[str, int]]:
    every = [
        dict(zip(space.knobs, values, strict=True))
        for values in itertools.product(*space.knobs.values())
    ]
    random.Random(0).shuffle(every)
    yield from every[:count]


@pytest.mark.parametrize("case", ["3x3", "1x1", "depthwise", "channels that fill no block"])
def test_every_decision_computes_the_same(case: str, tmp_path: Path) -> None:
    chosen = load_target("local")
    kernels = kernels_of(conv_case(tmp_path, **CONVOLUTIONS[case]), chosen)
    function = next(f for n, f in kernels.items() if "conv2d" in n)
    space = kernel_space(function, chosen)
    assert space.size > 1
    arrays = arguments(function)
    expected = run_function(function, [a.copy() for a in arrays], chosen)
    assert np.isfinite(expected).all()
    for knobs in decisions(space, 12):
        scheduled = apply_candidate(function, chosen, space.candidate(knobs))
        actual = run_function(scheduled, [a.copy() for a in arrays], chosen)
        np.testing.assert_allclose(
            actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max(), err_msg=str(knobs)
        )


def test_knobs_outside_the_space_are_refused(tmp_path: Path) -> None:
    chosen = load_target("local")
    kernels = kernels_of(conv_case(tmp_path, **CONVOLUTIONS["3x3"]), chosen)
    function = next(f for n, f in kernels.items() if "conv2d" in n)
    candidate = kernel_space(function, chosen).candidate(
        {"columns": 5, "blocks": 1, "order": 0, "unroll": 1}
    )
    with pytest.raises(ValueError, match="not among"):
        apply_candidate(function, chosen, candidate)
    with pytest.raises(ValueError, match="none for the template"):
        apply_candidate(function, chosen, {**candidate, "template": "dense_packed"})


def test_equal_kernels_share_a_workload_and_others_do_not(tmp_path: Path) -> None:
    chosen = load_target("local")

    def workload(case: str) -> str:
        kernels = kernels_of(conv_case(tmp_path, **CONVOLUTIONS[case]), chosen)
        return workload_of(next(f for n, f in kernels.items() if "conv2d" in n))

    assert workload("3x3") == workload("3x3")
    assert workload("3x3") != workload("1x1")


@pytest.mark.parametrize("rows", [1, 5, 12])
@pytest.mark.parametrize("columns", [1, 7, 16, 100])
@pytest.mark.parametrize("target", PROFILES)
def test_matrix_products(rows: int, columns: int, target: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    weight = draw.standard_normal((37, columns)).astype(np.float32)
    path = single_node_model(tmp_path, "MatMul", {"x": (rows, 37)}, {"w": weight})
    chosen = profile(target)
    model = import_model(path)
    with tvm.target.Target(chosen.tvm):
        module = lower(model.module, chosen)
    from edgesdk.compiler.plan import make_plan

    plan = make_plan(module)
    kernels = {s.kernel: module[s.kernel] for s in plan.steps if s.kernel}
    scheduled, coverage = schedule_kernels(kernels, chosen)
    assert coverage.problems == ()
    assert coverage.rungs.keys() == {"template"}
    x = draw.standard_normal((rows, 37)).astype(np.float32)
    expected = np.maximum(x.astype(np.float64) @ weight.astype(np.float64), 0)
    actual = execute_plan(plan, scheduled, [x], chosen)[0]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * max(1, expected.max()))


POOLS = {
    "max": ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "max beyond the edge": ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    "mean": ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    "mean with the padding": (
        "AveragePool",
        {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "count_include_pad": 1},
    ),
    "mean of all": ("GlobalAveragePool", {}),
}


@pytest.mark.parametrize("case", POOLS)
@pytest.mark.parametrize("target", PROFILES)
def test_pooling_between_convolutions(case: str, target: str, tmp_path: Path) -> None:
    """Pooling of a blocked tensor: a convolution stands before it."""
    operator, attributes = POOLS[case]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node(operator, ["c"], ["out"], name="pool", **attributes),
    ]
    weights = random_weights(5, w=(20, 8, 1, 1))
    path = save_model(tmp_path, nodes, {"x": (1, 8, 9, 11)}, weights)
    check_against_onnx_runtime(path, profile(target), template=True)


TRANSPOSED = {
    "whole blocks": {"channels": 24, "out_channels": 32, "window": (2, 2)},
    "blocks that are not full": {"channels": 16, "out_channels": 19, "window": (2, 3)},
    "one channel": {"channels": 24, "out_channels": 1, "window": (2, 2)},
}


@pytest.mark.parametrize("case", TRANSPOSED)
@pytest.mark.parametrize("target", PROFILES)
def test_upsampling_by_transposed_convolution(case: str, target: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(6)
    channels, out_channels = TRANSPOSED[case]["channels"], TRANSPOSED[case]["out_channels"]
    window = TRANSPOSED[case]["window"]
    weights = {
        "w": draw.standard_normal((channels, out_channels, *window)).astype(np.float32),
        "b": draw.standard_normal(out_channels).astype(np.float32),
    }
    path = single_node_model(
        tmp_path, "ConvTranspose", {"x": (1, channels, 5, 7)}, weights, strides=list(window)
    )
    check_against_onnx_runtime(path, profile(target), template=True)


def test_a_scale_for_each_channel_is_computed_once(tmp_path: Path) -> None:
    """Squeeze and excitation: a small convolution's result is spread over a large tensor."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("GlobalAveragePool", ["c"], ["m"], name="mean"),
        helper.make_node("Conv", ["m", "v"], ["s"], name="squeeze"),
        helper.make_node("Sigmoid", ["s"], ["g"], name="gate"),
        helper.make_node("Mul", ["c", "g"], ["out"], name="scale"),
    ]
    weights = random_weights(7, w=(24, 8, 1, 1), v=(24, 24, 1, 1))
    path = save_model(tmp_path, nodes, {"x": (1, 8, 9, 9)}, weights)
    check_against_onnx_runtime(path, load_target("local"), template=True)


@pytest.mark.parametrize("scales", [[1, 1, 2, 2], [1, 1, 3, 1], [1, 1, 1, 4]])
def test_upsampling_by_repetition_stays_blocked(scales: list[int], tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node(
            "Resize",
            ["c", "", "scales"],
            ["r"],
            name="resize",
            mode="nearest",
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        ),
        helper.make_node("Conv", ["r", "v"], ["out"], name="after"),
    ]
    weights = random_weights(9, w=(24, 8, 1, 1), v=(8, 24, 3, 3))
    weights["scales"] = np.array(scales, np.float32)
    path = save_model(tmp_path, nodes, {"x": (1, 8, 5, 7)}, weights)
    chosen = load_target("local")
    check_against_onnx_runtime(path, chosen, template=True)
    names = kernels_of(path, chosen)
    assert any("repeat" in name for name in names)
    assert sum("unblock" in name for name in names) == 1  # the output's


def test_integers_are_not_divided_by_what_no_channel_holds(tmp_path: Path) -> None:
    """20 channels leave lanes of the second block empty: dividing by their zeros would trap."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Cast", ["c"], ["i"], name="cast", to=TensorProto.INT32),
        helper.make_node("Div", ["i", "d"], ["q"], name="div"),
        helper.make_node("Cast", ["q"], ["out"], name="back", to=TensorProto.FLOAT),
    ]
    weights = random_weights(10, w=(20, 8, 3, 3))
    weights["d"] = np.arange(1, 21, dtype=np.int32).reshape(1, 20, 1, 1)
    path = save_model(tmp_path, nodes, {"x": (1, 8, 6, 6)}, weights)
    check_against_onnx_runtime(path, load_target("local"), template=True)


@pytest.mark.parametrize("shape", [(3, 508), (2, 7, 13), (1, 31), (4, 64)])
def test_elementwise_kernels_of_any_length(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = single_node_model(tmp_path, "Tanh", {"x": shape}, {})
    check_against_onnx_runtime(path, load_target("local"), template=False)


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_softmax_along_any_axis(axis: int, tmp_path: Path) -> None:
    path = single_node_model(tmp_path, "Softmax", {"x": (3, 5, 37)}, {}, axis=axis)
    check_against_onnx_runtime(path, load_target("local"), template=False)


@pytest.mark.parametrize("target", PROFILES)
@pytest.mark.parametrize(
    ("op", "shape", "axes", "keep"),
    [
        ("ReduceMean", (3, 5, 96), [2], 1),
        ("ReduceSum", (7, 128), [1], 0),
        ("ReduceSum", (4, 6, 64), [1, 2], 1),
        ("ReduceMax", (2, 3, 4, 160), [3], 0),
        ("ReduceMin", (5, 64), [1], 1),
        ("ReduceMean", (6, 100), [1], 1),  # 100 terms: no vector of 8 divides them
        ("ReduceSum", (64, 96), [0], 0),  # terms that lie apart
        ("ReduceMean", (1, 4096), [1], 1),
    ],
)
def test_sums_along_rows(
    op: str, shape: tuple[int, ...], axes: list[int], keep: int, target: str, tmp_path: Path
) -> None:
    chosen = profile(target)
    weights = {}
    options = {"axes": axes}
    if op == "ReduceSum":  # since operator set 13 an input
        weights, options = {"axes": np.array(axes, np.int64)}, {}
    path = single_node_model(tmp_path, op, {"x": shape}, weights, keepdims=keep, **options)
    check_against_onnx_runtime(path, chosen, template=False)


@pytest.mark.parametrize("target", PROFILES)
@pytest.mark.parametrize("shape", [(5, 768), (2, 3, 128), (3, 100), (2, 9000)])
@pytest.mark.parametrize("op", ["Softmax", "LayerNormalization"])
def test_rows_of_several_sums(op: str, shape: tuple[int, ...], target: str, tmp_path: Path) -> None:
    """Rows that vectors divide, that they do not, and that are too long for the stack."""
    weights = {}
    if op == "LayerNormalization":
        weights = random_weights(4, scale=shape[-1:], bias=shape[-1:])
    path = single_node_model(tmp_path, op, {"x": shape}, weights, axis=-1)
    check_against_onnx_runtime(path, profile(target), template=False)


def check_against_onnx_runtime(path: Path, chosen: TargetProfile, *, template: bool) -> None:
    """Compiles `path` without problems, with or without a template, and compares."""
    from edgesdk.compiler.plan import make_plan

    model = import_model(path)
    with tvm.target.Target(chosen.tvm):
        module = lower(model.module, chosen)
    plan = make_plan(module)
    kernels = {s.kernel: module[s.kernel] for s in plan.steps if s.kernel}
    scheduled, coverage = schedule_kernels(kernels, chosen)
    assert coverage.problems == ()
    assert "plain" not in coverage.rungs
    assert ("template" in coverage.rungs) == template
    x = np.random.default_rng(8).standard_normal(model.inputs[0].shape).astype(np.float32)
    expected = Reference(path, model.shapes).run({"x": x})["out"]
    actual = execute_plan(plan, scheduled, [x], chosen)[0]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
