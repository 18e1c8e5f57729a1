"""A scheduled kernel as numbers for the cost model: MetaSchedule's features of buffer stores."""

from __future__ import annotations

import sys
import types
from typing import Any

# What a kernel is described by: the sum and the maximum over its stores of each of the features.
STORE_FEATURES = 164
FEATURES = 2 * STORE_FEATURES


def store_features(scheduled: Any, target: Any) -> Any:
    """Returns a float32 vector of FEATURES numbers for a scheduled PrimFunc."""
    import numpy as np
    import tvm
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

    module = tvm.IRModule({"main": scheduled})
    candidate = MeasureCandidate(Schedule(module), [])
    rows = PerStoreFeature().extract_from(_context(module, target), [candidate])[0].numpy()
    if rows.shape[0] == 0:
        return np.zeros(FEATURES, np.float32)
    return np.concatenate([rows.sum(axis=0), rows.max(axis=0)]).astype(np.float32)


def _context(module: Any, target: Any) -> Any:
    """A TuneContext without the tensor intrinsics.

    Its constructor imports hundreds of them (half a minute of parsing), of which the templates use
    none; a module in their place keeps them out.
    """
    name = "tvm.s_tir.tensor_intrin"
    stand_in = name not in sys.modules
    if stand_in:
        sys.modules[name] = types.ModuleType(name)
    try:
        from tvm.s_tir.meta_schedule.tune_context import TuneContext

        return TuneContext(
            mod=module, target=target, space_generator=None, search_strategy=None, num_threads=1
        )
    finally:
        if stand_in:
            del sys.modules[name]
