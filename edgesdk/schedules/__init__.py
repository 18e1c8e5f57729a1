"""Which schedule a kernel gets: the ladder, from the best rung that fits down to plain loops.

A *candidate* says how a kernel is scheduled, as plain data that a tuning record can hold:
{"template": "conv2d_direct", "knobs": {"columns": 14, "blocks": 2, "order": 0, "unroll": 1}}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import conv2d, conv2d_int8, dense, dense_int8, generic, pool, winograd
from edgesdk.schedules.casts import drop_round_trips
from edgesdk.schedules.features import floor_cycles, kernel_facts
from edgesdk.schedules.gpu import gemm, gemm_registers, tensor_cores
from edgesdk.schedules.gpu import generic as gpu_generic
from edgesdk.schedules.gpu import winograd as gpu_winograd
from edgesdk.schedules.template import Knobs, Space, Template

Candidate = dict[str, Any]
# The rung of kernels that keep the loops they came with.
PLAIN = "plain"
# Finds a tuned candidate for a kernel: (candidate, name of the rung), or None.
Lookup = Callable[[Any], "tuple[Candidate, str] | None"]

_CPU_TEMPLATES: dict[str, Template] = {
    template.name: template
    for module in (conv2d, conv2d_int8, dense, dense_int8, pool, winograd)
    for template in module.TEMPLATES
}
_GPU_TEMPLATES: dict[str, Template] = {
    template.name: template
    for template in (*gemm.TEMPLATES, tensor_cores.TEMPLATE, gpu_winograd.INPUT)
}
# The same blocks on GPUs without shared memory.
_REGISTER_TEMPLATES: dict[str, Template] = {gemm.GEMM: gemm_registers.TEMPLATE}


@dataclass(frozen=True)
class Coverage:
    """`rungs` maps the name of a rung to the kernels it served; `problems` says why a better rung
    failed on a kernel, one line each. `cycles` is what all calls of a kernel take in one run, by
    estimate: see `features.floor_cycles`. It is empty for a GPU, for which there is none."""

    rungs: dict[str, tuple[str, ...]]
    problems: tuple[str, ...] = ()
    cycles: dict[str, float] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, float]:
        """The part of the network's estimated time that each rung serves; together 1. Empty if
        there is no estimate."""
        if not self.cycles:
            return {}
        total = sum(self.cycles.values()) or 1.0
        return {
            rung: sum(self.cycles.get(name, 0.0) for name in names) / total
            for rung, names in self.rungs.items()
        }


@dataclass(frozen=True)
class KernelSpace:
    """What a tuner may choose for a kernel: the template, its knobs' values, and the default."""

    template: str
    knobs: Space
    default: Knobs
    check: Callable[[Knobs], None] | None = None  # see `Template.checker`

    def allows(self, knobs: Knobs) -> bool:
        """Whether nothing is known against a combination of the knobs' values."""
        try:
            if self.check is not None:
                self.check(knobs)
        except ValueError:
            return False
        return True

    @property
    def size(self) -> int:
        """The number of decisions, those included that `apply_candidate` will refuse."""
        count = 1
        for values in self.knobs.values():
            count *= len(values)
        return count

    def candidate(self, knobs: Knobs) -> Candidate:
        return {"template": self.template, "knobs": dict(knobs)}


def schedule_kernels(
    kernels: dict[str, Any],
    profile: TargetProfile,
    *,
    lookup: Lookup | None = None,
    calls: Mapping[str, int] | None = None,
) -> tuple[dict[str, Any], Coverage]:
    """Schedules each PrimFunc of `kernels` for `profile`. Never fails: a kernel that no rung takes
    keeps its plain loops, and the coverage says so. `calls` counts each kernel's calls in a run of
    the network; those that are not in it count once."""
    scheduled: dict[str, Any] = {}
    rungs: dict[str, list[str]] = {}
    problems: list[str] = []
    cycles: dict[str, float] = {}
    for name, function in kernels.items():
        scheduled[name], rung, reasons = _climb(function, profile, lookup)
        rungs.setdefault(rung, []).append(name)
        problems += [f"{name}: {reason}" for reason in reasons]
        if profile.gpu is None:
            once = floor_cycles(kernel_facts(function), profile, vectors=rung != PLAIN)
            cycles[name] = once * (calls or {}).get(name, 1)
    return scheduled, Coverage({k: tuple(v) for k, v in rungs.items()}, tuple(problems), cycles)


def kernel_space(function: Any, profile: TargetProfile) -> KernelSpace:
    """Returns what can be chosen for `function` (an unscheduled PrimFunc).

    Raises ValueError, or TVM's ScheduleError, if no rung with knobs takes the kernel.
    """
    found = _find_template(function, profile)
    if found is None:
        rung = _generic(profile)
        return KernelSpace(
            rung.NAME, rung.space(function, profile), rung.default(function, profile)
        )
    template, sch, block = found
    return KernelSpace(
        template.name,
        template.space(sch, block, profile),
        template.default(sch, block, profile),
        None if template.checker is None else template.checker(sch, block, profile),
    )


def apply_candidate(function: Any, profile: TargetProfile, candidate: Candidate) -> Any:
    """Returns `function` scheduled as `candidate` says.

    Raises ValueError or TVM's ScheduleError if it does not fit the kernel.
    """
    knobs = candidate["knobs"]
    rung = _generic(profile)
    if candidate["template"] == rung.NAME:
        return drop_round_trips(rung.schedule(function, profile, knobs))
    found = _find_template(function, profile)
    if found is None or found[0].name != candidate["template"]:
        raise ValueError(f"the kernel is none for the template {candidate['template']!r}")
    template, sch, block = found
    values = template.space(sch, block, profile)
    if knobs.keys() != values.keys() or any(knobs[k] not in values[k] for k in knobs):
        raise ValueError(f"the knobs {knobs} are not among {values}")
    template.apply(sch, block, profile, knobs)
    return drop_round_trips(sch.mod["main"])


def workload_of(function: Any) -> str:
    """16 hex digits that name what a kernel computes: equal kernels of two models share it."""
    import tvm_ffi

    bare = function.without_attr("global_symbol") if function.attrs else function
    return f"{tvm_ffi.structural_hash(bare, map_free_vars=True) & (2**64 - 1):016x}"


def _climb(
    function: Any, profile: TargetProfile, lookup: Lookup | None
) -> tuple[Any, str, list[str]]:
    reasons: list[str] = []
    for rung in ("tuned", "template", "generic"):
        try:
            if rung == "tuned":
                found = lookup(function) if lookup is not None else None
                if found is None:
                    continue
                candidate, rung_name = found
            elif rung == "template":
                if _find_template(function, profile) is None:
                    continue
                space = kernel_space(function, profile)
                candidate, rung_name = space.candidate(space.default), rung
            else:
                fallback = _generic(profile)
                knobs = fallback.default(function, profile)
                candidate, rung_name = {"template": fallback.NAME, "knobs": knobs}, rung
            return apply_candidate(function, profile, candidate), rung_name, reasons
        except Exception as error:  # TVM raises many types, with pages of rendered IR
            reasons.append(f"{rung}: {_reason(error)}")
    if profile.gpu is not None:
        function = gpu_generic.schedule_plain(function)
    return function, PLAIN, reasons


def _generic(profile: TargetProfile) -> Any:
    return generic if profile.gpu is None else gpu_generic


def _find_template(function: Any, profile: TargetProfile) -> tuple[Template, Any, Any] | None:
    """The template of `function`, with a fresh schedule and the block that carries its name.

    Raises ValueError for a kernel with two such blocks.
    """
    import tvm
    from tvm.s_tir import Schedule

    sch = Schedule(tvm.IRModule({"main": function}), error_render_level="none")
    templates = _templates(profile)
    found = []
    for child in sch.get_child_blocks(sch.get_sblock("root")):
        name = sch.get(child).annotations.get("edgesdk.template")
        if name is not None and str(name) in templates:
            found.append((templates[str(name)], sch, child))
    if len(found) > 1:
        raise ValueError("two template blocks in one kernel")
    return found[0] if found else None


def _templates(profile: TargetProfile) -> dict[str, Template]:
    if profile.gpu is None:
        return _CPU_TEMPLATES
    return _GPU_TEMPLATES if profile.gpu.shared_kib > 0 else _REGISTER_TEMPLATES


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:160] if lines else ''}"
