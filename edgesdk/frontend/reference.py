"""The reference: the program that the model's format belongs to, given the file as it came.

That is ONNX Runtime for ONNX, TFLite's interpreter and PyTorch for theirs, all on the CPU; never
the repaired model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgesdk.errors import EdgeSdkError, ModelError, UsageError
from edgesdk.frontend.model import TensorSpec, ValueHint
from edgesdk.memory import release_memory

if TYPE_CHECKING:
    import numpy as np

_TYPES = {
    "tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16",
    "tensor(int8)": "int8", "tensor(int16)": "int16", "tensor(int32)": "int32",
    "tensor(int64)": "int64", "tensor(uint8)": "uint8", "tensor(uint16)": "uint16",
    "tensor(uint32)": "uint32", "tensor(uint64)": "uint64", "tensor(bool)": "bool",
}  # fmt: skip

# Keeps two more copies of the weights of convolutions, for speed only; in a file of this size and
# more, that would take most of what compiling may take.
_HUNGRY = ["NchwcTransformer"]
_LARGE_BYTES = 32 << 20


class Session(Protocol):
    """A model in the program that its format belongs to. `dtypes` are its inputs' NumPy types."""

    outputs: tuple[str, ...]
    dtypes: dict[str, str]

    def run(self, feeds: Mapping[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        """Returns the outputs in the order of `outputs`."""
        ...


class Reference:
    """Runs the original model in ONNX Runtime, TFLite's interpreter or PyTorch.

    `shapes` are the fixed input shapes by the model's own names (`ImportedModel.shapes`); `run`
    refuses others. `optimise=False` computes the same in another order, which shows how much of a
    result is rounding. `outputs` names the tensors to return, by default the model's outputs; it is
    for ONNX models only. Raises ModelError when the model is refused.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, Sequence[int]],
        *,
        optimise: bool = True,
        outputs: Sequence[str] | None = None,
    ) -> None:
        from edgesdk.frontend.sources import open_source

        self.path = Path(path)
        self.shapes = {name: tuple(int(d) for d in shape) for name, shape in shapes.items()}
        source = open_source(self.path)
        self.program = source.reference
        release_memory()  # what an earlier session left
        self._session: Session
        if source.quantised:
            from edgesdk.frontend.tflite.runtime import QuantisedSession

            exact = _OnnxSession(source.onnx, None, optimise=optimise)
            self._session = QuantisedSession(exact, source, self.shapes) if optimise else exact
        elif source.kind == "TFLite":
            from edgesdk.frontend.tflite.runtime import TFLiteSession

            self._session = TFLiteSession(source, self.shapes, optimise=optimise)
        elif source.kind == "PyTorch":
            from edgesdk.frontend.torch_export import TorchSession

            self._session = TorchSession(source, optimise=optimise)
        else:
            self._session = _OnnxSession(self.path, outputs, optimise=optimise)
        self.outputs, self.dtypes = self._session.outputs, dict(self._session.dtypes)

    def run(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Returns the outputs by name for `inputs` by name.

        Raises UsageError when an input is missing or has another shape or type than the model,
        ModelError when the program fails on them.
        """
        import numpy as np

        for name, shape in self.shapes.items():
            if name not in inputs:
                raise UsageError(f"the input {name!r} is missing")
            given = np.asarray(inputs[name])
            if given.shape != shape or given.dtype.name != self.dtypes.get(name, given.dtype.name):
                raise UsageError(
                    f"the input {name!r} is {given.dtype.name}{list(given.shape)};"
                    f" the model takes {self.dtypes.get(name)}{list(shape)}"
                )
        feeds = {n: np.asarray(a) for n, a in inputs.items() if n in self.dtypes}
        try:
            values = self._session.run(feeds)
        except EdgeSdkError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            program = self.program.split(",")[0]
            raise ModelError(f"{program} fails on {self.path.name}: {text}") from error
        return {name: np.asarray(v) for name, v in zip(self.outputs, values, strict=True)}


class _OnnxSession:
    def __init__(self, path: Path, outputs: Sequence[str] | None, *, optimise: bool) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        # On x86 without VNNI, its fast kernels for quantised models cut sums at 16 bits.
        options.add_session_config_entry("session.x64quantprecision", "1")
        if not optimise:
            # No second copy of the weights, arranged for a speed that nobody asks for.
            options.add_session_config_entry("session.disable_prepacking", "1")
            level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.graph_optimization_level = level
        try:
            self._session = onnxruntime.InferenceSession(
                str(path) if outputs is None else _with_outputs(path, outputs),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=_HUNGRY if path.stat().st_size > _LARGE_BYTES else None,
            )
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise ModelError(f"ONNX Runtime refuses {path.name}: {text}") from error
        self.outputs = tuple(outputs or (o.name for o in self._session.get_outputs()))
        self.dtypes = {i.name: _TYPES.get(i.type, i.type) for i in self._session.get_inputs()}

    def run(self, feeds: Mapping[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        return list(self._session.run(list(self.outputs), feeds))


def _with_outputs(path: Path, outputs: Sequence[str]) -> bytes:
    """The model in `path` with more outputs. Raises ValueError for one of more than 2 GB."""
    import onnx

    model = onnx.load(path)
    present = {o.name for o in model.graph.output}
    model.graph.output.extend(
        # ONNX Runtime infers the types; it only wants the names.
        onnx.ValueInfoProto(name=name)
        for name in dict.fromkeys(outputs)
        if name not in present
    )
    return bytes(model.SerializeToString())


def draw_inputs(
    inputs: Sequence[TensorSpec], *, seed: int, hints: Mapping[str, ValueHint] | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """Draws one array for each input, by the model's own name; the same for the same seed.

    Floats are normally distributed with deviation 1 (cut at 4), booleans are fair, integers lie
    where `hints` (`ImportedModel.hints`) says, else from 0 to 9, 8-bit ones over their range.
    """
    import numpy as np

    drawn: dict[str, np.ndarray[Any, Any]] = {}
    for position, spec in enumerate(inputs):
        rng = np.random.default_rng([seed, position])
        dtype = np.dtype(spec.dtype)
        hint = (hints or {}).get(spec.name)
        if dtype.kind == "f":
            normal = np.clip(rng.standard_normal(spec.shape), -4.0, 4.0)
            drawn[spec.name] = np.asarray(normal, dtype)
        elif dtype.kind == "b":
            drawn[spec.name] = np.asarray(rng.integers(0, 2, spec.shape), dtype)
        elif hint is not None and hint.choices:
            drawn[spec.name] = np.asarray(rng.choice(hint.choices, spec.shape), dtype)
        elif hint is not None:
            drawn[spec.name] = np.asarray(rng.integers(hint.low, hint.high + 1, spec.shape), dtype)
        elif dtype.itemsize == 1:
            info = np.iinfo(dtype)
            drawn[spec.name] = rng.integers(info.min, info.max + 1, spec.shape, dtype)
        else:
            drawn[spec.name] = np.asarray(rng.integers(0, 10, spec.shape), dtype)
    return drawn
