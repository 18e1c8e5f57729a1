"""What tuning records say about the device they were measured on.

Only what decides how fast code runs belongs to the key, and only what is the same after a reboot:
no temperature, free memory, clock, kernel release, host name or address. Two boards of one kind
have the same key, and so share their records.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections import Counter
from dataclasses import astuple, dataclass
from typing import Literal

from edgesdk.deploy.facts import DeviceFacts

Level = Literal["device", "model", "cpu"]

_TVM_PACKAGE = "apache-tvm"

# The CPU features that change the code that can be run, as /proc/cpuinfo names them. The rest
# (mitigations, virtualisation, counters) comes and goes with the kernel and the microcode.
_CODE_FEATURES = re.compile(
    r"(mmx|pni|ssse3|sse\w*|fma4?|f16c|abm|popcnt|movbe|bmi[12]|avx\w*|amx_\w+|"
    r"neon|vfp\w*|half|idiv[at]|fp|fphp|asimd\w*|atomics|sve\w*|sme\w*|i8mm|bf16)"
)
_COUNTED = re.compile(r"(\d+)x (.+)")


@dataclass(frozen=True)
class DeviceKey:
    """A kind of device.

    `model` is the board ("Raspberry Pi 4 Model B Rev 1.4"), `cpu` its processor ("Cortex-A72";
    "4x Cortex-A53 + 2x Cortex-A72" where the cores differ), `cores` how many of them are online, 0
    if unknown; `isa` the architecture of its programs and the features that matter for code
    ("aarch64 asimd fp"), `tvm` the version that generated the code, `gpu` and `driver` the
    accelerator, for targets that use one. A text is empty where the device could not tell.
    """

    model: str
    cpu: str
    cores: int
    isa: str
    tvm: str
    gpu: str = ""
    driver: str = ""

    @property
    def fingerprint(self) -> str:
        """16 hex digits over all fields: equal only where all of them are."""
        text = json.dumps(astuple(self), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """The most telling name that the device has."""
        return self.model or self.gpu or self.cpu or f"unknown {self.isa.partition(' ')[0]} device"


def device_key(facts: DeviceFacts, *, gpu: str = "", driver: str = "") -> DeviceKey:
    """Returns the key of the device that said `facts`, for code of the installed TVM.

    Raises PackageNotFoundError (importlib.metadata) when TVM is not installed.
    """
    features = sorted(f for f in facts.cpu_features or () if _CODE_FEATURES.fullmatch(f))
    return DeviceKey(
        model=" ".join((facts.board or "").split()),
        cpu=_cpu(facts.cpu_model),
        cores=facts.cores or 0,
        isa=" ".join([facts.programs or facts.machine, *features]),
        tvm=importlib.metadata.version(_TVM_PACKAGE),
        gpu=gpu,
        driver=driver,
    )


def level_of(wanted: DeviceKey, other: DeviceKey) -> Level | None:
    """Returns how near `other` is to `wanted`, or None if what was measured there means nothing.

    "device": equal in all. "model": the same board, whatever its system, TVM or driver. "cpu": the
    same GPU; without one, the same CPU with the same features (virtual machines call very different
    CPUs alike), in any number.
    """
    if other == wanted:
        return "device"
    if other.gpu != wanted.gpu:
        return None
    if wanted.model and other.model == wanted.model:
        return "model"
    if wanted.gpu or (wanted.cpu and (other.cpu, other.isa) == (wanted.cpu, wanted.isa)):
        return "cpu"
    return None


def nearness(wanted: DeviceKey, other: DeviceKey) -> tuple[bool, ...]:
    """A key that sorts devices of one level: the nearest to `wanted` is the largest."""
    return (
        other.cores == wanted.cores,
        other.isa == wanted.isa,
        other.driver == wanted.driver,
        other.tvm == wanted.tvm,
    )


def _cpu(model: str | None) -> str:
    """The CPU's name without the number of cores, where all are of one kind.

    The cores of a mixed CPU are put in order: they are listed as they came up.
    """
    parts = [_COUNTED.fullmatch(part.strip()) for part in (model or "").split(" + ")]
    counted: Counter[str] = Counter()
    for part in parts:
        if part is None:
            return " ".join((model or "").split())
        counted[part.group(2)] += int(part.group(1))
    if len(counted) == 1:
        return next(iter(counted))
    return " + ".join(f"{counted[name]}x {name}" for name in sorted(counted))
