"""What a tuning session shows while it runs, on stderr: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from edgesdk.console import time_text
from edgesdk.tuning.state import SessionState, TaskState

if TYPE_CHECKING:
    from rich.console import RenderableType

_DRAW_EVERY_S = 0.25
_LINE_EVERY_S = 10.0

# What a terminal must have room for besides the rows of tasks: title, header, rule, "more", the
# summary, and the line of the cursor.
_OTHER_LINES = 10
_COLUMNS = ("TASK", "CALLS", "SHARE", "TRIALS", "BEST", "GAIN", "GFLOP/S")
_STYLES = {"tuning": "bold cyan", "skipped": "dim", "waiting": "dim", "done": ""}


class LiveTable:
    """Shows every SessionState that it is given. Use it as a context manager.

    On a terminal a table is redrawn, at most four times a second. Elsewhere a line comes when the
    phase changes, a task is done or an error of a new kind occurs, and every ten seconds one that
    says how far the session is.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stderr
        self._view: _Table | _Lines = _Table(stream) if stream.isatty() else _Lines(stream)

    def __enter__(self) -> Self:
        self._view.start()
        return self

    def update(self, state: SessionState) -> None:
        """Shows `state`; cheap enough to be called for every trial."""
        self._view.update(state)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._view.stop()


class _Table:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live: Any = None
        self._state: SessionState | None = None
        self._drawn_at = -_DRAW_EVERY_S

    def start(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(file=self._stream), auto_refresh=False)
        self._live.start()

    def update(self, state: SessionState) -> None:
        self._state = state
        if time.monotonic() - self._drawn_at >= _DRAW_EVERY_S:
            self._draw(state)

    def stop(self) -> None:
        # What came since the table was drawn last must not be lost.
        if self._state is not None:
            self._draw(self._state)
        self._live.stop()

    def _draw(self, state: SessionState) -> None:
        self._live.update(live_table(state, self._live.console.height), refresh=True)
        self._drawn_at = time.monotonic()


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase = ""
        self._done: set[str] = set()
        self._errors: set[str] = set()
        self._note = ""
        self._said_at = time.monotonic()

    def start(self) -> None:
        pass

    def update(self, state: SessionState) -> None:
        if state.phase != self._phase:
            self._phase = state.phase
            self._say(f"{state.model} for {state.target} on {state.device}: {state.phase}")
            self._say_progress(state)
        for task in state.tasks:
            if task.phase in ("done", "skipped") and task.workload not in self._done:
                self._done.add(task.workload)
                self._say(task_text(task))
        if state.note != self._note:
            self._note = state.note
            if state.note:
                self._say(state.note)
        for kind, number in state.errors.items():
            if number and kind not in self._errors:
                self._errors.add(kind)
                self._say(f"failed for the first time: {kind}")
        if time.monotonic() - self._said_at >= _LINE_EVERY_S:
            self._say_progress(state)

    def stop(self) -> None:
        pass

    def _say_progress(self, state: SessionState) -> None:
        if state.trials:
            self._say("; ".join(text for text in summary_texts(state) if text))
        self._said_at = time.monotonic()

    def _say(self, line: str) -> None:
        print(f"tune: {line}", file=self._stream, flush=True)


def live_table(state: SessionState, height: int) -> RenderableType:
    """Returns the table for a terminal of `height` lines.

    Where not all tasks fit, those being tuned and those with the largest share are shown.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    title = Text.assemble(
        (state.model, "bold"), f" for {state.target} on {state.device}: ", (state.phase, "bold")
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in _COLUMNS:
        left = name == _COLUMNS[0]
        table.add_column(
            name, justify="left" if left else "right", no_wrap=True, overflow="ellipsis"
        )
    shown, rest = choose_rows(state.tasks, max(3, height - _OTHER_LINES))
    for task in shown:
        table.add_row(*(Text(cell) for cell in task_cells(task)), style=_STYLES[task.phase])
    lines: list[RenderableType] = [title, table]
    if rest:
        share = sum(task.share for task in rest)
        lines.append(Text(f"and {len(rest)} more with {share:.1%} of the time", style="dim"))
    latency, progress, errors = summary_texts(state)
    lines += [Text(latency, style="bold"), Text(progress)]
    for text in (errors, state.note):
        if text:
            lines.append(Text(text, style="yellow"))
    return Group(*lines)


def choose_rows(tasks: tuple[TaskState, ...], room: int) -> tuple[list[TaskState], list[TaskState]]:
    """Returns the tasks for `room` rows, the largest share first, and those left out."""
    by_share = sorted(tasks, key=lambda task: task.share, reverse=True)
    urgent = sorted(by_share, key=lambda task: task.phase != "tuning")
    chosen = {id(task) for task in urgent[:room]}
    return (
        [task for task in by_share if id(task) in chosen],
        [task for task in by_share if id(task) not in chosen],
    )


def task_cells(task: TaskState) -> tuple[str, ...]:
    """Returns the cells of a task's row."""
    return (
        task.name,
        str(task.calls),
        f"{task.share:.1%}",
        "-" if task.phase == "skipped" else str(task.trials),
        "" if task.best_ms is None else time_text(task.best_ms),
        "" if task.gain is None else f"{task.gain:.2f}x",
        "" if task.gflops is None else f"{task.gflops:.1f}",
    )


def task_text(task: TaskState) -> str:
    """Returns one line that says what came of a task."""
    if task.phase == "skipped":
        return f"{task.name}: not tuned" + (f" ({task.note})" if task.note else "")
    if task.trials == 0:
        return f"{task.name}: not reached"
    if task.best_ms is None:
        return f"{task.name}: no valid measurement in {task.trials} trials"
    was = "" if task.baseline_ms is None else f", was {time_text(task.baseline_ms)}"
    gain = "" if task.gain is None else f" ({task.gain:.2f}x)"
    speed = "" if task.gflops is None else f", {task.gflops:.1f} GFLOP/s"
    return f"{task.name}: {time_text(task.best_ms)}{was}{gain}{speed}, {task.trials} trials"


def summary_texts(state: SessionState) -> tuple[str, str, str]:
    """Returns latency, progress and errors of a session, each as one text, "" where unknown."""
    latency = ""
    if state.latency_ms is not None:
        latency = f"latency {time_text(state.latency_ms)} (estimated)"
        if state.baseline_latency_ms is not None and state.gain is not None:
            latency += f", was {time_text(state.baseline_latency_ms)}: {state.gain:.2f}x"
    if state.final is not None:
        tuned, untuned = (
            time_text(statistics.median(ms))
            for ms in (state.final.tuned_ms, state.final.untuned_ms)
        )
        how = "sum of the tuned kernels" if state.final.summed else "measured"
        latency = f"latency {tuned} ({how}), untuned {untuned}: {state.final.gain:.2f}x"
        if state.final.verdict:
            latency += f"; {state.final.verdict}"
    limit = "" if state.trial_limit is None else f" of {state.trial_limit}"
    parts = [f"{state.trials}{limit} trials", f"{state.trials_per_s:.1f} a second"]
    parts.append(f"{duration_text(state.elapsed_s)} so far")
    if state.eta_s is not None:
        parts.append(f"{duration_text(state.eta_s)} left")
    if state.temperature_c is not None:
        parts.append(f"device {state.temperature_c:.0f} °C")
    if state.throttled:
        parts.append("slowed down by heat or power")
    return latency, ", ".join(parts), errors_text(state.errors)


def errors_text(errors: Mapping[str, int]) -> str:
    """Returns "failed 12: 8 timeout, 4 crash", or "" if nothing failed."""
    counted = sorted(errors.items(), key=lambda item: (-item[1], item[0]))
    each = ", ".join(f"{number} {kind}" for kind, number in counted if number)
    return f"failed {sum(errors.values())}: {each}" if each else ""


def duration_text(seconds: float) -> str:
    """Returns a duration in the two largest units that it needs: "1 h 4 min", "3 min 20 s"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
