"""Writes docs/conformance.md: ONNX's own operator cases, compiled and run, each in the open.

python tools/conformance.py [--target T] [--output FILE]; some minutes, on OpenCL an hour. The cases
come with the onnx package; how one is run is in tests/compile/conformance.py, which the tests use,
too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "compile"))

from conformance import Case, backend_cases, check_cases, left_out  # noqa: E402

# So many cases make one network; the launcher takes 256 inputs at most.
TOGETHER = 50
STATUSES = ("ok", "refused", "wrong")


@dataclass(frozen=True)
class Line:
    """How one case ended."""

    case: str
    operator: str
    status: str
    detail: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="local", help="one that this machine can run")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "conformance.md")
    parser.add_argument("--json", type=Path, help="the outcome of each case, for looking closer")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    lines, skipped = run_cases(list(backend_cases(every=True)), arguments.target)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    arguments.output.write_text(report(lines, skipped, arguments.target), encoding="utf-8")
    wrong = [line.case for line in lines if line.status == "wrong"]
    print(f"{len(lines)} cases, {len(wrong)} wrong: {' '.join(wrong)}")
    sys.exit(bool(wrong))


def run_cases(cases: Sequence[Case], target: str) -> tuple[list[Line], Counter[str]]:
    """Runs the cases that count; the others are counted by the reason why they do not."""
    reasons = {case.name: left_out(case) for case in cases}
    counted = [case for case in cases if not reasons[case.name]]
    batches = [counted[at : at + TOGETHER] for at in range(0, len(counted), TOGETHER)]
    # Fresh processes: TVM's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    lines: list[Line] = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        for number, some in enumerate(pool.map(partial(run_batch, target=target), batches), 1):
            print(f"{number} of {len(batches)}", file=sys.stderr, flush=True)
            lines += some
    return lines, Counter(reason for reason in reasons.values() if reason)


def run_batch(cases: Sequence[Case], target: str) -> list[Line]:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = check_cases(cases, Path(folder), target=target)
    return [
        Line(case.name, case.operator, outcome.status, outcome.detail)
        for case, outcome in zip(cases, outcomes, strict=True)
    ]


def report(lines: Sequence[Line], skipped: Counter[str], target: str) -> str:
    place = "a CPU" if target == "local" else f"`{target}`"
    counts = Counter(line.status for line in lines)
    share = 100 * counts["ok"] / len(lines)
    otherwise = [line for line in lines if line.status == "ok" and line.detail]
    parts = [
        f"""# Conformance

ONNX's own cases for each operator, compiled for {place} and run. Written by `make conformance`;
onnx {version("onnx")}, onnxruntime {version("onnxruntime")}.

**{counts["ok"]} of {len(lines)} cases pass ({share:.1f} %), {counts["refused"]} are refused,
{counts["wrong"]} are wrong.** What is refused is named, with the
reason, before anything is compiled.

A case passes when all outputs have the case's types, shapes and values: integers equal, floats
within 1e-4 of the largest value (2e-3 in half precision), or within the case's own tolerance if
that is larger. The cases give axes, shapes and the like as inputs; where only that makes a case
impossible, they are constants, as in real models.

Not counted, because they are not inference on tensors of common numbers:
""",
        *(f"- {count} cases: {reason}" for reason, count in sorted(skipped.items())),
        "",
        _otherwise(otherwise),
        "## Refused\n",
        _refused([line for line in lines if line.status == "refused"]),
        "## By operator\n",
        _table(lines),
    ]
    return "\n".join(part for part in parts if part is not None) + "\n"


def _otherwise(lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    names = ", ".join(f"`{line.case}`" for line in lines)
    return (
        f"{len(lines)} cases that pass give what ONNX Runtime gives and not what the case says (see"
        f" [operators.md](operators.md)):\n{names}.\n"
    )


def _refused(lines: Sequence[Line]) -> str:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        by_reason[f"{line.operator}: {_general(line.detail)}"].append(line.case)
    rows = ["| operator and reason | cases |", "| --- | ---: |"]
    rows += [f"| {reason} | {len(cases)} |" for reason, cases in sorted(by_reason.items())]
    return "\n".join(rows) + "\n"


def _general(detail: str) -> str:
    """The reason without what is special to one case, on one line."""
    first = detail.split("; ")[0].partition(": ")[2] or detail
    return re.sub(r"\[[\d, ]*\]|float\d+\[.*?\]", "...", first).replace("|", "\\|")


def _table(lines: Sequence[Line]) -> str:
    by_operator: dict[str, Counter[str]] = defaultdict(Counter)
    for line in lines:
        by_operator[line.operator][line.status] += 1
    rows = ["| operator | pass | refused | wrong |", "| --- | ---: | ---: | ---: |"]
    for operator, counts in sorted(by_operator.items()):
        cells = [str(counts[status]) if counts[status] else "" for status in STATUSES]
        rows.append(f"| {operator} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
