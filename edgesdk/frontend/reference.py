"""The reference: ONNX Runtime on the CPU, given the file as it came, never the repaired model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgesdk.errors import ModelError, UsageError
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


class Reference:
    """Runs the original model in ONNX Runtime.

    `shapes` are the fixed input shapes by the model's own names (`ImportedModel.shapes`); `run`
    refuses others. `optimise=False` computes the same in another order, which shows how much of a
    result is rounding. Raises ModelError when ONNX Runtime refuses the model.
    """

    def __init__(
        self, path: Path, shapes: Mapping[str, Sequence[int]], *, optimise: bool = True
    ) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        release_memory()  # what an earlier session left
        if not optimise:
            # No second copy of the weights, arranged for a speed that nobody asks for.
            options.add_session_config_entry("session.disable_prepacking", "1")
            level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.graph_optimization_level = level
        try:
            self._session = onnxruntime.InferenceSession(
                str(path),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=_HUNGRY if Path(path).stat().st_size > _LARGE_BYTES else None,
            )
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise ModelError(f"ONNX Runtime refuses {Path(path).name}: {text}") from error
        self.path = Path(path)
        self.shapes = {name: tuple(int(d) for d in shape) for name, shape in shapes.items()}
        self.outputs = tuple(o.name for o in self._session.get_outputs())
        self.dtypes = {i.name: _TYPES.get(i.type, i.type) for i in self._session.get_inputs()}

    def run(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Returns the outputs by name for `inputs` by name.

        Raises UsageError when an input is missing or has another shape or type than the model,
        ModelError when ONNX Runtime fails on them.
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
            values = self._session.run(None, feeds)
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise ModelError(f"ONNX Runtime fails on {self.path.name}: {text}") from error
        return {name: np.asarray(v) for name, v in zip(self.outputs, values, strict=True)}


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
