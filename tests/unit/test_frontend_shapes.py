"""Which input shapes are taken, which are assumed, and what is said about the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx.parser
import pytest

from edgesdk.errors import UnsupportedModelError, UsageError
from edgesdk.frontend.shapes import FixedInputs, fix_inputs


def fix(inputs: str, shapes: Mapping[str, Sequence[int]] | None = None) -> FixedInputs:
    text = f'<ir_version: 8, opset_import: ["": 13]> g ({inputs}) => (float y) {{ y = Neg (x) }}'
    return fix_inputs(onnx.parser.parse_model(text), {"w"}, shapes or {})


def shapes_of(fixed: FixedInputs) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in fixed.values.items()}


def test_static_shapes_need_nothing() -> None:
    fixed = fix("float[1,3,4] x, int64[2] n, float s, float[5] w")
    assert shapes_of(fixed) == {"x": (1, 3, 4), "n": (2,), "s": ()}
    assert "w" not in fixed.values
    assert fixed.assumed == ()


@pytest.mark.parametrize("name", ["N", "batch", "batch_size", "unk__7", "bs"])
def test_open_batch_becomes_one_and_is_told(name: str) -> None:
    fixed = fix(f"float[{name},3,4] x")
    assert shapes_of(fixed) == {"x": (1, 3, 4)}
    assert "batch" in fixed.assumed[0]
    assert "fixed to 1" in fixed.assumed[0]


def test_the_same_name_means_the_same_number() -> None:
    fixed = fix("float[N,T] x, float[2,N] h", {"x": (4, 7)})
    assert shapes_of(fixed) == {"x": (4, 7), "h": (2, 4)}


def test_open_height_and_width_are_asked_for() -> None:
    with pytest.raises(UsageError, match="'x' leaves axis 2 \\('H'\\), axis 3 \\('W'\\) open") as e:
        fix("float[N,3,H,W] x")
    assert e.value.hint == "add --shape x=1x3xHxW with numbers for the letters"


def test_a_sequence_is_no_batch() -> None:
    with pytest.raises(UsageError, match="'sequence'"):
        fix("float[sequence,80] x")


def test_unknown_name_lists_the_inputs_and_suggests() -> None:
    with pytest.raises(UsageError, match="no input 'imag'; its inputs are 'image'") as e:
        fix("float[1,3] image", {"imag": (1, 3)})
    assert e.value.hint is not None
    assert "--shape image=" in e.value.hint


def test_a_weight_is_no_input() -> None:
    with pytest.raises(UsageError, match="it is a weight"):
        fix("float[1,3] x, float[5] w", {"w": (5,)})


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3), "has 2 dimensions"),
        ((1, 4, 8), "the model fixes 3"),
        ((1, 3, 0), "0 at axis 2"),
        ((1, 3, -5), "-5 at axis 2"),
    ],
)
def test_contradictions(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fix("float[1,3,W] x", {"x": shape})


def test_two_numbers_for_one_name() -> None:
    with pytest.raises(UsageError, match="dimension 'T' is 5 in 'x' but 6 in 'h'"):
        fix("float[T] x, float[T] h", {"x": (5,), "h": (6,)})


def test_safe_identifiers_are_names_too() -> None:
    text = '<ir_version: 8, opset_import: ["": 13]> g (float[1,W] x) => (float y) { y = Neg (x) }'
    model = onnx.parser.parse_model(text)
    model.graph.input[0].name = "gpu_0/data:0"
    fixed = fix_inputs(model, set(), {"gpu_0_data_0": (1, 9)})
    assert shapes_of(fixed) == {"gpu_0/data:0": (1, 9)}


def test_strings_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="not supported"):
        fix("string[2] x")
