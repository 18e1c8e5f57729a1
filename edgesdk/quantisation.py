"""quantize_model: a network in floats becomes one of 8-bit integers, by ONNX Runtime's quantizer.

What range each tensor has is learned from sample inputs, the calibration. The result is an ONNX
file in QDQ form: QuantizeLinear and DequantizeLinear around each operator that computes with
integers.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgesdk.errors import ModelError, UsageError
from edgesdk.settings import suggestion

if TYPE_CHECKING:
    import numpy as np
    import onnx

Activations = Literal["uint8", "int8"]
Method = Literal["minmax", "entropy", "percentile"]

# Scales for each channel need this operator set.
_OPSET = 17
_FIRST_OPSET = 13
# How many samples the result is compared on.
_COMPARED = 200

Sample = dict[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class OutputError:
    """How far an output of the quantised network is from that in floats, over all samples.

    `max_relative_error` is relative to the largest magnitude, `cosine` that between all numbers.
    `top1_agreement` is how often the largest number of a row is at the same place, for outputs
    [N, classes]; None for others.
    """

    name: str
    max_relative_error: float
    cosine: float
    top1_agreement: float | None


@dataclass(frozen=True)
class QuantisedModel:
    """`operators` counts those that compute with integers now; `samples` those of the calibration,
    of which `compared` were used to measure `outputs`. Sizes are in bytes."""

    path: Path
    size_bytes: int
    original_bytes: int
    samples: int
    compared: int
    operators: int
    outputs: tuple[OutputError, ...]


def quantize_model(
    model: Path,
    *,
    calibration: Path,
    output: Path,
    activations: Activations = "uint8",
    method: Method = "minmax",
    per_channel: bool = True,
    reduce_range: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
) -> QuantisedModel:
    """Writes `model` (in floats), quantised, as ONNX to `output`.

    `calibration` is a folder of samples, see `read_samples`. Weights become int8, with a scale for
    each output channel, or one for all without `per_channel`; `reduce_range` gives them 7 bits.

    Raises UsageError for the samples and for an output that cannot be written, ModelError for a
    model that is none, is quantised already, or is refused by the quantizer.
    """
    import onnx

    from edgesdk.frontend.integers import is_quantised
    from edgesdk.frontend.load import load_onnx
    from edgesdk.frontend.sources import open_source

    source = open_source(model).onnx
    load_onnx(source)  # for its errors
    proto = onnx.load(source)
    if is_quantised(proto):
        raise ModelError(f"{model} is quantised already", hint="give the model in floats")
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {output.parent}", hint=f"mkdir {output.parent}")
    progress("reading the calibration samples")
    samples = read_samples(calibration, _inputs_of(proto))
    with tempfile.TemporaryDirectory(prefix="edgesdk-quantize-") as temporary, _quiet():
        prepared, raw = Path(temporary) / "prepared.onnx", Path(temporary) / "quantised.onnx"
        progress("preparing the model")
        _prepare(proto, prepared)
        progress(f"running {len(samples)} samples and quantising")
        _quantize(
            prepared,
            raw,
            samples,
            activations=activations,
            method=method,
            per_channel=per_channel,
            reduce_range=reduce_range,
        )
        operators = _count_operators(onnx.load(raw))
        if not operators:
            raise ModelError(
                f"nothing in {model.name} can be quantised",
                hint="integers are for convolutions and matrix products with constant weights",
            )
        progress("comparing with the model in floats")
        compared = samples[:_COMPARED]
        outputs = _compare(source, raw, compared)
        partial = output.with_name(f".{output.name}.tmp")
        try:
            partial.write_bytes(raw.read_bytes())
            partial.replace(output)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UsageError(f"cannot write {output}: {error.strerror or error}") from error
    return QuantisedModel(
        path=output,
        size_bytes=output.stat().st_size,
        original_bytes=model.stat().st_size,
        samples=len(samples),
        compared=len(compared),
        operators=operators,
        outputs=outputs,
    )


@dataclass(frozen=True)
class _Input:
    """`shape` has None for dimensions that the model leaves open."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    def text(self) -> str:
        sizes = "x".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.name} {self.dtype.name}[{sizes}]"


def read_samples(folder: Path, inputs: Sequence[_Input]) -> list[Sample]:
    """Reads the samples in `folder`: each .npz is one, with an array for each input by its name;
    for a model with one input, each .npy is one, too. Sorted by file name.

    Raises UsageError, with the file, for what does not fit the inputs.
    """
    if not folder.is_dir():
        raise UsageError(
            f"there is no calibration folder {folder}", hint="give a folder of .npz or .npy files"
        )
    files = sorted(f for f in folder.iterdir() if f.suffix in (".npz", ".npy"))
    if not files:
        raise UsageError(
            f"{folder} holds no .npz or .npy file",
            hint=f"save samples there, for example np.savez('0.npz', {inputs[0].name}=array)",
        )
    samples = []
    for file in files:
        arrays = _arrays(file, inputs)
        for given in inputs:
            if given.name not in arrays:
                raise UsageError(
                    f"{file} has no array for the input {given.name!r}",
                    hint=suggestion(
                        given.name,
                        arrays,
                        otherwise=f"its arrays: {', '.join(arrays)}; the model's inputs:"
                        f" {', '.join(i.text() for i in inputs)}",
                    ),
                )
            _check(arrays[given.name], given, file)
        samples.append({i.name: arrays[i.name] for i in inputs})
    return samples


def _arrays(file: Path, inputs: Sequence[_Input]) -> Mapping[str, np.ndarray[Any, Any]]:
    import zipfile

    import numpy as np

    try:
        loaded = np.load(file, allow_pickle=False)
        if file.suffix == ".npz":
            with loaded:
                return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise UsageError(
            f"{file} is not a {file.suffix} file of numbers",
            hint=f"write one with numpy.{'savez' if file.suffix == '.npz' else 'save'}",
        ) from error
    if len(inputs) > 1:
        raise UsageError(
            f"{file} holds one array, and the model has the inputs"
            f" {', '.join(i.name for i in inputs)}",
            hint="save all inputs of a sample in one .npz file, by their names",
        )
    return {inputs[0].name: loaded}


def _check(array: np.ndarray[Any, Any], given: _Input, file: Path) -> None:
    import numpy as np

    fits = len(array.shape) == len(given.shape) and all(
        want in (None, size) for want, size in zip(given.shape, array.shape, strict=True)
    )
    if not fits or array.dtype != given.dtype:
        sizes = "x".join(map(str, array.shape))
        raise UsageError(
            f"{file}: {given.name} is {array.dtype.name}[{sizes}], the model takes {given.text()}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise UsageError(f"{file}: {given.name} has NaN or infinity")


def _inputs_of(proto: onnx.ModelProto) -> list[_Input]:
    from onnx import helper

    weights = {t.name for t in proto.graph.initializer}
    found = []
    for value in proto.graph.input:
        tensor = value.type.tensor_type
        if value.name in weights:
            continue
        dims = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        found.append(_Input(value.name, dtype, tuple(dims)))
    if not found:
        raise ModelError("the model has no inputs, so there is nothing to calibrate")
    return found


def _prepare(proto: onnx.ModelProto, path: Path) -> None:
    """Writes the model with a young operator set, shapes inferred and batch norms folded."""
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if 0 < opset < _FIRST_OPSET:
        try:
            proto = onnx.version_converter.convert_version(proto, _OPSET)
        except Exception as error:
            raise ModelError(
                f"operator set {opset} cannot be converted to {_OPSET}: {_first_line(error)}",
                hint=f"export the model again with opset_version={_OPSET}",
            ) from error
    onnx.save(proto, path)
    try:
        quant_pre_process(str(path), str(path), skip_symbolic_shape=True)
    except Exception as error:
        raise ModelError(f"the model cannot be prepared: {_first_line(error)}") from error


def _quantize(
    source: Path,
    output: Path,
    samples: Sequence[Sample],
    *,
    activations: Activations,
    method: Method,
    per_channel: bool,
    reduce_range: bool,
) -> None:
    from onnxruntime.quantization import (
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.calibrate import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(samples)

        def get_next(self) -> Sample | None:
            return next(self.left, None)

    methods = {
        "minmax": CalibrationMethod.MinMax,
        "entropy": CalibrationMethod.Entropy,
        "percentile": CalibrationMethod.Percentile,
    }
    try:
        quantize_static(
            str(source),
            str(output),
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=per_channel,
            reduce_range=reduce_range,
            activation_type=QuantType.QUInt8 if activations == "uint8" else QuantType.QInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=methods[method],
        )
    except Exception as error:
        raise ModelError(f"ONNX Runtime's quantizer fails: {_first_line(error)}") from error


def _count_operators(proto: onnx.ModelProto) -> int:
    """The operators all of whose tensors are dequantised."""
    real = {o for n in proto.graph.node if n.op_type == "DequantizeLinear" for o in n.output}
    kinds = ("Conv", "Gemm", "MatMul", "ConvTranspose")
    return sum(
        n.op_type in kinds and all(i in real for i in n.input if i) for n in proto.graph.node
    )


def _compare(original: Path, quantised: Path, samples: Sequence[Sample]) -> tuple[OutputError, ...]:
    import numpy as np

    before, after = _session(original), _session(quantised)
    names = [o.name for o in before.get_outputs()]
    pairs: list[list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]] = [[] for _ in names]
    for sample in samples:
        for index, pair in enumerate(
            zip(before.run(names, sample), after.run(names, sample), strict=True)
        ):
            pairs[index].append((np.asarray(pair[0]), np.asarray(pair[1])))
    return tuple(_difference(n, p) for n, p in zip(names, pairs, strict=True))


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.x64quantprecision", "1")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelError(f"ONNX Runtime refuses {path.name}: {_first_line(error)}") from error


def _difference(
    name: str, pairs: Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
) -> OutputError:
    import numpy as np

    real = np.concatenate([p[0].astype(np.float64).ravel() for p in pairs])
    rounded = np.concatenate([p[1].astype(np.float64).ravel() for p in pairs])
    scale = float(np.abs(real).max(initial=0.0)) or 1.0
    norms = float(np.linalg.norm(real) * np.linalg.norm(rounded))
    agreement = None
    first = pairs[0][0]
    # [N, classes], or with axes of length 1 behind that.
    rows = first.ndim >= 2 and first.shape[1] > 1 and first.size == first.shape[0] * first.shape[1]
    if rows and first.dtype.kind == "f":
        same = [a.argmax(1) == b.argmax(1) for a, b in pairs]
        agreement = float(np.mean(np.concatenate(same)))
    return OutputError(
        name,
        float(np.abs(real - rounded).max(initial=0.0)) / scale,
        float(real @ rounded) / norms if norms else float(np.array_equal(real, rounded)),
        agreement,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """The quantizer logs advice that is for its own users."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
