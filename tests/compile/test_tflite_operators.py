"""TFLite's operators: what each becomes in ONNX gives what TFLite's interpreter gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import numpy_helper
from tflite_files import Net, interpret

from edgesdk.frontend.sources import REFUSED_DOMAIN
from edgesdk.frontend.tflite import convert_tflite

Build = Callable[[Net], Any]
CASES: dict[str, Build] = {}
RNG = np.random.default_rng(5)


def case(name: str, build: Build) -> None:
    assert name not in CASES, name
    CASES[name] = build


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(list(shape)).standard_normal(shape).astype(np.float32)


# Convolutions and pools: both paddings, strides that do not divide the size, dilation, groups.
for padding in (0, 1):
    for stride, dilation in ((1, 1), (2, 1), (1, 2)):
        common = {
            "padding": padding, "strideH": stride, "strideW": stride,
            "dilationHFactor": dilation, "dilationWFactor": dilation,
        }  # fmt: skip
        label = f"pad{padding}-stride{stride}-dilation{dilation}"
        for activation in (0, 1, 3) if stride == 2 else (2,):
            case(
                f"conv-{label}-activation{activation}",
                lambda n, c=common, a=activation: n.op(
                    "CONV_2D",
                    [n.input((2, 9, 8, 3)), n.const(weights(4, 3, 2, 3)), n.const(weights(4))],
                    options="Conv2DOptions", fusedActivationFunction=a, **c,
                ),
            )  # fmt: skip
        case(
            f"depthwise-{label}",
            lambda n, c=common: n.op(
                "DEPTHWISE_CONV_2D",
                [n.input((1, 9, 8, 3)), n.const(weights(1, 3, 3, 6)), n.const(weights(6))],
                options="DepthwiseConv2DOptions", depthMultiplier=2, **c,
            ),
        )  # fmt: skip
    for kind in ("AVERAGE_POOL_2D", "MAX_POOL_2D"):
        case(
            f"{kind}-pad{padding}",
            lambda n, k=kind, p=padding: n.op(
                k, [n.input((1, 9, 8, 3))], options="Pool2DOptions", padding=p, strideH=2,
                strideW=3, filterHeight=3, filterWidth=2, fusedActivationFunction=1,
            ),
        )  # fmt: skip
for padding, size in ((0, (8, 6)), (0, (7, 6)), (1, (9, 7))):
    case(
        f"transpose-conv-{padding}-{size[0]}",
        lambda n, p=padding, s=size: n.op(
            "TRANSPOSE_CONV",
            [n.const([1, *s, 5], "int32"), n.const(weights(5, 3, 3, 2)), n.input((1, 4, 3, 2))],
            options="TransposeConvOptions", padding=p, strideH=2, strideW=2,
        ),
    )  # fmt: skip
case(
    "transpose-conv-bias",
    lambda n: n.op(
        "TRANSPOSE_CONV",
        [n.const([1, 8, 6, 5], "int32"), n.const(weights(5, 2, 2, 2)), n.input((1, 4, 3, 2)),
         n.const(weights(5))],
        options="TransposeConvOptions", padding=0, strideH=2, strideW=2, version=3,
    ),
)  # fmt: skip
case(
    "grouped-conv",
    lambda n: n.op(
        "CONV_2D", [n.input((1, 5, 5, 4)), n.const(weights(6, 3, 3, 2)), n.const(weights(6))],
        options="Conv2DOptions", strideH=1, strideW=1, dilationHFactor=1, dilationWFactor=1,
    ),
)  # fmt: skip

# Matrix products.
case(
    "fully-connected-flattens",
    lambda n: n.op(
        "FULLY_CONNECTED", [n.input((2, 3, 4)), n.const(weights(5, 12)), n.const(weights(5))],
        options="FullyConnectedOptions", fusedActivationFunction=1,
    ),
)  # fmt: skip
case(
    "fully-connected-keeps-dimensions",
    lambda n: n.op(
        "FULLY_CONNECTED", [n.input((2, 3, 4)), n.const(weights(5, 4)), -1],
        options="FullyConnectedOptions", keepNumDims=True, version=5,
    ),
)  # fmt: skip
for x, y in ((False, False), (True, False), (False, True), (True, True)):
    case(
        f"batch-matmul-{x:d}{y:d}",
        lambda n, x=x, y=y: n.op(
            "BATCH_MATMUL",
            [n.input((2, 4, 3) if x else (2, 3, 4)), n.input((2, 5, 4) if y else (2, 4, 5))],
            options="BatchMatMulOptions", adjX=x, adjY=y,
        ),
    )  # fmt: skip

# Element by element, in the file's order and, behind a convolution, with channels first.
UNARY = (
    "ABS NEG EXP SIN COS FLOOR CEIL RELU RELU6 RELU_N1_TO_1 RELU_0_TO_1 ELU TANH LOGISTIC"
    " HARD_SWISH SQUARE ROUND"
)
for kind in UNARY.split():
    case(kind, lambda n, k=kind: n.op(k, [n.input((2, 5))]))
for kind in ("SQRT", "RSQRT", "LOG"):
    case(kind, lambda n, k=kind: n.op(k, [n.op("EXP", [n.input((2, 5))])]))
for approximate in (False, True):
    case(
        f"GELU-{approximate:d}",
        lambda n, a=approximate: n.op(
            "GELU", [n.input((2, 5))], options="GeluOptions", approximate=a
        ),
    )
case(
    "LEAKY_RELU",
    lambda n: n.op("LEAKY_RELU", [n.input((2, 5))], options="LeakyReluOptions", alpha=0.2),
)


def pointwise(n: Net, channels: int = 4) -> int:
    """A tensor that there is with channels first."""
    return n.op(
        "CONV_2D", [n.input((1, 4, 3, 2)), n.const(weights(channels, 1, 1, 2)),
         n.const(weights(channels))],
        options="Conv2DOptions", strideH=1, strideW=1, dilationHFactor=1, dilationWFactor=1,
    )  # fmt: skip


OPTIONS = {
    "ADD": "AddOptions", "SUB": "SubOptions", "MUL": "MulOptions", "DIV": "DivOptions",
}  # fmt: skip
BINARY = "ADD SUB MUL DIV MAXIMUM MINIMUM SQUARED_DIFFERENCE FLOOR_MOD FLOOR_DIV"
for kind in BINARY.split():
    for label, other in (
        ("row", lambda n: n.const(weights(4) + 3)),
        ("scalar", lambda n: n.const(np.float32(1.5))),
        ("plane", lambda n: n.const(weights(4, 3, 1) + 3)),
        ("same", lambda n: n.input((1, 4, 3, 4))),
        ("broadcast", lambda n: n.input((1, 1, 1, 4))),
    ):
        case(
            f"{kind}-{label}",
            lambda n, k=kind, o=other: n.op(
                k, [pointwise(n), o(n)], options=OPTIONS.get(k, ""),
                **({"fusedActivationFunction": 1} if k in ("ADD", "MUL") else {}),
            ),
        )  # fmt: skip
COMPARISONS = "EQUAL NOT_EQUAL LESS LESS_EQUAL GREATER GREATER_EQUAL"
for kind in COMPARISONS.split():
    case(
        kind,
        lambda n, k=kind: n.op(k, [n.input((3, 4), "int32"), n.input((1, 4), "int32")], "bool"),
    )
for kind in ("LOGICAL_AND", "LOGICAL_OR"):
    case(kind, lambda n, k=kind: n.op(k, [n.input((4,), "bool"), n.input((4,), "bool")], "bool"))
case("LOGICAL_NOT", lambda n: n.op("LOGICAL_NOT", [n.input((4,), "bool")], "bool"))
for kind in ("FLOOR_DIV", "FLOOR_MOD"):
    case(
        f"{kind}-int",
        lambda n, k=kind: n.op(
            k, [n.input((3, 4), "int32"), n.const([3, -2, 5, -7], "int32")], "int32", version=2
        ),
    )
case("POW", lambda n: n.op("POW", [n.op("ABS", [n.input((2, 5))]), n.const(np.float32(1.7))]))
case("PRELU", lambda n: n.op("PRELU", [pointwise(n), n.const(weights(1, 1, 4))]))
case("PRELU-plane", lambda n: n.op("PRELU", [pointwise(n), n.const(weights(4, 3, 4))]))
case(
    "ADD_N",
    lambda n: n.op("ADD_N", [n.input((2, 3)), n.input((2, 3)), n.input((2, 3))]),
)
for kind in ("SELECT", "SELECT_V2"):
    case(
        kind,
        lambda n, k=kind: n.op(k, [n.input((2, 3), "bool"), n.input((2, 3)), n.input((2, 3))]),
    )
case(
    "SELECT-rows",
    lambda n: n.op("SELECT", [n.input((2,), "bool"), n.input((2, 3)), n.input((2, 3))]),
)
case("CAST", lambda n: n.op("CAST", [n.op("MUL", [n.input((2, 5)), n.const(np.float32(7))],
                                          options="MulOptions")], "int32",
                            options="CastOptions"))  # fmt: skip

# Along axes.
case("SOFTMAX", lambda n: n.op("SOFTMAX", [n.input((2, 5))], options="SoftmaxOptions", beta=1.5))
case(
    "SOFTMAX-channels",
    lambda n: n.op("SOFTMAX", [pointwise(n)], options="SoftmaxOptions", beta=1.0),
)
case("LOG_SOFTMAX", lambda n: n.op("LOG_SOFTMAX", [n.input((2, 5))]))
case(
    "L2_NORMALIZATION",
    lambda n: n.op("L2_NORMALIZATION", [pointwise(n)], options="L2NormOptions"),
)
case(
    "LOCAL_RESPONSE_NORMALIZATION",
    lambda n: n.op(
        "LOCAL_RESPONSE_NORMALIZATION", [pointwise(n, 9)],
        options="LocalResponseNormalizationOptions", radius=2, bias=1.5, alpha=0.3, beta=0.6,
    ),
)  # fmt: skip
for kind in ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD"):
    for axes, keep in (([1, 2], True), ([1, 2], False), ([-1], False), ([2], False), ([3], True)):
        case(
            f"{kind}-{axes}-{keep:d}",
            lambda n, k=kind, a=axes, p=keep: n.op(
                k, [pointwise(n), n.const(a, "int32")], options="ReducerOptions", keepDims=p
            ),
        )
for kind in ("REDUCE_ANY", "REDUCE_ALL"):
    case(
        kind,
        lambda n, k=kind: n.op(
            k, [n.input((3, 4), "bool"), n.const([1], "int32")], "bool", options="ReducerOptions"
        ),
    )
for axis in (3, 1):
    case(
        f"ARG_MAX-{axis}",
        lambda n, a=axis: n.op(
            "ARG_MAX", [pointwise(n), n.const([a], "int32")], "int32", options="ArgMaxOptions",
            outputType=2,
        ),
    )  # fmt: skip
case(
    "ARG_MIN",
    lambda n: n.op(
        "ARG_MIN", [n.input((3, 7)), n.const([-1], "int32")], "int64", options="ArgMinOptions",
        outputType=4,
    ),
)  # fmt: skip
for exclusive, reverse in ((False, False), (True, True)):
    case(
        f"CUMSUM-{exclusive:d}",
        lambda n, e=exclusive, r=reverse: n.op(
            "CUMSUM", [n.input((3, 5)), n.const(np.int32(1))], options="CumsumOptions",
            exclusive=e, reverse=r,
        ),
    )  # fmt: skip


def topk(n: Net) -> list[int]:
    outputs = [n.tensor((1,)), n.tensor((1,), "int32")]
    n.op("TOPK_V2", [n.input((3, 9)), n.const(np.int32(4))], outputs)
    return outputs


case("TOPK_V2", topk)

# Shapes.
case("RESHAPE", lambda n: n.op("RESHAPE", [pointwise(n), n.const([2, -1], "int32")]))
case("TRANSPOSE", lambda n: n.op("TRANSPOSE", [pointwise(n), n.const([0, 3, 1, 2], "int32")]))
case("TRANSPOSE-2", lambda n: n.op("TRANSPOSE", [pointwise(n), n.const([2, 1, 3, 0], "int32")]))
case(
    "SQUEEZE",
    lambda n: n.op("SQUEEZE", [n.input((1, 3, 1, 2))], options="SqueezeOptions", squeezeDims=[-2]),
)
case("SQUEEZE-all", lambda n: n.op("SQUEEZE", [n.input((1, 3, 1, 2))], options="SqueezeOptions"))
case("EXPAND_DIMS", lambda n: n.op("EXPAND_DIMS", [n.input((3, 2)), n.const(np.int32(-1))]))
for axis in (-1, 1):
    case(
        f"CONCATENATION{axis}",
        lambda n, a=axis: n.op(
            "CONCATENATION", [pointwise(n), n.input((1, 4, 3, 4)), n.const(weights(1, 4, 3, 4))],
            options="ConcatenationOptions", axis=a,
        ),
    )  # fmt: skip


def split(n: Net) -> list[int]:
    outputs = [n.tensor((1,)), n.tensor((1,))]
    n.op("SPLIT", [n.const(np.int32(3)), pointwise(n)], outputs, options="SplitOptions",
         numSplits=2)  # fmt: skip
    return outputs


def split_v(n: Net) -> list[int]:
    outputs = [n.tensor((1,)), n.tensor((1,)), n.tensor((1,))]
    n.op("SPLIT_V", [n.input((2, 7)), n.const([2, -1, 1], "int32"), n.const(np.int32(1))], outputs,
         options="SplitVOptions", numSplits=3)  # fmt: skip
    return outputs


def unpack(n: Net) -> list[int]:
    outputs = [n.tensor((1,)), n.tensor((1,)), n.tensor((1,))]
    n.op("UNPACK", [n.input((2, 3, 4))], outputs, options="UnpackOptions", num=3, axis=-2)
    return outputs


case("SPLIT", split)
case("SPLIT_V", split_v)
case("UNPACK", unpack)
case(
    "PACK",
    lambda n: n.op(
        "PACK", [n.input((2, 3)), n.input((2, 3))], options="PackOptions", valuesCount=2, axis=-1
    ),
)
case(
    "SLICE",
    lambda n: n.op(
        "SLICE",
        [pointwise(n), n.const([0, 1, 0, 1], "int32"), n.const([1, 2, -1, 3], "int32")],
        [n.tensor((1, 2, 3, 3))],
    ),
)
for label, bounds, masks in (
    ("plain", ([0, 1, 0], [2, 5, 4], [1, 2, 1]), {}),
    ("begin-end", ([9, 1, 9], [9, 9, 2], [1, 1, 1]), {"beginMask": 5, "endMask": 3}),
    ("shrink", ([1, 0, -1], [2, 6, 0], [1, 3, 1]), {"shrinkAxisMask": 5}),
    ("backwards", ([0, 4, 0], [2, 0, 4], [1, -1, 1]), {"endMask": 2}),
    ("backwards-all", ([0, 0, 0], [2, 0, 4], [1, -2, 1]), {"beginMask": 2, "endMask": 2}),
    ("new-axis", ([0, 0, 1], [0, 2, 5], [1, 1, 1]), {"newAxisMask": 1}),
    ("ellipsis", ([0, 0, 1], [1, 0, 3], [1, 1, 1]), {"ellipsisMask": 2}),
):
    case(
        f"STRIDED_SLICE-{label}",
        lambda n, b=bounds, m=masks: n.op(
            "STRIDED_SLICE", [n.input((2, 6, 4)), *(n.const(x, "int32") for x in b)],
            options="StridedSliceOptions", version=4, **m,
        ),
    )  # fmt: skip
case(
    "GATHER",
    lambda n: n.op(
        "GATHER", [n.input((3, 5, 2)), n.const([[4, 0], [1, 1]], "int32")],
        options="GatherOptions", axis=1,
    ),
)  # fmt: skip
case(
    "GATHER_ND",
    lambda n: n.op("GATHER_ND", [n.input((3, 5, 2)), n.const([[2, 4], [0, 1]], "int32")]),
)
case("TILE", lambda n: n.op("TILE", [n.input((2, 3)), n.const([2, 3], "int32")]))
case(
    "BROADCAST_TO",
    lambda n: n.op("BROADCAST_TO", [n.input((2, 1)), n.const([3, 2, 4], "int32")], version=2),
)
case("FILL", lambda n: n.op("FILL", [n.const([2, 3], "int32"), n.input(())]))
case("SHAPE", lambda n: n.op("SHAPE", [pointwise(n)], "int32", options="ShapeOptions",
                             outType=2))  # fmt: skip
case("REVERSE_V2", lambda n: n.op("REVERSE_V2", [n.input((2, 3)), n.const([1], "int32")]))
case(
    "ONE_HOT",
    lambda n: n.op(
        "ONE_HOT", [n.const([3, 0, 1], "int32"), n.const(np.int32(4)), n.input(()),
                    n.const(np.float32(-2))],
        options="OneHotOptions", axis=-1,
    ),
)  # fmt: skip
PADS = [[0, 0], [1, 2], [0, 1], [2, 0]]
case("PAD", lambda n: n.op("PAD", [pointwise(n), n.const(PADS, "int32")]))
case(
    "PADV2",
    lambda n: n.op("PADV2", [n.input((1, 4, 3, 2)), n.const(PADS, "int32"),
                             n.const(np.float32(-3))]),
)  # fmt: skip
case(
    "MIRROR_PAD-reflect",
    lambda n: n.op("MIRROR_PAD", [pointwise(n), n.const(PADS, "int32")],
                   options="MirrorPadOptions", mode=0),
)  # fmt: skip
case(
    "MIRROR_PAD-symmetric",
    lambda n: n.op("MIRROR_PAD", [pointwise(n), n.const([[0, 0], [1, 1], [1, 0], [0, 0]],
                                                        "int32")],
                   options="MirrorPadOptions", mode=1),
)  # fmt: skip
case(
    "SPACE_TO_DEPTH",
    lambda n: n.op("SPACE_TO_DEPTH", [n.input((1, 4, 6, 3))], options="SpaceToDepthOptions",
                   blockSize=2),
)  # fmt: skip
case(
    "DEPTH_TO_SPACE",
    lambda n: n.op("DEPTH_TO_SPACE", [n.input((1, 2, 3, 12))], options="DepthToSpaceOptions",
                   blockSize=2),
)  # fmt: skip
case(
    "SPACE_TO_BATCH_ND",
    lambda n: n.op("SPACE_TO_BATCH_ND", [n.input((2, 5, 4, 3)), n.const([3, 2], "int32"),
                                         n.const([[0, 1], [2, 0]], "int32")]),
)  # fmt: skip
case(
    "BATCH_TO_SPACE_ND",
    lambda n: n.op("BATCH_TO_SPACE_ND", [n.input((6, 2, 3, 2)), n.const([3, 2], "int32"),
                                         n.const([[1, 0], [0, 1]], "int32")]),
)  # fmt: skip
for kind in ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"):
    for corners, centers in ((False, False), (True, False), (False, True)):
        for size in ((7, 5), (2, 2)):
            options = (
                "ResizeBilinearOptions" if "LINEAR" in kind else "ResizeNearestNeighborOptions"
            )
            case(
                f"{kind}-{corners:d}{centers:d}-{size[0]}",
                lambda n, k=kind, c=corners, h=centers, s=size, o=options: n.op(
                    k, [n.input((1, 4, 3, 2)), n.const(s, "int32")], options=o, alignCorners=c,
                    halfPixelCenters=h, version=3,
                ),
            )  # fmt: skip


def lstm(n: Net) -> int:
    hidden, size = 4, 3
    gates = [n.const(weights(hidden, size) * (i + 1) / 4) for i in range(4)]
    recurrent = [n.const(weights(hidden, hidden) * (i + 1) / 4) for i in range(4)]
    biases = [n.const(weights(hidden) * (i + 1) / 4) for i in range(4)]
    states = [n.tensor((2, hidden)), n.tensor((2, hidden))]
    for state in states:
        n.graph.tensors[state].isVariable = True
    return n.op(
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        [n.input((2, 5, size)), *gates, *recurrent, -1, -1, -1, *biases, -1, -1, *states,
         -1, -1, -1, -1],
        options="UnidirectionalSequenceLSTMOptions", fusedActivationFunction=4,
    )  # fmt: skip


case("UNIDIRECTIONAL_SEQUENCE_LSTM", lstm)
case(
    "float16-weights",
    lambda n: n.op(
        "FULLY_CONNECTED",
        [n.input((2, 6)), n.op("DEQUANTIZE", [n.const(weights(3, 6).astype(np.float16))]), -1],
        options="FullyConnectedOptions",
    ),
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operator(name: str) -> None:
    net = Net()
    outputs = CASES[name](net)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    content = net.bytes(*outputs)
    converted = convert_tflite(content, name)
    assert not [n.doc_string for n in converted.proto.graph.node if n.domain == REFUSED_DOMAIN]
    feeds = [drawn(net, i) for i in net.inputs]
    expected = interpret(content, feeds)
    for array, wanted in zip(run_onnx(converted, feeds), expected, strict=True):
        assert array.dtype == wanted.dtype
        assert array.shape == wanted.shape
        np.testing.assert_allclose(array, wanted, rtol=2e-5, atol=2e-5)
        assert wanted.size == 0 or np.any(wanted) or wanted.dtype == bool


def drawn(net: Net, index: int) -> np.ndarray:
    tensor = net.graph.tensors[index]
    rng = np.random.default_rng(index)
    if tensor.type == 0:
        return rng.standard_normal(tensor.shape).astype(np.float32)
    if tensor.type == 6:
        return rng.integers(0, 2, tensor.shape).astype(bool)
    return rng.integers(-9, 9, tensor.shape).astype(np.int32)


def run_onnx(converted: Any, feeds: list[np.ndarray]) -> list[np.ndarray]:
    proto = type(converted.proto)()
    proto.CopyFrom(converted.proto)
    for name, array in converted.weights.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    names = [i.name for i in session.get_inputs()]
    return session.run(None, dict(zip(names, feeds, strict=True)))
