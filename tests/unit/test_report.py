"""What a tuning session shows: the live table, its plain lines, and the HTML report."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from edgesdk.errors import UsageError
from edgesdk.tuning import live
from edgesdk.tuning.charts import Series, search_chart, spread_chart
from edgesdk.tuning.devicekey import DeviceKey
from edgesdk.tuning.live import (
    LiveTable,
    choose_rows,
    duration_text,
    errors_text,
    live_table,
    summary_texts,
)
from edgesdk.tuning.report import latency_history, render_report, write_report
from edgesdk.tuning.state import FinalLatency, SessionState, TaskState
from edgesdk.tuning.trial import TrialRecord

PI = DeviceKey("Raspberry Pi 4", "Cortex-A72", 4, "aarch64", "0.27.0")
CONV, DENSE = "c0" * 16, "de" * 16
EVIL = '<script>alert("x")</script>&\x00\x1b[31m\udcff'

TASKS = (
    TaskState("fused_conv2d", CONV, 3, 0.75, "tuning", 4, 10.0, 4.0, 21.5),
    TaskState(
        *("fused_dense", DENSE, 1, 0.2, "done", 2, 8.0, 7.0, 3.25),
        candidate='{"knobs":{"columns":14},"template":"conv2d_direct"}',
        schedule="def main(): ...",
    ),
    TaskState("fused_reshape[x]", "0e" * 16, 1, 0.05, "skipped", note="one candidate only"),
)
STATE = SessionState(
    model="net",
    target="rpi4",
    device="pi",
    phase="tuning",
    tasks=TASKS,
    trials=6,
    trial_limit=100,
    elapsed_s=65,
    trials_per_s=2.5,
    eta_s=200,
    baseline_latency_ms=38.0,
    latency_ms=19.0,
    temperature_c=61.4,
    throttled=True,
    errors={"timeout": 1, "crash": 2},
)
FINAL = FinalLatency((40.0, 42.0, 41.0), (20.0, 21.0, 20.5), 3e-6, True)


def trial(workload: str, *samples_s: float, **more: Any) -> TrialRecord:
    """A trial of a kernel."""
    candidate = {"template": "conv2d_direct", "knobs": {"columns": 14}}
    return TrialRecord(workload, "{}", PI, candidate, samples_s, **more)


TRIALS = [
    trial(CONV, 12e-3),
    trial(CONV, 6e-3),
    trial(DENSE, 7e-3),
    trial(CONV, error_kind="timeout", error="no answer in 10 s", kernel="fused_conv2d"),
    trial(CONV, 4e-3),
    trial(DENSE, 0.0, 0.0, kernel="fused_dense"),
]
ENVIRONMENT = {"Versions": {"TVM": "0.27.0"}, "Options": {"seed": "7"}}


# ---- the live table ----


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _drawn(state: SessionState, height: int = 40, width: int = 100) -> str:
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=width).print(live_table(state, height))
    return stream.getvalue()


def test_the_table() -> None:
    lines = [line.rstrip() for line in _drawn(STATE, width=120).splitlines()]
    assert lines[0] == "net for rpi4 on pi: tuning"
    assert lines[1].split() == ["TASK", "CALLS", "SHARE", "TRIALS", "BEST", "GAIN", "GFLOP/S"]
    assert lines[3].split() == ["fused_conv2d", "3", "75.0%", "4", "4.00", "ms", "2.50x", "21.5"]
    assert lines[4].split() == ["fused_dense", "1", "20.0%", "2", "7.00", "ms", "1.14x", "3.2"]
    assert lines[5].split() == ["fused_reshape[x]", "1", "5.0%", "-"]
    assert lines[6:] == [
        "latency 19.0 ms (estimated), was 38.0 ms: 2.00x",
        "6 of 100 trials, 2.5 a second, 1 min 5 s so far, 3 min 20 s left, device 61 °C,"
        " slowed down by heat or power",
        "failed 3: 2 crash, 1 timeout",
    ]


def test_what_is_not_known_is_left_out() -> None:
    text = _drawn(SessionState("net", "rpi4", "pi", tasks=(TaskState("k", CONV, 1, 1.0),)))
    assert "°C" not in text and "latency" not in text and "left" not in text
    assert "failed" not in text and "None" not in text and "nan" not in text


def test_a_small_terminal_shows_what_matters() -> None:
    tasks = tuple(TaskState(f"k{i}", f"{i:032x}", 1, (20 - i) / 210) for i in range(20))
    tasks = (*tasks[:15], replace(tasks[15], phase="tuning"), *tasks[16:])
    shown, rest = choose_rows(tasks, 3)
    assert [t.name for t in shown] == ["k0", "k1", "k15"] and len(rest) == 17
    text = _drawn(replace(STATE, tasks=tasks), height=13)
    assert "and 17 more with" in text and len(text.splitlines()) <= 13
    assert choose_rows(tasks, 30) == (sorted(tasks, key=lambda t: -t.share), [])


def test_the_measured_latency_replaces_the_estimate() -> None:
    text, _, _ = summary_texts(replace(STATE, final=FINAL))
    assert text == "latency 20.5 ms (measured), untuned 41.0 ms: 2.00x"
    worse = FinalLatency((10.0,), (20.0,), 0.0, False)
    assert "the untuned code is kept" in summary_texts(replace(STATE, final=worse))[0]


def test_on_a_terminal_the_last_state_is_always_shown() -> None:
    stream = _Terminal()
    with LiveTable(stream) as table:
        for number in range(50):
            table.update(replace(STATE, trials=number))
        table.update(replace(STATE, trials=99, phase="finished"))
    # Redrawing is limited, so that a session is not slowed down by it.
    assert "99 of 100 trials" in stream.getvalue() and "finished" in stream.getvalue()
    assert "7 of 100 trials" not in stream.getvalue()


def test_the_table_survives_an_error() -> None:
    stream = _Terminal()
    with pytest.raises(KeyError), LiveTable(stream) as table:
        table.update(STATE)
        raise KeyError
    assert stream.getvalue().endswith("\x1b[?25h")  # the cursor is there again
    with LiveTable(_Terminal()):
        pass


def test_without_a_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with LiveTable(stream) as table:
        table.update(replace(STATE, phase="canary", trials=0, tasks=(), errors={"crash": 0}))
        table.update(STATE)
        table.update(STATE)
        monkeypatch.setattr(live, "_LINE_EVERY_S", 0.0)
        table.update(replace(STATE, trials=7))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "tune: net for rpi4 on pi: canary"
    assert lines[1] == "tune: net for rpi4 on pi: tuning"
    assert lines[2].startswith("tune: latency 19.0 ms (estimated), was 38.0 ms: 2.00x; 6 of 100")
    assert lines[3:7] == [
        "tune: fused_dense: 7.00 ms, was 8.00 ms (1.14x), 3.2 GFLOP/s, 2 trials",
        "tune: fused_reshape[x]: not tuned (one candidate only)",
        "tune: failed for the first time: timeout",
        "tune: failed for the first time: crash",
    ]
    assert "7 of 100 trials" in lines[7] and len(lines) == 8
    assert "\x1b" not in stream.getvalue()


def test_rich_is_not_imported_without_a_terminal() -> None:
    code = (
        "import sys\nfrom edgesdk.tuning.live import LiveTable\n"
        "from edgesdk.tuning.state import SessionState\n"
        "with LiveTable() as t: t.update(SessionState('m', 't', 'd'))\n"
        "print([m for m in ('rich', 'tvm', 'numpy', 'onnx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n" and done.stderr == "tune: m for t on d: preparing\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (3840, "1 h 4 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_errors() -> None:
    assert errors_text({"a": 1, "b": 3, "c": 0}) == "failed 4: 3 b, 1 a"
    assert errors_text({}) == errors_text({"a": 0}) == ""


# ---- the report ----

# Elements that would make the browser load something, and attributes that name it.
_LOADING = {
    "script",
    "link",
    "img",
    "iframe",
    "object",
    "embed",
    "video",
    "audio",
    "source",
    "base",
}
_VOID = {"meta", "br"}


class _Checker(HTMLParser):
    """Reads a page, and fails where it loads anything or an element is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in _LOADING
        for name, _ in attrs:
            assert name not in ("src", "href", "srcset", "data") and not name.startswith("on")
        self.seen.append(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)


def _checked(html: str) -> _Checker:
    checker = _Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert not re.search(r"https?://|url\(|@import", html)
    assert "nan" not in re.sub(r"<pre>.*?</pre>|<style>.*?</style>", "", html, flags=re.S).lower()
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.S):
        ElementTree.fromstring(svg)
    return checker


def _report(state: SessionState = STATE, trials: list[TrialRecord] = TRIALS) -> str:
    now = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    return render_report(state, trials, ENVIRONMENT, now=now)


def test_the_report_says_it_all() -> None:
    page = _checked(_report(replace(STATE, final=FINAL)))
    text = " ".join(" ".join(page.text).split())
    for part in (
        "net tuned for rpi4 on pi; tuning, written 2030-01-02 03:04:05 UTC",
        "2.00x faster measured on the device 20.5 ms latency; untuned 41.0 ms",
        "6 trials of 100, 2 failed",
        "3e-06 relative. The bundle uses the tuned code.",
        "untuned 41.0 ms 40.0 ms 41.8 ms 4.4% 3",
        "fused_conv2d 3 75.0% 4 10.0 ms 4.00 ms 2.50x 21.5",
        "fused_reshape[x] one candidate only",
        "failed 2: 1 impossible time, 1 timeout, out of 6 trials",
        "no answer in 10 s",
        'fused_dense {"knobs":{"columns":14},"template":"conv2d_direct"} def main(): ...',
        "Versions TVM 0.27.0",
        "Options seed 7",
    ):
        assert part in text
    # The network, the spread, and the two kernels that have trials.
    assert page.seen.count("svg") == 4


def test_what_is_not_tuned_is_folded_away() -> None:
    html = _report()
    folded = html[html.index("1 more that are not tuned, with 5.0% of the time") :]
    assert "fused_reshape" in folded and "fused_conv2d" not in folded[: folded.index("</details>")]


def test_a_sum_of_kernels_is_called_so() -> None:
    final = FinalLatency((2.0,), (1.0,), 0.0, True, summed=True)
    html = _report(replace(STATE, final=final))
    assert "runs no whole networks" in html and "measured on the device" not in html
    assert "sum of the tuned kernels" in summary_texts(replace(STATE, final=final))[0]


def test_wrong_results_are_called_out() -> None:
    final = FinalLatency((2.0,), (1.0,), 0.5, False, wrong=True)
    assert "wrong results on the device" in _report(replace(STATE, final=final))


def test_outliers_do_not_squeeze_the_spread() -> None:
    final = FinalLatency((1.0,) * 20 + (90.0,), (0.9,) * 21, 0.0, True)
    html = _report(replace(STATE, final=final))
    assert "1 slower" in html


def test_before_the_end_the_latency_is_an_estimate() -> None:
    page = _checked(_report())
    text = " ".join(page.text)
    assert "2.00x faster" in text and "estimated so far" in text
    assert "Measured latency" not in text


def test_a_schedule_that_made_it_slower_is_called_out() -> None:
    html = _report(replace(STATE, final=FinalLatency((10.0,), (20.0,), 0.0, False)))
    assert "0.50x faster" not in html and "2.00x slower" in html
    assert "not faster: the untuned code is kept" in html


@pytest.mark.parametrize(
    "state",
    [
        SessionState("net", "rpi4", "pi"),
        replace(STATE, tasks=()),
        replace(STATE, tasks=tuple(replace(t, baseline_ms=None, best_ms=None) for t in TASKS)),
        replace(STATE, tasks=tuple(replace(t, baseline_ms=0.0, best_ms=0.0) for t in TASKS)),
    ],
)
@pytest.mark.parametrize("trials", [[], TRIALS, [trial(CONV, error_kind="crash")] * 3])
def test_a_report_at_any_moment(state: SessionState, trials: list[TrialRecord]) -> None:
    _checked(_report(state, trials))


def test_only_one_trial_and_only_equal_times() -> None:
    page = _checked(_report(STATE, [trial(CONV, 10e-3)]))
    assert page.seen.count("svg") == 2
    _checked(_report(replace(STATE, final=FinalLatency((1.0,), (1.0,), 0.0, True)), TRIALS))


def test_nothing_that_a_device_says_becomes_html() -> None:
    task = replace(TASKS[0], name=EVIL, note=EVIL, schedule=EVIL)
    state = SessionState(EVIL, EVIL, EVIL, tasks=(task,), errors={EVIL: 1})
    failed = trial(CONV, error_kind="crash", error=EVIL, kernel=EVIL)
    knobs = replace(failed, candidate={"template": EVIL, "knobs": {}}, error_kind=EVIL)
    page = _checked(render_report(state, [failed, knobs, trial(CONV, 1e-3)], {EVIL: {EVIL: EVIL}}))
    text = "".join(page.text)
    assert text.count('<script>alert("x")</script>&') >= 8
    assert not re.search(r"[\x00-\x08\x0b-\x1f\ud800-\udfff]", text)


def test_long_texts_are_cut() -> None:
    task = replace(TASKS[0], schedule="x" * 10_000_000)
    failed = trial(CONV, error_kind="crash", error="e" * 10_000_000)
    assert len(_report(replace(STATE, tasks=(task,)), [failed])) < 300_000


def test_thousands_of_trials_make_no_large_file() -> None:
    many = [trial(CONV, (i % 97 + 1) * 1e-4) for i in range(10_000)]
    assert len(_report(STATE, many)) < 400_000


def test_the_latency_of_the_network_after_each_trial() -> None:
    # conv: 3 calls of 10 ms, then 6, then 4; dense: 1 call of 8 ms, then 7.
    assert latency_history(TASKS, TRIALS) == [(0, 38), (2, 26), (3, 25), (5, 19)]
    unmeasured = tuple(replace(t, baseline_ms=None) for t in TASKS)
    assert latency_history(unmeasured, TRIALS) == [(0, 43), (2, 25), (5, 19)]
    assert latency_history(TASKS, [trial("ff" * 16, 1e-9)]) == [(0, 38)]
    assert latency_history((), TRIALS) == []


def test_the_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "out" / "report.html"
    write_report(path, STATE, TRIALS, ENVIRONMENT)
    write_report(path, replace(STATE, final=FINAL), iter(TRIALS), ENVIRONMENT)
    assert "Measured latency" in path.read_text("utf-8")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    with pytest.raises(UsageError, match="cannot write"):
        write_report(path / "below", STATE, TRIALS, ENVIRONMENT)


# ---- charts ----


def _coordinates(svg: str, css: str) -> list[tuple[float, float]]:
    found = re.search(rf'class="[^"]*{css}[^"]*" d="([^"]*)"', svg)
    return (
        [(float(x), float(y)) for x, y in re.findall(r"M([\d.]+) ([\d.]+)", found.group(1))]
        if (found)
        else []
    )


def test_a_chart_puts_points_where_they_belong() -> None:
    svg = search_chart(
        label="l",
        dots=Series("sample", [(1, 100.0), (2, 10.0), (4, 1.0)]),
        steps=Series("best", [(1, 100.0), (4, 1.0)]),
        failed=[3],
        reference=10.0,
    )
    (x1, y1), (x2, y2), (x4, y4) = _coordinates(svg, "sample")
    assert x2 - x1 == pytest.approx((x4 - x2) / 2, abs=0.2)
    # A logarithmic axis: each factor of ten is as high, and less is lower.
    assert y2 - y1 == pytest.approx(y4 - y2, abs=0.2) and y1 < y2
    ((x3, bottom),) = _coordinates(svg, "failed")
    assert x2 < x3 < x4 and bottom > y4
    assert _coordinates(svg, "reference")[0][1] == pytest.approx(y2, abs=0.1)


@pytest.mark.parametrize(
    "values",
    [[1.0], [1.0, 1.0], [1e-6, 1e6], [0.999, 1.001], [3.0, 4.0], [1e-9, 1e-9], [0.1, 3600000.0]],
)
def test_every_chart_has_a_scale_and_no_point_outside(values: list[float]) -> None:
    points = [(float(i), v) for i, v in enumerate(values, start=1)]
    svg = search_chart(label="l", dots=Series("sample", points), steps=Series("best", points))
    root = ElementTree.fromstring(svg)
    scale = [e.text for e in root.iter("text") if e.get("text-anchor") == "end"]
    assert 2 <= len(scale) <= 7 and len(set(scale)) == len(scale)
    assert all(46 <= x <= 348 and 10 <= y <= 140 for x, y in _coordinates(svg, "sample"))


def test_nothing_to_draw_is_no_chart() -> None:
    empty = Series("best", [])
    assert search_chart(label="l", dots=empty, steps=empty, failed=[1]) == ""
    assert spread_chart(label="l", rows=[("a", empty)]) == ""


def test_the_spread_marks_the_median() -> None:
    rows = [("a", Series("best", [(0, 1.0), (0, 2.0), (0, 5.0)]))]
    svg = spread_chart(label="l", rows=rows)
    dots, line = _coordinates(svg, "dots best"), _coordinates(svg, "line best")
    assert line[0][0] == pytest.approx(dots[1][0], abs=0.1)
    assert math.isclose((dots[1][0] - dots[0][0]) / (dots[2][0] - dots[1][0]), 1 / 3, abs_tol=0.01)
