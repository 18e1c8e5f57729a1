"""What edgesdk says: results on stdout, all else on stderr.

Nothing heavy is imported here; `rich` comes only with a live status on a terminal.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Progress = Callable[[str], None]


def print_json(data: Any) -> None:
    """Prints `data` as one JSON document. NaN and infinity, which JSON lacks, become null."""
    text = json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    print(text)


def finite(data: Any) -> Any:
    """Returns `data` as JSON can hold it: null for NaN and infinity, strings for keys."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return data


def print_error(message: str, hint: str | None) -> None:
    """Prints an error's two lines to stderr."""
    print(f"error: {one_line(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {one_line(hint)}", file=sys.stderr)


def warn(message: str) -> None:
    """Prints a warning to stderr."""
    print(f"warning: {one_line(message)}", file=sys.stderr)


def note(message: str) -> None:
    """Prints what the user may want to know, but did not ask for, to stderr."""
    print(message, file=sys.stderr)


def one_line(text: str) -> str:
    """Returns `text` with every run of white space as one space."""
    return " ".join(text.split())


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> str:
    """Returns aligned columns with two spaces between them.

    `right` has one letter per column that is aligned to the right, "r", and "l" for the others;
    columns that it does not reach are left-aligned.
    """
    lines = [list(header), *(list(row) for row in rows)] if header else [list(r) for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))] if lines else []
    text = []
    for line in lines:
        cells = [
            cell.rjust(width) if right[i : i + 1] == "r" else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Returns "name  value" lines, aligned; pairs without a value are left out."""
    return table((), [(name, value) for name, value in pairs if value])


def time_text(milliseconds: float) -> str:
    """Returns a duration in ms with three significant digits, as plain digits."""
    if milliseconds <= 0 or not math.isfinite(milliseconds):
        return f"{milliseconds:g} ms"
    digits = max(0, 2 - math.floor(math.log10(milliseconds)))
    return f"{milliseconds:.{digits}f} ms"


@contextmanager
def stages(title: str) -> Iterator[Progress]:
    """Shows the stages of a longer work on stderr; yields the function that is told each one.

    On a terminal one line is rewritten, with a clock; elsewhere each stage is a line of its own.
    """
    if not sys.stderr.isatty():
        yield lambda stage: note(f"{title}: {stage}")
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    # A stage's text may hold brackets, which are no markup.
    text = TextColumn("{task.description}", markup=False)
    with Bar(
        SpinnerColumn(), text, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda stage: bar.update(task, description=f"{title}: {stage}")


@contextmanager
def counting(title: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Shows how far a work of `total` steps is; yields the function that is told of each.

    It takes the number of steps done and what comes next. On a terminal there is a bar with the
    time left; elsewhere a line for each tenth.
    """
    if not sys.stderr.isatty():
        last = 0

        def line(done: int, name: str) -> None:
            nonlocal last
            if 10 * done // total > last:
                last = 10 * done // total
                note(f"{title}: {done} of {total}")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done, name: bar.update(task, completed=done, description=f"{title}: {name}")
