"""Each small model of conformance_cases.py, compiled and run, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance import difference, run_in_tvm, runtime_calls
from conformance_cases import CASES, TextCase

from edgesdk.frontend import Reference, draw_inputs, import_model


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case_matches_onnx_runtime(case: TextCase, tmp_path: Path) -> None:
    path = tmp_path / "case.onnx"
    path.write_bytes(case.model().SerializeToString())
    model = import_model(path)
    inputs = draw_inputs(model.inputs, seed=3, hints=model.hints)
    want = Reference(path, model.shapes).run(inputs)
    got = run_in_tvm(model, inputs)
    assert {n: difference(got[n], w) for n, w in want.items()} == dict.fromkeys(want, "")
    assert runtime_calls(model) == set()
