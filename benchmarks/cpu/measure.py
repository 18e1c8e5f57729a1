"""Measures engines in turns, each in a process of its own.

While one runs, the others are stopped (SIGSTOP), so that no thread pool that spins a while after
its run takes the CPU away from the next. A round gives each engine one turn, in an order that
rotates; what slows the machine for some seconds hits all of them.
"""

from __future__ import annotations

import json
import select
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

RUNNER = Path(__file__).with_name("runner.py")
REFERENCE = "onnxruntime"
# Converting and compiling of a large network, once; IREE takes longest.
_LOAD_LIMIT_S = 900.0
_TURN_LIMIT_S = 300.0
_TURN_S = 0.15
_MAX_RUNS = 200


@dataclass
class Result:
    """What one engine did with one network. `error` says why there are no numbers.

    `wall_ms` holds every timed run; `cpu_ms` one number for each turn: CPU time of all its threads,
    user and system, by run. `max_error` is the largest difference to ONNX Runtime's outputs,
    relative to each output's largest magnitude; None where outputs cannot be matched.
    """

    engine: str
    version: str = ""
    error: str = ""
    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    max_error: float | None = None

    def summary(self) -> dict[str, Any]:
        """Medians and spread (10th and 90th percentile), for the table and the JSON file."""
        numbers = {}
        for name, values in (("wall_ms", self.wall_ms), ("cpu_ms", self.cpu_ms)):
            if values:
                p10, median, p90 = np.percentile(values, [10, 50, 90])
                numbers[name] = {
                    "median": float(median),
                    "p10": float(p10),
                    "p90": float(p90),
                    "samples": len(values),
                }
        return {
            "engine": self.engine,
            "version": self.version,
            "error": self.error,
            "max_relative_error": self.max_error,
            **numbers,
        }


class Runner:
    """A running `runner.py`, stopped whenever it is not asked. Use it as a context manager."""

    def __init__(self, python: Path, engine: str, job: Path) -> None:
        self._argv = [str(python), str(RUNNER), engine, str(job)]

    def __enter__(self) -> Runner:
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self) -> dict[str, Any]:
        """Waits until the network is loaded; {"error"} when it is not."""
        answer = self._answer(_LOAD_LIMIT_S)
        if "error" not in answer:
            self._process.send_signal(signal.SIGSTOP)
        return answer

    def ask(self, **request: object) -> dict[str, Any]:
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": "its process ended"}
        answer = self._answer(_TURN_LIMIT_S)
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            return {"error": f"no answer within {limit_s:g} s"}
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait(timeout=10)
            ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            return {"error": f"its process ended ({ended})"}
        return dict(json.loads(line))


def measure(
    runners: dict[str, Runner], *, rounds: int, folder: Path, budget_s: float
) -> list[Result]:
    """Measures all `runners` (label -> Runner), the reference's among them, and compares outputs.

    `budget_s` bounds the time of all turns together: large networks get fewer rounds, at least 3.
    """
    results = {label: Result(label) for label in runners}
    saved: dict[str, list[np.ndarray]] = {}
    for label, runner in runners.items():
        print(f"  {label}: loading", file=sys.stderr)
        answer = runner.start()
        results[label].version = str(answer.get("version", ""))
        results[label].error = str(answer.get("error", ""))
        if not results[label].error:
            file = folder / "outputs.npz"
            answer = runner.ask(save=str(file))
            results[label].error = str(answer.get("error", ""))
            if not results[label].error:
                with np.load(file) as arrays:
                    saved[label] = [arrays[f"arr_{i}"] for i in range(len(arrays.files))]
    for label, outputs in saved.items():
        if REFERENCE in saved:
            results[label].max_error = largest_error(saved[REFERENCE], outputs)
    alive = [label for label in runners if not results[label].error]
    runs = {label: _runs_of_a_turn(runners[label]) for label in alive}
    turn_s = sum(count * seconds for count, seconds in runs.values())
    for number in range(max(3, min(rounds, int(budget_s / max(turn_s, 1e-9))))):
        for label in rotated(alive, number):
            answer = runners[label].ask(runs=runs[label][0])
            if "error" in answer:
                results[label].error = str(answer["error"])
                alive.remove(label)
                continue
            results[label].wall_ms += [1e3 * s for s in answer["wall_s"]]
            results[label].cpu_ms.append(1e3 * answer["cpu_s"] / runs[label][0])
    return list(results.values())


def _runs_of_a_turn(runner: Runner) -> tuple[int, float]:
    """How many runs make a turn, and the seconds that one takes; they also warm it up."""
    answer = runner.ask(runs=3)
    seconds = statistics.median(answer["wall_s"]) if "wall_s" in answer else _TURN_S
    return max(1, min(_MAX_RUNS, int(_TURN_S / seconds))), seconds


def rotated(labels: Sequence[str], number: int) -> list[str]:
    """The order of round `number`: each label is once first before one is first again."""
    if not labels:
        return []
    start = number % len(labels)
    return [*labels[start:], *labels[:start]]


def largest_error(expected: list[np.ndarray], actual: list[np.ndarray]) -> float | None:
    """The largest difference, relative to the largest magnitude of its output.

    An engine may drop or add axes of one element, or (TensorFlow Lite files) give outputs joined
    along an axis, in another order: what then has equally many elements in the last axis is one
    output. None when the outputs still do not match; NaN counts as infinite.
    """
    if [a.size for a in expected] != [a.size for a in actual]:
        expected, actual = _joined(expected), _joined(actual)
        if [a.size for a in expected] != [a.size for a in actual]:
            return None
    worst = 0.0
    for left, right in zip(expected, actual, strict=True):
        a, b = left.ravel().astype(np.float64), right.ravel().astype(np.float64)
        if a.size == 0:
            continue
        error = float(np.max(np.abs(a - b))) / max(float(np.max(np.abs(a))), 1e-30)
        worst = max(worst, np.inf if np.isnan(error) else error)
    return worst


def _joined(arrays: list[np.ndarray]) -> list[np.ndarray]:
    groups: dict[int, list[np.ndarray]] = {}
    for array in arrays:
        width = array.shape[-1] if array.ndim else 1
        groups.setdefault(width, []).append(array.reshape(-1, width))
    return [np.concatenate(groups[width]) for width in sorted(groups)]
