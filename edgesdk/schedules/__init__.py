"""Which schedule a kernel gets: the ladder, from the best rung that fits down to plain loops.

`schedule_kernels` returns every kernel scheduled, and the coverage: which rung served which kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import conv2d, dense, generic, pool

_TEMPLATES: dict[str, Callable[[Any, Any, TargetProfile], None]] = {
    conv2d.DIRECT: conv2d.schedule_direct,
    conv2d.DEPTHWISE: conv2d.schedule_depthwise,
    dense.DENSE: dense.schedule_dense,
    pool.POOL: pool.schedule_pool,
    pool.GLOBAL_MEAN: pool.schedule_pool,
}


@dataclass(frozen=True)
class Coverage:
    """`rungs` maps the name of a rung to the kernels it served; `problems` says why a better rung
    failed on a kernel, one line each."""

    rungs: dict[str, tuple[str, ...]]
    problems: tuple[str, ...] = ()


def schedule_kernels(
    kernels: dict[str, Any], profile: TargetProfile
) -> tuple[dict[str, Any], Coverage]:
    """Schedules each PrimFunc of `kernels` for the CPU of `profile`. Never fails: a kernel that no
    rung takes keeps its plain loops, and the coverage says so."""
    scheduled: dict[str, Any] = {}
    rungs: dict[str, list[str]] = {}
    problems = []
    for name, function in kernels.items():
        rung = "plain"
        scheduled[name] = function
        for candidate, apply in (("template", _apply_template), ("generic", generic.schedule)):
            try:
                result = apply(function, profile)
            except Exception as error:  # TVM raises many types, with pages of rendered IR
                problems.append(f"{name}: {candidate}: {_reason(error)}")
                continue
            if result is not None:
                scheduled[name], rung = result, candidate
                break
        rungs.setdefault(rung, []).append(name)
    return scheduled, Coverage({k: tuple(v) for k, v in rungs.items()}, tuple(problems))


def _apply_template(function: Any, profile: TargetProfile) -> Any | None:
    """Returns `function` scheduled by its template, or None if it has none."""
    import tvm
    from tvm.s_tir import Schedule

    sch = Schedule(tvm.IRModule({"main": function}), error_render_level="none")
    found = []
    for child in sch.get_child_blocks(sch.get_sblock("root")):
        template = sch.get(child).annotations.get("edgesdk.template")
        if template is not None:
            found.append((str(template), child))
    if not found:
        return None
    (template, block), *others = found
    if others:
        raise ValueError("two template blocks in one kernel")
    _TEMPLATES[template](sch, block, profile)
    return sch.mod["main"]


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:160] if lines else ''}"
