"""TFLite's interpreter: the reference for TFLite files, given the file as it came.

TFLite's integer kernels round each in a way of its own: its own kernels and XNNPACK's differ from
each other, by one step of the quantisation or, behind a Softmax, some. So the results of a
quantised network are compared with what ONNX Runtime computes from its form in ONNX, where rounding
is defined; and ONNX Runtime's results must be TFLite's, within few steps.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgesdk.errors import ModelError, VerificationError

if TYPE_CHECKING:
    import numpy as np

    from edgesdk.frontend.reference import Session
    from edgesdk.frontend.sources import Source


class TFLiteSession:
    """Runs a TFLite file; names are those that its ONNX form has.

    `optimise=False` takes TFLite's own kernels instead of XNNPACK's, which sum in another order.
    Where these lack an operator (MediaPipe's own are in XNNPACK only) it computes as with
    `optimise`. Raises ModelError when the interpreter refuses the model.
    """

    def __init__(
        self, source: Source, shapes: Mapping[str, Sequence[int]], *, optimise: bool = True
    ) -> None:
        import onnx

        self.path = source.path
        graph = onnx.load(source.onnx, load_external_data=False).graph
        self.outputs = tuple(o.name for o in graph.output)
        names = [i.name for i in graph.input]
        self._interpreter = self._open(names, shapes, plain=not optimise)
        details = self._interpreter.get_input_details()
        self._inputs = {n: d["index"] for n, d in zip(names, details, strict=True)}
        self.dtypes = {
            n: d["dtype"].__name__.rstrip("_") for n, d in zip(names, details, strict=True)
        }

    def run(self, feeds: Mapping[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """Returns the outputs in the order of `outputs`."""
        for name, array in feeds.items():
            self._interpreter.set_tensor(self._inputs[name], array)
        self._interpreter.reset_all_variables()
        self._interpreter.invoke()
        details = self._interpreter.get_output_details()
        return [self._interpreter.get_tensor(d["index"]).copy() for d in details]

    def _open(
        self, names: Sequence[str], shapes: Mapping[str, Sequence[int]], *, plain: bool
    ) -> Any:
        from edgesdk.frontend.tflite.file import missing_interpreter

        try:
            from ai_edge_litert.interpreter import Interpreter, OpResolverType
        except ImportError as error:
            raise missing_interpreter() from error
        own = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        kernels = own if plain else OpResolverType.AUTO
        try:
            interpreter = Interpreter(
                model_content=self.path.read_bytes(),
                experimental_op_resolver_type=kernels,
                num_threads=1,
            )
            for name, detail in zip(names, interpreter.get_input_details(), strict=True):
                shape = [int(d) for d in shapes.get(name, detail["shape"])]
                if shape != list(detail["shape"]):
                    interpreter.resize_tensor_input(detail["index"], shape)
            with _silent():
                interpreter.allocate_tensors()
        except (RuntimeError, ValueError) as error:
            if plain:
                return self._open(names, shapes, plain=False)
            text = " ".join(str(error).split())[:200]
            raise ModelError(f"TFLite's interpreter refuses {self.path.name}: {text}") from error
        return interpreter


class QuantisedSession:
    """ONNX Runtime's results, `exact`, confirmed by TFLite's interpreter."""

    def __init__(self, exact: Session, source: Source, shapes: Mapping[str, Sequence[int]]) -> None:
        self._exact = exact
        self._fast = TFLiteSession(source, shapes)
        self._plain = TFLiteSession(source, shapes, optimise=False)
        self.outputs, self.dtypes = exact.outputs, exact.dtypes

    def run(self, feeds: Mapping[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        """Returns the exact outputs. Raises VerificationError where TFLite's are others."""
        import numpy as np

        results = self._exact.run(feeds)
        fast, plain = self._fast.run(feeds), self._plain.run(feeds)
        for name, *arrays in zip(self.outputs, results, fast, plain, strict=True):
            ours, one, other = (np.asarray(a, np.float64) for a in arrays)
            whole = np.issubdtype(arrays[0].dtype, np.integer)
            step = 1.0 if whole else float(np.max(np.abs(one), initial=0.0)) / 128
            spread = float(np.max(np.abs(one - other), initial=0.0))
            distance = float(
                np.max(np.minimum(np.abs(ours - one), np.abs(ours - other)), initial=0)
            )
            if distance > max(_STEPS * step, step + 2 * spread):
                raise VerificationError(
                    f"output {name!r} of the model's form in ONNX is {distance / step:.3g} steps of"
                    " the quantisation away from that of TFLite's interpreter",
                    hint="the conversion of this model is wrong: please report it, with the model",
                )
        return results


# Of the quantisation; of an output in floats, 1/128 of its largest value.
_STEPS = 4


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keeps the interpreter's own lines, which no setting switches off, from stderr."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
