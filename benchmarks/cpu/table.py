"""The Markdown table of the results, and the summary under it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

# Above this an engine computes something else; it takes no part in the comparison.
WRONG = 1e-2
_OWN = "edgesdk"


def table(rows: Sequence[dict[str, Any]], clock: str) -> list[str]:
    """Lines of Markdown: a row for each engine of each network, `clock` ("cpu_ms" or "wall_ms")
    being the one that is compared. `rows` are `Result.summary()` with "model" and "threads"."""
    lines = [
        "| model | threads | engine | CPU ms (p10-p90) | wall ms (p10-p90) | "
        "/ ONNX Runtime | max error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        start = f"| {row['model']} | {row['threads']} | {row['engine']} |"
        if row["error"]:
            lines.append(f"{start} - | - | - | {_cell(row['error'])} |")
            continue
        ratio = ratio_to(rows, row, "onnxruntime", clock)
        lines.append(
            f"{start} {_numbers(row['cpu_ms'])} | {_numbers(row['wall_ms'])} | "
            f"{'-' if ratio is None else f'{ratio:.2f}'} | {_error(row['max_relative_error'])} |"
        )
    return lines


def ratio_to(
    rows: Iterable[dict[str, Any]], row: dict[str, Any], engine: str, clock: str
) -> float | None:
    """The median of `row` over that of `engine` on the same network with as many threads."""
    for other in rows:
        same = (other["model"], other["threads"]) == (row["model"], row["threads"])
        if same and other["engine"] == engine and counts(other) and clock in row:
            return float(row[clock]["median"] / other[clock]["median"])
    return None


def counts(row: dict[str, Any]) -> bool:
    """Whether the engine ran, and computed what ONNX Runtime computed."""
    error = row["max_relative_error"]
    return not row["error"] and error is not None and error <= WRONG


def summary(rows: Sequence[dict[str, Any]], clock: str) -> list[str]:
    """How edgesdk does against each engine: geometric mean and worst of the ratios of medians."""
    threads = sorted({row["threads"] for row in rows})
    own = sorted({row["engine"] for row in rows if row["engine"].startswith(_OWN)})
    others = list(dict.fromkeys(r["engine"] for r in rows if not r["engine"].startswith(_OWN)))
    lines = [
        "| threads | ours | against | models | geometric mean | best | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for count in threads:
        for ours in own:
            for engine in others:
                ratios = {
                    row["model"]: ratio
                    for row in rows
                    if row["engine"] == ours and row["threads"] == count and counts(row)
                    if (ratio := ratio_to(rows, row, engine, clock)) is not None
                }
                if not ratios:
                    continue
                mean = geometric_mean(ratios.values())
                best, worst = (
                    min(ratios, key=ratios.__getitem__),
                    max(ratios, key=ratios.__getitem__),
                )
                lines.append(
                    f"| {count} | {ours} | {engine} | {len(ratios)} | {mean:.2f} | "
                    f"{ratios[best]:.2f} ({best}) | {ratios[worst]:.2f} ({worst}) |"
                )
    return lines


def geometric_mean(values: Iterable[float]) -> float:
    """Raises ValueError for no values, or one that is not positive."""
    logarithms = [math.log(value) for value in values]
    if not logarithms:
        raise ValueError("the geometric mean of nothing")
    return math.exp(sum(logarithms) / len(logarithms))


def _numbers(values: dict[str, float]) -> str:
    median, low, high = (_short(values[key]) for key in ("median", "p10", "p90"))
    return f"{median} ({low}-{high})"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _error(value: float | None) -> str:
    if value is None:
        return "outputs cannot be matched"
    return f"{value:.0e}" if value <= WRONG else f"**wrong: {value:.1e}**"


def _cell(text: str) -> str:
    return text.replace("|", "/")[:160]
