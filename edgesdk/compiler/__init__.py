"""From an imported network to a linked library: `compile_model` runs the stages in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgesdk.compiler import codegen, cuda, device_code, device_compilers, emit, link
from edgesdk.compiler.lower import lower
from edgesdk.compiler.plan import ALIGNMENT, Plan, make_plan
from edgesdk.compiler.variants import merge_kernels, share_weights
from edgesdk.errors import CompileError
from edgesdk.memory import release_memory
from edgesdk.profiles import TargetProfile
from edgesdk.schedules import Coverage, Lookup, schedule_kernels
from edgesdk.toolchain import Toolchain, load_toolchain

if TYPE_CHECKING:
    from edgesdk.frontend import ImportedModel

_MAX_KERNEL_NAME = 48


@dataclass(frozen=True)
class CompiledModel:
    """A linked library and its launcher (if there can be one), on this machine, not yet a bundle.

    Sizes are in bytes. `activations_bytes` is what the intermediate tensors would take without
    reuse of memory; `arena_bytes` what they take, both for the shapes that need most;
    `arenas_bytes` has the latter for each of them. `device_images` is the code for the GPU that is
    in the library.
    """

    library: Path
    launcher: Path | None
    header: str
    build_id: str
    toolchain: Toolchain
    coverage: Coverage
    weights_bytes: int
    arena_bytes: int
    arenas_bytes: tuple[int, ...]
    activations_bytes: int
    num_kernel_calls: int
    device_images: tuple[cuda.Image, ...] = ()


def compile_model(
    model: ImportedModel,
    profile: TargetProfile,
    *,
    build: Path,
    others: Sequence[ImportedModel] = (),
    lookup: Lookup | None = None,
    name_build: Callable[[], str],
    progress: Callable[[str], None] = lambda stage: None,
) -> CompiledModel:
    """Compiles `model`, whose module it takes, for `profile` in the empty folder `build`.

    `others` are the same model imported with other shapes, which the library serves as well.
    `lookup` finds tuned schedules; `name_build` gives the build's id once they are chosen.
    `progress` hears the name of each stage as it begins. Raises ToolMissingError before any work if
    the target's compiler is missing, UnsupportedModelError or CompileError later.
    """
    import tvm

    toolchain = load_toolchain(profile.toolchain)
    toolchain.require(profile.machine)
    if profile.gpu is not None:
        device_compilers.require_compiler(profile.gpu)
    progress("lowering")
    models = (model, *others)
    modules = []
    panels: dict[bytes, int] | None = {} if others else None
    for each in models:
        with tvm.target.Target(profile.tvm):
            modules.append(lower(each.take_module(), profile, panels=panels))
        release_memory()
    kernels = merge_kernels(modules)
    symbols = {name: _symbol(name, i) for i, name in enumerate(sorted(kernels.functions))}
    progress(f"scheduling {len(kernels.functions)} kernels")
    calls: Counter[str] = Counter()
    for module, names in zip(modules, kernels.names, strict=True):
        calls.update({names[n]: count for n, count in _calls(module["main"]).items()})
    code = _generate(
        kernels.functions,
        symbols,
        profile,
        calls=calls,
        lookup=lookup,
        build=build,
        progress=progress,
    )
    progress("planning memory")
    alignment = profile.gpu.alignment_bytes if profile.gpu is not None else ALIGNMENT
    plans = []
    for names in kernels.names:
        plans.append(
            make_plan(modules.pop(0), names=names, on_device=code.on_device, alignment=alignment)
        )
    if others:
        plans = list(share_weights(plans, alignment=alignment))
    del kernels
    release_memory()
    build_id = name_build()
    progress("linking")
    library = build / toolchain.object_format.library.format(model.name)
    source = _write_sources(
        models, plans, symbols, profile, images=code.images, build=build, build_id=build_id
    )
    link.link_library(
        objects=code.objects,
        model_source=source,
        toolchain=toolchain,
        output=library,
        exported=[f"edgesdk_open_{model.name}"],
        build=build,
    )
    arenas = tuple(plan.arena_bytes + plan.device_arena_bytes for plan in plans)
    return CompiledModel(
        library=library,
        launcher=link.launcher(toolchain),
        header=emit.model_header(model.name, [_ports(each) for each in models]),
        build_id=build_id,
        toolchain=toolchain,
        coverage=code.coverage,
        weights_bytes=plans[0].weights_bytes,
        arena_bytes=max(arenas),
        arenas_bytes=arenas,
        activations_bytes=max(plan.activations_bytes for plan in plans),
        num_kernel_calls=sum(s.kernel is not None for s in plans[0].steps),
        device_images=code.images.images if code.images is not None else (),
    )


@dataclass(frozen=True)
class _Code:
    """What came out of the kernels: objects for the CPU, images and launches for the GPU."""

    coverage: Coverage
    objects: list[Path]
    on_device: dict[str, device_code.DeviceKernel]
    images: emit.DeviceImages | None = None


def _generate(
    kernels: dict[str, Any],
    symbols: dict[str, str],
    profile: TargetProfile,
    *,
    calls: Counter[str],
    lookup: Lookup | None,
    build: Path,
    progress: Callable[[str], None],
) -> _Code:
    """Schedules `kernels` and generates code for the processor that each runs on."""
    import tvm

    scheduled, coverage = schedule_kernels(kernels, profile, lookup=lookup, calls=calls)
    progress(f"generating code for {len(kernels)} kernels")
    target = tvm.target.Target(profile.tvm)
    if profile.gpu is None:
        return _Code(coverage, _write_kernels(scheduled, symbols, target, build), {})
    code, refused = _device_code(scheduled, symbols, target)
    code = device_compilers.adapt(code, profile.gpu)
    objects: list[Path] = []
    if refused:
        host = profile.host()
        rest, host_coverage = schedule_kernels({n: kernels[n] for n in refused}, host)
        objects = _write_kernels(rest, symbols, tvm.target.Target(host.tvm), build)
        coverage = _merged(coverage, host_coverage, refused)
    images = None
    if code.kernels:
        progress(f"compiling {len(code.kernels)} kernels for the GPU")
        images = emit.DeviceImages(
            profile.gpu.api, device_compilers.compile_images(code.source, profile.gpu)
        )
    on_device = {name: code.kernels[symbols[name]] for name in scheduled if name not in refused}
    return _Code(coverage, objects, on_device, images)


def _calls(main: Any) -> Counter[str]:
    """How often one run of the lowered network calls each kernel."""
    from tvm import ir

    values = (binding.value for block in main.body.blocks for binding in block.bindings)
    return Counter(
        value.args[0].name_hint
        for value in values
        if getattr(getattr(value, "op", None), "name", "") == "relax.call_tir"
        and isinstance(value.args[0], ir.GlobalVar)
    )


def _merged(gpu: Coverage, cpu: Coverage, refused: dict[str, str]) -> Coverage:
    """The coverage of kernels on both processors; rungs of the CPU are called "cpu RUNG"."""
    rungs = {r: tuple(n for n in names if n not in refused) for r, names in gpu.rungs.items()}
    rungs |= {f"cpu {rung}": names for rung, names in cpu.rungs.items()}
    reasons = tuple(f"{name}: it runs on the CPU: {reason}" for name, reason in refused.items())
    return Coverage(
        {rung: names for rung, names in rungs.items() if names},
        (*gpu.problems, *reasons, *cpu.problems),
    )


def _device_code(
    scheduled: dict[str, Any], symbols: dict[str, str], target: Any
) -> tuple[device_code.DeviceCode, dict[str, str]]:
    """The device code of `scheduled`, and of those that have none the reason."""
    named = {symbols[name]: function for name, function in scheduled.items()}
    try:
        return device_code.generate(named, target), {}
    except CompileError:
        pass  # at least one is to blame
    refused = {}
    for name, function in scheduled.items():
        try:
            device_code.generate({symbols[name]: function}, target)
        except CompileError as error:
            refused[name] = error.message
            del named[symbols[name]]
    if not named:
        return device_code.DeviceCode("", {}), refused
    return device_code.generate(named, target), refused


def _write_kernels(
    scheduled: dict[str, Any], symbols: dict[str, str], target: Any, build: Path
) -> list[Path]:
    """Compiles kernels for the CPU; the list is empty if there are none."""
    if not scheduled:
        return []
    path = build / "kernels.o"
    functions = {symbols[name]: function for name, function in scheduled.items()}
    codegen.write_object(functions, target, path)
    codegen.check_symbols(path)
    return [path]


def _write_sources(
    models: Sequence[ImportedModel],
    plans: Sequence[Plan],
    symbols: dict[str, str],
    profile: TargetProfile,
    *,
    images: emit.DeviceImages | None,
    build: Path,
    build_id: str,
) -> Path:
    weights_file = build / "weights.bin"
    emit.write_weights(plans[0], weights_file, images)
    source = build / "model.cc"
    source.write_text(
        emit.model_source(
            [_variant(model, plan, symbols) for model, plan in zip(models, plans, strict=True)],
            name=models[0].name,
            target=profile.name,
            build_id=build_id,
            cpu_features=profile.contract.cpu_features,
            weights_file=weights_file,
            device=images,
        ),
        encoding="utf-8",
    )
    return source


def _variant(model: ImportedModel, plan: Plan, symbols: dict[str, str]) -> emit.Variant:
    """The plan with linker symbols for its kernels; the layers keep the names."""
    steps = tuple(
        replace(step, kernel=symbols[step.kernel]) if step.kernel else step for step in plan.steps
    )
    inputs, outputs = _ports(model)
    layers = tuple(step.kernel or "copy" for step in plan.steps)
    return emit.Variant(replace(plan, steps=steps), inputs, outputs, layers)


def _ports(model: ImportedModel) -> tuple[tuple[emit.Port, ...], tuple[emit.Port, ...]]:
    return (
        tuple(emit.Port(t.name, t.shape, t.dtype) for t in model.inputs),
        tuple(emit.Port(t.name, t.shape, t.dtype) for t in model.outputs),
    )


def _symbol(name: str, index: int) -> str:
    """A linker symbol for a kernel: TVM's names grow with every fused operator."""
    short = re.sub(r"\W", "_", name)[:_MAX_KERNEL_NAME].rstrip("_")
    return f"k{index}_{short}"
