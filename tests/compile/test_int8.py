"""Integer arithmetic: exact results of every template on every instruction set that runs here."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))
import quantised

from edgesdk.compiler import compile_model
from edgesdk.compiler.gate import run_launcher
from edgesdk.frontend import import_model
from edgesdk.profiles import TargetProfile, load_target
from edgesdk.schedules.dot import find_dot
from edgesdk.toolchain import emulator_command

# Signed and unsigned data on every kernel, the four combinations of types in turn.
_TURNS = itertools.cycle(quantised.TYPES)
_CASES = [(case, next(_TURNS)) for case in quantised.CONVOLUTIONS]
_BOTH = [
    ("3x3", "s8 to u8"),
    ("picture", "u8 to u8"),
    ("1x1", "s8 to s8"),
    ("depthwise", "s8 to u8"),
    ("depthwise 5x5, stride 2", "u8 to u8"),
    ("groups that fill no block", "s8 to s8"),
]
_PRODUCTS = [("one row", "u8 to s8"), ("odd sizes", "s8 to u8"), ("rows", "u8 to u8")]


def profile(name: str) -> TargetProfile:
    if name not in ("sse", "i8mm"):
        return load_target(name)
    if name == "i8mm":
        base = load_target("rpi5")
        tvm = {**base.tvm, "mcpu": "generic", "mattr": ["+dotprod", "+i8mm"]}
        assert base.emulator is not None
        return dataclasses.replace(
            base, tvm=tvm, emulator=dataclasses.replace(base.emulator, cpu="max")
        )
    base = load_target("linux-x86_64")
    cpu = dataclasses.replace(base.cpu, vector_bits=128)
    return dataclasses.replace(base, tvm={**base.tvm, "mcpu": "x86-64-v2"}, cpu=cpu)


@pytest.mark.parametrize(
    "target", ["local", "linux-x86_64", "sse", "rpi5", "i8mm", "rpi4", "rpi4-32"]
)
def test_results_are_exact(target: str, tmp_path: Path) -> None:
    network = quantised.network([*_CASES, *_BOTH], _PRODUCTS)
    network.save(tmp_path / "q.onnx")
    wanted = profile(target)
    compiled = compile_model(
        import_model(tmp_path / "q.onnx"), wanted, build=tmp_path, name_build=lambda: "test"
    )
    assert compiled.coverage.problems == ()
    prefix = () if wanted.emulator is None else emulator_command(wanted, compiled.toolchain)
    results = run_launcher(
        prefix,
        library=compiled.library,
        launcher=compiled.launcher,
        inputs=list(network.feeds.values()),
    )
    for (name, expected), actual in zip(network.expected.items(), results, strict=True):
        np.testing.assert_array_equal(actual, expected, err_msg=name)
        assert len(np.unique(expected)) > 10, f"{name} tells little"


@pytest.mark.parametrize(
    ("target", "data", "name"),
    [
        ("linux-x86_64", "uint8", "pmaddwd256"),  # weights of 8 bits: no cut sums
        ("sse", "int8", "pmaddwd128"),
        ("i8mm", "uint8", "usdot"),
        ("i8mm", "int8", "sdot"),  # as many products, and nothing to flip
        ("rpi5", "uint8", "sdot"),
        ("rpi4", "int8", "smull"),
        ("rpi4-32", "uint8", "vmull"),
    ],
)
def test_the_best_instruction_is_chosen(target: str, data: str, name: str) -> None:
    dot = find_dot(profile(target), data, np.array([[-128, 127, -128, -128]]))
    assert dot is not None
    assert dot.instruction.name == name


@pytest.mark.parametrize(
    ("weight", "fits"),
    [
        ([64, 64, 0], True),  # 255 * 128 is below 2^15
        ([64, 65, 0], False),
        ([-64, -64, 0], True),
        ([-64, -65, 0], False),
        ([127, -128, 127], True),  # of opposite signs
        ([0, 127, 127], True),  # no pair: sums begin at even places
        ([0, 0, 127, 2], False),
    ],
)
def test_sums_of_two_products_stay_within_16_bits(weight: list[int], fits: bool) -> None:
    """The instruction that cuts them is used where they cannot reach that far, and only there."""
    dot = find_dot(profile("linux-x86_64"), "uint8", np.asarray([weight]))
    assert dot is not None
    assert (dot.instruction.name == "pmaddubsw256") == fits
    if fits:
        pairs = np.pad(weight, (0, len(weight) % 2)).reshape(-1, 2)
        extremes = [np.clip(pairs, *ends).sum(1) * 255 for ends in ((-128, 0), (0, 127))]
        assert all((e >= -(2**15)).all() and (e < 2**15).all() for e in extremes)


def test_without_an_instruction_floats_are_summed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU without one, and on GPUs; exact where sums stay below 2^24, as here."""
    lowering = sys.modules["edgesdk.compiler.lower"]  # the package has a function of that name
    monkeypatch.setattr(lowering, "has_dot", lambda profile: False)
    cases = [
        ("3x3", "u8 to s8"),
        ("depthwise", "s8 to u8"),
        ("groups that fill no block", "s8 to s8"),
    ]
    network = quantised.network(cases, [("rows", "u8 to s8")])
    network.save(tmp_path / "q.onnx")
    compiled = compile_model(
        import_model(tmp_path / "q.onnx"),
        profile("linux-x86_64"),
        build=tmp_path,
        name_build=lambda: "test",
    )
    assert compiled.coverage.problems == ()
    kernels = [name for names in compiled.coverage.rungs.values() for name in names]
    assert not [name for name in kernels if "_int8" in name]
    results = run_launcher(
        (),
        library=compiled.library,
        launcher=compiled.launcher,
        inputs=list(network.feeds.values()),
    )
    for (name, expected), actual in zip(network.expected.items(), results, strict=True):
        np.testing.assert_array_equal(actual, expected, err_msg=name)
