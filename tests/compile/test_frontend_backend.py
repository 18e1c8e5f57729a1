"""ONNX's own operator cases: nothing may be wrong, and what must work works.

All cases run through the repairs, whose results ONNX Runtime computes; one case of each operator
is compiled and run as well. `make conformance` compiles them all (some minutes).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from conformance import (
    Case,
    Outcome,
    backend_cases,
    check_cases,
    difference,
    folded,
    left_out,
    walk_case,
)

from edgesdk.errors import UnsupportedModelError

# Operators of inference whose cases pass, every one of them.
_NAMES = """
Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool
BatchNormalization BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Celu CenterCropPad Clip Col2Im
Compress Concat ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh CumSum DepthToSpace
DequantizeLinear Det Div DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten
Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool Greater
GreaterOrEqual GridSample GroupNormalization HardSigmoid HardSwish Hardmax Identity
InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log
LogSoftmax LpNormalization LpPool MatMul MatMulInteger Max MaxPool MaxUnpool Mean
MeanVarianceNormalization Min Mish Mod Mul Neg NegativeLogLikelihoodLoss OneHot Or PRelu Pad
Pow QLinearConv QLinearMatMul RMSNormalization RNN Reciprocal ReduceL1 ReduceL2 ReduceLogSum
ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape
Resize ReverseSequence RoiAlign Round ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin
Sinh Size Slice Softmax SoftmaxCrossEntropyLoss Softplus Softsign SpaceToDepth Split Sqrt Squeeze
STFT Sub Sum Tan Tanh ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Where Xor CumProd
Dropout Swish Compress Constant If Loop NonZero QuantizeLinear Range ConstantOfShape AffineGrid
Attention Unique
"""
MUST_PASS = frozenset(_NAMES.split())
# What they give is known from shapes and constants: nothing of them runs.
COMPUTED_WHILE_COMPILING = frozenset(
    [
        "Constant",
        "ConstantOfShape",
        "EyeLike",
        "Loop",
        "NonZero",
        "Range",
        "Shape",
        "Size",
        "Unique",
    ]
)
# Cases of these operators that are training, and refused.
TRAINING = ("training", "_dropout_default_mask", "loop13_seq", "test_scan_sum", "test_loop16")
# Cases that ONNX Runtime, the reference, answers otherwise than ONNX says; we follow it.
AS_ONNX_RUNTIME = {
    "test_maxunpool_export_with_output_shape",
    "test_resize_downsample_scales_cubic_align_corners",
    "test_resize_downsample_scales_linear_align_corners",
}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return list(backend_cases())


def operator(case: Case) -> str:
    """The operator that a case is about: that of its last node."""
    return str(case.model.graph.node[-1].op_type)


def types_supported(case: Case) -> bool:
    """Whether all tensors hold numbers that devices compute with."""
    arrays = (*case.inputs.values(), *case.outputs.values())
    return all(a.dtype.isbuiltin == 1 and a.dtype.kind in "fiub" for a in arrays)


def test_no_repair_computes_something_else(cases: list[Case], tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    wrong, refused = [], []
    for case in cases:
        if not types_supported(case):
            continue
        try:
            got = folded(case, tmp_path)
        except UnsupportedModelError as error:
            outcomes["refused"] += 1
            if operator(case) in MUST_PASS and not any(t in case.name for t in TRAINING):
                refused.append((case.name, error.nodes))
            continue
        texts = [difference(got[n], w, max(case.relative, 1e-4)) for n, w in case.outputs.items()]
        outcomes["wrong" if any(texts) else "ok"] += 1
        if any(texts):
            wrong.append((case.name, texts))
    print(dict(outcomes))
    assert [w for w in wrong if w[0] not in AS_ONNX_RUNTIME] == []
    assert refused == []
    assert outcomes["ok"] > 1200


def test_operators_run(cases: list[Case], tmp_path: Path) -> None:
    chosen: dict[str, Case] = {}
    for case in cases:
        kind = operator(case)
        if kind in MUST_PASS and kind not in chosen and not left_out(case):
            walked = walk_case(case, tmp_path)
            if isinstance(walked, Outcome) or all(
                v.const is not None for v in walked.outputs.values()
            ):
                continue  # nothing of it would run
            chosen[kind] = case
    outcomes = check_cases(list(chosen.values()), tmp_path)
    ended = dict(zip(chosen, outcomes, strict=True))
    assert {kind: outcome for kind, outcome in ended.items() if outcome.status != "ok"} == {}
    assert set(MUST_PASS) - set(chosen) == COMPUTED_WHILE_COMPILING
