"""Graph-level layout: whole stretches of a network in channel blocks, weights packed beforehand.

A convolution is fast when one vector holds neighbouring output channels, so its tensors are kept as
[N, C/b, H*W, b] ("NCHWc", the pixels as one long row) with b the lanes of a vector. This pass walks
the graph once. It turns each convolution with constant weights into a tensor expression on blocked
tensors, lets blocked tensors flow through element-wise operators, pooling, means and concatenation,
and puts a transform only where an operator needs the plain layout. C is rounded up to a multiple of
b: the lanes beyond C hold numbers without meaning, which no operator mixes with the others.

Matrix products with constant weights get their weights packed for the vector unit as well.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import conv2d, conv2d_transpose, dense, pool, winograd
from edgesdk.schedules.blocks import (
    block_array,
    block_tensor,
    crop_columns,
    every_pixel,
    repeat_pixels,
    unblock_tensor,
)
from edgesdk.schedules.walk import GraphWalk, LayoutTensor, as_const, constant_of, type_of

if TYPE_CHECKING:
    import numpy as np

# One tensor in, one out, element by element.
_UNARY = {
    "abs", "negative", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "asinh", "acosh", "atanh", "sigmoid", "tanh", "erf", "floor", "ceil", "round",
    "sign", "logical_not", "isnan", "isinf", "bitwise_not", "nn.relu", "astype", "nn.leakyrelu",
    "clip", "nn.gelu", "nn.silu",
}  # fmt: skip
_BINARY = {
    "add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "equal", "not_equal",
    "greater", "less", "greater_equal", "less_equal", "logical_and", "logical_or", "logical_xor",
    "mod", "floor_mod", "floor_divide", "where",
}  # fmt: skip

# Dividing integers by the zeros in lanes beyond C would trap.
_DIVISIONS = {"relax.divide", "relax.mod", "relax.floor_mod", "relax.floor_divide"}

# What TVM may fuse with a kernel (its OpPatternKind): nothing, or element-wise operators behind it.
OPAQUE = 8
_EPILOGUE_ONLY = 4


def assign_layouts(
    module: Any, profile: TargetProfile, *, panels: dict[bytes, int] | None = None
) -> Any:
    """Returns `module` with `main` rewritten for the CPU or GPU of `profile`. Results differ by
    rounding only. A main without a single dataflow block is returned as it is.

    `panels` is one table for all shapes of a network: how wide the first of them packed each weight
    of a product, which the others then do as well, so that they share it.
    """
    from tvm import relax

    function = module["main"]
    blocks = function.body.blocks
    if len(blocks) != 1 or not isinstance(blocks[0], relax.DataflowBlock):
        return module
    if profile.gpu is not None:
        from edgesdk.schedules.gpu.layout import GpuRewriter

        return GpuRewriter(module, profile).run()
    from edgesdk.schedules.layout_int8 import IntegerRewriter

    rewriter = IntegerRewriter(module, profile)
    rewriter.panels = panels
    return rewriter.run()


class Rewriter(GraphWalk):
    """The rules for floats on a CPU, and for what follows a convolution on any processor."""

    def __init__(self, module: Any, profile: TargetProfile) -> None:
        super().__init__(module, profile)
        # The pixels that 1x1 convolutions with a stride read, by the handle of the tensor.
        self.met: dict[Any, Any] = {}
        self.panels: dict[bytes, int] | None = None  # see assign_layouts
        self.rules = {
            "relax.nn.conv2d": self._conv2d,
            "relax.nn.conv2d_transpose": self._conv2d_transpose,
            "relax.nn.max_pool2d": self._pool2d,
            "relax.nn.avg_pool2d": self._pool2d,
            "relax.mean": self._mean,
            "relax.concat": self._concat,
            "relax.matmul": self._matmul,
            "relax.reshape": self._repeat,
        }
        self.rules |= {f"relax.{name}": self._elementwise for name in _UNARY | _BINARY}

    def _conv2d(self, call: Any) -> LayoutTensor | None:
        config = self._conv2d_config(call)
        if config is None:
            return None
        data, weight = self._get(call.args[0]), constant_of(self._get(call.args[1]).plain)
        assert weight is not None
        if config.kind == "split groups":
            return self._split_groups(data, weight, config, data.dtype)
        config, weight = config.as_row(weight)
        # Few input channels (a picture): broadcasting them needs no blocks.
        plain = config.kind == "direct" and data.blocked is None and data.shape[1] < self.block
        source = data.plain if plain else self._blocked(data)
        convolve = partial(self._convolve, plain=plain)
        result = self._convolve_wider(source, weight, config, convolve)
        return LayoutTensor(type_of(call)[0], data.dtype, blocked=result)

    def _conv2d_config(self, call: Any, *, dtype: str = "float32") -> conv2d.Conv2d | None:
        """What `call` convolves, if it gives numbers of type `dtype` and its weights are constants
        in a layout that is known here."""
        data = self._get(call.args[0])
        weight = constant_of(self._get(call.args[1]).plain)
        attrs = call.attrs
        shape, found = type_of(call)
        if weight is None or shape is None or found != dtype or 0 in (*shape, *data.shape):
            return None
        if (attrs.data_layout, attrs.kernel_layout) != ("NCHW", "OIHW"):
            return None
        return conv2d.Conv2d(
            in_shape=data.shape,
            out_shape=shape,
            window=tuple(weight.shape[2:]),
            stride=_ints(attrs.strides),
            padding=_ints(attrs.padding),
            dilation=_ints(attrs.dilation),
            groups=int(attrs.groups),
            block=self.block,
        )

    def _convolve_wider(
        self, source: Any, weight: np.ndarray, config: Any, convolve: Callable[..., Any]
    ) -> Any:
        """`convolve` with as many columns as register tiles want; those beyond are cut off."""
        wider = conv2d.round_columns(config, self.profile)
        result = convolve(source, weight, wider)
        if wider == config:
            return result
        widths = {"wide": wider.out_shape[3], "width": config.out_shape[3]}
        return self._te(crop_columns, result, **widths, hint="crop")

    def _convolve(self, source: Any, weight: np.ndarray, config: Any, *, plain: bool) -> Any:
        from tvm import relax

        if not plain and config.skips_pixels:
            source, config = self._every_pixel(source, config)
        static = {"config": config, "plain_input": plain}
        if plain and type_of(source)[0] != config.in_shape:
            source = self.bb.emit(relax.op.reshape(source, config.in_shape))
        if config.kind != "depthwise" and (any(config.padding) or winograd.fits(config)):
            source = self._te(conv2d.pad_spatial, source, **static, hint="pad")
        if not plain and winograd.fits(config):
            return self._winograd(source, weight, config)
        packed = as_const(conv2d.pack_weight(weight, config, plain_input=plain))
        return self._te(conv2d.conv2d_nchwc, source, packed, **static, hint=f"conv2d_{config.kind}")

    def _every_pixel(self, source: Any, config: conv2d.Conv2d) -> tuple[Any, conv2d.Conv2d]:
        """The pixels that a 1x1 convolution meets, close together, and the convolution of those:
        each is read many times. Two convolutions of one tensor share them."""
        out_hw = config.out_shape[2:]
        key = (source.id_, config.stride, out_hw)
        if key not in self.met:
            self.met[key] = self._te(
                every_pixel,
                source,
                in_width=config.in_shape[3],
                stride=config.stride,
                out_hw=out_hw,
                hint="every_pixel",
            )
        close = replace(config, in_shape=(*config.in_shape[:2], *out_hw), stride=(1, 1))
        return self.met[key], close

    def _winograd(self, padded: Any, weight: np.ndarray, config: Any) -> Any:
        packed = as_const(winograd.pack_weight(weight, self.block))
        tiles = self._te(
            winograd.transform_input, padded, config=config, hint="winograd_input", pattern=OPAQUE
        )
        products = self._te(winograd.multiply, tiles, packed, hint="winograd_products")
        return self._te(
            winograd.transform_output,
            products,
            config=config,
            hint="winograd_output",
            pattern=_EPILOGUE_ONLY,
        )

    def _conv2d_transpose(self, call: Any) -> LayoutTensor | None:
        """A transposed convolution as a plain one that computes, for each pixel, the results that
        lie over it in a channel for each place; then they are spread out."""
        data = self._get(call.args[0])
        weight = constant_of(self._get(call.args[1]).plain)
        attrs = call.attrs
        shape, dtype = type_of(call)
        if weight is None or shape is None or dtype != "float32" or 0 in (*shape, *data.shape):
            return None
        if (
            (attrs.data_layout, attrs.kernel_layout) != ("NCHW", "IOHW")
            or int(attrs.groups) != 1
            or set(_ints(attrs.dilation)) != {1}
        ):
            return None
        strides, start = _ints(attrs.strides), _ints(attrs.padding)[:2]
        # Whole blocks of output channels for each place, or all places of few channels in a block.
        whole = weight.shape[1] >= self.block
        places = conv2d_transpose.phase_weights(weight, strides, self.block if whole else None)
        config = conv2d_transpose.plain_convolution(
            places, data.shape, shape, strides=strides, start=start, block=self.block
        )
        pixels = self._convolve(self._blocked(data), places, config, plain=False)
        static = {"shape": shape, "strides": strides, "start": start}
        static |= {"in_width": config.out_shape[3], "hint": "spread"}
        if whole:
            blocked = self._te(conv2d_transpose.spread_blocks, pixels, **static)
            return LayoutTensor(shape, dtype, blocked=blocked)
        plain = self._te(conv2d_transpose.spread_lanes, pixels, **static)
        return LayoutTensor(shape, dtype, plain=plain)

    def _split_groups(
        self,
        data: LayoutTensor,
        weight: np.ndarray,
        config: Any,
        dtype: str,
        convolve: Callable[..., Any] | None = None,
    ) -> LayoutTensor:
        """A grouped convolution whose groups do not fill blocks: each group is rounded up to whole
        blocks for it, and the plain layout comes out, since the lanes between groups are empty."""
        groups = config.groups
        source = self._te(
            block_tensor,
            self._plain_of(data),
            block=self.block,
            groups=groups,
            hint="block_groups",
        )
        rounded, wider = conv2d.round_groups(weight, config)
        convolve = convolve or partial(self._convolve, plain=False)
        result = convolve(source, wider, rounded)
        return LayoutTensor(
            config.out_shape,
            dtype,
            plain=self._te(
                unblock_tensor,
                result,
                shape=config.out_shape,
                groups=groups,
                hint="unblock_groups",
            ),
        )

    def _pool2d(self, call: Any) -> LayoutTensor | None:
        data = self._get(call.args[0])
        attrs = call.attrs
        if data.blocked is None or attrs.layout != "NCHW":
            return None
        shape, dtype = type_of(call)
        result = self._te(
            pool.pool2d_nchwc,
            data.blocked,
            in_hw=data.shape[2:],
            kind="max" if "max" in call.op.name else "avg",
            window=_ints(attrs.pool_size),
            stride=_ints(attrs.strides),
            padding=_ints(attrs.padding),
            dilation=_ints(attrs.dilation),
            out_hw=shape[2:],
            count_include_pad=bool(getattr(attrs, "count_include_pad", False)),
            hint="pool2d",
        )
        return LayoutTensor(shape, dtype, blocked=result)

    def _mean(self, call: Any) -> LayoutTensor | None:
        return self._mean_of(self._get(call.args[0]), call)

    def _mean_of(self, data: LayoutTensor, call: Any) -> LayoutTensor | None:
        from tvm import relax

        shape, dtype = type_of(call)
        if data.blocked is None or call.attrs.axis is None:
            return None
        axes = sorted(int(a) % 4 for a in call.attrs.axis)
        if axes != [2, 3]:
            return None
        n, c = data.shape[:2]
        mean = self._te(pool.global_mean_nchwc, data.blocked, hint="global_mean")
        value = LayoutTensor((n, c, 1, 1), dtype, blocked=mean)
        if call.attrs.keepdims:
            return value
        return LayoutTensor(
            shape, dtype, plain=self.bb.emit(relax.op.reshape(self._emit_unblocked(value), shape))
        )

    def _concat(self, call: Any) -> LayoutTensor | None:
        from tvm import relax

        if not isinstance(call.args[0], relax.Tuple):
            return None
        parts = [self._get(item) for item in call.args[0].fields]
        shape, dtype = type_of(call)
        if len(shape) != 4 or not any(p.blocked is not None for p in parts):
            return None
        axis = int(call.attrs.axis) % 4
        if axis == 3 or (axis == 1 and any(p.shape[1] % self.block for p in parts[:-1])):
            return None
        joined = relax.op.concat([self._blocked(p) for p in parts], axis)
        return LayoutTensor(shape, dtype, blocked=self.bb.emit(joined))

    def _elementwise(self, call: Any) -> LayoutTensor | None:
        parts = [self._get(a) for a in call.args]
        tensors = [p for p in parts if isinstance(p, LayoutTensor)]
        shape, dtype = type_of(call)
        if shape is None or len(shape) != 4 or not any(p.blocked is not None for p in tensors):
            return None
        if call.op.name in _DIVISIONS and not dtype.startswith("float"):
            return None
        arguments = []
        for part in parts:
            argument = self._broadcast(part, shape) if isinstance(part, LayoutTensor) else part
            if argument is None:
                return None
            arguments.append(argument)
        return LayoutTensor(shape, dtype, blocked=self._emit_call(call, arguments))

    def _broadcast(self, part: LayoutTensor, shape: tuple[int, ...]) -> Any:
        """An operand as one that combines with a blocked tensor of `shape`, or None."""
        from tvm import relax

        rank = len(part.shape)
        if rank > 4:
            return None
        n, c, h, w = full = (1,) * (4 - rank) + part.shape
        if (h, w) not in ((1, 1), shape[2:]):
            return None
        constant = constant_of(part.plain) if part.plain is not None else None
        if constant is not None and constant.size == 1:
            return as_const(constant.reshape(()))
        if c == shape[1] and c > 1:
            if constant is not None:
                return as_const(block_array(constant.reshape(full), self.block))
            return self._blocked(part) if rank == 4 else None
        if part.blocked is not None:
            return None
        # The same for all channels: broadcast over blocks and lanes.
        if constant is not None:
            return as_const(constant.reshape(n, 1, h * w, 1))
        return self.bb.emit(relax.op.reshape(part.plain, (n, 1, h * w, 1)))

    def _repeat(self, call: Any) -> LayoutTensor | None:
        """Upsampling by repetition along one axis: a reshape that ends, for the height,
        [N, C, H, W] -> [N, C, H, 1, W] -> broadcast to [N, C, H, sy, W] -> [N, C, sy*H, W]."""
        spread = self._bound(call.args[0], "relax.broadcast_to")
        apart = self._bound(spread.args[0], "relax.reshape") if spread is not None else None
        source = self._get(apart.args[0]) if apart is not None else None
        if not isinstance(source, LayoutTensor) or source.blocked is None:
            return None
        shape, dtype = type_of(call)
        single, wide = type_of(apart)[0], type_of(spread)[0]
        n, c, h, w = source.shape
        if len(wide) != 5:
            return None
        for sy, sx in ((wide[3], 1), (1, wide[4])):
            inserted = (
                ((n, c, h, 1, w), (n, c, h, sy, w))
                if sx == 1
                else ((n, c, h, w, 1), (n, c, h, w, sx))
            )
            if (single, wide) == inserted and shape == (n, c, h * sy, w * sx):
                repeated = self._te(
                    repeat_pixels, source.blocked, in_width=w, times=(sy, sx), hint="repeat"
                )
                return LayoutTensor(shape, dtype, blocked=repeated)
        return None

    def _matmul(self, call: Any) -> Any:
        data = self._get(call.args[0])
        weight = constant_of(self._get(call.args[1]).plain)
        shape, dtype = type_of(call)
        if weight is None or weight.ndim != 2 or dtype != "float32" or len(data.shape) < 2:
            return None
        if 0 in (*data.shape, *weight.shape):
            return None
        multiply = partial(self._multiply, weight=weight)
        return self._by_rows(self._plain(call.args[0]), shape, multiply)

    def _by_rows(self, source: Any, shape: tuple[int, ...], multiply: Callable[[Any], Any]) -> Any:
        """A product of `shape` by `multiply`, which takes [M, K] and returns [M, N]."""
        from tvm import relax

        given = type_of(source)[0]
        rows = math.prod(shape[:-1])
        if given != (rows, given[-1]):
            source = self.bb.emit(relax.op.reshape(source, (rows, given[-1])))
        product = multiply(source)
        if shape != (rows, shape[-1]):
            product = self.bb.emit(relax.op.reshape(product, shape))
        return product

    def _multiply(self, source: Any, weight: np.ndarray) -> Any:
        """[M, K] times [K, N]."""
        columns = weight.shape[1]
        width = self._panel_width(weight, type_of(source)[0][0])
        packed = as_const(dense.pack_weight(weight, width))
        return self._te(dense.dense_packed, source, packed, columns=columns, hint="dense")

    def _panel_width(self, weight: np.ndarray, rows: int) -> int:
        width = dense.panel_width(weight.shape[1], rows, self.profile)
        if self.panels is None:
            return width
        content = hashlib.blake2b(weight.tobytes(), digest_size=16)
        return self.panels.setdefault(content.digest(), width)


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in values)
