"""The benchmarks' own arithmetic: what would make a table lie if it were wrong."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules measure, table and loops, imported as the scripts do it."""
    import importlib
    from types import SimpleNamespace

    for folder in ("cpu", "arm"):
        monkeypatch.syspath_prepend(str(_BENCHMARKS / folder))
    names = ("measure", "table", "loops")
    modules = {name: importlib.import_module(name) for name in names}
    yield SimpleNamespace(**modules)
    for name in names:
        sys.modules.pop(name, None)


def row(engine: str, median: float, **fields: Any) -> dict[str, Any]:
    numbers = {"median": median, "p10": median, "p90": median, "samples": 1}
    standard = {"model": "m", "threads": 1, "error": "", "max_relative_error": 0.0}
    return {**standard, "engine": engine, "cpu_ms": numbers, "wall_ms": numbers, **fields}


def test_an_engine_that_computes_something_else_is_not_compared(harness: Any) -> None:
    ours = row("edgesdk", 2.0)
    wrong = row("quick", 0.1, max_relative_error=0.5)
    unmatched = row("odd", 0.1, max_relative_error=None)
    rows = [ours, row("onnxruntime", 4.0), wrong, unmatched]
    assert harness.table.ratio_to(rows, ours, "onnxruntime", "cpu_ms") == 0.5
    assert harness.table.ratio_to(rows, ours, "quick", "cpu_ms") is None
    assert harness.table.ratio_to(rows, ours, "odd", "cpu_ms") is None
    assert "**wrong" in "\n".join(harness.table.table(rows, "cpu_ms"))
    text = "\n".join(harness.table.summary(rows, "cpu_ms"))
    assert "onnxruntime" in text and "quick" not in text


def test_our_own_wrong_results_are_not_compared_either(harness: Any) -> None:
    rows = [row("edgesdk", 2.0, max_relative_error=1.0), row("onnxruntime", 4.0)]
    assert len(harness.table.summary(rows, "cpu_ms")) == 2  # the heading alone


def test_ratios_stay_within_a_model_and_a_number_of_threads(harness: Any) -> None:
    ours = row("edgesdk", 2.0)
    rows = [
        ours,
        row("onnxruntime", 100.0, model="another"),
        row("onnxruntime", 100.0, threads=2),
        row("onnxruntime", 1.0),
    ]
    assert harness.table.ratio_to(rows, ours, "onnxruntime", "cpu_ms") == 2.0


def test_a_reason_stands_in_the_table_without_breaking_it(harness: Any) -> None:
    (line,) = harness.table.table([row("iree", 1.0, error="cannot | do")], "cpu_ms")[2:]
    assert "cannot / do" in line
    assert line.count("|") == harness.table.table([], "cpu_ms")[0].count("|")


def test_summary_names_the_best_and_the_worst_model(harness: Any) -> None:
    rows = [
        row("edgesdk", 1.0, model="a"),
        row("onnxruntime", 2.0, model="a"),
        row("edgesdk", 2.0, model="b"),
        row("onnxruntime", 1.0, model="b"),
    ]
    line = harness.table.summary(rows, "cpu_ms")[-1]
    assert "| 2 | 1.00 | 0.50 (a) | 2.00 (b) |" in line


def test_geometric_mean(harness: Any) -> None:
    assert harness.table.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError):
        harness.table.geometric_mean([])


def test_largest_error_is_relative_to_each_output(harness: Any) -> None:
    expected = [np.array([100.0, 0.0]), np.array([1.0])]
    assert harness.measure.largest_error(expected, [a.copy() for a in expected]) == 0.0
    actual = [np.array([101.0, 0.0]), np.array([1.0])]
    assert harness.measure.largest_error(expected, actual) == pytest.approx(0.01)


def test_nan_counts_as_infinitely_wrong(harness: Any) -> None:
    assert harness.measure.largest_error([np.ones(2)], [np.array([1.0, np.nan])]) == math.inf


def test_outputs_joined_along_an_axis_are_matched_by_their_last_one(harness: Any) -> None:
    rng = np.random.default_rng(0)
    scores, boxes = rng.random((1, 6, 1)), rng.random((1, 6, 4))
    parts = [scores[:, :2], scores[:, 2:], boxes[:, :2], boxes[:, 2:]]
    assert harness.measure.largest_error(parts, [boxes, scores]) == 0.0
    assert harness.measure.largest_error(parts, [boxes + 1, scores]) > 0.5
    assert harness.measure.largest_error(parts, [boxes]) is None


def test_each_engine_is_first_once_in_turn(harness: Any) -> None:
    orders = [harness.measure.rotated(["a", "b", "c"], number) for number in range(3)]
    assert [order[0] for order in orders] == ["a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert harness.measure.rotated([], 4) == []


_DISASSEMBLY = """
0000000000000000 <__tvm_ffi_k0_conv>:
   0:	mov	x8, #0x10                  	// #16
   4:	ldr	q0, [x0], #16
   8:	ldr	q1, [x1], #16
   c:	fmla	v2.4s, v1.4s, v0.s[0]
  10:	fmla	v3.2s, v1.2s, v0.s[1]
  14:	str	q2, [sp, #16]
  18:	subs	x8, x8, #0x1
  1c:	b.ne	4 <__tvm_ffi_k0_conv+0x4>  // b.any
  20:	ret

0000000000000030 <k1_call>:
  30:	bl	0 <__tvm_ffi_k0_conv>
  34:	fmadd	s0, s1, s2, s3
  38:	cbnz	x8, 30 <k1_call>
  3c:	cbz	x8, 40 <k1_call+0x10>
  40:	fmadd	s0, s1, s2, s3
  44:	sub	x8, x8, #0x1
  48:	cbnz	x8, 40 <k1_call+0x10>
"""


def test_loops_are_found_where_nothing_else_branches(harness: Any) -> None:
    first, second = harness.loops.find_loops(_DISASSEMBLY)
    assert first.function == "__tvm_ffi_k0_conv"
    assert first.lines[0] == "ldr q0, [x0], #16" and first.lines[-1] == "b.ne .Lloop"
    assert len(first.lines) == 7
    assert first.multiply_adds == 4 + 2
    assert second.function == "k1_call"  # the first loop there holds a call
    assert second.lines[-1] == "cbnz x8, .Lloop"
    assert second.multiply_adds == 1
    assert (first.stores, second.stores) == (1, 0)
