"""From an imported network to a linked library: `compile_model` runs the stages in order."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgesdk.compiler import codegen, emit, link
from edgesdk.compiler.lower import lower
from edgesdk.compiler.plan import Plan, make_plan
from edgesdk.memory import release_memory
from edgesdk.profiles import TargetProfile
from edgesdk.schedules import Coverage, Lookup, schedule_kernels
from edgesdk.toolchain import Toolchain, load_toolchain

if TYPE_CHECKING:
    from edgesdk.frontend import ImportedModel

_MAX_KERNEL_NAME = 48


@dataclass(frozen=True)
class CompiledModel:
    """A linked library and its launcher, on this machine, not yet a bundle.

    Sizes are in bytes. `activations_bytes` is what the intermediate tensors would take without
    reuse of memory; `arena_bytes` what they take.
    """

    library: Path
    launcher: Path
    header: str
    build_id: str
    toolchain: Toolchain
    coverage: Coverage
    weights_bytes: int
    arena_bytes: int
    activations_bytes: int
    num_kernel_calls: int


def compile_model(
    model: ImportedModel,
    profile: TargetProfile,
    *,
    build: Path,
    lookup: Lookup | None = None,
    name_build: Callable[[], str],
    progress: Callable[[str], None] = lambda stage: None,
) -> CompiledModel:
    """Compiles `model`, whose module it takes, for `profile` in the empty folder `build`.

    `lookup` finds tuned schedules; `name_build` gives the build's id once they are chosen.
    `progress` hears the name of each stage as it begins. Raises ToolMissingError before any work if
    the target's compiler is missing, UnsupportedModelError or CompileError later.
    """
    import tvm

    toolchain = load_toolchain(profile.toolchain)
    toolchain.require(profile.machine)
    target = tvm.target.Target(profile.tvm)
    progress("lowering")
    with target:
        module = lower(model.take_module(), profile)
    release_memory()
    progress("planning memory")
    plan = make_plan(module)
    kernels = {
        name: module[name]
        for name in sorted({s.kernel for s in plan.steps if s.kernel is not None})
    }
    del module
    release_memory()
    progress(f"scheduling {len(kernels)} kernels")
    scheduled, coverage = schedule_kernels(kernels, profile, lookup=lookup)
    build_id = name_build()
    progress(f"generating code for {len(kernels)} kernels")
    symbols = {name: _symbol(name, index) for index, name in enumerate(kernels)}
    kernel_object = build / "kernels.o"
    if scheduled:
        codegen.write_object(
            {symbols[name]: function for name, function in scheduled.items()}, target, kernel_object
        )
        codegen.check_symbols(kernel_object)
    progress("linking")
    library = build / f"lib{model.name}.so"
    source = _write_sources(model, plan, symbols, profile, build=build, build_id=build_id)
    link.link_library(
        objects=[kernel_object] if scheduled else [],
        model_source=source,
        toolchain=toolchain,
        output=library,
        exported=[f"edgesdk_open_{model.name}"],
        build=build,
    )
    inputs, outputs = _ports(model)
    return CompiledModel(
        library=library,
        launcher=link.launcher(toolchain),
        header=emit.model_header(model.name, inputs=inputs, outputs=outputs),
        build_id=build_id,
        toolchain=toolchain,
        coverage=coverage,
        weights_bytes=plan.weights_bytes,
        arena_bytes=plan.arena_bytes,
        activations_bytes=plan.activations_bytes,
        num_kernel_calls=sum(s.kernel is not None for s in plan.steps),
    )


def _write_sources(
    model: ImportedModel,
    plan: Plan,
    symbols: dict[str, str],
    profile: TargetProfile,
    *,
    build: Path,
    build_id: str,
) -> Path:
    import dataclasses

    inputs, outputs = _ports(model)
    weights_file = build / "weights.bin"
    emit.write_weights(plan, weights_file)
    layers = tuple(step.kernel or "copy" for step in plan.steps)
    steps = tuple(
        dataclasses.replace(step, kernel=symbols[step.kernel]) if step.kernel else step
        for step in plan.steps
    )
    source = build / "model.cc"
    source.write_text(
        emit.model_source(
            dataclasses.replace(plan, steps=steps),
            name=model.name,
            target=profile.name,
            build_id=build_id,
            cpu_features=profile.contract.cpu_features,
            inputs=inputs,
            outputs=outputs,
            layers=layers,
            weights_file=weights_file,
        ),
        encoding="utf-8",
    )
    return source


def _ports(model: ImportedModel) -> tuple[list[emit.Port], list[emit.Port]]:
    return (
        [emit.Port(t.name, t.shape, t.dtype) for t in model.inputs],
        [emit.Port(t.name, t.shape, t.dtype) for t in model.outputs],
    )


def _symbol(name: str, index: int) -> str:
    """A linker symbol for a kernel: TVM's names grow with every fused operator."""
    short = re.sub(r"\W", "_", name)[:_MAX_KERNEL_NAME].rstrip("_")
    return f"k{index}_{short}"
