"""Graph-level layout for GPUs: the walk of `schedules/layout.py` with blocks of 4 channels.

A thread then moves 16 bytes at a time, and neighbouring threads neighbouring pixels. Convolutions
and matrix products with constant weights become the products of `gemm.py`, or of `tensor_cores.py`
where the GPU has such and the numbers allow it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import conv2d as cpu_conv2d
from edgesdk.schedules.gpu import depthwise, gemm, tensor_cores, winograd
from edgesdk.schedules.layout import OPAQUE, LayoutTensor, Rewriter, as_const, constant_of, type_of

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
        elif config.groups == 1 and self._on_tensor_cores(
            config.out_shape[2] * config.out_shape[3], str(weight.dtype)
        ):
            packed = tensor_cores.pack_conv2d(weight, plain=plain)
            kernel, hint = tensor_cores.conv2d, f"conv2d_{config.kind}"
        elif not plain and self._winograd_pays(config):
            return self._winograd(source, weight, config)
        else:
            packed = gemm.pack_conv2d(weight, config, plain=plain)
            kernel, hint = gemm.conv2d, f"conv2d_{config.kind}"
        return self._te(
            kernel, source, as_const(packed), config=config, hint=hint, pattern=_EPILOGUE_ONLY
        )

    def _winograd_pays(self, config: Any) -> bool:
        assert self.profile.gpu is not None
        return winograd.pays(config, self.profile.gpu)

    def _winograd(self, source: Any, weight: np.ndarray, config: Any) -> Any:
        even = winograd.even(config)
        tiles = self._te(
            winograd.transform_input, source, config=even, hint="winograd_input", pattern=OPAQUE
        )
        packed = as_const(winograd.pack_weight(weight))
        products = self._te(
            winograd.multiply, tiles, packed, hint="winograd_products", pattern=OPAQUE
        )
        return self._te(
            winograd.transform_output,
            products,
            config=even,
            height=config.out_shape[2],
            width=config.out_shape[3],
            hint="winograd_output",
            pattern=_EPILOGUE_ONLY,
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
        module: Any = tensor_cores if self._on_tensor_cores(rows, dtype) else gemm
        product = self._te(
            module.dense,
            source,
            as_const(module.pack_dense(weight)),
            columns=n,
            hint="dense",
            pattern=_EPILOGUE_ONLY,
        )
        if shape != (rows, n):
            product = self.bb.emit(relax.op.reshape(product, shape))
        return product

    def _on_tensor_cores(self, rows: int, dtype: str) -> bool:
        """Whether tensor cores multiply `rows` rows of numbers of type `dtype`."""
        gpu = self.profile.gpu
        assert gpu is not None
        allowed = dtype == "float32" and self.profile.precision in ("tf32", "fp16")
        return allowed and rows >= gemm.MIN_PIXELS and tensor_cores.has_tensor_cores(gpu)
