"""The layout pass for quantised networks: 8-bit integers are multiplied as they are stored.

The front end writes convolutions and matrix products of quantised tensors as ones of int32 numbers,
astype(data) - zero point, which is what they mean and what every target can compute. Here such an
operand is recognised, and on a CPU with an instruction for it the 8-bit numbers themselves are
summed, in the blocks of the other operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from edgesdk.schedules import conv2d, conv2d_int8, dense_int8
from edgesdk.schedules.blocks import block_tensor
from edgesdk.schedules.dot import DotProduct, find_dot
from edgesdk.schedules.layout import OPAQUE, Rewriter
from edgesdk.schedules.walk import LayoutTensor, as_const, constant_of, type_of

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class _Integers:
    """8-bit `data` less their zero point (an integer, or a scalar of the new graph), and the
    instruction that multiplies them with the weights at hand."""

    data: LayoutTensor
    zero: Any
    dot: DotProduct


class IntegerRewriter(Rewriter):
    """`Rewriter` with rules for convolutions and products of int32."""

    def _conv2d(self, call: Any) -> LayoutTensor | None:
        config = self._conv2d_config(call, dtype="int32")
        if config is None:
            return super()._conv2d(call)
        weight = constant_of(self._get(call.args[1]).plain)
        assert weight is not None
        integers = self._integers(call.args[0], weight)
        if integers is None or not isinstance(integers.zero, int):
            return None
        convolve = partial(self._convolve_integers, integers=integers)
        data = integers.data
        if config.kind == "split groups":
            return self._split_groups(data, weight, config, "int32", convolve=convolve)
        config, weight = config.as_row(weight)
        if config.kind == "direct" and data.blocked is None and data.shape[1] < self.block:
            # A picture: no more channels than a dot product takes.
            depth = integers.dot.depth
            few = -(-data.shape[1] // depth) * depth
            # Opaque: numbers are quantised before, in vectors of a picture's row.
            source = self._te(block_tensor, data.plain, block=few, hint="block", pattern=OPAQUE)
        else:
            source = self._blocked(data)
        result = self._convolve_wider(source, weight, config, convolve)
        return LayoutTensor(type_of(call)[0], "int32", blocked=result)

    def _convolve_integers(
        self, source: Any, weight: np.ndarray, config: Any, *, integers: _Integers
    ) -> Any:
        """int32, blocked. `source` has the pixels of `config`, in blocks of any size."""
        from tvm import relax

        dot, zero, shift = integers.dot, integers.zero, 0
        in_block = type_of(source)[0][-1]
        if config.kind == "depthwise":
            packed = conv2d.pack_weight(weight, config, plain_input=False).astype("int16")
            static = {"config": config, "zero": zero, "hint": "conv2d_depthwise_int8"}
            result = self._te(conv2d_int8.depthwise_int8, source, as_const(packed), **static)
            shift = conv2d_int8.DEPTHWISE_SHIFT if integers.data.dtype == "int8" else 0
        else:
            if any(config.padding):
                static = {"config": config, "plain_input": False, "value": zero, "hint": "pad"}
                source = self._te(conv2d.pad_spatial, source, **static)
            packed = conv2d_int8.pack_weight(weight, config, dot.depth, in_block)
            packed = packed.astype(dot.instruction.weight)
            shift = dot.shift
            static = {"config": config, "instruction": dot, "hint": f"conv2d_{config.kind}_int8"}
            result = self._te(conv2d_int8.conv2d_int8, source, as_const(packed), **static)
        corrections = conv2d_int8.corrections(weight, zero, shift, self.block)
        if not corrections.any():
            return result
        return self.bb.emit(relax.op.add(result, as_const(corrections)))

    def _matmul(self, call: Any) -> Any:
        shape, dtype = type_of(call)
        weight = constant_of(self._get(call.args[1]).plain)
        if dtype != "int32":
            return super()._matmul(call)
        if weight is None or weight.ndim != 2 or weight.size == 0:
            return None
        integers = self._integers(call.args[0], weight)
        if integers is None or 0 in shape or len(shape) < 2:
            return None
        multiply = partial(self._multiply_integers, weight=weight, integers=integers)
        return self._by_rows(self._plain_of(integers.data), shape, multiply)

    def _multiply_integers(self, source: Any, weight: np.ndarray, integers: _Integers) -> Any:
        """[M, K] of integers times [K, N], int32."""
        from tvm import relax

        dot, zero = integers.dot, integers.zero
        rows = type_of(source)[0][0]
        width = self._panel_width(weight, rows)
        packed = dense_int8.pack_weight(weight, width, dot.depth)
        terms = packed.shape[1] * dot.depth
        if terms != weight.shape[0]:
            source = self._te(dense_int8.pad_terms, source, terms=terms, hint="pad")
        product = self._te(
            dense_int8.dense_int8,
            source,
            as_const(packed.astype(dot.instruction.weight)),
            columns=weight.shape[1],
            instruction=dot,
            hint="dense_int8",
        )
        totals = weight.sum(0, dtype="int32")
        constant = totals * (dot.shift + (zero if isinstance(zero, int) else 0))
        if constant.any():
            product = self.bb.emit(relax.op.subtract(product, as_const(constant)))
        if not isinstance(zero, int):
            moved = self.bb.emit(relax.op.multiply(as_const(totals), zero))
            product = self.bb.emit(relax.op.subtract(product, moved))
        return product

    def _mean(self, call: Any) -> LayoutTensor | None:
        """A mean of integers that were made floats sums them as integers."""
        wide = self._bound(call.args[0], "relax.astype")
        data = self._get(wide.args[0]) if wide is not None else None
        if isinstance(data, LayoutTensor) and data.dtype in ("int8", "uint8"):
            return self._mean_of(data, call)
        return super()._mean(call)

    def _integers(self, expr: Any, weight: np.ndarray) -> _Integers | None:
        """What `expr` of the old graph widens to int32, if that can be multiplied as it is:
        astype(data), or that minus a zero point, reshaped or not."""
        import numpy as np
        from tvm import relax

        shape, zero = type_of(expr)[0], 0
        expr = self._before_reshape(expr)
        shifted = self._bound(expr, "relax.subtract")
        if shifted is not None:
            taken = self._get(shifted.args[1])
            if taken.shape != ():
                return None
            constant = constant_of(taken.plain)
            zero = taken.plain if constant is None else int(constant)
            expr = self._before_reshape(shifted.args[0])
        wide = self._bound(expr, "relax.astype")
        data = self._get(wide.args[0]) if wide is not None else None
        if not isinstance(data, LayoutTensor) or data.dtype not in ("int8", "uint8"):
            return None
        # Convolutions: [O, I, KH, KW]; products: [K, N].
        terms = np.moveaxis(weight, 1 if weight.ndim > 2 else 0, -1)
        dot = find_dot(self.profile, data.dtype, terms)
        if dot is None:
            return None
        if data.shape != shape:
            plain = self.bb.emit(relax.op.reshape(self._plain_of(data), shape))
            data = LayoutTensor(shape, data.dtype, plain=plain)
        return _Integers(data, zero, dot)

    def _before_reshape(self, expr: Any) -> Any:
        reshaped = self._bound(expr, "relax.reshape")
        return expr if reshaped is None else reshaped.args[0]
