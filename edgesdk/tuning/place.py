"""Where a session measures: a device that a transport reaches, or one behind TVM's RPC tracker."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from edgesdk.bundle import Bundle
from edgesdk.errors import DeviceError, DeviceUnreachableError, VerificationError
from edgesdk.tuning.devicekey import DeviceKey, device_key
from edgesdk.tuning.measure import Measurer
from edgesdk.tuning.state import FinalLatency

if TYPE_CHECKING:
    from edgesdk.deploy.run import Launch, PlacedBundle
    from edgesdk.deploy.transport.base import Transport
    from edgesdk.profiles import TargetProfile

_WARMUP = 3
_RUNS = 10
_EXAMINATIONS = 3


class Place(Protocol):
    """A device for a tuning session. Its methods raise DeviceError or DeviceUnreachableError."""

    @property
    def name(self) -> str:
        """What the user calls it."""

    def examine(self, untuned: Bundle) -> tuple[DeviceKey, Mapping[str, float] | None]:
        """Returns what the device is, and the time of each kernel in one run of the network in ms.

        None where only single kernels can be run. Raises VerificationError when the network's
        results are wrong there.
        """

    def connect(self) -> Measurer:
        """Returns what measures candidates; call `disconnect` before another call."""

    def disconnect(self) -> None:
        """Ends what `connect` began; never raises."""

    def compare(self, untuned: Bundle, tuned: Bundle, turns: int) -> FinalLatency | None:
        """Measures two whole networks in `turns`. None where only single kernels can be run."""


class Board(Place):
    """A device from the user's list, or this machine. `threads` 0: all its CPUs."""

    def __init__(self, device: str, profile: TargetProfile, *, threads: int = 0) -> None:
        self._device = device
        self._profile = profile
        self._options = ["--threads", str(threads)] if threads else []
        self._transport: Transport | None = None
        self._agent: Measurer | None = None

    @property
    def name(self) -> str:
        return self._device

    def examine(self, untuned: Bundle) -> tuple[DeviceKey, Mapping[str, float] | None]:
        from edgesdk.deploy.facts import read_facts
        from edgesdk.deploy.run import placed_bundle

        with placed_bundle(untuned, self._device) as placed:
            key = device_key(read_facts(placed.transport))
            launches = [
                self._launch(placed, ["--warmup", "2", "--repeat", "5", "--per-layer"])
                for _ in range(_EXAMINATIONS)
            ]
        if any(launch.differs for launch in launches):
            raise VerificationError(
                f"the untuned network gives wrong results on {self._device}",
                hint=f"edgesdk verify BUNDLE --device {self._device}",
            )
        # The shares decide where the search goes: one run that was disturbed must not.
        time_ms: Counter[str] = Counter()
        for layers in zip(*(launch.report["layers"] for launch in launches), strict=True):
            time_ms[layers[0]["name"]] += min(layer["mean_ms"] for layer in layers)
        return key, time_ms

    def connect(self) -> Measurer:
        from edgesdk.deploy.transport import open_transport
        from edgesdk.devices import get_device
        from edgesdk.tuning.agent import Agent

        self._transport = open_transport(get_device(self._device))
        try:
            self._agent = Agent(self._transport, self._profile)
        except BaseException:
            self.disconnect()
            raise
        return self._agent

    def disconnect(self) -> None:
        agent, self._agent = self._agent, None
        transport, self._transport = self._transport, None
        for end in (agent, transport):
            if end is not None:
                with suppress(DeviceError, DeviceUnreachableError):
                    end.close()

    def compare(self, untuned: Bundle, tuned: Bundle, turns: int) -> FinalLatency | None:
        from edgesdk.deploy.run import placed_bundle

        untuned_ms: list[float] = []
        tuned_ms: list[float] = []
        error, differs = 0.0, False
        with (
            placed_bundle(untuned, self._device) as before,
            placed_bundle(tuned, self._device) as after,
        ):
            for _ in range(turns):
                untuned_ms += self._run(before).report["latency_ms"]
                launch = self._run(after)
                tuned_ms += launch.report["latency_ms"]
                error = max(error, launch.report["selftest"]["max_relative_error"] or 0.0)
                differs = differs or launch.differs
        final = FinalLatency(tuple(untuned_ms), tuple(tuned_ms), error, shipped=False)
        shipped = not differs and final.gain >= 1.0
        return replace(final, shipped=shipped, wrong=differs)

    def _run(self, placed: PlacedBundle) -> Launch:
        return self._launch(placed, ["--warmup", str(_WARMUP), "--repeat", str(_RUNS)])

    def _launch(self, placed: PlacedBundle, options: list[str]) -> Launch:
        """Runs the network on its golden inputs and compares the outputs."""
        tolerance = repr(placed.bundle.manifest.verification.tolerance)
        test = ["--selftest", placed.path("golden"), "--tolerance", tolerance]
        return placed.launch([*test, *options, *self._options])


class Tracked(Place):
    """A device behind TVM's RPC tracker at `address` ("host:port"), registered there as `key`.

    Nothing can be asked of it but to run kernels: records know it by the tracker's key alone.
    """

    def __init__(self, address: str, key: str, profile: TargetProfile) -> None:
        self._address = address
        self._key = key
        self._profile = profile
        self._device: Measurer | None = None

    @property
    def name(self) -> str:
        return f"{self._key}@{self._address}"

    def examine(self, untuned: Bundle) -> tuple[DeviceKey, Mapping[str, float] | None]:
        key = DeviceKey(
            model=f"tracker key {self._key}",
            cpu="",
            cores=0,
            isa=" ".join(self._profile.contract.machine),
            tvm=importlib.metadata.version("apache-tvm"),
        )
        return key, None

    def connect(self) -> Measurer:
        from edgesdk.tuning.tracker import TrackerDevice

        self._device = TrackerDevice(self._address, self._key)
        return self._device

    def disconnect(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            with suppress(DeviceError, DeviceUnreachableError):
                device.close()

    def compare(self, untuned: Bundle, tuned: Bundle, turns: int) -> FinalLatency | None:
        return None
