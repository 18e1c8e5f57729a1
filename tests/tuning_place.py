"""Tuning with made-up times: nothing is built, nothing is run, all else is as it always is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgesdk.bundle import Bundle
from edgesdk.tuning.builder import BuildRequest, BuildResult, BuildTask
from edgesdk.tuning.devicekey import DeviceKey
from edgesdk.tuning.measure import (
    DeviceState,
    ErrorKind,
    Measurer,
    MeasureRequest,
    MeasureResult,
)
from edgesdk.tuning.place import Place
from edgesdk.tuning.state import FinalLatency
from edgesdk.tuning.trial import canonical

KEY = DeviceKey("Fake board", "Fake CPU", 2, "x86_64", "0.27.0")


def save_network(path: Path, *, channels: tuple[int, ...] = (16, 32), size: int = 12) -> Path:
    """Convolutions of 3x3 with Relu, a sum over pixels at the end. Input "x": 1x3x`size`x`size`.

    Layers of the same sizes are the same kernels in every network: weights are arguments.
    """
    draw = np.random.default_rng(0)
    nodes, weights, before, name = [], [], 3, "x"
    for index, count in enumerate(channels):
        weight = draw.standard_normal((count, before, 3, 3)).astype(np.float32) / 8
        weights.append(numpy_helper.from_array(weight, f"w{index}"))
        conv, act = f"c{index}", f"r{index}"
        nodes.append(helper.make_node("Conv", [name, f"w{index}"], [conv], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [conv], [act]))
        before, name = count, act
    nodes.append(helper.make_node("GlobalAveragePool", [name], ["y"]))
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, size, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, before, 1, 1])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save_model(model, path)
    return path


class FakeBuilder:
    """Stands for the Builder: what it "builds" is the candidate's text."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.tasks: list[BuildTask] = []

    def __enter__(self) -> FakeBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add_task(self, task: BuildTask) -> None:
        self.tasks.append(task)

    def build(self, requests: Iterable[BuildRequest]) -> Iterator[BuildResult]:
        for request in requests:
            request.output.write_text(canonical(request.candidate), encoding="utf-8")
            yield BuildResult(request.number, "", "", 0.0)


def made_up_s(candidate: str) -> float:
    """1 to 2 us, the same for the same candidate, and without any sense in it."""
    return 1e-6 * (1 + int(hashlib.sha256(candidate.encode()).hexdigest()[:8], 16) / 2**32)


class FakePlace(Place):
    """`answer(n)` is the error kind of the n-th measurement, "" for none; it may raise. `final` is
    what the comparison of whole networks gives. `asked` holds every candidate in order."""

    def __init__(
        self,
        *,
        answer: Callable[[int], ErrorKind] = lambda number: "",
        time_s: Callable[[str], float] = made_up_s,
        final: FinalLatency | None = None,
        throttled: Callable[[int], bool] = lambda number: False,
        key: DeviceKey = KEY,
    ) -> None:
        self.answer, self.time_s, self.final = answer, time_s, final
        self.throttled, self.key = throttled, key
        self.asked: list[tuple[str, str]] = []
        self.connections = 0
        self.open = False

    @property
    def name(self) -> str:
        return "fake"

    def examine(self, untuned: Bundle) -> tuple[DeviceKey, Mapping[str, float] | None]:
        return self.key, None

    def connect(self) -> Measurer:
        self.connections += 1
        self.open = True
        return _FakeMeasurer(self)

    def disconnect(self) -> None:
        self.open = False

    def compare(self, untuned: Bundle, tuned: Bundle, turns: int) -> FinalLatency | None:
        return self.final


class _FakeMeasurer(Measurer):
    def __init__(self, place: FakePlace) -> None:
        self._place = place

    @property
    def facts(self) -> None:
        return None

    def put(self, data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    def drop(self, blob: str) -> None:
        pass

    def measure(self, requests: Iterable[MeasureRequest]) -> Iterator[MeasureResult]:
        place = self._place
        for request in requests:
            candidate = request.library.read_text(encoding="utf-8")
            number = len(place.asked)
            place.asked.append((request.arguments[-1].blob, candidate))
            kind = place.answer(number)
            state = DeviceState(temperature_c=50.0, throttled=place.throttled(number))
            samples = () if kind else (place.time_s(candidate),) * 3
            yield MeasureResult(request.candidate, kind, kind, samples, 0.0, state, state)

    def close(self) -> None:
        pass
