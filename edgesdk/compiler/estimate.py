"""What a model will take on a target, known before any code is generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgesdk.compiler.lower import lower
from edgesdk.compiler.plan import make_plan
from edgesdk.frontend import import_model
from edgesdk.profiles import TargetProfile


@dataclass(frozen=True)
class MemoryEstimate:
    """Sizes in bytes, as a bundle will have them but for tuned layouts.

    `weights_bytes` are in the file, packed for the target; `activations_bytes` hold all
    intermediate tensors, `unshared_bytes` would without reuse; `inputs_bytes` and `outputs_bytes`
    belong to the caller.
    """

    weights_bytes: int
    activations_bytes: int
    unshared_bytes: int
    inputs_bytes: int
    outputs_bytes: int
    kernel_calls: int


def estimate_memory(
    path: Path, profile: TargetProfile, *, shapes: Mapping[str, Sequence[int]]
) -> MemoryEstimate:
    """Returns what the model `path` takes on a target, without any of its tools.

    Raises what `import_model` raises, and UnsupportedModelError.
    """
    import tvm

    model = import_model(path, shapes=shapes)
    with tvm.target.Target(profile.tvm):
        module = lower(model.take_module(), profile)
    plan = make_plan(module)
    sizes = dict.fromkeys(("input", "output"), 0)
    for tensor in {(t.storage, t.index): t for t in plan.tensors}.values():
        if tensor.storage in sizes:
            sizes[tensor.storage] += tensor.size_bytes
    return MemoryEstimate(
        weights_bytes=plan.weights_bytes,
        activations_bytes=plan.arena_bytes,
        unshared_bytes=plan.activations_bytes,
        inputs_bytes=sizes["input"],
        outputs_bytes=sizes["output"],
        kernel_calls=sum(step.kernel is not None for step in plan.steps),
    )
