"""One scheduled GPU kernel as a library that the measuring agent runs."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgesdk.compiler import device_code, device_compilers, emit, link
from edgesdk.compiler.plan import Plan, PlanTensor, Step, align, size_of
from edgesdk.profiles import TargetProfile
from edgesdk.toolchain import Toolchain

# Calls in one run: the way to the driver and back takes some microseconds, as long as a small
# kernel.
_CALLS = 32


def link_gpu_candidate(
    function: Any, scheduled: Any, profile: TargetProfile, toolchain: Toolchain, *, output: Path
) -> None:
    """Writes the library `output`: a model whose inputs and outputs are the arguments of
    `function` (the last is the output), and whose run calls `scheduled`, the same function with a
    schedule, several times.

    Raises CompileError if it cannot be compiled, ToolMissingError without a compiler.
    """
    import tvm

    assert profile.gpu is not None
    code = device_code.generate({"candidate": scheduled}, tvm.target.Target(profile.tvm))
    code = device_compilers.adapt(code, profile.gpu)
    exact = replace(profile.gpu, ptx=None)  # it is measured as it will run
    images = emit.DeviceImages(
        profile.gpu.api, device_compilers.compile_images(code.source, exact, keep=False)
    )
    ports = [
        emit.Port(f"argument{i}", tuple(int(d) for d in p.ty.shape), str(p.ty.dtype))
        for i, p in enumerate(function.params)
    ]
    plan = _plan(ports, code.kernels["candidate"], profile.gpu.alignment_bytes)
    with tempfile.TemporaryDirectory(dir=output.parent) as temporary:
        build = Path(temporary)
        weights = build / "weights.bin"
        emit.write_weights(plan, weights, images)
        source = build / "model.cc"
        text = emit.model_source(
            [
                emit.Variant(
                    plan,
                    inputs=tuple(ports[:-1]),
                    outputs=tuple(ports[-1:]),
                    layers=("candidate",) * len(plan.steps),
                )
            ],
            name="candidate",
            target=profile.name,
            build_id="candidate",
            cpu_features=(),
            weights_file=weights,
            device=images,
        )
        source.write_text(
            text
            + 'extern "C" EDGESDK_API const uint32_t edgesdk_candidate_calls;\n'
            + f"const uint32_t edgesdk_candidate_calls = {_CALLS};\n",
            encoding="utf-8",
        )
        link.link_library(
            objects=[],
            model_source=source,
            toolchain=toolchain,
            output=output,
            exported=["edgesdk_open_candidate", "edgesdk_candidate_calls"],
            build=build,
        )


def _plan(ports: list[emit.Port], kernel: device_code.DeviceKernel, alignment: int) -> Plan:
    tensors = []
    for index, port in enumerate(ports):
        last = index == len(ports) - 1
        storage, number = ("device_output", 0) if last else ("device_input", index)
        size_bytes = size_of(port.shape, port.dtype)
        tensors.append(PlanTensor(storage, number, 0, port.shape, port.dtype, size_bytes))
    end = 0
    for size_bytes in kernel.workspaces:
        tensors.append(PlanTensor("device_arena", 0, end, (size_bytes,), "uint8", size_bytes))
        end = align(end + size_bytes, alignment)
    steps = [Step("candidate", launch.args, launch) for launch in kernel.launches]
    return Plan(
        tensors=tuple(tensors),
        steps=tuple(steps * _CALLS),
        weights=(),
        weight_offsets=(),
        weights_bytes=0,
        arena_bytes=0,
        activations_bytes=0,
        device_arena_bytes=end,
    )
