"""What there is to tune in a model: its kernels, each once, and the choice that each leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgesdk.compiler.lower import lower
from edgesdk.compiler.plan import make_plan
from edgesdk.schedules import KernelSpace, kernel_space, workload_of

if TYPE_CHECKING:
    import numpy as np

    from edgesdk.frontend import ImportedModel
    from edgesdk.profiles import TargetProfile


@dataclass(frozen=True)
class Task:
    """One kernel of a model. `names` are its copies in the model, `calls` how often a run calls it,
    `function` the unscheduled PrimFunc, `operations` the innermost iterations of its largest block
    (multiply-adds of a convolution). `extents` are that block's loop extents."""

    workload: str
    names: tuple[str, ...]
    calls: int
    function: Any
    space: KernelSpace
    operations: int
    extents: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.names[0]


def collect_tasks(model: ImportedModel, profile: TargetProfile) -> list[Task]:
    """Returns the kernels of `model` for `profile`, equal ones once, in the order of the plan."""
    import tvm

    with tvm.target.Target(profile.tvm):
        module = lower(model.module, profile)
    plan = make_plan(module)
    calls: dict[str, int] = {}
    for step in plan.steps:
        if step.kernel is not None:
            calls[step.kernel] = calls.get(step.kernel, 0) + 1
    grouped: dict[str, list[str]] = {}
    for name in calls:
        grouped.setdefault(workload_of(module[name]), []).append(name)
    tasks = []
    for workload, names in grouped.items():
        function = module[names[0]]
        extents = _largest_block(function)
        operations = 1
        for extent in extents:
            operations *= extent
        try:
            space = kernel_space(function, profile)
        except Exception:  # the kernel runs as plain loops: `compile` reports it as a problem
            space = KernelSpace("plain", {}, {})
        tasks.append(
            Task(
                workload=workload,
                names=tuple(names),
                calls=sum(calls[name] for name in names),
                function=function,
                space=space,
                operations=operations,
                extents=extents,
            )
        )
    return tasks


def is_tunable(task: Task) -> bool:
    """More than one decision, and all arguments plain floats (others cannot be drawn at random)."""
    return task.space.size > 1 and all(str(p.ty.dtype) == "float32" for p in task.function.params)


def draw_arguments(task: Task, seed: int) -> list[np.ndarray]:
    """Random arguments for a kernel; the last one is its output, full of NaN."""
    import numpy as np

    draw = np.random.default_rng(seed)
    arrays = [
        draw.standard_normal([int(d) for d in p.ty.shape]).astype(np.float32)
        for p in task.function.params
    ]
    arrays[-1] = np.full_like(arrays[-1], np.nan)
    return arrays


def reference_output(task: Task, arguments: list[np.ndarray]) -> np.ndarray:
    """What the kernel computes, by its plain loops on this machine: no schedule is involved."""
    import tvm

    from edgesdk.host import detect_host

    module = tvm.IRModule({"main": task.function.with_attr("global_symbol", "main")})
    built = tvm.compile(module, target=tvm.target.Target(detect_host().tvm))
    tensors = [tvm.runtime.tensor(a) for a in arguments]
    built["main"](*tensors)
    return tensors[-1].numpy()


def _largest_block(function: Any) -> tuple[int, ...]:
    """The loop extents of the block with the most iterations."""
    import tvm
    from tvm.s_tir import Schedule

    sch = Schedule(tvm.IRModule({"main": function}), error_render_level="none")
    best: tuple[int, ...] = ()
    largest = 0
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        extents = tuple(int(v.dom.extent) for v in sch.get(block).iter_vars)
        size = 1
        for extent in extents:
            size *= extent
        if size > largest:
            best, largest = extents, size
    return best
