"""Where a wrong result comes from: the first layer that differs, and a folder that shows it.

All layers are compiled as outputs and compared first. Where nothing differs then, the fault is one
of fused kernels: the network is cut at one tensor after the other, by halves, each cut compiled as
the whole would be.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from edgesdk.compiler.gate import MismatchError
from edgesdk.compiler.probe import Probe
from edgesdk.errors import EdgeSdkError, VerificationError
from edgesdk.frontend import Reference
from edgesdk.frontend.layers import Layer, LayeredModel, cut_model, load_layers
from edgesdk.frontend.sources import REFERENCES, open_source
from edgesdk.numerics import QUANTISED_TOLERANCE, Difference, compare, tolerance_of

if TYPE_CHECKING:
    import numpy as np

    Arrays = Mapping[str, np.ndarray]

MODEL_NAME = "model.onnx"
# How many layers before the one that differs a reproducer may hold, if fewer do not show it.
_DEPTHS = (1, 2, 4, 16)


@dataclass(frozen=True)
class LayerResult:
    """A tensor that `layer` computes, compared with the reference's.

    `overflows` says that it has NaN or infinity, whatever the reference has.
    """

    layer: Layer
    difference: Difference
    tolerance: float
    overflows: bool

    @property
    def ok(self) -> bool:
        return self.difference.within(self.tolerance)


@dataclass(frozen=True)
class _Values:
    """What the reference computes for every tensor, and the difference that is allowed to each."""

    expected: Arrays
    tolerances: Mapping[str, float]

    def compare(self, layer: Layer, tensor: str, actual: np.ndarray) -> LayerResult:
        import numpy as np

        difference = compare(tensor, actual, self.expected[tensor])
        overflows = actual.dtype.kind == "f" and not np.isfinite(actual).all()
        return LayerResult(layer, difference, self.tolerances[tensor], overflows)


def explain(
    mismatch: MismatchError,
    *,
    model: Path,
    probe: Probe,
    folder: Path,
    command: Callable[[Sequence[str]], str],
) -> VerificationError:
    """Returns `mismatch` with the layer where it begins, and writes a reproducer into `folder`.

    `command` gives the command line that shows the difference from a model and its inputs.
    What prevents the search is in the message: the mismatch is never lost.
    """
    inputs = mismatch.sample.inputs
    try:
        if _wrong_in_onnx(mismatch, model):
            return VerificationError(
                f"{mismatch.message}, and so does its form in ONNX in ONNX Runtime",
                hint="the conversion of this model is wrong: please report it, with the model",
            )
        layered = load_layers(model, {name: array.shape for name, array in inputs.items()})
        values = _reference_values(layered, inputs)
        result = _first_wrong(layered, values, inputs, mismatch.difference, probe)
        cuts = _cuts(layered, result, mismatch.difference.name)
        size = _write_reproducer(layered, values, result, cuts, probe, folder, command)
    except (EdgeSdkError, OSError) as error:
        return VerificationError(
            f"{mismatch.message}; its layer was not found: {error}", hint=mismatch.hint
        )
    overflow = ""
    if mismatch.difference.nonfinite and result.overflows:
        kind = values.expected[result.difference.name].dtype
        overflow = f", whose numbers overflow {kind}"
    return VerificationError(
        f"{mismatch.message}, first in the layer {result.layer}{overflow}",
        hint=f"{folder} shows it with {size}; see its README.md, and please send it",
    )


def compare_layers(
    model: Path, inputs: Arrays, probe: Probe, progress: Callable[[str], None]
) -> list[LayerResult]:
    """Runs `model` with every layer's result as an output and compares each with the reference's.

    Raises what `import_model` and `probe` raise.
    """
    layered = load_layers(model, {name: array.shape for name, array in inputs.items()})
    progress(f"running the reference with {len(layered.tensors)} tensors")
    values = _reference_values(layered, inputs)
    progress(f"compiling with {len(layered.tensors)} tensors as outputs")
    return _all_layers(layered, values, inputs, probe)


def _wrong_in_onnx(mismatch: MismatchError, model: Path) -> bool:
    """Whether a model of another format differs already in the form that it was converted to."""
    source = open_source(model)
    if source.kind == "ONNX":
        return False
    inputs, name = mismatch.sample.inputs, mismatch.difference.name
    shapes = {n: array.shape for n, array in inputs.items()}
    converted = Reference(source.onnx, shapes).run(inputs)[name]
    found = compare(name, converted, mismatch.sample.expected[name])
    return not found.within(mismatch.difference.max_relative_error / 2)


def nonfinite_origin(model: Path, inputs: Arrays) -> Layer | None:
    """Returns the first layer in which the reference itself computes NaN or infinity, if any."""
    import numpy as np

    layered = load_layers(model, {name: array.shape for name, array in inputs.items()})
    expected = Reference(
        layered.path, {n: a.shape for n, a in inputs.items()}, outputs=layered.tensors
    ).run(inputs)
    for layer in layered.layers:
        arrays = [expected[t] for t in layer.outputs]
        if not all(np.isfinite(a).all() for a in arrays if a.dtype.kind == "f"):
            return layer
    return None


def _reference_values(layered: LayeredModel, inputs: Arrays) -> _Values:
    shapes = {name: array.shape for name, array in inputs.items()}
    expected = Reference(layered.path, shapes, outputs=layered.tensors).run(inputs)
    other = Reference(layered.path, shapes, outputs=layered.tensors, optimise=False).run(inputs)
    tolerances = {
        name: _tolerance(layered, {name: array}, {name: other[name]})
        for name, array in expected.items()
    }
    return _Values({**inputs, **expected}, tolerances)


def _tolerance(layered: LayeredModel, expected: Arrays, other: Arrays) -> float:
    """The difference allowed to `expected`, as the gate allows it to outputs."""
    return QUANTISED_TOLERANCE if layered.quantised else tolerance_of(expected, other)


def _all_layers(
    layered: LayeredModel, values: _Values, inputs: Arrays, probe: Probe
) -> list[LayerResult]:
    actual = probe.run(layered.path, inputs, layered.tensors)
    return [
        values.compare(layer, tensor, actual[tensor])
        for layer in layered.layers
        for tensor in layer.outputs
    ]


def _first_wrong(
    layered: LayeredModel, values: _Values, inputs: Arrays, output: Difference, probe: Probe
) -> LayerResult:
    """The first layer that differs, or at last the one that computes `output`.

    Where `output` has NaN or infinity, it is the first layer that has: ONNX Runtime computes half
    precision in single precision between operators, and so may have infinity later or never.
    """
    for result in _all_layers(layered, values, inputs, probe):
        if not result.ok or (output.nonfinite and result.overflows):
            return result
    last = layered.layer_of(output.name)
    if last is None:
        raise VerificationError(f"{output.name!r} is no layer's result")
    known: dict[Layer, LayerResult] = {}

    def cut_after(layer: Layer) -> LayerResult:
        if layer not in known:
            known[layer] = _cut_after(layered, values, inputs, layer, probe)
        return known[layer]

    wrong = cut_after(last)
    while True:
        # Bisect: the last candidate is wrong, what comes before the first is not.
        candidates = layered.ancestors(wrong.layer)
        low, high = -1, len(candidates) - 1
        while high - low > 1:
            middle = (low + high) // 2
            result = cut_after(candidates[middle])
            if result.ok:
                low = middle
            else:
                high, wrong = middle, result
        # Where the network branches, a layer on another way to this one may be wrong, too.
        parents = [layered.layer_of(name) for name in wrong.layer.reads]
        results = (cut_after(parent) for parent in parents if parent is not None)
        bad = next((r for r in results if not r.ok), None)
        if bad is None:
            return wrong
        wrong = bad


def _cut_after(
    layered: LayeredModel, values: _Values, inputs: Arrays, layer: Layer, probe: Probe
) -> LayerResult:
    """Compares the worst result of `layer` in the network that ends with it."""
    actual = probe.run(layered.path, inputs, layer.outputs)
    results = [values.compare(layer, tensor, actual[tensor]) for tensor in layer.outputs]
    return next((r for r in results if not r.ok), results[0])


def _cuts(layered: LayeredModel, wrong: LayerResult, output: str) -> list[tuple[list[Layer], str]]:
    """What may show the fault, layers and the tensor that they end in, the smallest first."""
    before = layered.ancestors(wrong.layer)
    cuts = [(before[-depth:], wrong.difference.name) for depth in _DEPTHS if depth < len(before)]
    cuts.append((before, wrong.difference.name))
    last = layered.layer_of(output)
    if last is not None and last is not wrong.layer:
        whole = layered.ancestors(last)
        if wrong.layer in whole:
            cuts.append((whole[whole.index(wrong.layer) :], output))
        cuts.append((whole, output))
    return cuts


def _write_reproducer(
    layered: LayeredModel,
    values: _Values,
    wrong: LayerResult,
    cuts: Sequence[tuple[Sequence[Layer], str]],
    probe: Probe,
    folder: Path,
    command: Callable[[Sequence[str]], str],
) -> str:
    """Writes the first of `cuts` that shows the difference into `folder`; returns what it holds.

    An older folder is replaced, if it is a reproducer. Raises VerificationError when another thing
    stands there, OSError when it cannot be written.
    """
    if folder.exists() and not (folder / MODEL_NAME).is_file():
        raise VerificationError(f"{folder} exists and is no reproducer")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        staging = Path(temporary) / folder.name
        staging.mkdir()
        size = _first_cut(layered, values, wrong, cuts, probe, staging, command)
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    return size


def _first_cut(
    layered: LayeredModel,
    values: _Values,
    wrong: LayerResult,
    cuts: Sequence[tuple[Sequence[Layer], str]],
    probe: Probe,
    folder: Path,
    command: Callable[[Sequence[str]], str],
) -> str:
    import numpy as np
    import onnx

    for layers, tensor in cuts:
        cut = cut_model(layered, layers, values.expected, [tensor])
        path = folder / MODEL_NAME
        onnx.save(cut, path)
        feeds = {i.name: values.expected[i.name] for i in cut.graph.input}
        shapes = {name: array.shape for name, array in feeds.items()}
        expected = Reference(path, shapes).run(feeds)
        other = Reference(path, shapes, optimise=False).run(feeds)
        actual = probe.run(path, feeds)
        difference = compare(tensor, actual[tensor], expected[tensor])
        tolerance = _tolerance(layered, expected, other)
        if not difference.within(tolerance):
            break
    else:
        raise VerificationError(
            f"the layer {wrong.layer} is wrong in the whole network only,"
            " where it is computed together with others"
        )
    options: list[str] = []
    for index, (name, array) in enumerate(feeds.items()):
        np.save(folder / f"input_{index}.npy", array)
        options += ["--input", f"{name}=input_{index}.npy"]
    np.save(folder / "expected.npy", expected[tensor])
    np.save(folder / "actual.npy", actual[tensor])
    size = "one layer" if len(layers) == 1 else f"{len(layers)} layers"
    text = _README.substitute(
        layer=str(wrong.layer),
        size=size,
        tensor=tensor,
        target=probe.profile.name,
        difference=difference.describe(tolerance),
        cosine=f"{difference.cosine:.6g}",
        reference=REFERENCES["ONNX"],
        command=command([MODEL_NAME, *options]),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    return size


_README = Template("""\
# A wrong result

The layer $layer, compiled for $target, does not compute what the reference does
($reference): `$tensor` $difference, cosine $cosine.

`model.onnx` holds $size of the network, `input_N.npy` what goes in, `expected.npy` the
reference's result and `actual.npy` the compiled network's. In this folder,

    $command

ends with exit code 8 as long as the difference is there.
""")
