"""Measures a bundle where it runs, and beside ONNX Runtime on this machine if asked.

What is timed is what the user waits for: one run of the network, inputs and outputs in place. An
A/B comparison takes turns, because a machine is not the same one minute later.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgesdk.deploy.facts import DeviceFacts, read_facts
from edgesdk.deploy.run import PlacedBundle, golden_inputs
from edgesdk.deploy.verify import golden_error
from edgesdk.errors import ModelError, UsageError

if TYPE_CHECKING:
    from edgesdk.bundle.manifest import Manifest

OPPONENTS = ("onnxruntime",)
DEFAULT_WARMUP = 5

# Without --repeat: about this long, within these numbers of runs.
_MEASURE_MS = 3000.0
_MIN_REPEAT, _MAX_REPEAT = 10, 2000

# A quiet machine stays below this spread.
_CALM_SPREAD = 0.3

# A comparison takes this many turns. The pause lets the other side's waiting threads go to sleep,
# which otherwise spin on the CPUs that are measured.
_TURNS = 5
_PAUSE_S = 0.1

# `vcgencmd get_throttled` of the Raspberry Pi (its documentation, "vcgencmd"): bits 0 to 3 are now,
# 16 to 19 since the start.
_THROTTLE_BITS = (
    (0, "low voltage"),
    (1, "capped frequency"),
    (2, "throttling"),
    (3, "the temperature limit"),
)


@dataclass(frozen=True)
class Latencies:
    """Latencies of single runs in ms. `spread` is (p90 - min) / median."""

    runs: int
    median_ms: float
    p90_ms: float
    min_ms: float
    max_ms: float
    spread: float

    @staticmethod
    def of(values_ms: Sequence[float]) -> Latencies:
        """Sums up at least one measured value."""
        ordered = sorted(values_ms)
        median = statistics.median(ordered)
        p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
        spread = (p90 - ordered[0]) / median if median > 0 else 0.0
        return Latencies(len(ordered), median, p90, ordered[0], ordered[-1], spread)


@dataclass(frozen=True)
class LayerCost:
    """A layer's mean latency in ms, and which kernel ran it; in the order of execution."""

    name: str
    kernel: str
    mean_ms: float


@dataclass(frozen=True)
class Comparison:
    """Another runtime on the same inputs and the same number of threads, turn by turn.

    `speedup` is its median latency divided by the bundle's: above 1 the bundle is faster.
    `turn_speedups` are the same ratio in each turn, which shows how far to trust it.
    """

    opponent: str
    version: str
    latency: Latencies
    speedup: float
    turn_speedups: tuple[float, ...]


@dataclass(frozen=True)
class BenchReport:
    """What was measured. `open_ms` is loading the library; temperatures are in degrees Celsius and
    None where the device tells none; `warnings` says why numbers may be off. `shapes` are those of
    the inputs where the bundle serves several."""

    bundle: str
    target: str
    device: str
    cpu: str | None
    threads: int
    warmup: int
    latency: Latencies
    open_ms: float
    peak_rss_bytes: int
    governor: str | None
    temperature_before_c: float | None
    temperature_after_c: float | None
    layers: tuple[LayerCost, ...]
    against: tuple[Comparison, ...]
    warnings: tuple[str, ...]
    shapes: str = ""


def bench_placed(
    placed: PlacedBundle,
    *,
    repeat: int | None = None,
    warmup: int = DEFAULT_WARMUP,
    threads: int | None = None,
    per_layer: bool = False,
    against: Sequence[str] = (),
    model: Path | None = None,
    variant: int = 0,
    progress: Callable[[str], None] = lambda stage: None,
) -> BenchReport:
    """Times `repeat` runs (by default as many as fit in 3 s, 10 to 2000) after `warmup` others.

    The inputs are the bundle's golden ones, and the outputs are compared too. `per_layer` times
    every layer, which costs a little in each. `against` names runtimes to compare with, on this
    machine only; they need `model`, the file that the bundle was compiled from. `variant` is the
    number of the shapes that are measured.

    Raises UsageError for arguments that cannot be meant, VerificationError when the outputs are
    wrong, DeviceError when the network fails.
    """
    manifest = placed.bundle.manifest
    for name, value, least in (
        ("repeat", repeat, 1),
        ("warmup", warmup, 0),
        ("threads", threads, 1),
    ):
        if value is not None and value < least:
            raise UsageError(f"{name} is {value}", hint=f"give at least {least}")
    if variant not in range(len(manifest.variants)):
        known = ", ".join(f"{i}: {v.text}" for i, v in enumerate(manifest.variants))
        raise UsageError(f"the bundle has no variant {variant}", hint=f"it has {known}")
    opponents = [_opponent(placed, name, model, variant) for name in against]
    before = read_facts(placed.transport)
    progress("warming up")
    # Also settles the number of threads and, without --repeat, that of runs.
    first = _launch(placed, variant, repeat=1, warmup=warmup, threads=threads)
    threads = int(first["threads"])
    if repeat is None:
        fitting = _MEASURE_MS / max(float(first["latency_ms"][0]), 1e-3)
        repeat = int(min(max(fitting, _MIN_REPEAT), _MAX_REPEAT))
    progress(f"{repeat} runs")
    if opponents:
        values, report, comparisons = _take_turns(
            placed,
            opponents,
            variant,
            repeat=repeat,
            warmup=warmup,
            threads=threads,
            progress=progress,
        )
    else:
        report = _launch(placed, variant, repeat=repeat, warmup=warmup, threads=threads)
        values, comparisons = report["latency_ms"], ()
    layers: tuple[LayerCost, ...] = ()
    if per_layer:
        progress("timing each layer")
        profile = _launch(
            placed, variant, repeat=repeat, warmup=warmup, threads=threads, per_layer=True
        )
        layers = tuple(LayerCost(**layer) for layer in profile["layers"])
    after = read_facts(placed.transport)
    latency = Latencies.of(values)
    return BenchReport(
        bundle=manifest.name,
        target=manifest.target,
        device=placed.transport.name,
        cpu=after.cpu_model,
        threads=threads,
        warmup=warmup,
        latency=latency,
        open_ms=float(report["open_ms"]),
        peak_rss_bytes=int(report["memory"]["peak_rss_bytes"]),
        governor=after.governor,
        temperature_before_c=before.temperature_c,
        temperature_after_c=after.temperature_c,
        layers=layers,
        against=comparisons,
        warnings=(*doubts(before, after, latency), *(n for o in opponents for n in o.notes)),
        shapes=manifest.variants[variant].text if manifest.other_variants else "",
    )


def doubts(before: DeviceFacts, after: DeviceFacts, latency: Latencies) -> tuple[str, ...]:
    """Returns why latencies measured between `before` and `after` may not be the device's best."""
    found = []
    if after.governor is not None and after.governor != "performance":
        found.append(
            f"the CPU governor is {after.governor!r}, not 'performance':"
            " the frequency may have changed while measuring"
        )
    first, last = (int(f.throttled, 16) if f.throttled else 0 for f in (before, after))
    # Now, or for the first time since the start: it happened while measuring.
    active = last | ((last & ~first) >> 16)
    reasons = [reason for bit, reason in _THROTTLE_BITS if active >> bit & 1]
    if reasons:
        found.append(f"the board was slowed down while measuring: {', '.join(reasons)}")
    if latency.spread > _CALM_SPREAD:
        found.append(
            f"the runs differ by {100 * latency.spread:.0f} %: something else may be running there"
        )
    return tuple(found)


def _launch(
    placed: PlacedBundle,
    variant: int,
    *,
    repeat: int,
    warmup: int,
    threads: int | None,
    per_layer: bool = False,
) -> dict[str, Any]:
    chosen = placed.bundle.manifest.variants[variant]
    tolerance = chosen.verification.tolerance
    options = ["--selftest", placed.path(chosen.golden), "--tolerance", f"{tolerance:g}"]
    options += ["--repeat", str(repeat), "--warmup", str(warmup)]
    options += ["--threads", str(threads)] if threads is not None else []
    launch = placed.launch([*options, "--per-layer"] if per_layer else options)
    if launch.differs:
        relative = launch.report["selftest"]["max_relative_error"]
        raise golden_error(
            placed.transport.name, math.inf if relative is None else relative, tolerance
        )
    return dict(launch.report)


class _OnnxRuntime:
    """ONNX Runtime on this machine, with the model that the bundle was compiled from."""

    name = "onnxruntime"

    def __init__(self, placed: PlacedBundle, model: Path, variant: int) -> None:
        import onnxruntime

        from edgesdk.frontend.sources import open_source

        self.version: str = onnxruntime.__version__
        source = open_source(model)
        self._model = source.onnx
        self.notes = (
            (f"onnxruntime ran the ONNX model that {model.name} was converted to here",)
            if source.kind != "ONNX"
            else ()
        )
        self._inputs = golden_inputs(placed.bundle, variant)
        self._session: Any = None

    def open(self, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        try:
            self._session = onnxruntime.InferenceSession(
                str(self._model), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise ModelError(f"ONNX Runtime refuses {self._model.name}: {text}") from error

    def measure(self, *, repeat: int, warmup: int) -> list[float]:
        for _ in range(warmup):
            self._session.run(None, self._inputs)
        values = []
        for _ in range(repeat):
            start = time.perf_counter()
            self._session.run(None, self._inputs)
            values.append((time.perf_counter() - start) * 1e3)
        return values


def _opponent(placed: PlacedBundle, name: str, model: Path | None, variant: int) -> _OnnxRuntime:
    if name not in OPPONENTS:
        raise UsageError(
            f"cannot compare with {name!r}", hint=f"use one of: {', '.join(OPPONENTS)}"
        )
    if not placed.on_this_machine:
        raise UsageError(
            f"{name} is compared with on this machine, not on {placed.transport.name}",
            hint="use --device local, and a bundle for this machine",
        )
    if model is None:
        raise UsageError(
            f"comparing with {name} needs the model itself, which is not in the bundle",
            hint="add --model MODEL",
        )
    _check_same_model(placed.bundle.manifest, model)
    return _OnnxRuntime(placed, model, variant)


def _check_same_model(manifest: Manifest, model: Path) -> None:
    from edgesdk.frontend.load import load_model

    if load_model(model).sha256 != manifest.model_sha256:
        raise UsageError(
            f"{model} is not the model that the bundle {manifest.name} was compiled from",
            hint="give that file, or compile this one again",
        )


def _take_turns(
    placed: PlacedBundle,
    opponents: Sequence[_OnnxRuntime],
    variant: int,
    *,
    repeat: int,
    warmup: int,
    threads: int,
    progress: Callable[[str], None],
) -> tuple[list[float], dict[str, Any], tuple[Comparison, ...]]:
    """Measures in turns; returns the bundle's latencies, its last report, and the comparisons."""
    for opponent in opponents:
        opponent.open(threads)
    per_turn = math.ceil(repeat / _TURNS)
    ours: list[list[float]] = []
    theirs: list[list[list[float]]] = [[] for _ in opponents]
    report: dict[str, Any] = {}
    for turn in range(_TURNS):
        progress(f"turn {turn + 1} of {_TURNS}, {per_turn} runs each")
        time.sleep(_PAUSE_S)
        report = _launch(placed, variant, repeat=per_turn, warmup=warmup, threads=threads)
        ours.append(report["latency_ms"])
        for values, opponent in zip(theirs, opponents, strict=True):
            time.sleep(_PAUSE_S)
            values.append(opponent.measure(repeat=per_turn, warmup=warmup))
    all_ours = [value for turn in ours for value in turn]
    return (
        all_ours,
        report,
        tuple(
            _compare(opponent, ours, values)
            for opponent, values in zip(opponents, theirs, strict=True)
        ),
    )


def _compare(
    opponent: _OnnxRuntime, ours: list[list[float]], theirs: list[list[float]]
) -> Comparison:
    latency = Latencies.of([value for turn in theirs for value in turn])
    mine = Latencies.of([value for turn in ours for value in turn])
    return Comparison(
        opponent=opponent.name,
        version=opponent.version,
        latency=latency,
        speedup=latency.median_ms / mine.median_ms,
        turn_speedups=tuple(
            statistics.median(b) / statistics.median(a) for a, b in zip(ours, theirs, strict=True)
        ),
    )
