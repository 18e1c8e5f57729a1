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
    import onnx

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
class _Cut:
    """A part of a network that shows a difference: `model` computes `tensor` from `inputs`."""

    model: onnx.ModelProto
    layers: int
    tensor: str
    inputs: Arrays
    expected: np.ndarray
    actual: np.ndarray
    difference: Difference
    tolerance: float

    @property
    def size(self) -> str:
        return "one layer" if self.layers == 1 else f"{self.layers} layers"


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
        search = _Search(load_layers(model, _shapes(inputs)), inputs, probe)
        result = search.first_wrong(mismatch.difference)
        cut = search.smallest_cut(result, mismatch.difference.name)
        _write_reproducer(cut, result.layer, folder, target=probe.profile.name, command=command)
    except (EdgeSdkError, OSError) as error:
        return VerificationError(
            f"{mismatch.message}; its layer was not found: {error}", hint=mismatch.hint
        )
    overflow = ""
    if mismatch.difference.nonfinite and result.overflows:
        overflow = f", whose numbers {_overflow(search.values[result.difference.name], probe)}"
    return VerificationError(
        f"{mismatch.message}, first in the layer {result.layer}{overflow}",
        hint=f"{folder} shows it with {cut.size}; see its README.md, and please send it",
    )


def compare_layers(
    model: Path, inputs: Arrays, probe: Probe, progress: Callable[[str], None]
) -> list[LayerResult]:
    """Runs `model` with every layer's result as an output and compares each with the reference's.

    Raises what `import_model` and `probe` raise.
    """
    layered = load_layers(model, _shapes(inputs))
    progress(f"running the reference with {len(layered.tensors)} tensors")
    search = _Search(layered, inputs, probe)
    progress(f"compiling with {len(layered.tensors)} tensors as outputs")
    return search.all_layers()


def _overflow(values: np.ndarray, probe: Probe) -> str:
    """How `values`, as the reference computes them, overflow what they are stored in."""
    import numpy as np

    kind = "float16" if probe.profile.precision == "fp16" else str(values.dtype)
    largest = np.abs(values[np.isfinite(values)]).max(initial=0.0)
    limit = np.finfo(kind).max
    beyond = f": {largest:.6g} is more than {limit:.6g}" if largest > limit else ""
    return f"overflow {kind}{beyond}"


def nonfinite_origin(model: Path, inputs: Arrays) -> Layer | None:
    """Returns the first layer in which the reference itself computes NaN or infinity, if any."""
    import numpy as np

    layered = load_layers(model, _shapes(inputs))
    expected = Reference(layered.path, _shapes(inputs), outputs=layered.tensors).run(inputs)
    for layer in layered.layers:
        arrays = [expected[t] for t in layer.outputs]
        if not all(np.isfinite(a).all() for a in arrays if a.dtype.kind == "f"):
            return layer
    return None


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def _wrong_in_onnx(mismatch: MismatchError, model: Path) -> bool:
    """Whether a model of another format differs already in the form that it was converted to."""
    source = open_source(model)
    if source.kind == "ONNX":
        return False
    inputs, name = mismatch.sample.inputs, mismatch.difference.name
    converted = Reference(source.onnx, _shapes(inputs)).run(inputs)[name]
    found = compare(name, converted, mismatch.sample.expected[name])
    return not found.within(mismatch.difference.max_relative_error / 2)


class _Search:
    """Compiles a network, whole or cut, runs it on `inputs`, and compares with the reference.

    `values` is what the reference computes for every tensor.
    """

    def __init__(self, layered: LayeredModel, inputs: Arrays, probe: Probe) -> None:
        self._layered, self._inputs, self._probe = layered, inputs, probe
        expected, self._tolerances = self._reference(layered.path, inputs, layered.tensors)
        self.values: Arrays = {**inputs, **expected}

    def all_layers(self) -> list[LayerResult]:
        """Every layer's results, all of them outputs of the network."""
        return self._results(self._layered.layers)

    def first_wrong(self, output: Difference) -> LayerResult:
        """The first layer that differs, or at last the one that computes `output`.

        Where `output` has NaN or infinity, it is the first layer that has: ONNX Runtime computes
        half precision in single precision between operators, and so may have infinity later or
        never.
        """
        for result in self.all_layers():
            if not result.ok or (output.nonfinite and result.overflows):
                return result
        last = self._layered.layer_of(output.name)
        if last is None:
            raise VerificationError(f"{output.name!r} is no layer's result")
        known: dict[Layer, LayerResult] = {}

        def cut_after(layer: Layer) -> LayerResult:
            """The worst result of `layer` in the network that ends with it."""
            if layer not in known:
                results = self._results([layer])
                known[layer] = next((r for r in results if not r.ok), results[0])
            return known[layer]

        wrong = cut_after(last)
        while True:
            # Bisect: the last candidate is wrong, what comes before the first is not.
            candidates = self._layered.ancestors(wrong.layer)
            low, high = -1, len(candidates) - 1
            while high - low > 1:
                middle = (low + high) // 2
                result = cut_after(candidates[middle])
                if result.ok:
                    low = middle
                else:
                    high, wrong = middle, result
            # Where the network branches, a layer on another way to this one may be wrong, too.
            parents = [self._layered.layer_of(name) for name in wrong.layer.reads]
            results = (cut_after(parent) for parent in parents if parent is not None)
            bad = next((r for r in results if not r.ok), None)
            if bad is None:
                return wrong
            wrong = bad

    def smallest_cut(self, wrong: LayerResult, output: str) -> _Cut:
        """The smallest part of the network that shows the fault. VerificationError if none does."""
        import onnx

        for layers, tensor in self._cuts(wrong, output):
            model = cut_model(self._layered, layers, self.values, [tensor])
            inputs = {i.name: self.values[i.name] for i in model.graph.input}
            with tempfile.TemporaryDirectory(prefix="edgesdk-") as folder:
                path = Path(folder) / MODEL_NAME
                onnx.save(model, path)
                expected, tolerances = self._reference(path, inputs, [tensor])
                actual = self._probe.run(path, inputs)
            difference = compare(tensor, actual[tensor], expected[tensor])
            if not difference.within(tolerances[tensor]):
                return _Cut(
                    model=model,
                    layers=len(layers),
                    tensor=tensor,
                    inputs=inputs,
                    expected=expected[tensor],
                    actual=actual[tensor],
                    difference=difference,
                    tolerance=tolerances[tensor],
                )
        raise VerificationError(
            f"the layer {wrong.layer} is wrong in the whole network only,"
            " where it is computed together with others"
        )

    def _cuts(self, wrong: LayerResult, output: str) -> list[tuple[list[Layer], str]]:
        """What may show the fault, layers and the tensor that they end in, the smallest first."""
        name = wrong.difference.name
        before = self._layered.ancestors(wrong.layer)
        cuts = [(before[-depth:], name) for depth in _DEPTHS if depth < len(before)]
        cuts.append((before, name))
        last = self._layered.layer_of(output)
        if last is not None and last is not wrong.layer:
            whole = self._layered.ancestors(last)
            if wrong.layer in whole:
                cuts.append((whole[whole.index(wrong.layer) :], output))
            cuts.append((whole, output))
        return cuts

    def _results(self, layers: Sequence[Layer]) -> list[LayerResult]:
        """Runs the network with the results of `layers` as its outputs."""
        import numpy as np

        tensors = [tensor for layer in layers for tensor in layer.outputs]
        actual = self._probe.run(self._layered.path, self._inputs, tensors)
        return [
            LayerResult(
                layer,
                compare(tensor, actual[tensor], self.values[tensor]),
                self._tolerances[tensor],
                overflows=actual[tensor].dtype.kind == "f"
                and not np.isfinite(actual[tensor]).all(),
            )
            for layer in layers
            for tensor in layer.outputs
        ]

    def _reference(
        self, path: Path, inputs: Arrays, tensors: Sequence[str]
    ) -> tuple[Arrays, dict[str, float]]:
        """What the reference computes, and the difference allowed to it, as the gate allows it."""
        shapes = _shapes(inputs)
        expected = Reference(path, shapes, outputs=tensors).run(inputs)
        other = Reference(path, shapes, outputs=tensors, optimise=False).run(inputs)
        tolerances = {
            name: QUANTISED_TOLERANCE
            if self._layered.quantised
            else max(tolerance_of({name: array}, {name: other[name]}), self._probe.tolerance)
            for name, array in expected.items()
        }
        return expected, tolerances


def _write_reproducer(
    cut: _Cut, layer: Layer, folder: Path, *, target: str, command: Callable[[Sequence[str]], str]
) -> None:
    """Writes `cut` into `folder`; an older folder is replaced, if it is a reproducer.

    Raises VerificationError when another thing stands there, OSError when it cannot be written.
    """
    import numpy as np
    import onnx

    if folder.exists() and not (folder / MODEL_NAME).is_file():
        raise VerificationError(f"{folder} exists and is no reproducer")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        staging = Path(temporary) / folder.name
        staging.mkdir()
        onnx.save(cut.model, staging / MODEL_NAME)
        options: list[str] = []
        for index, (name, array) in enumerate(cut.inputs.items()):
            np.save(staging / f"input_{index}.npy", array)
            options += ["--input", f"{name}=input_{index}.npy"]
        np.save(staging / "expected.npy", cut.expected)
        np.save(staging / "actual.npy", cut.actual)
        text = _README.substitute(
            layer=str(layer),
            size=cut.size,
            tensor=cut.tensor,
            target=target,
            difference=cut.difference.describe(cut.tolerance),
            cosine=f"{cut.difference.cosine:.6g}",
            reference=REFERENCES["ONNX"],
            command=command([MODEL_NAME, *options]),
        )
        (staging / "README.md").write_text(text, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)


_README = Template("""\
# A wrong result

The layer $layer, compiled for $target, does not compute what the reference does
($reference): `$tensor` $difference, cosine $cosine.

`model.onnx` holds $size of the network, `input_N.npy` what goes in, `expected.npy` the
reference's result and `actual.npy` the compiled network's. In this folder,

    $command

ends with exit code 8 as long as the difference is there.
""")
