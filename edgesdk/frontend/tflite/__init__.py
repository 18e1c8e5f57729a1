"""Reads a TFLite file and writes the same network as ONNX, which the rest of the front end takes.

Images are [N, H, W, C] in TFLite and [N, C, H, W] in ONNX. Each tensor of four dimensions has up
to two forms, one in each order; an operator takes the form that suits it, and a transposition is
written only where the form that is wanted is not there yet. So a whole convolutional network is
computed with channels first, and transposed where it begins and ends.

A quantised tensor is stored as integers, as in the file. What computes takes it dequantised and
quantises its result: in ONNX's words, DequantizeLinear and QuantizeLinear around each operator.
"""

from __future__ import annotations

from edgesdk.errors import ModelError
from edgesdk.frontend.sources import Conversion
from edgesdk.frontend.tflite import axes, elements, layers, shapes  # noqa: F401 (they register)
from edgesdk.frontend.tflite.file import MALFORMED, damaged, parse_tflite
from edgesdk.frontend.tflite.operators import RefusedOperatorError, convert_operator
from edgesdk.frontend.tflite.writer import Writer


def convert_tflite(content: bytes, name: str) -> Conversion:
    """Returns the ONNX form of a TFLite file's `content`; `name` is the file's, for messages.

    Raises ToolMissingError without the extra `tflite`, ModelError for a damaged file. Operators
    that cannot be converted become nodes of REFUSED_DOMAIN.
    """
    model = parse_tflite(content, name)
    if not model.subgraphs:
        raise ModelError(f"{name} holds no graph", hint="export or download the model again")
    try:
        writer = Writer(model, content)
        for operator in model.subgraphs[0].operators or ():
            convert_operator(writer.operator(operator))
        return writer.finish(name)
    except (RefusedOperatorError, *MALFORMED) as error:
        raise damaged(name, error) from error
