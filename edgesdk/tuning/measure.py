"""What is measured, and what came of it: the data that a session and a device exchange.

`agent.Agent` measures on any device that a transport reaches, `tracker.TrackerDevice` on devices
behind TVM's own RPC tracker. Both are a `Measurer`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self

if TYPE_CHECKING:
    from edgesdk.deploy.facts import DeviceFacts

ErrorKind = Literal["", "load", "crash", "timeout", "memory", "wrong", "kernel", "device"]
"""Why there is no result: "" there is one; "load" the library cannot be loaded; "crash"; "timeout";
"memory" it wanted more than it may have; "wrong" its results differ from the expected ones;
"kernel" it raised an error; "device" the device is at fault (disk full, no memory left)."""

# The types of `edgesdk_dtype` in edgesdk_model.h, in the order of their numbers, which begin at 1.
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool"),
)
_DTYPE_BYTES = dict(zip(DTYPES, (4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1), strict=True))


@dataclass(frozen=True)
class TensorArgument:
    """One argument of a kernel. `blob` is the SHA-256 (hex) of its bytes, row-major, little-endian.

    For an output these are the bytes that the kernel should write. `dtype` is a NumPy name.
    """

    shape: tuple[int, ...]
    dtype: str
    blob: str
    is_output: bool

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class MeasureRequest:
    """`library` on this machine exports `symbol` (or `__tvm_ffi_<symbol>`), a TVMFFISafeCallType.

    A sample is the mean time of `number` calls; 0: of as many as take `min_repeat_ms`. There are
    `repeat` samples after `warmup` calls that are not timed. With `flush_cache_bytes`, a block of
    that size is read before each call, outside of the time. `tolerance` is relative to the
    output's largest magnitude; integers must be equal. `timeout_s` counts from the start of the
    candidate on the device. `memory_limit_bytes` is what it may take beside its arguments, 0: no
    limit. `threads` 0: as many as the device has CPUs.
    """

    candidate: int
    library: Path
    symbol: str
    arguments: tuple[TensorArgument, ...]
    tolerance: float
    number: int = 0
    repeat: int = 3
    min_repeat_ms: float = 20.0
    warmup: int = 1
    flush_cache_bytes: int = 0
    timeout_s: float = 10.0
    memory_limit_bytes: int = 1 << 30
    threads: int = 0


@dataclass(frozen=True)
class DeviceState:
    """The fastest core's clock, the hottest sensor, and whether heat or low voltage slow it down.

    None where the device cannot tell.
    """

    clock_khz: int | None = None
    temperature_c: float | None = None
    throttled: bool | None = None


@dataclass(frozen=True)
class MeasureResult:
    """`samples_s` holds seconds per call, and is complete when `error_kind` is "".

    `max_relative_error` is the largest difference between an output and what it should be, divided
    by the latter's largest magnitude; infinite when NaN or infinity stand in wrong places. The
    states are those right before the first and right after the last sample.
    """

    candidate: int
    error_kind: ErrorKind
    error: str
    samples_s: tuple[float, ...]
    max_relative_error: float
    before: DeviceState
    after: DeviceState

    @property
    def ok(self) -> bool:
        return not self.error_kind


class Measurer(Protocol):
    """A device that measures candidates. For one thread at a time.

    Its methods raise DeviceError or DeviceUnreachableError when it has failed as a whole; it is of
    no use after that. What is wrong with one candidate is in that candidate's result.
    """

    @property
    def facts(self) -> DeviceFacts | None:
        """What the device is; None where there is no way to ask."""

    def put(self, data: bytes) -> str:
        """Brings `data` to the device, unless it is there, and returns its name in requests."""

    def drop(self, blob: str) -> None:
        """Forgets what `put` brought."""

    def measure(self, requests: Iterable[MeasureRequest]) -> Iterator[MeasureResult]:
        """Measures one candidate after the other; results come in the order of the requests.

        Some requests are taken ahead of the results. Raises ValueError for a request that cannot
        be meant.
        """

    def close(self) -> None:
        """Ends it, and what it had on the device. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_request(request: MeasureRequest, blobs: dict[str, int]) -> None:
    """Raises ValueError when `request` cannot be meant. `blobs`: name -> size of what was put."""
    for index, argument in enumerate(request.arguments):
        where = f"candidate {request.candidate}, argument {index}"
        if argument.dtype not in DTYPES:
            raise ValueError(f"{where}: the data type {argument.dtype!r} is not known")
        if argument.blob not in blobs:
            raise ValueError(f"{where}: its data were not put on the device")
        if blobs[argument.blob] != argument.size_bytes:
            raise ValueError(
                f"{where}: its data have {blobs[argument.blob]} bytes, not {argument.size_bytes}"
            )
    if not 1 <= request.repeat <= 1024:
        raise ValueError(f"repeat is {request.repeat}, not between 1 and 1024")
    if not 0 < request.timeout_s <= 3600:
        raise ValueError(f"timeout_s is {request.timeout_s}, not between 0 and 3600")
    for name in ("number", "warmup", "threads", "flush_cache_bytes", "memory_limit_bytes"):
        if getattr(request, name) < 0:
            raise ValueError(f"{name} is {getattr(request, name)}, must be at least 0")
    if not (request.tolerance >= 0 and request.min_repeat_ms >= 0):
        raise ValueError("tolerance and min_repeat_ms must be at least 0")
