"""Runs one model through the front end and TVM's own virtual machine, against a reference."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgesdk.compiler import compile_model, gate
from edgesdk.errors import EdgeSdkError, UnsupportedModelError
from edgesdk.frontend import ImportedModel, Reference, import_model
from edgesdk.frontend.graph import Graph, Value
from edgesdk.frontend.importer import name_values, walk_model
from edgesdk.frontend.optimise import optimise
from edgesdk.profiles import load_target

Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Outcome:
    """`status` is "ok", "refused" (by name, with the reason in `detail`) or "wrong"."""

    status: str
    detail: str = ""


def run_in_tvm(model: ImportedModel, inputs: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    """Compiles `model` for this machine and runs it; outputs by the model's own names."""
    import tvm
    from tvm import relax

    if all(0 in s.shape for s in model.outputs):  # TVM's machine cannot hold such a constant
        return {s.name: np.empty(s.shape, s.dtype) for s in model.outputs}
    with tvm.transform.PassContext(opt_level=3):
        built = tvm.compile(model.module, tvm.target.Target({"kind": "llvm", "num-cores": 2}))
    machine = relax.VirtualMachine(built, tvm.cpu())
    arguments = [tvm.runtime.tensor(np.array(inputs[s.name], order="C")) for s in model.inputs]
    result = machine["main"](*arguments)
    tensors = [result] if len(model.outputs) == 1 else list(result)
    return {s.name: t.numpy() for s, t in zip(model.outputs, tensors, strict=True)}


# All that may be left in Relax once every operator is a kernel.
_PLAIN = {"Tensor", "call_tir", "dataflow", "output", "const", "Tuple", "function", "shape"}


def runtime_calls(model: ImportedModel) -> set[str]:
    """The functions of TVM's runtime that `model` would call on a device: there must be none."""
    import tvm
    from tvm import relax

    with tvm.target.Target({"kind": "llvm"}):
        text = relax.transform.LegalizeOps()(model.module).script(show_meta=False)
    called = set(re.findall(r"\bT\.(\w*(?:packed|extern)\w*)\(", text))
    return called | (set(re.findall(r"\bR\.(\w+)\(", text)) - _PLAIN)


def difference(
    got: np.ndarray[Any, Any],
    want: np.ndarray[Any, Any],
    relative: float = 1e-4,
    absolute: float = 1e-5,
) -> str:
    """Says how `got` differs from `want`, or nothing when it does not."""
    if got.shape != want.shape:
        return f"shape {list(got.shape)} instead of {list(want.shape)}"
    if got.dtype != want.dtype:
        return f"type {got.dtype} instead of {want.dtype}"
    if want.size == 0:
        return ""
    if want.dtype.kind in "iub":
        wrong = np.count_nonzero(got != want)
        return f"{wrong} of {want.size} integers differ" if wrong else ""
    a, b = got.astype(np.float64), want.astype(np.float64)
    special = ~np.isfinite(b)
    if not np.array_equal(np.isnan(a), np.isnan(b)) or np.any(
        a[special & ~np.isnan(b)] != b[special & ~np.isnan(b)]
    ):
        return "NaN or infinity where there is none, or the reverse"
    gap = np.abs(a[~special] - b[~special])
    scale = np.max(np.abs(b[~special]), initial=0.0)
    half = 2e-3 if want.dtype.itemsize == 2 else 0.0
    bound = absolute + max(relative, half) * scale
    worst = float(gap.max(initial=0.0))
    return f"off by {worst:.3g} where {scale:.3g} is the largest" if worst > bound else ""


def check_model(
    path: Path,
    inputs: Arrays,
    expected: Arrays | Sequence[np.ndarray[Any, Any]],
    relative: float = 1e-4,
    absolute: float = 1e-5,
) -> Outcome:
    """Imports, compiles and runs `path` on `inputs`, and compares with `expected`."""
    shapes = {name: array.shape for name, array in inputs.items()}
    try:
        model = import_model(path, shapes=shapes)
    except UnsupportedModelError as error:
        return Outcome("refused", "; ".join(f"{kind}: {why}" for _, kind, why in error.nodes))
    except EdgeSdkError as error:
        return Outcome("refused", f"{type(error).__name__}: {error.message}")
    got = run_in_tvm(model, inputs)

    def compare(have: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> str:
        return difference(have, want, relative, absolute)

    if not isinstance(expected, Mapping):
        expected = {s.name: a for s, a in zip(model.outputs, expected, strict=True)}
    texts = [f"{n}: {t}" for n, w in expected.items() if (t := compare(got[n], w))]
    if not texts:
        return Outcome("ok")
    try:
        runtime = Reference(path, model.shapes).run(inputs)
    except EdgeSdkError:
        return Outcome("wrong", texts[0])
    if any(compare(got[n], w) for n, w in runtime.items()):
        return Outcome("wrong", texts[0])
    return Outcome("ok", f"as ONNX Runtime, not as the case: {texts[0]}")


@dataclass(frozen=True)
class Case:
    """One case of ONNX's own backend tests: a model and what it must give."""

    name: str
    model: Any
    inputs: dict[str, np.ndarray[Any, Any]]
    outputs: dict[str, np.ndarray[Any, Any]]
    relative: float
    absolute: float

    @property
    def operator(self) -> str:
        """The operator that the case is about: that of its last node."""
        return str(self.model.graph.node[-1].op_type)


_RANDOM = {"Bernoulli", "RandomUniformLike", "RandomNormalLike", "Multinomial"}


def left_out(case: Case) -> str:
    """Why a case does not count as one of inference on tensors of numbers; "" if it does."""
    graph = case.model.graph
    ports = (*graph.input, *graph.output)
    if "_expanded" in case.name:
        return "the same again, with the operator's definition in ONNX written out"
    if any(v.type.WhichOneof("value") != "tensor_type" for v in ports):
        return "sequences or optionals go in or come out"
    arrays = [*case.inputs.values(), *case.outputs.values()]
    if any(a.dtype.kind in "OUS" for a in arrays):
        return "strings"
    domains = {node.domain for node in graph.node}
    if "ai.onnx.preview.training" in domains or _trains(case):
        return "training"
    if domains & {"ai.onnx.ml", "ai.onnx.preview"}:
        return "operators of ai.onnx.ml (trees, encoders) and of the preview"
    if any(node.op_type in _RANDOM for node in graph.node):
        return "random numbers, whose values no case can know"
    if any(a.dtype.isbuiltin != 1 for a in arrays):
        return "floats of 4 and 8 bits, bfloat16, and integers of 2 and 4 bits at run time"
    if all(o.version < 7 for o in case.model.opset_import if not o.domain):
        return "operator sets before 7"
    return ""


def _trains(case: Case) -> bool:
    node = case.model.graph.node[-1]
    mode = next((a.i for a in node.attribute if a.name == "training_mode"), 0)
    if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2] in case.inputs:
        mode = bool(case.inputs[node.input[2]])
    return bool(mode)


def backend_cases(*, every: bool = False) -> Iterator[Case]:
    """The operator cases that come with the onnx package; those of tensors only, if not `every`."""
    import onnx
    from onnx import numpy_helper
    from onnx.backend.test.loader import load_model_tests

    def array(item: Any) -> np.ndarray[Any, Any]:
        return numpy_helper.to_array(item) if isinstance(item, onnx.TensorProto) else item

    for test in sorted(load_model_tests(kind="node"), key=lambda t: t.name):
        graph = test.model.graph
        ports = (*graph.input, *graph.output)
        if not every and any(v.type.WhichOneof("value") != "tensor_type" for v in ports):
            continue
        if not every and all(o.version < 7 for o in test.model.opset_import if not o.domain):
            continue
        given, wanted = test.data_sets[0]
        inputs = {v.name: array(a) for v, a in zip(graph.input, given, strict=True)}
        outputs = {v.name: array(a) for v, a in zip(graph.output, wanted, strict=True)}
        yield Case(test.name, test.model, inputs, outputs, test.rtol, test.atol)


def folded(case: Case, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs of a case's model with constant inputs: what the repairs compute.

    Every operator that a repair puts in place of another is then computed by ONNX Runtime.
    """
    from edgesdk.frontend.load import load_onnx
    from edgesdk.frontend.walk import Walker

    path = folder / "folded.onnx"
    path.write_bytes(_with_constants(case, list(case.inputs)).SerializeToString())
    graph = Walker(load_onnx(path)).walk({})
    outputs = zip(case.model.graph.output, graph.outputs, strict=True)
    return {info.name: np.asarray(value.const) for info, value in outputs}


def check_cases(cases: Sequence[Case], folder: Path, *, target: str = "local") -> list[Outcome]:
    """Compiles the cases as one network, side by side, as a user's network is, and runs it here.

    The cases give axes, shapes and the like as inputs, which real models have as constants. Where
    that is why a case is refused, inputs become constants, at last all. What the front end computes
    already is compared without being compiled.
    """
    walked = [walk_case(case, folder) for case in cases]
    found: list[dict[str, np.ndarray[Any, Any]]] = [
        {} if isinstance(w, Outcome) else {n: v.const for n, v in w.outputs.items()} for w in walked
    ]
    whole = Graph([], [], [])
    inputs, outputs, places = [], [], []
    for number, (case, walk) in enumerate(zip(cases, walked, strict=True)):
        if isinstance(walk, Outcome):
            continue
        computed = {n: v for n, v in walk.outputs.items() if v.const is None}
        if computed:
            optimise(walk.graph)
            whole.nodes += walk.graph.nodes
            whole.inputs += walk.graph.inputs
            inputs += [case.inputs[name] for name in walk.inputs]
            # Tidying may have replaced them.
            after = dict(zip(walk.outputs, walk.graph.outputs, strict=True))
            whole.outputs += [after[name] for name in computed]
            outputs += [f"{number}_{name}" for name in computed]
            places += [(number, name) for name in computed]
    if places:
        results = _run_graph(whole, inputs, outputs, folder, target=target)
        for (number, name), array in zip(places, results, strict=True):
            found[number][name] = array
    return [
        walk if isinstance(walk, Outcome) else _judge(case, got, folder)
        for case, walk, got in zip(cases, walked, found, strict=True)
    ]


@dataclass(frozen=True)
class WalkedCase:
    """A case after the front end: `inputs` are those that stay inputs."""

    graph: Graph
    inputs: list[str]
    outputs: dict[str, Value]


def walk_case(case: Case, folder: Path) -> WalkedCase | Outcome:
    """What the front end makes of a case, or why it refuses it."""
    path = folder / f"{case.name}.onnx"
    names = list(case.inputs)
    shape_like = [n for n in names[1:] if case.inputs[n].ndim <= 1]
    outcome = Outcome("refused")
    for fixed in ([], shape_like, names):
        path.write_bytes(_with_constants(case, fixed).SerializeToString())
        shapes = {n: a.shape for n, a in case.inputs.items() if n not in fixed}
        try:
            walked = walk_model(path, shapes=shapes)
        except EdgeSdkError as error:
            nodes = getattr(error, "nodes", ())
            detail = "; ".join(f"{kind}: {why}" for _, kind, why in nodes) or error.message
            outcome = Outcome("refused", detail)
            if "at run time" not in detail:
                break
        else:
            results = zip(walked.proto.graph.output, walked.graph.outputs, strict=True)
            return WalkedCase(walked.graph, list(shapes), {o.name: v for o, v in results})
        finally:
            path.unlink()
    return outcome


def _run_graph(
    graph: Graph,
    inputs: Sequence[np.ndarray[Any, Any]],
    outputs: list[str],
    folder: Path,
    *,
    target: str,
) -> list[np.ndarray[Any, Any]]:
    from edgesdk.frontend.emit import emit_module

    names, given, results = name_values(graph, [f"x{i}" for i in range(len(inputs))], outputs)
    model = ImportedModel(
        name="cases",
        module=emit_module(graph, names),
        inputs=given,
        outputs=results,
        source=folder / "cases.onnx",
        sha256="",
        opset=0,
        shapes={s.name: s.shape for s in given},
        repairs=(),
    )
    profile = load_target(target)
    with tempfile.TemporaryDirectory(dir=folder) as build:
        compiled = compile_model(model, profile, build=Path(build), name_build=lambda: "cases")
        execute = gate.executor(profile, compiled.toolchain)
        return execute(compiled.library, compiled.launcher, inputs, len(outputs))


def _judge(case: Case, got: Arrays, folder: Path) -> Outcome:
    relative, absolute = max(case.relative, 1e-4), max(case.absolute, 1e-5)

    def compare(wanted: Arrays) -> list[str]:
        texts = {n: difference(got[n], w, relative, absolute) for n, w in wanted.items()}
        return [f"{name}: {text}" for name, text in texts.items() if text]

    texts = compare(case.outputs)
    if not texts:
        return Outcome("ok")
    path = folder / f"{case.name}.onnx"
    path.write_bytes(case.model.SerializeToString())
    try:
        runtime = Reference(path, {n: a.shape for n, a in case.inputs.items()}).run(case.inputs)
    except EdgeSdkError:
        return Outcome("wrong", texts[0])
    finally:
        path.unlink()
    if compare(runtime):
        return Outcome("wrong", texts[0])
    return Outcome("ok", f"as ONNX Runtime, not as the case: {texts[0]}")


def _with_constants(case: Case, names: list[str]) -> Any:
    """The case's model with the inputs `names` as constants."""
    import onnx
    from onnx import numpy_helper

    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    kept = [i for i in model.graph.input if i.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for name in names:
        model.graph.initializer.append(numpy_helper.from_array(case.inputs[name], name))
    return model
