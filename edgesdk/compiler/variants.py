"""Several fixed shapes of one network in one library: equal kernels and equal weights once.

Each shape is a variant: a plan of its own over kernels and weights that all plans share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from edgesdk.compiler.plan import ALIGNMENT, Plan, align
from edgesdk.schedules import workload_of

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class MergedKernels:
    """The kernels of all variants by name, and for each variant what its own names became."""

    functions: dict[str, Any]
    names: tuple[Mapping[str, str], ...]


def merge_kernels(modules: Sequence[Any]) -> MergedKernels:
    """Collects the PrimFuncs of lowered modules. A kernel of a later one that computes the same as
    one before, on the same shapes, takes its name; others whose name is taken get a new one."""
    import tvm
    import tvm_ffi

    functions: dict[str, Any] = {}
    by_workload: dict[str, str] = {}
    names: list[dict[str, str]] = []
    for number, module in enumerate(modules):
        mine: dict[str, str] = {}
        for variable, function in module.functions.items():
            if not isinstance(function, tvm.tirx.PrimFunc):
                continue
            own = variable.name_hint
            bare = function.without_attr("global_symbol") if function.attrs else function
            workload = workload_of(function)
            twin = by_workload.get(workload)
            # The kernels of one variant keep their own names: reports name layers after them.
            if number > 0 and twin is not None:
                other = functions[twin]
                other = other.without_attr("global_symbol") if other.attrs else other
                if tvm_ffi.structural_equal(bare, other, map_free_vars=True):
                    mine[own] = twin
                    continue
            name = own if own not in functions else f"{own}_shape{number}"
            functions[name] = function
            by_workload.setdefault(workload, name)
            mine[own] = name
        names.append(mine)
    return MergedKernels(functions, tuple(names))


def share_weights(plans: Sequence[Plan], *, alignment: int = ALIGNMENT) -> tuple[Plan, ...]:
    """Returns `plans` over one block of weights, in which equal bytes are there once."""
    arrays: list[np.ndarray] = []
    offsets: list[int] = []
    places: dict[tuple[int, bytes], int] = {}  # by size and content
    total = 0
    moved: list[dict[int, int]] = []
    for plan in plans:
        mine: dict[int, int] = {}
        for array, offset in zip(plan.weights, plan.weight_offsets, strict=True):
            key = (array.nbytes, _digest(array))
            if key not in places:
                places[key] = total
                arrays.append(array)
                offsets.append(total)
                total = align(total + array.nbytes, alignment)
            mine[offset] = places[key]
        moved.append(mine)
    return tuple(
        replace(
            plan,
            tensors=tuple(
                replace(t, offset=mine[t.offset]) if t.storage.endswith("weight") else t
                for t in plan.tensors
            ),
            weights=tuple(arrays),
            weight_offsets=tuple(offsets),
            weights_bytes=total,
        )
        for plan, mine in zip(plans, moved, strict=True)
    )


def _digest(array: np.ndarray) -> bytes:
    import numpy as np

    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return hashlib.blake2b(data, digest_size=16).digest()
