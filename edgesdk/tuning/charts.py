"""The charts of the report, as SVG to be placed in HTML: colours come from its style sheet.

Axes of time are logarithmic: candidates differ by factors. Points are drawn as one path, a dot
each, which keeps a report of ten thousand trials small.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 46, 12, 10, 30


def safe(text: str) -> str:
    """Returns `text` for use inside HTML, also where a device sent bytes that are no text."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text))


@dataclass(frozen=True)
class Series:
    """Points (x, y) that belong together. `css` is their class: its stroke is their colour."""

    css: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Axes:
    width: int
    height: int
    x_last: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        room = self.width - _MARGIN_LEFT - _MARGIN_RIGHT
        return _MARGIN_LEFT + room * value / self.x_last

    def y(self, value: float) -> float:
        room = self.height - _MARGIN_TOP - _MARGIN_BOTTOM
        part = math.log(self.y_high / value) / math.log(self.y_high / self.y_low)
        return _MARGIN_TOP + room * part


def search_chart(
    *,
    label: str,
    dots: Series,
    steps: Series,
    failed: Sequence[int] = (),
    reference: float | None = None,
    width: int = 360,
    height: int = 170,
) -> str:
    """Returns a chart of milliseconds against the number of the trial.

    `dots` are single measurements, `steps` is a value that holds until the next point, `failed` the
    trials without a value (ticks at the bottom), `reference` a dashed line. All values are > 0.
    Returns "" when there is nothing to draw.
    """
    values = [y for _, y in (*dots.points, *steps.points)] + ([reference] if reference else [])
    if not values:
        return ""
    numbers = [x for x, _ in (*dots.points, *steps.points)]
    low, high = min(values), max(values)
    # A little room, and a range even when all values are alike.
    room = max(1.06, (high / low) ** 0.06)
    axes = _Axes(width, height, max([1, *numbers, *failed]), low / room, high * room)
    parts = [_grid(axes)]
    if reference:
        parts.append(_path("reference", [f"M{_MARGIN_LEFT} {axes.y(reference):.1f}H{width - 12}"]))
    parts.append(_path(f"dots {dots.css}", _dots(axes, dots.points)))
    bottom = height - _MARGIN_BOTTOM
    parts.append(_path("failed", [f"M{axes.x(n):.1f} {bottom - 1}v-6" for n in failed]))
    parts.append(_path(f"line {steps.css}", _steps(axes, steps.points)))
    return _svg(width, height, label, parts)


def spread_chart(*, label: str, rows: Sequence[tuple[str, Series]], width: int = 720) -> str:
    """Returns one row of dots per series, with a mark at the median; `points` are (any, ms > 0).

    A few runs that were disturbed must not squeeze all others into a corner: what takes more than
    three times the slowest median is beyond the right end, and its number stands there.
    """
    values = [y for _, series in rows for _, y in series.points]
    if not values:
        return ""
    left, row_height = 76, 40
    height = len(rows) * row_height + 30
    medians = [
        statistics.median(y for _, y in series.points) for _, series in rows if series.points
    ]
    low, high = min(values), min(max(values), 3 * max(medians))
    pad = (high - low) * 0.05 or low * 0.05
    low, high = low - pad, high + pad

    def x(value: float) -> float:
        return left + (width - left - 16) * (value - low) / (high - low)

    parts = []
    for tick in _linear_ticks(low, high, 6):
        parts.append(f'<path class="grid" d="M{x(tick):.1f} 6V{height - 26}"/>')
        parts.append(_text(x(tick), height - 10, f"{tick:.6g}", "middle"))
    parts.append(_text(left - 10, height - 10, "ms", "end"))
    for number, (name, series) in enumerate(rows):
        middle = 10 + row_height * (number + 0.5)
        parts.append(_text(left - 10, middle + 4, name, "end"))
        # Spread over the row's height in the order of the turns, so that dots do not cover others.
        dots = [
            f"M{x(ms):.1f} {middle + (turn % 5 - 2) * 5:.1f}h0"
            for turn, (_, ms) in enumerate(series.points)
            if ms <= high
        ]
        parts.append(_path(f"dots {series.css}", dots))
        beyond = len(series.points) - len(dots)
        if beyond:
            parts.append(_text(width - 4, middle + 4, f"{beyond} slower \u2192", "end"))
        if series.points:
            median = statistics.median(y for _, y in series.points)
            parts.append(
                _path(f"line {series.css}", [f"M{x(median):.1f} {middle - 16}v32"]),
            )
    return _svg(width, height, label, parts)


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{safe(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _grid(axes: _Axes) -> str:
    parts = []
    right, bottom = axes.width - _MARGIN_RIGHT, axes.height - _MARGIN_BOTTOM
    for tick in _log_ticks(axes.y_low, axes.y_high):
        y = axes.y(tick)
        parts.append(f'<path class="grid" d="M{_MARGIN_LEFT} {y:.1f}H{right}"/>')
        parts.append(_text(_MARGIN_LEFT - 6, y + 4, f"{tick:.4g}", "end"))
    for tick in _linear_ticks(0, axes.x_last, 5 if axes.width < 500 else 9):
        if tick == int(tick):
            parts.append(_text(axes.x(tick), bottom + 16, f"{tick:.0f}", "middle"))
    parts.append(_text(0, bottom + 16, "ms", "start"))
    parts.append(f'<path class="axis" d="M{_MARGIN_LEFT} {bottom}H{right}"/>')
    return "".join(parts)


def _dots(axes: _Axes, points: Sequence[tuple[float, float]]) -> list[str]:
    # A line of no length with round ends is a dot.
    return [f"M{axes.x(x):.1f} {axes.y(y):.1f}h0" for x, y in points]


def _steps(axes: _Axes, points: Sequence[tuple[float, float]]) -> list[str]:
    if not points:
        return []
    path = [f"M{axes.x(points[0][0]):.1f} {axes.y(points[0][1]):.1f}"]
    path += [f"H{axes.x(x):.1f}V{axes.y(y):.1f}" for x, y in points[1:]]
    return [*path, f"H{axes.x(axes.x_last):.1f}"]


def _path(css: str, commands: Sequence[str]) -> str:
    return f'<path class="{css}" d="{"".join(commands)}"/>' if commands else ""


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe(text)}</text>'


def _log_ticks(low: float, high: float) -> list[float]:
    """Two to six round numbers between `low` and `high`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [s * 10.0**power for power in range(first, last + 1) for s in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 6:
            break
    if len(ticks) > 6:
        ticks = ticks[:: -(-len(ticks) // 6)]
    return ticks if len(ticks) >= 3 else _linear_ticks(low, high, 5)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    """At most about `most` round numbers between `low` and `high`."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    first, last = math.ceil(low / step), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]
