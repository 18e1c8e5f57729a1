"""What `edgesdk inspect` finds out: the model as it came, and what the front end says to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgesdk import console
from edgesdk.errors import ModelError, UnsupportedModelError, UsageError

if TYPE_CHECKING:
    import onnx

    from edgesdk.compiler.estimate import MemoryEstimate
    from edgesdk.profiles import TargetProfile


@dataclass(frozen=True)
class Port:
    """An input or output: `shape` holds numbers, and names ("?" for none) of open dimensions."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def shape_text(self) -> str:
        """The shape as people write it, e.g. "Nx3x224x224"."""
        return "x".join(map(str, self.shape)) or "scalar"


@dataclass(frozen=True)
class Refusal:
    """A node that cannot be compiled."""

    node: str
    operator: str
    reason: str


@dataclass(frozen=True)
class TargetReport:
    """What the model takes on a target (`compiler.estimate`, sizes in bytes), or why it does not
    fit there: `refused` then."""

    target: str
    memory: MemoryEstimate | None
    refused: str | None = None


@dataclass(frozen=True)
class ModelReport:
    """`parameters` counts the numbers in weights. `flops` are the operations of one run, a
    multiply-add counting as two; None where shapes are missing or something is refused. `inputs`
    and `outputs` are static if the model could be imported, else as the file has them.

    `opset` is that of the model's form in ONNX. `operators` maps each operator of the file, by its
    format's own name where that is known, to its count. `needs` says which shapes are missing
    before more can be told; then `repairs` and `refused` are empty.
    """

    model: str
    format: str
    size_bytes: int
    sha256: str
    opset: int
    producer: str
    parameters: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    operators: dict[str, int]
    repairs: tuple[str, ...]
    refused: tuple[Refusal, ...]
    needs: str | None
    flops: int | None
    targets: tuple[TargetReport, ...]


def inspect_model(
    path: Path, shapes: Mapping[str, Sequence[int]], targets: Sequence[str] = ()
) -> ModelReport:
    """Reads a model and imports it as `edgesdk compile` would, for each of `targets`.

    The name of a family means all its boards.

    Raises UsageError for an unknown target, a missing file and for `shapes` that contradict the
    model, ModelError for a file that is no sound ONNX model. What is refused is in the report.
    """
    from edgesdk.frontend import import_model
    from edgesdk.frontend.load import load_model
    from edgesdk.frontend.sources import open_source
    from edgesdk.profiles import load_targets

    profiles = [profile for target in targets for profile in load_targets(target)]
    source = open_source(path)
    loaded = load_model(path)
    proto = loaded.proto
    inputs = [i for i in proto.graph.input if i.name not in loaded.weights]
    ports = tuple(map(_port, inputs)), tuple(map(_port, proto.graph.output))
    repairs: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()
    needs = flops = None
    estimates: list[TargetReport] = []
    try:
        imported = import_model(path, shapes=shapes)
    except UnsupportedModelError as error:
        nodes = error.nodes or (("", "", error.message),)
        refused = tuple(Refusal(*node) for node in nodes)
    except UsageError as error:
        if shapes:  # then it may be the shapes that are wrong
            raise
        needs = f"{error.message}; {error.hint}" if error.hint else error.message
    else:
        repairs, flops = imported.repairs, imported.flops
        ports = (
            tuple(Port(t.name, t.dtype, t.shape) for t in imported.inputs),
            tuple(Port(t.name, t.dtype, t.shape) for t in imported.outputs),
        )
        del imported  # its module holds the weights
        estimates = [_for_target(path, profile, shapes) for profile in profiles]
    return ModelReport(
        model=str(path),
        format=source.kind,
        size_bytes=path.stat().st_size,
        sha256=loaded.sha256,
        opset=loaded.opset,
        producer=" ".join(w for w in (proto.producer_name, proto.producer_version) if w),
        parameters=sum(int(w.size) for w in loaded.weights.values())
        + _constant_parameters(proto.graph),
        inputs=ports[0],
        outputs=ports[1],
        operators=source.operators or dict(Counter(_operators(proto.graph)).most_common()),
        repairs=repairs,
        refused=refused,
        needs=needs,
        flops=flops,
        targets=tuple(estimates),
    )


def _for_target(
    path: Path, profile: TargetProfile, shapes: Mapping[str, Sequence[int]]
) -> TargetReport:
    from edgesdk.compiler.estimate import estimate_memory

    try:
        return TargetReport(profile.name, estimate_memory(path, profile, shapes=shapes))
    except ModelError as error:
        return TargetReport(profile.name, None, error.message)


def report_text(report: ModelReport) -> str:
    """The report for people."""
    from edgesdk.deploy.transport.base import size_text

    parts = [
        console.facts(
            [
                ("model", report.model),
                ("size", f"{size_text(report.size_bytes)}, {report.parameters:,} parameters"),
                ("work", "" if report.flops is None else f"{_count_text(report.flops)}FLOP a run"),
                _format(report),
                *(("input", f"{t.name} {t.dtype} {t.shape_text}") for t in report.inputs),
                *(("output", f"{t.name} {t.dtype} {t.shape_text}") for t in report.outputs),
            ]
        ),
        "operators\n" + _indented(f"{count:5} {name}" for name, count in report.operators.items()),
    ]
    if report.repairs:
        parts.append("repaired or assumed\n" + _indented(f"  {r}" for r in report.repairs))
    if report.targets:
        parts.append(_targets_text(report.targets))
    if report.refused:
        rows = [(f"  {r.node or '(no name)'}", r.operator, r.reason) for r in report.refused]
        parts.append("refused\n" + console.table((), rows))
    elif report.needs:
        parts.append(f"shapes are needed\n  {report.needs}")
    else:
        parts.append("nothing is refused: it can be compiled")
    return "\n\n".join(parts)


def _targets_text(targets: Sequence[TargetReport]) -> str:
    from edgesdk.deploy.transport.base import size_text

    rows = []
    for report in targets:
        memory = report.memory
        if memory is None:
            rows.append((report.target, "", "", "", report.refused or ""))
            continue
        weights, activations = map(size_text, (memory.weights_bytes, memory.activations_bytes))
        rows.append((report.target, weights, activations, str(memory.kernel_calls), ""))
    header = ("TARGET", "WEIGHTS", "ACTIVATIONS", "KERNEL CALLS", "")
    return console.table(header, rows, right="lrrr")


def _count_text(count: int) -> str:
    """A count with a prefix of thousands, e.g. "1.23 G"."""
    power = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.3g} {' kMGT'[power].strip()}"


def _format(report: ModelReport) -> tuple[str, str]:
    made_by = f", by {report.producer}" if report.producer else ""
    if report.format == "ONNX":
        return "opset", f"{report.opset}{made_by}"
    return "format", f"{report.format}{made_by}"


def _indented(lines: Any) -> str:
    return "\n".join(lines)


def _port(info: onnx.ValueInfoProto) -> Port:
    from onnx import helper

    tensor = info.type.tensor_type
    try:
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    except KeyError:
        dtype = info.type.WhichOneof("value") or "unknown"
    shape = tuple(
        d.dim_value if d.HasField("dim_value") else (d.dim_param or "?") for d in tensor.shape.dim
    )
    return Port(info.name, dtype, shape if tensor.HasField("shape") else ("?",))


def _constant_parameters(graph: onnx.GraphProto) -> int:
    """The numbers in the Constant nodes of `graph` and of the graphs inside its nodes: some
    exporters keep their weights there. Integers, which are shapes for the most part, do not count.
    """
    import math

    from onnx import TensorProto

    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
    count = 0
    for node in graph.node:
        for attribute in node.attribute:
            tensor = attribute.t
            if node.op_type == "Constant" and tensor.dims and tensor.data_type in floats:
                count += math.prod(tensor.dims)
            for inside in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                count += sum(math.prod(t.dims) for t in inside.initializer)
                count += _constant_parameters(inside)
    return count


def _operators(graph: onnx.GraphProto) -> list[str]:
    """The operators of `graph` and of the graphs inside its nodes (If, Loop, Scan)."""
    found = []
    for node in graph.node:
        custom = node.domain not in ("", "ai.onnx")
        found.append(f"{node.domain}.{node.op_type}" if custom else node.op_type)
        for attribute in node.attribute:
            inner = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
            for inside in inner:
                found += _operators(inside)
    return found
