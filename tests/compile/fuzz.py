"""Fuzzes for as long as you like: make fuzz MINUTES=60 SEED=1

What is found is written to out/fuzz (or --output), a folder for each: the model, shrunk, and what
is wrong with it. Add it to conformance_cases.py when it is mended.
"""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path

import numpy as np
import onnx
from fuzz_graphs import Example, check, graphs
from hypothesis import HealthCheck, Phase, given, seed, settings

EXAMPLES = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=12)
    parser.add_argument("--output", type=Path, default=Path("out/fuzz"))
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    number, found = arguments.seed, 0
    while time.monotonic() < end:
        folder = arguments.output / f"graphs-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        if run_graphs(number, arguments.nodes, folder):
            found += 1
            print(f"seed {number}: {(folder / 'wrong.txt').read_text()[:300]}", flush=True)
        else:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
        number += 1
    print(f"seeds {arguments.seed} to {number - 1}, {EXAMPLES} graphs each: {found} wrong")


def run_graphs(number: int, nodes: int, folder: Path) -> bool:
    """Tries the graphs of one seed; whether one is wrong. The last one tried stays in `folder`."""

    @seed(number)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    @given(graphs(nodes))
    def tried(example: Example) -> None:
        try:
            wrong = check(example, folder)
        except Exception:
            wrong = traceback.format_exc()[-3000:]
        if wrong:
            onnx.save(example.model, folder / "wrong.onnx")
            np.savez(folder / "inputs.npz", **example.inputs)
            (folder / "wrong.txt").write_text(f"{wrong}\n\n{example!r}\n", encoding="utf-8")
        assert not wrong

    try:
        tried()
    except AssertionError:
        return True
    return False


if __name__ == "__main__":
    main()
