"""The flat plan: a lowered Relax function as a list of kernel calls over planned memory.

`make_plan` reads the straight-line `main` that `lower.py` leaves, gives every intermediate tensor a
place in one arena, and collects the constants. `emit.py` writes the result down for the device.

Where an accelerator runs some of the kernels, tensors have a side, the CPU's or the accelerator's,
each with an arena of its own. A tensor that is needed on the other side is copied there once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from edgesdk.compiler.device_code import DeviceKernel, Launch
from edgesdk.errors import UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np

ALIGNMENT = 64  # what TVM's generated code assumes of every tensor


@dataclass(frozen=True)
class PlanTensor:
    """A view of storage. `storage` is "input", "output", "weight" or "arena", or one of these with
    "device_" before it.

    `index` numbers inputs and outputs; `offset` is in bytes from the start of the storage.
    """

    storage: str
    index: int
    offset: int
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


@dataclass(frozen=True)
class Step:
    """One kernel call; `kernel` None is a copy from `args[0]` to `args[1]`.

    `args` are indices into Plan.tensors: inputs first, then outputs. With `launch` the step is a
    launch that is part of `kernel`, and `args` are what the launch takes.
    """

    kernel: str | None
    args: tuple[int, ...]
    launch: Launch | None = None


@dataclass(frozen=True)
class Plan:
    tensors: tuple[PlanTensor, ...]
    steps: tuple[Step, ...]
    weights: tuple[np.ndarray, ...]  # in the order of `weight_offsets`
    weight_offsets: tuple[int, ...]
    weights_bytes: int
    arena_bytes: int
    activations_bytes: int  # sum of all intermediate tensors: what a plan without reuse would need
    device_arena_bytes: int = 0


@dataclass
class _Value:
    """A tensor of the graph while the plan is made: it lives in one buffer, perhaps with others."""

    buffer: int
    shape: tuple[int, ...]
    dtype: str


@dataclass
class _Buffer:
    """Bytes that one or more values (a tensor and its reshapes) share."""

    storage: str
    size_bytes: int
    index: int = 0
    constant: Any = None
    on_device: bool = False
    first_step: int = -1
    last_step: int = -1
    offset: int = 0


@dataclass
class _Builder:
    names: Mapping[str, str]
    buffers: list[_Buffer] = field(default_factory=list)
    # By the handle of the Relax variable: comparing variables with == builds an expression.
    values: dict[int, Any] = field(default_factory=dict)
    calls: list[tuple[str | None, list[_Value]]] = field(default_factory=list)
    num_outputs: list[int] = field(default_factory=list)  # of each call: its last arguments
    constants: dict[tuple[str, tuple[int, ...], bytes], int] = field(default_factory=dict)

    def new_buffer(self, storage: str, size_bytes: int, **kwargs: Any) -> int:
        self.buffers.append(_Buffer(storage, size_bytes, **kwargs))
        return len(self.buffers) - 1


def make_plan(
    module: Any,
    *,
    names: Mapping[str, str] | None = None,
    on_device: Mapping[str, DeviceKernel] | None = None,
    alignment: int = ALIGNMENT,
) -> Plan:
    """Returns the plan of `module["main"]`, a Relax function of kernel calls with static shapes.

    `names` says what the module's kernels are called in the plan (by default as in the module).
    `on_device` are the kernels that the accelerator runs, by that name; all others run on the CPU.
    Tensors begin at multiples of `alignment` bytes.
    Raises UnsupportedModelError if something is left that a flat plan cannot express.
    """
    builder = _Builder(names or {})
    function = module["main"]
    for index, parameter in enumerate(function.params):
        shape, dtype = _static_type(parameter)
        buffer = builder.new_buffer("input", size_of(shape, dtype), index=index)
        builder.values[parameter.id_] = _Value(buffer, shape, dtype)
    for block in function.body.blocks:
        for binding in block.bindings:
            builder.values[binding.var.id_] = _read_binding(builder, binding)
    results = _resolve(builder, function.body.body)
    _place_outputs(builder, results if isinstance(results, tuple) else (results,))
    kernels = on_device or {}
    _choose_sides(builder, kernels)
    return _launched(_finish(builder, alignment), kernels, alignment)


def size_of(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a dense tensor."""
    import numpy as np

    count = 1
    for dim in shape:
        count *= dim
    if dtype == "bfloat16":
        return count * 2
    return count * int(np.dtype(dtype).itemsize)


def _static_type(expr: Any) -> tuple[tuple[int, ...], str]:
    return _static_tensor(expr.ty, str(expr))


def _static_tensor(info: Any, what: str) -> tuple[tuple[int, ...], str]:
    shape = getattr(info, "shape", None)
    if shape is None:
        raise UnsupportedModelError(f"the size of a tensor is unknown at compile time: {what[:80]}")
    dims = []
    for dim in shape.values if hasattr(shape, "values") else shape:
        try:
            dims.append(int(dim))
        except TypeError:
            raise UnsupportedModelError(
                f"the size of a tensor depends on the data: {what[:80]} has dimension {dim}"
            ) from None
    return tuple(dims), str(info.dtype)


def _read_binding(builder: _Builder, binding: Any) -> Any:
    from tvm import relax

    value = binding.value
    if isinstance(binding, relax.MatchCast):
        return _resolve(builder, value)
    if not isinstance(value, relax.Call):
        return _resolve(builder, value)
    operator = value.op
    name = operator.name if hasattr(operator, "name") else str(operator)
    if name == "relax.call_tir":
        return _read_kernel_call(builder, value)
    if name == "relax.reshape":
        source = _resolve(builder, value.args[0])
        shape, dtype = _static_type(value)
        return _Value(source.buffer, shape, dtype)
    raise UnsupportedModelError(
        f"the network needs {name} at run time, which a compiled plan cannot express",
        hint="`edgesdk inspect` shows which operator it comes from",
    )


def _read_kernel_call(builder: _Builder, call: Any) -> Any:
    from tvm import relax

    own = call.args[0].name_hint
    kernel = builder.names.get(own, own)
    arguments = []
    for argument in call.args[1].fields:
        value = _resolve(builder, argument)
        if not isinstance(value, _Value):
            raise UnsupportedModelError(f"kernel {kernel} takes an argument that is no tensor")
        arguments.append(value)
    if len(call.args) > 2:
        raise UnsupportedModelError(f"kernel {kernel} has a size that depends on the data")
    out_type = call.ty_args[0]
    many = isinstance(out_type, relax.TupleType)
    outputs = []
    for info in out_type.fields if many else [out_type]:
        shape, dtype = _static_tensor(info, kernel)
        buffer = builder.new_buffer("arena", size_of(shape, dtype))
        outputs.append(_Value(buffer, shape, dtype))
    builder.calls.append((kernel, arguments + outputs))
    builder.num_outputs.append(len(outputs))
    return tuple(outputs) if many else outputs[0]


def _resolve(builder: _Builder, expr: Any) -> Any:
    """The value(s) that a leaf expression stands for."""
    from tvm import ir, relax

    if isinstance(expr, relax.Var):
        return builder.values[expr.id_]
    if isinstance(expr, relax.Tuple):
        return tuple(_resolve(builder, item) for item in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return _resolve(builder, expr.tuple_value)[expr.index]
    if isinstance(expr, ir.GenericConst):
        return _constant(builder, expr)
    raise UnsupportedModelError(
        f"the compiled graph holds a {type(expr).__name__}, which a flat plan cannot express"
    )


def _constant(builder: _Builder, expr: Any) -> _Value:
    import hashlib

    import numpy as np

    array = expr.value.numpy()
    dtype = str(expr.value.dtype)
    digest = hashlib.blake2b(
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest_size=16
    ).digest()
    key = (dtype, tuple(array.shape), digest)
    if key not in builder.constants:
        builder.constants[key] = builder.new_buffer(
            "weight", size_of(array.shape, dtype), constant=array
        )
    return _Value(builder.constants[key], tuple(int(d) for d in array.shape), dtype)


def _place_outputs(builder: _Builder, results: Sequence[_Value]) -> None:
    """Turns the buffers of results into outputs; copies those that are an input, a constant, or
    returned twice."""
    for index, value in enumerate(results):
        buffer = builder.buffers[value.buffer]
        if buffer.storage == "arena":
            buffer.storage = "output"
            buffer.index = index
            continue
        copy = builder.new_buffer("output", buffer.size_bytes, index=index)
        builder.calls.append((None, [value, _Value(copy, value.shape, value.dtype)]))
        builder.num_outputs.append(1)


def _choose_sides(builder: _Builder, kernels: Mapping[str, DeviceKernel]) -> None:
    """Gives each buffer the side of the kernel that writes it, and inserts copies for readers on
    the other side. Inputs and constants are there on both sides."""
    calls: list[tuple[str | None, list[_Value]]] = []
    twins: dict[tuple[int, bool], int] = {}  # (buffer, side) -> the buffer with the same content

    def on_side(value: _Value, side: bool) -> _Value:
        buffer = builder.buffers[value.buffer]
        if buffer.on_device == side:
            return value
        key = (value.buffer, side)
        if key not in twins:
            if buffer.storage in ("input", "weight"):
                twin = replace(buffer, on_device=side)
                builder.buffers.append(twin)
                twins[key] = len(builder.buffers) - 1
            else:
                twins[key] = builder.new_buffer("arena", buffer.size_bytes, on_device=side)
                calls.append((None, [value, _Value(twins[key], value.shape, value.dtype)]))
        return _Value(twins[key], value.shape, value.dtype)

    for (kernel, values), outputs in zip(builder.calls, builder.num_outputs, strict=True):
        inputs, results = values[:-outputs], values[-outputs:]
        side = kernel in kernels
        if kernel is None and kernels:  # a copy stays on the side where its source is
            side = builder.buffers[inputs[0].buffer].on_device
        moved = [on_side(value, side) for value in inputs]
        for value in results:
            builder.buffers[value.buffer].on_device = side
        calls.append((kernel, moved + results))
    builder.calls = calls
    for step, (_, values) in enumerate(calls):
        for value in values:
            buffer = builder.buffers[value.buffer]
            buffer.first_step = step if buffer.first_step < 0 else buffer.first_step
            buffer.last_step = step


def _launched(plan: Plan, kernels: Mapping[str, DeviceKernel], alignment: int) -> Plan:
    """`plan` with each call of a device kernel as the launches it consists of.

    Scratch memory between launches follows the device's arena; calls use it one after the other.
    """
    tensors, steps = list(plan.tensors), []
    scratch_bytes = 0
    for step in plan.steps:
        kernel = kernels.get(step.kernel) if step.kernel is not None else None
        if kernel is None:
            steps.append(step)
            continue
        arguments, end = list(step.args), plan.device_arena_bytes
        for size_bytes in kernel.workspaces:
            scratch = PlanTensor("device_arena", 0, end, (size_bytes,), "uint8", size_bytes)
            arguments.append(len(tensors))
            tensors.append(scratch)
            end = align(end + size_bytes, alignment)
        scratch_bytes = max(scratch_bytes, end - plan.device_arena_bytes)
        for launch in kernel.launches:
            args = tuple(arguments[a] for a in launch.args)
            steps.append(Step(step.kernel, args, launch))
    return replace(
        plan,
        tensors=tuple(tensors),
        steps=tuple(steps),
        device_arena_bytes=plan.device_arena_bytes + scratch_bytes,
    )


def _finish(builder: _Builder, alignment: int) -> Plan:
    arena = [b for b in builder.buffers if b.storage == "arena"]
    arena_bytes = assign_offsets([b for b in arena if not b.on_device])
    device_arena_bytes = assign_offsets([b for b in arena if b.on_device], alignment=alignment)
    used = {value.buffer for _, values in builder.calls for value in values}
    weights: dict[int, _Buffer] = {}  # by the array, which both sides may read
    weights_bytes = 0
    for index, buffer in enumerate(builder.buffers):
        if buffer.storage != "weight" or index not in used:
            continue
        if (first := weights.setdefault(id(buffer.constant), buffer)) is not buffer:
            buffer.offset = first.offset
            continue
        buffer.offset = weights_bytes
        weights_bytes = align(weights_bytes + buffer.size_bytes, alignment)
    tensors: dict[PlanTensor, int] = {}
    steps = []
    for kernel, values in builder.calls:
        args = []
        for value in values:
            buffer = builder.buffers[value.buffer]
            tensor = PlanTensor(
                storage=f"device_{buffer.storage}" if buffer.on_device else buffer.storage,
                index=buffer.index,
                offset=buffer.offset,
                shape=value.shape,
                dtype=value.dtype,
                size_bytes=buffer.size_bytes,
            )
            args.append(tensors.setdefault(tensor, len(tensors)))
        steps.append(Step(kernel, tuple(args)))
    return Plan(
        tensors=tuple(tensors),
        steps=tuple(steps),
        weights=tuple(b.constant for b in weights.values()),
        weight_offsets=tuple(b.offset for b in weights.values()),
        weights_bytes=weights_bytes,
        arena_bytes=arena_bytes,
        activations_bytes=sum(align(b.size_bytes) for b in arena),
        device_arena_bytes=device_arena_bytes,
    )


def assign_offsets(buffers: Sequence[_Buffer], *, alignment: int = ALIGNMENT) -> int:
    """Gives each buffer an offset so that buffers alive at the same time do not overlap.

    Greedy by size: the largest buffer first, each at the lowest offset that is free during its life
    (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020).
    Returns the bytes needed.
    """
    placed: list[_Buffer] = []
    total = 0
    for buffer in sorted(buffers, key=lambda b: (-b.size_bytes, b.first_step)):
        neighbours = sorted(
            (
                other
                for other in placed
                if other.first_step <= buffer.last_step and buffer.first_step <= other.last_step
            ),
            key=lambda b: b.offset,
        )
        offset = 0
        for other in neighbours:
            if offset + buffer.size_bytes <= other.offset:
                break
            offset = max(offset, align(other.offset + other.size_bytes, alignment))
        buffer.offset = offset
        placed.append(buffer)
        total = max(total, offset + buffer.size_bytes)
    return align(total, alignment)


def align(size_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of `alignment`."""
    return (size_bytes + alignment - 1) // alignment * alignment
