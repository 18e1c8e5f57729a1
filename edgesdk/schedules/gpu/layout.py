"""Graph-level layout for GPUs: the walk of `schedules/layout.py` with blocks of 4 channels.

A thread then moves 16 bytes at a time, and neighbouring threads neighbouring pixels. Convolutions
and matrix products with constant weights become the products of `gemm.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import conv2d as cpu_conv2d
from edgesdk.schedules.gpu import depthwise, gemm
from edgesdk.schedules.layout import LayoutTensor, Rewriter, as_const, constant_of, type_of

# What TVM may fuse with these kernels: element-wise operators behind them.
_EPILOGUE_ONLY = 4


class GpuRewriter(Rewriter):
    def __init__(self, module: Any, profile: TargetProfile) -> None:
        super().__init__(module, profile)
        self.block = gemm.VECTOR

    def _conv2d(self, call: Any) -> LayoutTensor | None:
        config, weight = self._conv2d_config(call), constant_of(self._get(call.args[1]).plain)
        if config is None or weight is None:
            return None
        data = self._get(call.args[0])
        if config.kind == "split groups":
            return self._split_groups(data, weight, config, data.dtype)
        plain = config.kind == "direct" and data.blocked is None and data.shape[1] < self.block
        source = data.plain if plain else self._blocked(data)
        result = self._convolve(source, weight, config, plain=plain)
        return LayoutTensor(type_of(call)[0], data.dtype, blocked=result)

    def _convolve(self, source: Any, weight: np.ndarray, config: Any, *, plain: bool) -> Any:
        if config.kind == "depthwise":
            packed = cpu_conv2d.pack_weight(weight, config, plain_input=False)
            kernel, hint = depthwise.conv2d, "conv2d_depthwise"
        else:
            packed = gemm.pack_conv2d(weight, config, plain=plain)
            kernel, hint = gemm.conv2d, f"conv2d_{config.kind}"
        return self._te(
            kernel, source, as_const(packed), config=config, hint=hint, pattern=_EPILOGUE_ONLY
        )

    def _matmul(self, call: Any) -> Any:
        from tvm import relax

        data = self._get(call.args[0])
        weight = constant_of(self._get(call.args[1]).plain)
        shape, dtype = type_of(call)
        if weight is None or weight.ndim != 2 or dtype != "float32" or len(data.shape) < 2:
            return None
        k, n = weight.shape
        rows = int(np.prod(data.shape[:-1]))
        if rows * k * n == 0 or rows < 8:
            return None
        source = self._plain(call.args[0])
        if data.shape != (rows, k):
            source = self.bb.emit(relax.op.reshape(source, (rows, k)))
        product = self._te(
            gemm.dense,
            source,
            as_const(gemm.pack_dense(weight)),
            columns=n,
            hint="dense",
            pattern=_EPILOGUE_ONLY,
        )
        if shape != (rows, n):
            product = self.bb.emit(relax.op.reshape(product, shape))
        return product
