"""The report of a tuning session: one HTML file that needs nothing else, written as it goes.

It has no script and loads nothing; its charts are inline SVG and it follows the reader's light or
dark mode.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from edgesdk.console import time_text
from edgesdk.tuning.charts import Series, safe, search_chart, spread_chart
from edgesdk.tuning.files import replacing
from edgesdk.tuning.live import duration_text, errors_text
from edgesdk.tuning.state import FinalLatency, SessionState, TaskState
from edgesdk.tuning.trial import TrialRecord, canonical

_STYLE = Path(__file__).with_name("report.css")
_LONGEST_ERROR = 2_000
_LONGEST_SCHEDULE = 200_000

Environment = Mapping[str, Mapping[str, str]]


def write_report(
    path: Path, state: SessionState, trials: Iterable[TrialRecord], environment: Environment
) -> None:
    """Writes the report to `path`, which a browser always finds whole.

    `trials` are those of the session in their order; they belong to the task with their workload.
    `environment` has sections ("Versions", "Device", "Target", "Options") of names and values.
    Raises UsageError when the file cannot be written.
    """
    html = render_report(state, trials, environment)
    with replacing(path) as stream:
        stream.write(html)


def render_report(
    state: SessionState,
    trials: Iterable[TrialRecord],
    environment: Environment,
    *,
    now: datetime | None = None,
) -> str:
    """Returns the report as HTML; `now` is the time that it bears."""
    trials = list(trials)
    by_task: dict[str, list[TrialRecord]] = {task.workload: [] for task in state.tasks}
    for trial in trials:
        if trial.workload in by_task:
            by_task[trial.workload].append(trial)
    written = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M:%S UTC")
    tasks = sorted(state.tasks, key=lambda task: task.share, reverse=True)
    body = [
        f"<h1>{safe(state.model)}</h1>",
        f'<p class="soft">tuned for {safe(state.target)} on {safe(state.device)};'
        f" {safe(state.phase)}, written {written}</p>",
        _numbers(state, trials),
        _network(state, trials),
        _final(state.final) if state.final is not None else "",
        _layers(tasks),
        _histories(tasks, by_task),
        _failures(trials),
        _schedules(tasks),
        _environment(environment),
    ]
    style = _STYLE.read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(state.model)} for {safe(state.target)}: tuning</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def latency_history(
    tasks: Sequence[TaskState], trials: Sequence[TrialRecord]
) -> list[tuple[float, float]]:
    """Returns (number of trials, estimated latency of the network in ms), where that changes.

    The estimate is the sum over all tasks of calls x best so far; a task that is not measured
    before tuning counts from its first measurement on, at what that shows.
    """
    best: dict[str, float] = {}
    calls = {task.workload: task.calls for task in tasks}
    for task in tasks:
        if task.baseline_ms:
            best[task.workload] = task.baseline_ms
    for trial in trials:
        if trial.ok and trial.workload in calls:
            best.setdefault(trial.workload, trial.cost_s * 1e3)
    if not best:
        return []
    latency = sum(calls[workload] * ms for workload, ms in best.items())
    points = [(0.0, latency)]
    for number, trial in enumerate(trials, start=1):
        cost_ms = trial.cost_s * 1e3
        if trial.workload in calls and cost_ms < best.get(trial.workload, cost_ms):
            latency -= calls[trial.workload] * (best[trial.workload] - cost_ms)
            best[trial.workload] = cost_ms
            points.append((float(number), latency))
    return points


def _numbers(state: SessionState, trials: Sequence[TrialRecord]) -> str:
    cells = []
    if state.final is not None:
        tuned, untuned = (
            statistics.median(ms) for ms in (state.final.tuned_ms, state.final.untuned_ms)
        )
        how = "the sum of its kernels" if state.final.summed else "measured on the device"
        kept = "" if state.final.shipped else ": the untuned code is kept"
        cells.append((_gain(state.final.gain), how + kept))
        cells.append((time_text(tuned), f"latency; untuned {time_text(untuned)}"))
    elif state.gain is not None and state.latency_ms and state.baseline_latency_ms:
        cells.append((_gain(state.gain), "estimated so far"))
        before = time_text(state.baseline_latency_ms)
        cells.append((time_text(state.latency_ms), f"latency, estimated; untuned {before}"))
    limit = "" if state.trial_limit is None else f" of {state.trial_limit}"
    failed = sum(not trial.ok for trial in trials)
    said = f"trials{limit}, {failed} failed"
    cells.append((str(state.trials), said))
    cells.append((duration_text(state.elapsed_s), f"{state.trials_per_s:.1f} trials a second"))
    if state.temperature_c is not None:
        slowed = ", slowed down by heat or power" if state.throttled else ""
        cells.append((f"{state.temperature_c:.0f} °C", f"device{slowed}"))
    boxes = [
        f'<div class="number{" first" if number == 0 else ""}"><b>{safe(value)}</b>'
        f'<span class="soft small">{safe(meaning)}</span></div>'
        for number, (value, meaning) in enumerate(cells)
    ]
    return f'<div class="numbers">{"".join(boxes)}</div>'


def _network(state: SessionState, trials: Sequence[TrialRecord]) -> str:
    points = latency_history(state.tasks, trials)
    if not points or not trials:
        return ""
    # Drawn up to the last trial, better or not.
    chart = search_chart(
        label=f"estimated latency from {time_text(points[0][1])} to {time_text(points[-1][1])}",
        dots=Series("best", ()),
        steps=Series("best", [*points, (float(len(trials)), points[-1][1])]),
        width=1040,
        height=220,
    )
    return (
        "<section><h2>Latency of the network</h2>"
        '<p class="soft small">Estimated from its layers, against the number of trials</p>'
        f'<div class="scroll">{chart}</div></section>'
    )


def _final(final: FinalLatency) -> str:
    rows = []
    for name, css, samples in (
        ("untuned", "before", final.untuned_ms),
        ("tuned", "after", final.tuned_ms),
    ):
        low, median, high = (_quantile(samples, part) for part in (0.0, 0.5, 0.9))
        rows.append(
            f'<tr><td><span class="key {css}"></span>{name}</td>'
            + _right(time_text(median), time_text(low), time_text(high))
            + _right(f"{(high - low) / median:.1%}", str(len(samples)))
            + "</tr>"
        )
    chart = spread_chart(
        label=f"latencies of the network: tuned is {_gain(final.gain)}",
        rows=[
            ("untuned", Series("untuned", [(0, ms) for ms in final.untuned_ms])),
            ("tuned", Series("best", [(0, ms) for ms in final.tuned_ms])),
        ],
        width=1040,
    )
    verdict = (
        '<span class="good">The bundle uses the tuned code.</span>'
        if final.shipped
        else f'<span class="bad">{safe(final.verdict[:1].upper() + final.verdict[1:])}.</span>'
    )
    what = (
        "The sum over the kernels that were tuned: this device runs no whole networks."
        if final.summed
        else "The whole network on the device, untuned and tuned in turns; the bar is the median."
    )
    return (
        f"<section><h2>{'Latency of the kernels' if final.summed else 'Measured latency'}</h2>"
        f'<p class="soft small">{what} Largest error of the tuned outputs:'
        f" {final.max_relative_error:.2g} relative. {verdict}</p>"
        f'<div class="scroll">{chart}</div>'
        '<div class="scroll"><table><tr><th></th><th class="right">median</th>'
        '<th class="right">minimum</th><th class="right">p90</th>'
        '<th class="right">(p90 - min) / median</th><th class="right">runs</th></tr>'
        f"{''.join(rows)}</table></div></section>"
    )


def _layers(tasks: Sequence[TaskState]) -> str:
    if not tasks:
        return ""
    longest = max(
        (task.calls * max(task.baseline_ms or 0.0, task.best_ms or 0.0) for task in tasks),
        default=0.0,
    )
    heads = "".join(
        f'<th class="right">{name}</th>'
        for name in ("calls", "share", "trials", "before", "after", "gain", "GFLOP/s")
    )

    def table(chosen: Sequence[TaskState]) -> str:
        rows = "".join(_layer(task, longest) for task in chosen)
        return (
            '<div class="scroll"><table>'
            f"<tr><th>kernel</th>{heads}<th></th></tr>{rows}</table></div>"
        )

    tuned = [task for task in tasks if task.phase != "skipped"]
    skipped = [task for task in tasks if task.phase == "skipped"]
    folded = ""
    if skipped:
        share = sum(task.share for task in skipped)
        folded = (
            f"<details><summary>{len(skipped)} more that are not tuned, with {share:.1%} of the"
            f" time</summary>{table(skipped)}</details>"
        )
    return (
        '<section><h2>Layers</h2><p class="soft small">Times are for one call, bars for all calls'
        f" of one run {_legend(before='before tuning', after='best so far')}</p>"
        f"{table(tuned) if tuned else ''}{folded}</section>"
    )


def _layer(task: TaskState, longest: float) -> str:
    bars = "".join(
        f'<div class="bar {css}" style="width:{100 * task.calls * ms / longest:.1f}%"></div>'
        for css, ms in (("before", task.baseline_ms), ("after", task.best_ms))
        if ms is not None and longest > 0
    )
    note = f'<br><span class="soft small">{safe(task.note)}</span>' if task.note else ""
    return (
        f'<tr><td class="name">{safe(task.name)}{note}</td>'
        + _right(str(task.calls), f"{task.share:.1%}", str(task.trials))
        + _right(_time(task.baseline_ms), _time(task.best_ms))
        + _right(
            "" if task.gain is None else f"{task.gain:.2f}x",
            "" if task.gflops is None else f"{task.gflops:.1f}",
        )
        + f'<td class="bars">{bars}</td></tr>'
    )


def _histories(tasks: Sequence[TaskState], by_task: Mapping[str, list[TrialRecord]]) -> str:
    charts = []
    for task in tasks:
        trials = by_task[task.workload]
        dots: list[tuple[float, float]] = []
        steps: list[tuple[float, float]] = []
        failed: list[int] = []
        for number, trial in enumerate(trials, start=1):
            if not trial.ok:
                failed.append(number)
                continue
            cost_ms = trial.cost_s * 1e3
            dots.append((float(number), cost_ms))
            if not steps or cost_ms < steps[-1][1]:
                steps.append((float(number), cost_ms))
        chart = search_chart(
            label=f"{task.name}: {len(trials)} trials",
            dots=Series("sample", dots),
            steps=Series("best", steps),
            failed=failed,
            reference=task.baseline_ms,
        )
        if trials and chart:
            best = f"best {time_text(steps[-1][1])}" if steps else "none was valid"
            charts.append(
                f'<div><h3>{safe(task.name)} <span class="soft small">{best}</span></h3>'
                f"{chart}</div>"
            )
    if not charts:
        return ""
    legend = _legend(
        dot="each candidate", line="best so far", failed="failed", reference="before tuning"
    )
    return (
        '<section><h2>Search</h2><p class="soft small">Time of one call against the number of the'
        f" trial {legend}</p>"
        f'<div class="charts">{"".join(charts)}</div></section>'
    )


def _failures(trials: Sequence[TrialRecord]) -> str:
    failed: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if not trial.ok:
            failed.setdefault(_kind(trial), []).append(trial)
    if not failed:
        return ""
    rows = []
    for kind, group in sorted(failed.items(), key=lambda item: (-len(item[1]), item[0])):
        example = group[0]
        said = example.error[:_LONGEST_ERROR] or f"samples: {example.samples_s}"
        rows.append(
            f"<tr><td>{safe(kind)}</td>{_right(str(len(group)))}"
            f'<td class="name">{safe(example.kernel)}<br>'
            f"<code>{safe(canonical(example.candidate))}</code></td>"
            f"<td><pre>{safe(said)}</pre></td></tr>"
        )
    counts = Counter({kind: len(group) for kind, group in failed.items()})
    return (
        f'<section><h2>Failures</h2><p class="soft small">{safe(errors_text(counts))}, out of'
        f" {len(trials)} trials; the first of each kind</p>"
        '<div class="scroll"><table><tr><th>kind</th><th class="right">trials</th><th>kernel and'
        f" candidate</th><th>what was said</th></tr>{''.join(rows)}</table></div></section>"
    )


def _schedules(tasks: Sequence[TaskState]) -> str:
    blocks = []
    for task in tasks:
        if not task.candidate and not task.schedule:
            continue
        candidate = f"<code>{safe(task.candidate)}</code>" if task.candidate else ""
        script = task.schedule
        if len(script) > _LONGEST_SCHEDULE:
            script = script[:_LONGEST_SCHEDULE] + "\n# cut off here"
        pre = f"<pre>{safe(script)}</pre>" if script else ""
        blocks.append(f"<details><summary>{safe(task.name)}</summary>{candidate}{pre}</details>")
    if not blocks:
        return ""
    return (
        '<section><h2>Schedules that won</h2><p class="soft small">The candidate, and the kernel'
        f" that it gives as TVMScript</p>{''.join(blocks)}</section>"
    )


def _environment(environment: Environment) -> str:
    blocks = []
    for title, values in environment.items():
        rows = "".join(
            f"<dt>{safe(name)}</dt><dd>{safe(value)}</dd>" for name, value in values.items()
        )
        blocks.append(f"<div><h3>{safe(title)}</h3><dl>{rows}</dl></div>")
    if not blocks:
        return ""
    return (
        f'<section><h2>Environment</h2><div class="environment">{"".join(blocks)}</div></section>'
    )


def _legend(**meanings: str) -> str:
    """What the colours mean; the names are classes of `key` in the style sheet."""
    return "".join(
        f'<span class="legend"><span class="key {css}"></span>{meaning}</span>'
        for css, meaning in meanings.items()
    )


def _kind(trial: TrialRecord) -> str:
    return trial.error_kind or "impossible time"


def _gain(gain: float) -> str:
    return f"{gain:.2f}x faster" if gain >= 1 else f"{1 / gain:.2f}x slower"


def _time(milliseconds: float | None) -> str:
    return "" if milliseconds is None else time_text(milliseconds)


def _right(*cells: str) -> str:
    return "".join(f'<td class="right">{safe(cell)}</td>' for cell in cells)


def _quantile(samples: Sequence[float], part: float) -> float:
    ordered = sorted(samples)
    position = part * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
