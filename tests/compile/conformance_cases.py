"""Small models, one for each thing that has gone wrong in some converter, as ONNX text.

A case is the body of a graph; its constants are given beside it. What it must give is computed by
ONNX Runtime when the test runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper


@dataclass(frozen=True)
class TextCase:
    """A graph in ONNX's text form: inputs "float[1,3] x", outputs by name, nodes one per line."""

    name: str
    inputs: str
    outputs: str
    body: str
    opset: int = 17
    constants: dict[str, Any] = field(default_factory=dict)
    functions: str = ""
    domains: str = '"com.microsoft": 1'

    def model(self) -> onnx.ModelProto:
        """Returns the model, its constants as initializers, its outputs without types."""
        text = (
            f'<ir_version: 8, opset_import: ["": {self.opset}, {self.domains}]>\n'
            f"g ({self.inputs}) => ({', '.join('float ' + o for o in self.outputs.split())}) {{\n"
            f"{self.body}\n}}\n{self.functions}"
        )
        model = onnx.parser.parse_model(text)
        for output in model.graph.output:
            output.ClearField("type")
        for name, value in self.constants.items():
            array = np.asarray(value)
            if array.dtype == np.float64:
                array = array.astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        return model


def _i8(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    # Of 7 bits: on x86 without VNNI, ONNX Runtime cuts sums of two larger products at 16 bits.
    return np.random.default_rng(seed).integers(-64, 64, shape, np.int8)


def _u8(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def _f(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def _ints(*items: int) -> np.ndarray[Any, Any]:
    return np.asarray(items, np.int64)


X4 = "float[1,3,7,9] x"
NONE: dict[str, Any] = {}

_RESIZE = [
    TextCase(
        f"resize_{mode}_{coordinates}_{scale}",
        X4,
        "y",
        f'y = Resize <mode="{mode}", coordinate_transformation_mode="{coordinates}"> (x, roi, s)',
        13,
        {"roi": _f(0), "s": [1.0, 1.0, scale, scale]},
    )
    for mode in ("nearest", "linear", "cubic")
    for coordinates in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    for scale in (0.6, 2.0, 2.5)
]

_OLD_FORMS = [
    TextCase("upsample_7", X4, "y",
             'y = Upsample <mode="nearest", scales=[1.0,1.0,2.0,3.0]> (x)', 7),
    TextCase("upsample_7_linear", X4, "y",
             'y = Upsample <mode="linear", scales=[1.0,1.0,1.5,2.5]> (x)', 7),
    TextCase("upsample_9", X4, "y", 'y = Upsample <mode="linear"> (x, s)', 9,
             {"s": [1.0, 1.0, 2.0, 2.5]}),
    TextCase("resize_10", X4, "y", 'y = Resize <mode="linear"> (x, s)', 10,
             {"s": [1.0, 1.0, 2.5, 0.7]}),
    TextCase("resize_11_empty_scales", X4, "y", 'y = Resize <mode="linear"> (x, r, e, s)', 11,
             {"r": _f(0), "e": _f(0), "s": _ints(1, 3, 10, 5)}),
    TextCase("resize_18_axes", X4, "y",
             'y = Resize <mode="linear", axes=[3, 2]> (x, , , s)', 18, {"s": _ints(5, 10)}),
    TextCase("resize_18_antialias", X4, "y",
             'y = Resize <mode="cubic", antialias=1> (x, , , s)', 18, {"s": _ints(1, 3, 3, 4)}),
    TextCase("resize_18_not_larger", X4, "y",
             'y = Resize <mode="linear", axes=[2,3], keep_aspect_ratio_policy="not_larger">'
             " (x, , , s)", 18, {"s": _ints(10, 10)}),
    TextCase("slice_1", X4, "y", "y = Slice <axes=[2,3], starts=[1,-4], ends=[100,-1]> (x)", 7),
    TextCase("slice_negative_step", X4, "y", "y = Slice (x, s, e, a, t)", 13,
             {"s": _ints(-1, 5), "e": _ints(-100, 0), "a": _ints(3, 2), "t": _ints(-2, -1)}),
    TextCase("slice_empty_negative_step", X4, "y",
             "z = Slice (x, s, e, a, t)\n y = Concat <axis=3> (z, x)", 13,
             {"s": _ints(1), "e": _ints(5), "a": _ints(3), "t": _ints(-1)}),
    TextCase("pad_2_reflect", X4, "y", 'y = Pad <mode="reflect", pads=[0,0,2,1,0,0,3,2]> (x)', 7),
    TextCase("pad_2_edge", X4, "y", 'y = Pad <mode="edge", pads=[0,0,2,1,0,0,3,2]> (x)', 7),
    TextCase("pad_negative", X4, "y", "y = Pad (x, p, v)", 13,
             {"p": _ints(0, 0, -2, 1, 0, 1, 3, -2), "v": np.float32(1.5)}),
    TextCase("pad_wrap", X4, "y", 'y = Pad <mode="wrap"> (x, p)', 19,
             {"p": _ints(0, 0, 2, 1, 0, 0, 3, 2)}),
    TextCase("pad_18_axes", X4, "y", "y = Pad (x, p, , a)", 18,
             {"p": _ints(1, 2, 3, 0), "a": _ints(-1, 2)}),
    TextCase("clip_6", X4, "y", "y = Clip <min=-0.5, max=0.3> (x)", 7),
    TextCase("clip_only_min", X4, "y", "y = Clip (x, m)", 13, {"m": np.float32(0.1)}),
    TextCase("softmax_11", X4, "y", "y = Softmax <axis=2> (x)", 11),
    TextCase("softmax_11_negative", X4, "y", "y = Softmax <axis=-1> (x)", 11),
    TextCase("logsoftmax_7", X4, "y", "y = LogSoftmax (x)", 7),
    TextCase("hardmax_11", X4, "y", "y = Hardmax <axis=1> (x)", 11),
    TextCase("hardmax_13", X4, "y", "y = Hardmax <axis=-2> (x)", 13),
    TextCase("split_2", X4, "a b", "a, b = Split <axis=3, split=[4,5]> (x)", 7),
    TextCase("split_18_uneven", X4, "a b", "a, b = Split <axis=3, num_outputs=2> (x)", 18),
    TextCase("squeeze_1", "float[1,3,1,2] x", "y", "y = Squeeze <axes=[0,-2]> (x)", 11),
    TextCase("unsqueeze_1", "float[3,2] x", "y", "y = Unsqueeze <axes=[0,-1]> (x)", 11),
    TextCase("topk_1", "float[2,9] x", "v i", "v, i = TopK <k=3> (x)", 7),
    TextCase("topk_smallest", "float[5,4] x", "v i",
             "v, i = TopK <axis=0, largest=0> (x, k)", 13, {"k": _ints(2)}),
    TextCase("topk_ties", "int32[40] x", "v i", "v, i = TopK (x, k)", 13, {"k": _ints(20)}),
    TextCase("topk_long", "float[1,9000] x", "v i", "v, i = TopK (x, k)", 13, {"k": _ints(5)}),
    TextCase("reduce_sum_11", X4, "y", "y = ReduceSum <axes=[1,-1], keepdims=0> (x)", 11),
    TextCase("reduce_noop", X4, "y", "y = ReduceSum <noop_with_empty_axes=1> (x)", 13),
    TextCase("batchnorm_7", X4, "y", "y = BatchNormalization <epsilon=0.01> (x, s, b, m, v)", 7,
             {"s": _f(3), "b": _f(3, seed=1), "m": _f(3, seed=2), "v": np.abs(_f(3, seed=3))}),
    TextCase("prelu_7", X4, "y", "y = PRelu (x, s)", 7, {"s": _f(3, 1, 1)}),
    TextCase("gemm_7", "float[4,3] x", "y",
             "y = Gemm <alpha=0.5, beta=2.0, transA=1, transB=1> (x, w, c)", 7,
             {"w": _f(5, 4), "c": _f(5)}),
    TextCase("onehot_9", "int64[4] x", "y", "y = OneHot <axis=0> (x, d, v)", 9,
             {"d": _ints(5), "v": [2.0, 7.0]}),
    TextCase("onehot_negative", "int64[2,3] x", "y",
             "n = Neg (x)\n y = OneHot (n, d, v)", 11, {"d": _ints(10), "v": [0.0, 1.0]}),
    TextCase("scatter_9", "float[3,4] x", "y", "y = Scatter <axis=1> (x, i, u)", 9,
             {"i": np.asarray([[0, 3], [1, 2], [2, 0]]), "u": _f(3, 2)}),
    TextCase("dropout_7_mask", X4, "y m", "y, m = Dropout <ratio=0.4> (x)", 10),
    TextCase("constant_forms", "float[3] x", "y",
             "a = Constant <value_float=1.5> ()\n b = Constant <value_floats=[1.0,2.0,3.0]> ()\n"
             "c = Add (x, a)\n y = Mul (c, b)", 13),
    TextCase("pow_mixed", "float[2,3] x", "y", "y = Pow (x, e)", 15, {"e": np.int32(3)}),
    TextCase("pow_integers", "int32[2,3] x", "y", "y = Pow (x, e)", 15, {"e": np.float32(2)}),
    TextCase("pow_table", "float[2,3] x", "y", "a = Abs (x)\n y = Pow (a, e)", 15,
             {"e": [0.5, 2.0, -1.5]}),
]  # fmt: skip

_VALUES = [
    TextCase("max_nan", "float[6] x", "y", "s = Sqrt (x)\n y = Max (s, c, x)", 13,
             {"c": np.float32(0.5)}),
    TextCase("min_nan", "float[6] x", "y", "s = Sqrt (x)\n y = Min (s, c)", 13,
             {"c": np.float32(0.5)}),
    TextCase("nan_passes", "float[20] x", "a b c d",
             "s = Sqrt (x)\n a = Relu (s)\n b = Clip (s, l, h)\n c = Sign (s)\n"
             "d = HardSwish (s)", 16, {"l": np.float32(0.1), "h": np.float32(0.9)}),
    TextCase("large_arguments", "float[20] x", "a b c d e f",
             "s = Mul (x, k)\n a = Exp (s)\n b = Sigmoid (s)\n c = Tanh (s)\n d = Erf (s)\n"
             "e = Softplus (s)\n f = ReduceLogSumExp <axes=[0]> (s)", 13,
             {"k": np.float32(100)}),
    TextCase("reduce_max_infinite", "float[2,5] x", "y",
             "s = Mul (x, n)\n l = Log (s)\n y = ReduceMax <axes=[1]> (l)", 13,
             {"n": np.float32(0)}),
    TextCase("argmax_infinite", "float[2,5] x", "y",
             "s = Mul (x, n)\n a = Abs (s)\n l = Log (a)\n y = ArgMax <axis=1> (l)", 13,
             {"n": np.float32(0)}),
    TextCase("argmax_last", "int32[3,12] x", "y",
             "y = ArgMax <axis=1, select_last_index=1> (x)", 13),
    TextCase("matmul_empty", "float[2,0] x", "y", "y = MatMul (x, w)", 13, {"w": _f(0, 3)}),
    TextCase("reduce_empty", "float[2,0,3] x", "y", "y = ReduceSum <keepdims=0> (x, a)", 13,
             {"a": _ints(1)}),
    TextCase("cast_negative_to_unsigned", "float[20] x", "y",
             "z = Mul (x, c)\n y = Cast <to=2> (z)", 13, {"c": np.float32(40)}),
    TextCase("cast_to_bool", "float[20] x", "y", "f = Round (x)\n y = Cast <to=9> (f)", 13),
    TextCase("div_integers", "int32[20] x", "y", "n = Sub (x, c)\n y = Div (n, d)", 13,
             {"c": np.int32(5), "d": np.int32(3)}),
    TextCase("mod_integers", "int64[20] x", "y", "n = Sub (x, c)\n y = Mod (n, d)", 13,
             {"c": np.int64(5), "d": np.int64(3)}),
    TextCase("mod_floats", "float[20] x", "y", "y = Mod <fmod=1> (x, d)", 13,
             {"d": np.float32(0.7)}),
    TextCase("round_halves", "float[7] x", "y", "y = Round (h)", 13,
             {"h": [0.5, 1.5, 2.5, -0.5, -1.5, 0.0, 3.49]}),
    TextCase("double", "double[3,4] x", "y", "a = Tanh (x)\n y = ReduceMean <axes=[0]> (a)", 13),
    TextCase("half", "float16[3,64] x", "y", "y = ReduceSum (x, a)", 13, {"a": _ints(1)}),
    TextCase("many_elementwise", "float[3,40] x", "y",
             "a = Softplus (x)\n b = Selu (a)\n c = Elu <alpha=0.7> (x)\n d = Mul (b, c)\n"
             "e = Softsign (d)\n f = HardSwish (x)\n g = Celu <alpha=2.0> (x)\n"
             "h = ThresholdedRelu <alpha=0.3> (x)\n i = Shrink <bias=0.1, lambd=0.2> (x)\n"
             "y = Sum (a, b, c, d, e, f, g, h, i)", 16),
    TextCase("trigonometry", "float[3,40] x", "y",
             "t = Tanh (x)\n a = Asin (t)\n b = Acos (t)\n c = Atanh (t)\n d = Asinh (x)\n"
             "e = Cosh (x)\n f = Acosh (e)\n g = Sinh (x)\n h = Tan (t)\n i = Erf (x)\n"
             "j = Atan (x)\n y = Mean (a, b, c, d, e, f, g, h, i, j)", 16),
    TextCase("input_is_output", "float[3] x", "x y", "y = Identity (x)", 13),
    TextCase("outputs_twice", "float[3] x", "y z", "y = Neg (x)\n z = Identity (y)", 13),
    TextCase("constant_output", "float[3] x", "y z", "y = Neg (x)\n z = Identity (c)", 13,
             {"c": _f(2, 2)}),
    TextCase("names", "float[3] x", "y",
             "n1 = Neg (x)\n N1 = Abs (n1)\n int = Exp (N1)\n y = Add (int, n1)", 13),
    TextCase("lpnorm_zero", "float[2,4] x", "y",
             "z = Mul (x, m)\n y = LpNormalization <axis=1, p=1> (z)", 13, {"m": [[0.0], [1.0]]}),
]  # fmt: skip

_SPATIAL = [
    TextCase("conv_same_upper", X4, "y",
             'y = Conv <auto_pad="SAME_UPPER", strides=[2,2]> (x, w)', 13, {"w": _f(4, 3, 3, 2)}),
    TextCase("conv_same_lower", X4, "y",
             'y = Conv <auto_pad="SAME_LOWER", strides=[2,2]> (x, w)', 13, {"w": _f(4, 3, 3, 2)}),
    TextCase("conv_1d", "float[2,4,11] x", "y",
             "y = Conv <group=2, pads=[2,1], dilations=[2]> (x, w, b)", 13,
             {"w": _f(6, 2, 3), "b": _f(6)}),
    TextCase("conv_3d", "float[1,2,5,6,7] x", "y", "y = Conv <pads=[1,0,1,1,2,0]> (x, w)", 13,
             {"w": _f(3, 2, 3, 3, 3)}),
    TextCase("conv_batchnorm", X4, "y",
             "c = Conv <group=1> (x, w, b)\n n = BatchNormalization (c, s, t, m, v)\n"
             "y = Relu (n)", 13,
             {"w": _f(4, 3, 3, 3), "b": _f(4), "s": _f(4, seed=1), "t": _f(4, seed=2),
              "m": _f(4, seed=3), "v": np.abs(_f(4, seed=4)) + 0.1}),
    TextCase("conv_transpose_batchnorm", "float[1,4,5,5] x", "y",
             "c = ConvTranspose <group=2, strides=[2,2]> (x, w)\n"
             "n = BatchNormalization (c, s, t, m, v)\n y = Relu (n)", 13,
             {"w": _f(4, 3, 3, 3), "s": _f(6, seed=1), "t": _f(6, seed=2), "m": _f(6, seed=3),
              "v": np.abs(_f(6, seed=4)) + 0.1}),
    TextCase("conv_runtime_weight", "float[1,2,6,6] x, float[3,2,3,3] w", "y",
             "y = Conv (x, w)", 13),
    TextCase("conv_transpose_output_shape", X4, "y",
             "y = ConvTranspose <strides=[2,2], output_shape=[15,20]> (x, w)", 13,
             {"w": _f(3, 2, 3, 3)}),
    TextCase("conv_transpose_odd_output_shape", X4, "y",
             "y = ConvTranspose <strides=[3,2], output_shape=[22,20]> (x, w)", 13,
             {"w": _f(3, 2, 3, 3)}),
    TextCase("conv_transpose_same", X4, "y",
             'y = ConvTranspose <strides=[2,3], auto_pad="SAME_UPPER"> (x, w, b)', 13,
             {"w": _f(3, 2, 3, 3), "b": _f(2)}),
    TextCase("conv_transpose_output_padding", X4, "y",
             "y = ConvTranspose <strides=[3,3], output_padding=[2,1], pads=[1,1,1,1]> (x, w)", 13,
             {"w": _f(3, 2, 3, 3)}),
    TextCase("conv_transpose_wide_pads", X4, "y",
             "y = ConvTranspose <strides=[2,2], pads=[3,3,3,3]> (x, w, b)", 13,
             {"w": _f(3, 2, 3, 3), "b": _f(2)}),
    TextCase("conv_transpose_1d", "float[2,4,9] x", "y",
             "y = ConvTranspose <strides=[3], group=2, dilations=[2], pads=[1,2]> (x, w)", 13,
             {"w": _f(4, 3, 4)}),
    TextCase("maxpool_indices", X4, "y i",
             "y, i = MaxPool <kernel_shape=[3,2], strides=[2,2], pads=[1,0,1,1]> (x)", 13),
    TextCase("maxpool_indices_column", X4, "y i",
             "y, i = MaxPool <kernel_shape=[2,2], strides=[2,2], storage_order=1> (x)", 13),
    TextCase("maxpool_ceil_dilated", X4, "y",
             "y = MaxPool <kernel_shape=[2,2], strides=[3,3], dilations=[2,2], ceil_mode=1> (x)",
             13),
    TextCase("maxpool_uint8", "uint8[1,2,6,6] x", "y",
             "y = MaxPool <kernel_shape=[3,3], pads=[1,1,1,1]> (x)", 13),
    TextCase("avgpool_ceil_counted", X4, "y",
             "y = AveragePool <kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1,"
             " count_include_pad=1> (x)", 13),
    TextCase("avgpool_ceil", X4, "y",
             "y = AveragePool <kernel_shape=[3,2], strides=[2,2], pads=[1,0,0,1], ceil_mode=1> (x)",
             13),
    TextCase("avgpool_dilated", X4, "y",
             "y = AveragePool <kernel_shape=[2,2], dilations=[2,3], pads=[1,1,1,1]> (x)", 19),
    TextCase("avgpool_1d_same", "float[1,2,11] x", "y",
             'y = AveragePool <kernel_shape=[4], strides=[3], auto_pad="SAME_LOWER"> (x)', 13),
    TextCase("lppool", X4, "y", "y = LpPool <kernel_shape=[2,2], p=3, strides=[2,2]> (x)", 11),
    TextCase("global_pools", X4, "a b c",
             "a = GlobalAveragePool (x)\n b = GlobalMaxPool (x)\n c = GlobalLpPool <p=2> (x)", 13),
    TextCase("lrn", "float[1,6,4,4] x", "y", "y = LRN <size=5, alpha=0.3, beta=0.6> (x)", 13),
    TextCase("instance_norm", X4, "y", "y = InstanceNormalization (x, s, b)", 13,
             {"s": _f(3), "b": _f(3, seed=1)}),
    TextCase("group_norm_18", "float[2,6,4,4] x", "y",
             "y = GroupNormalization <num_groups=3> (x, s, b)", 18,
             {"s": _f(3), "b": _f(3, seed=1)}),
    TextCase("group_norm_21", "float[2,6,4,4] x", "y",
             "y = GroupNormalization <num_groups=3> (x, s, b)", 21,
             {"s": _f(6), "b": _f(6, seed=1)}),
    TextCase("layer_norm_outputs", "float[2,5,8] x", "y m d",
             "y, m, d = LayerNormalization <axis=1> (x, s, b)", 17,
             {"s": _f(5, 8), "b": _f(5, 8, seed=1)}),
    TextCase("depth_to_space_crd", "float[1,12,3,2] x", "y",
             'y = DepthToSpace <blocksize=2, mode="CRD"> (x)', 13),
    TextCase("space_to_depth", "float[1,3,4,6] x", "y", "y = SpaceToDepth <blocksize=2> (x)", 13),
    *(TextCase(f"grid_sample_{mode}_{padding}_{corners}", "float[2,3,5,6] x, float[2,4,3,2] g", "y",
               f'y = GridSample <mode="{mode}", padding_mode="{padding}",'
               f" align_corners={corners}> (x, g)", 16)
      for mode in ("bilinear", "nearest", "bicubic")
      for padding in ("zeros", "border", "reflection") for corners in (0, 1)),
    *(TextCase(f"roi_align_{opset}_{mode}", "float[2,3,9,9] x", "y",
               f'y = RoiAlign <output_height=2, output_width=3, sampling_ratio=2, mode="{mode}",'
               " spatial_scale=0.5> (x, r, i)", opset,
               {"r": np.asarray([[0, 1, 9, 12], [3.5, 2, 17, 16.5], [-3, -3, 2, 2]], np.float32),
                "i": _ints(0, 1, 1)})
      for opset in (10, 16) for mode in ("avg", "max")),
    TextCase("max_unpool", "float[1,1,4,4] x", "y",
             "p, i = MaxPool <kernel_shape=[2,2], strides=[2,2]> (x)\n"
             "y = MaxUnpool <kernel_shape=[2,2], strides=[2,2]> (p, i)", 11),
    TextCase("col2im", "float[1,18,20] x", "y", "y = Col2Im <pads=[0,1,0,1]> (x, s, b)", 18,
             {"s": _ints(6, 5), "b": _ints(3, 3)}),
]  # fmt: skip

_INDEX = [
    TextCase("gather_negative", "float[4,5] x, int64[2,2] i", "y",
             "n = Sub (i, c)\n y = Gather <axis=1> (x, n)", 13, {"c": _ints(5)}),
    TextCase("gather_nd_batch", "float[2,3,4] x", "y", "y = GatherND <batch_dims=1> (x, i)", 13,
             {"i": np.asarray([[[1], [-1]], [[0], [2]]])}),
    TextCase("scatter_nd_add", "float[4,3] x", "y", 'y = ScatterND <reduction="add"> (x, i, u)', 16,
             {"i": np.asarray([[1], [-1], [1]]), "u": _f(3, 3)}),
    TextCase("scatter_elements_max", "float[3,4] x", "y",
             'y = ScatterElements <axis=1, reduction="max"> (x, i, u)', 18,
             {"i": np.asarray([[0, 0], [1, -1], [2, 0]]), "u": _f(3, 2)}),
    TextCase("einsum_batch", "float[2,3,4] x, float[2,4,5] y", "z",
             'z = Einsum <equation="bij,bjk->bki"> (x, y)', 13),
    TextCase("einsum_trace", "float[3,3,2] x", "z", 'z = Einsum <equation="iik->k"> (x)', 13),
    TextCase("einsum_ellipsis", "float[2,3,4] x, float[4,5] y", "z",
             'z = Einsum <equation="...j,jk->...k"> (x, y)', 13),
    TextCase("einsum_three", "float[2,3] x, float[3,4] y, float[4,2] w", "z",
             'z = Einsum <equation="ij,jk,kl->il"> (x, y, w)', 13),
    TextCase("reverse_sequence", "float[4,3,2] x, int64[3] n", "y",
             "o = Min (n, f)\n p = Max (o, e)\n"
             "y = ReverseSequence <time_axis=0, batch_axis=1> (x, p)", 13,
             {"f": _ints(4), "e": _ints(1)}),
    TextCase("cumsum_reverse_exclusive", "float[3,5] x", "y",
             "y = CumSum <reverse=1, exclusive=1> (x, a)", 13, {"a": np.asarray(1, np.int32)}),
    TextCase("trilu", "float[2,4,5] x", "y", "y = Trilu <upper=0> (x, k)", 14, {"k": _ints(-1)}),
    TextCase("eye_and_range", "float[3,4] x", "y",
             "e = EyeLike <k=1, dtype=1> (x)\n r = Range (a, b, c)\n s = Add (e, r)\n"
             "y = Add (s, x)", 13, {"a": np.float32(1), "b": np.float32(9), "c": np.float32(2)}),
    TextCase("shape_chain", "float[2,3,4] x", "y",
             "s = Shape (x)\n f = Cast <to=1> (s)\n h = Div (f, t)\n i = Cast <to=7> (h)\n"
             "g = Slice (i, b, e)\n c = Concat <axis=0> (g, m)\n y = Reshape (x, c)", 13,
             {"t": np.float32(1), "b": _ints(0), "e": _ints(1), "m": _ints(-1)}),
    TextCase("compress_constant", "float[3,4] x", "y", "y = Compress <axis=1> (x, c)", 13,
             {"c": np.asarray([True, False, True])}),
    TextCase("non_zero_constant", "float[3,4] x", "y",
             "n = NonZero (c)\n t = Transpose (n)\n y = GatherND (x, t)", 13,
             {"c": np.asarray([[1, 0, 1, 0], [0, 1, 0, 0], [1, 1, 1, 1]], np.int32)}),
    TextCase("constant_of_shape", "float[2,3] x", "y",
             "s = Shape (x)\n c = ConstantOfShape <value=float[1] {2.5}> (s)\n y = Add (x, c)", 13),
    TextCase("dft", "float[2,10,1] x", "y", "y = DFT <axis=1, onesided=1> (x)", 17),
    TextCase("stft", "float[1,32,1] x", "y", "y = STFT (x, s, w)", 17,
             {"s": np.int64(8), "w": np.hanning(16).astype(np.float32)}),
    TextCase("det", "float[2,3,3] x", "y", "y = Det (x)", 13),
]  # fmt: skip


def _recurrent(kind: str, direction: str, extra: str = "", more: str = "", opset: int = 14,
               **changes: Any) -> TextCase:  # fmt: skip
    """A layer of 5 steps, batch 2, 3 inputs, 4 hidden."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    d = 2 if direction == "bidirectional" else 1
    constants: dict[str, Any] = {
        "w": _f(d, gates * 4, 3, scale=0.5),
        "r": _f(d, gates * 4, 4, seed=1, scale=0.5),
        "b": _f(d, gates * 8, seed=2, scale=0.5),
    }
    constants |= changes
    outputs = "y h c" if kind == "LSTM" else "y h"
    inputs = "x, w, r, b" + more
    shape = "2,5,3" if "layout=1" in extra else "5,2,3"
    return TextCase(
        f"{kind.lower()}_{direction}{'_' if extra or more else ''}"
        + "".join(c if c.isalnum() else "_" for c in extra + more),
        f"float[{shape}] x",
        outputs,
        f"{outputs.replace(' ', ', ')} = {kind}"
        f'<hidden_size=4, direction="{direction}"{extra}> ({inputs})',
        opset,
        constants,
    )


_STATE = {"h0": _f(1, 2, 4, seed=5), "c0": _f(1, 2, 4, seed=6)}
_RECURRENT = [
    *(_recurrent(k, d) for k in ("LSTM", "GRU", "RNN")
      for d in ("forward", "reverse", "bidirectional")),
    *(_recurrent(k, "bidirectional", more=", n", n=np.asarray([3, 5], np.int32))
      for k in ("LSTM", "GRU", "RNN")),
    _recurrent("LSTM", "forward", more=", , h0, c0", **_STATE),
    _recurrent("LSTM", "forward", more=", , h0, c0, p", p=_f(1, 12, seed=7), **_STATE),
    _recurrent("LSTM", "forward", ", input_forget=1, clip=0.3"),
    _recurrent("LSTM", "forward", ', activations=["HardSigmoid","Relu","Softsign"],'
               " activation_alpha=[0.3], activation_beta=[0.4]"),
    _recurrent("GRU", "forward", ", linear_before_reset=1"),
    _recurrent("GRU", "reverse", ", linear_before_reset=1, clip=0.4", more=", , h0",
               h0=_STATE["h0"]),
    _recurrent("GRU", "forward", ', activations=["Sigmoid","LeakyRelu"], activation_alpha=[0.2]'),
    _recurrent("RNN", "forward", ', activations=["Affine"], activation_alpha=[0.5],'
               " activation_beta=[0.1]", opset=7),
]  # fmt: skip

_QUANTISED = [
    TextCase("quantize", "float[2,3,4] x", "y", "y = QuantizeLinear (x, s, z)", 13,
             {"s": np.float32(0.013), "z": np.uint8(131)}),
    TextCase("quantize_axis", "float[2,3,4] x", "y", "y = QuantizeLinear <axis=1> (x, s, z)", 13,
             {"s": [0.1, 0.02, 0.3], "z": np.asarray([1, -5, 0], np.int8)}),
    TextCase("dequantize_axis", "int8[2,3,4] x", "y", "y = DequantizeLinear <axis=-1> (x, s, z)",
             13, {"s": [0.1, 0.02, 0.3, 1.0], "z": np.asarray([1, -5, 0, 7], np.int8)}),
    TextCase("dequantize_int32", "int32[2,3] x", "y", "y = DequantizeLinear (x, s)", 13,
             {"s": np.float32(0.1)}),
    TextCase("dynamic_quantize", "float[3,7] x", "y s z",
             "y, s, z = DynamicQuantizeLinear (x)", 13),
    TextCase("conv_integer", "uint8[1,3,6,6] x", "y",
             "y = ConvInteger <pads=[1,1,1,1]> (x, w, z, v)",
             13, {"w": _i8(4, 3, 3, 3), "z": np.uint8(120), "v": np.int8(3)}),
    TextCase("matmul_integer", "uint8[4,6] x", "y", "y = MatMulInteger (x, w, z, v)", 13,
             {"w": _i8(6, 5), "z": np.uint8(120), "v": np.int8(-3)}),
    TextCase("qlinear_conv", "uint8[1,3,6,6] x", "y",
             "y = QLinearConv <strides=[2,2], pads=[1,1,1,1]> (x, a, b, w, c, d, e, f, g)", 13,
             {"a": np.float32(0.02), "b": np.uint8(128), "w": _i8(4, 3, 3, 3),
              "c": [0.01, 0.02, 0.03, 0.04], "d": np.zeros(4, np.int8), "e": np.float32(0.5),
              "f": np.uint8(100), "g": np.asarray([100, -200, 300, 5], np.int32)}),
    TextCase("qlinear_matmul", "uint8[4,6] x", "y",
             "y = QLinearMatMul (x, a, b, w, c, d, e, f)", 13,
             {"a": np.float32(0.02), "b": np.uint8(128), "w": _u8(6, 5), "c": np.float32(0.01),
              "d": np.uint8(114), "e": np.float32(0.2), "f": np.uint8(90)}),
    TextCase("qdq_conv", X4, "y",
             "q = QuantizeLinear (x, s, z)\n d = DequantizeLinear (q, s, z)\n"
             "v = DequantizeLinear <axis=0> (w, t, u)\n c = Conv (d, v)\n"
             "p = QuantizeLinear (c, e, z)\n y = DequantizeLinear (p, e, z)", 13,
             {"s": np.float32(0.03), "z": np.int8(4), "w": _i8(4, 3, 3, 3),
              "t": [0.01, 0.02, 0.005, 0.01], "u": np.zeros(4, np.int8), "e": np.float32(0.25)}),
    TextCase("qlinear_add", "uint8[2,3] x, uint8[2,3] w", "y",
             "y = com.microsoft.QLinearAdd (x, a, b, w, c, d, e, f)", 13,
             {"a": np.float32(0.02), "b": np.uint8(128), "c": np.float32(0.05), "d": np.uint8(9),
              "e": np.float32(0.1), "f": np.uint8(90)}),
]  # fmt: skip

_MICROSOFT = [
    TextCase("gelu_bias", "float[2,8] x", "y", "y = com.microsoft.BiasGelu (x, b)", 13,
             {"b": _f(8)}),
    TextCase("gelu_fast", "float[2,8] x", "y", "y = com.microsoft.FastGelu (x)", 13),
    TextCase("gelu_quick", "float[2,8] x", "y", "y = com.microsoft.QuickGelu <alpha=1.5> (x)", 13),
    TextCase("gelu", "float[2,8] x", "y", "y = com.microsoft.Gelu (x)", 13),
    TextCase("gelu_20", "float[2,8] x", "y", 'y = Gelu <approximate="tanh"> (x)', 20),
    TextCase("fused_matmul", "float[2,4,3] x", "y",
             "y = com.microsoft.FusedMatMul <alpha=0.3, transA=1> (x, w)", 13, {"w": _f(2, 4, 5)}),
    TextCase("fused_conv", X4, "y",
             'y = com.microsoft.FusedConv <activation="LeakyRelu", activation_params=[0.2]> (x, w)',
             13, {"w": _f(4, 3, 3, 3)}),
    TextCase("skip_layer_norm", "float[2,3,8] x, float[2,3,8] s", "y",
             "y = com.microsoft.SkipLayerNormalization <epsilon=0.001> (x, s, g, b, c)", 13,
             {"g": _f(8), "b": _f(8, seed=1), "c": _f(8, seed=2)}),
    TextCase("simplified_layer_norm", "float[2,3,8] x", "y",
             "y = SimplifiedLayerNormalization <axis=-1, epsilon=0.001> (x, g)", 13, {"g": _f(8)}),
    TextCase("attention", "float[2,5,8] x, int32[2,5] m", "y",
             "n = Min (m, o)\n y = com.microsoft.Attention <num_heads=2> (x, w, b, n)", 13,
             {"w": _f(8, 24), "b": _f(24), "o": np.int32(1)}),
    TextCase("attention_causal", "float[2,5,8] x", "y",
             "y = com.microsoft.Attention <num_heads=4, unidirectional=1> (x, w, b)", 13,
             {"w": _f(8, 24), "b": _f(24)}),
    TextCase("multi_head_attention", "float[2,5,8] q, float[2,6,8] k, float[2,6,8] v", "y",
             "y = com.microsoft.MultiHeadAttention <num_heads=2> (q, k, v, b)", 13, {"b": _f(24)}),
]  # fmt: skip

_CONTROL = [
    TextCase("if_runtime", "float[3] x, bool c", "y",
             "y = If (c) <then_branch = t () => (float[3] a) { a = Neg (x) },"
             " else_branch = e () => (float[3] b) { b = Abs (x) }>", 13),
    TextCase("if_constant", "float[3] x", "y",
             "y = If (c) <then_branch = t () => (float[3] a) { a = Neg (x) },"
             " else_branch = e () => (float[1] b) { b = ReduceSum (x) }>", 13,
             {"c": np.asarray(False)}),
    TextCase("loop_fixed", "float[3] x", "y s",
             "y, s = Loop (n, t, x) <body = b (int64 i, bool c, float[3] v) =>"
             " (bool d, float[3] w, float[3] r) { d = Identity (c)\n f = Cast <to=1> (i)\n"
             " w = Add (v, f)\n r = Mul (w, v) }>", 13, {"n": np.int64(4), "t": np.asarray(True)}),
    TextCase("loop_stops_at_run_time", "float[1] x", "y",
             "y = Loop (n, t, x) <body = b (int64 i, bool c, float[1] v) =>"
             " (bool d, float[1] w) { w = Add (v, o)\n l = Less (w, m)\n"
             " d = Squeeze (l) }>", 13,
             {"n": np.int64(6), "t": np.asarray(True), "o": [0.7], "m": [1.5]}),
    TextCase("scan", "float[4,3] x", "y z",
             "y, z = Scan <num_scan_inputs=1, scan_output_directions=[1], body = b"
             " (float[3] s, float[3] v) => (float[3] t, float[3] o)"
             " { t = Add (s, v)\n o = Mul (t, v) }> (i, x)", 13, {"i": np.zeros(3, np.float32)}),
    TextCase("sequence", "float[4,3] x", "y",
             "q = SplitToSequence <axis=0, keepdims=1> (x)\n a = SequenceAt (q, p)\n"
             "s = SequenceInsert (q, a)\n y = ConcatFromSequence <axis=1> (s)", 13,
             {"p": np.int64(-2)}),
    TextCase("local_function", "float[4,3] x", "y",
             "y = mine.twice <gain=1.5> (x)", 13, domains='"mine": 1',
             functions='<domain: "mine", opset_import: ["": 13]>\n'
             "twice <gain> (v) => (w) { g = Constant <value_float: float = @gain> ()\n"
             " u = Mul (v, g)\n w = Add (u, u) }"),
]  # fmt: skip

CASES: tuple[TextCase, ...] = (
    *_RESIZE, *_OLD_FORMS, *_VALUES, *_SPATIAL, *_INDEX, *_RECURRENT, *_QUANTISED, *_MICROSOFT,
    *_CONTROL,
)  # fmt: skip
