"""Relax to kernels: the passes that turn an imported network into calls of fused loop nests."""

from __future__ import annotations

from typing import Any

from edgesdk.compiler.half import store_in_halves
from edgesdk.profiles import TargetProfile
from edgesdk.schedules.dot import has_dot
from edgesdk.schedules.in_floats import sum_in_floats
from edgesdk.schedules.layout import assign_layouts
from edgesdk.schedules.legalize import legalizations


def lower(module: Any, profile: TargetProfile, *, panels: dict[bytes, int] | None = None) -> Any:
    """Returns `module` with `main` as a straight line of `call_tir` on fused kernels.

    `panels` is that of `assign_layouts`, where one network is lowered for several shapes.
    Memory is planned later, by `plan.make_plan`, which needs the graph without allocations.
    """
    import tvm
    from tvm.relax import transform

    module = transform.CanonicalizeBindings()(module)
    if not has_dot(profile):
        module = sum_in_floats(module)
    module = assign_layouts(module, profile, panels=panels)
    passes = [
        transform.DeadCodeElimination(),
        transform.LegalizeOps(legalizations()),
        transform.AnnotateTIROpPattern(),
        transform.FuseOps(),
        transform.FuseTIR(),
        transform.RewriteDataflowReshape(),
        transform.ToNonDataflow(),
        transform.DeadCodeElimination(),
    ]
    # For GPUs TVM has scatters with threads of their own and sizes that no plan knows.
    with tvm.target.Target(profile.host().tvm):
        module = tvm.transform.Sequential(passes)(module)
    if profile.precision == "fp16":
        module = store_in_halves(module, tensors=profile.gpu is not None)
    return module
