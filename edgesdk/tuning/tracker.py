"""Measures on devices behind TVM's own RPC tracker, with TVM's client.

For boards that run TVM's RPC server already. It offers less than edgesdk's agent: no memory limit,
no clock or temperature, no check of the candidate's process. One session per candidate, as TVM's
own tuner does it, because only the end of a session ends a candidate that hangs. And a candidate
that crashes ends the whole server, which somebody must start again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from edgesdk.errors import DeviceError, DeviceUnreachableError, UsageError
from edgesdk.numerics import compare
from edgesdk.tuning.measure import (
    DeviceState,
    ErrorKind,
    Measurer,
    MeasureRequest,
    MeasureResult,
    TensorArgument,
    check_request,
)

if TYPE_CHECKING:
    import numpy as np

_CONNECT_LIMIT_S = 15.0
# A session's time counts from its start: this much for what comes before the candidate.
_SETUP_S = 5.0
_SETUP_BYTES_PER_S = 1e6
# How long to wait for a server that a candidate has crashed, in case something starts it again.
_RESTART_LIMIT_S = 20.0
_LIBRARY = "candidate.so"


class TrackerDevice(Measurer):
    """The devices that registered as `key` at the tracker at `address` ("host:port").

    A request waits up to `wait_s` seconds until one of them is free. The constructor raises
    UsageError when `address` cannot be meant, DeviceUnreachableError when no tracker answers there,
    DeviceError when it has no device of that key.
    """

    def __init__(self, address: str, key: str, *, wait_s: float = 600.0) -> None:
        self._address = address
        self._host, self._port = _parse(address)
        self._key = key
        self._wait_s = wait_s
        self._blobs: dict[str, bytes] = {}
        _probe(self._host, self._port)
        from tvm import rpc

        self._tracker: Any = rpc.connect_tracker(self._host, self._port)
        try:
            self._check_key()
        except BaseException:
            self.close()
            raise

    @property
    def facts(self) -> None:
        return None

    def put(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        self._blobs[name] = data
        return name

    def drop(self, blob: str) -> None:
        del self._blobs[blob]

    def measure(self, requests: Iterable[MeasureRequest]) -> Iterator[MeasureResult]:
        for request in requests:
            check_request(request, {name: len(data) for name, data in self._blobs.items()})
            yield self._measure(request)

    def close(self) -> None:
        self._tracker.close()

    def _measure(self, request: MeasureRequest) -> MeasureResult:
        library = bytearray(request.library.read_bytes())
        size = len(library) + sum(argument.size_bytes for argument in request.arguments)
        session = self._session(request.timeout_s + _SETUP_S + size / _SETUP_BYTES_PER_S)
        run = _Run(request, session, self._blobs)
        try:
            run.load(library)
            run.check()
            run.time()
        except _WrongResultError as error:
            return run.result("wrong", str(error))
        except Exception as error:  # TVM raises many types
            text = _reason(error)
            if "RPCSessionTimeoutError" in f"{type(error).__name__} {error}":
                return run.result("timeout", f"not done within {request.timeout_s:g} s {run.where}")
            if _is_alive(session):
                return run.result("load" if run.stage == "load" else "kernel", text)
            return run.result("crash", f"the connection to its process broke {run.where}: {text}")
        return run.result("", "")

    def _session(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + _RESTART_LIMIT_S
        while not self._servers():
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"no RPC server for {self._key!r} is left at the tracker {self._address}",
                    hint="a candidate that crashes ends TVM's RPC server: start it again there",
                )
            time.sleep(0.5)
        # TVM has no limit for this wait; with the socket's, it says that the request failed.
        self._tracker._sock.settimeout(self._wait_s)
        try:
            return self._tracker.request(
                self._key, session_timeout=math.ceil(timeout_s), max_retry=1
            )
        except Exception as error:
            raise DeviceError(
                f"no device of {self._key!r} came from the tracker {self._address} within "
                f"{self._wait_s:g} s: {_reason(error)}",
                hint="python -m tvm.exec.query_rpc_tracker shows who is waiting",
            ) from error

    def _check_key(self) -> None:
        if self._servers():
            return
        known = sorted({key for key, _ in self._registered()})
        raise DeviceError(
            f"the tracker {self._address} has no device of the key {self._key!r}",
            hint=f"its keys: {', '.join(known)}"
            if known
            else "start `python -m tvm.exec.rpc_server --tracker HOST:PORT --key KEY` on a device",
        )

    def _servers(self) -> list[Any]:
        return [address for key, address in self._registered() if key == self._key]

    def _registered(self) -> list[tuple[str, Any]]:
        try:
            if self._tracker._sock is None:  # a request that failed has closed it
                self._tracker._connect()
            self._tracker._sock.settimeout(_CONNECT_LIMIT_S)
            servers = self._tracker.summary()["server_info"]
        except (OSError, RuntimeError, ValueError) as error:
            raise DeviceUnreachableError(
                f"the tracker {self._address} does not answer any more: {error}",
                hint="is it still running?",
            ) from error
        return [(server["key"].removeprefix("server:"), server["addr"]) for server in servers]


class _WrongResultError(Exception):
    pass


class _Run:
    """One candidate in one session."""

    def __init__(self, request: MeasureRequest, session: Any, blobs: dict[str, bytes]) -> None:
        self.stage = "load"
        self._request = request
        self._session = session
        self._blobs = blobs
        self._samples: tuple[float, ...] = ()
        self._relative = 0.0

    @property
    def where(self) -> str:
        return {"load": "while it was loaded", "check": "in its first run"}.get(
            self.stage, "while it was timed"
        )

    def load(self, library: bytearray) -> None:
        import numpy as np
        import tvm

        self._session.upload(library, _LIBRARY)
        self._module = self._session.load_module(_LIBRARY)
        name = self._request.symbol.removeprefix("__tvm_ffi_")
        self._function = self._module[name]
        self._name = name
        self._device = self._session.cpu(0)
        if self._request.threads:
            self._session.get_function("runtime.config_threadpool")(1, self._request.threads)
        self._tensors = []
        for argument in self._request.arguments:
            data = self._blobs[argument.blob]
            if argument.is_output:
                # All bits set is NaN in every floating-point type: what is not written shows.
                data = b"\xff" * len(data)
            self._tensors.append(tvm.runtime.tensor(np.array(_array(argument, data)), self._device))

    def check(self) -> None:
        self.stage = "check"
        self._function(*self._tensors)
        for index, argument in enumerate(self._request.arguments):
            if not argument.is_output:
                continue
            actual = _comparable(argument, self._tensors[index].numpy())
            wanted = _comparable(argument, _array(argument, self._blobs[argument.blob]))
            found = compare(f"argument {index}", actual, wanted)
            self._relative = max(
                self._relative, math.inf if found.mismatch else found.max_relative_error
            )
            if not found.within(self._request.tolerance):
                raise _WrongResultError(
                    f"argument {index} {found.mismatch}"
                    if found.mismatch
                    else f"argument {index} differs by {found.max_relative_error:.3g} "
                    f"(relative; {self._request.tolerance:.3g} is allowed)"
                )

    def time(self) -> None:
        self.stage = "time"
        request = self._request
        for _ in range(request.warmup):
            self._function(*self._tensors)
        # TVM empties the cache before a sample, not before a call: then a sample is one call.
        flush = request.flush_cache_bytes
        evaluator = self._module.time_evaluator(
            self._name,
            self._device,
            number=1 if flush else request.number or 1,
            repeat=request.repeat,
            min_repeat_ms=0 if flush or request.number else math.ceil(request.min_repeat_ms),
            cache_flush_bytes=flush,
        )
        self._samples = tuple(evaluator(*self._tensors).results)

    def result(self, kind: ErrorKind, error: str) -> MeasureResult:
        return MeasureResult(
            candidate=self._request.candidate,
            error_kind=kind,
            error=error,
            samples_s=self._samples,
            max_relative_error=self._relative,
            before=DeviceState(),
            after=DeviceState(),
        )


def _parse(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"{address!r} is no address of a tracker", hint="write host:port")
    return host.strip("[]"), int(port)


def _probe(host: str, port: int) -> None:
    """Raises unless a tracker answers: TVM's client would try for a minute, or wait for ever."""
    from tvm.rpc import base

    magic = struct.pack("<i", base.RPC_TRACKER_MAGIC)
    address = f"{host}:{port}"
    answer = b""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_LIMIT_S) as connection:
            connection.sendall(magic)
            while len(answer) < len(magic):
                chunk = connection.recv(len(magic) - len(answer))
                if not chunk:
                    break
                answer += chunk
    except OSError as error:
        raise DeviceUnreachableError(
            f"no RPC tracker answers at {address}: {error.strerror or error}",
            hint="start one: python -m tvm.exec.rpc_tracker",
        ) from error
    if answer != magic:
        raise DeviceUnreachableError(
            f"what answers at {address} is no RPC tracker", hint="check the port"
        )


def _array(argument: TensorArgument, data: bytes) -> np.ndarray:
    import numpy as np

    if argument.dtype == "bfloat16":
        import ml_dtypes

        return np.frombuffer(data, ml_dtypes.bfloat16).reshape(argument.shape)
    return np.frombuffer(data, argument.dtype).reshape(argument.shape)


def _comparable(argument: TensorArgument, array: np.ndarray) -> np.ndarray:
    # NumPy does not count it among the floating-point types.
    return array.astype("float32") if argument.dtype == "bfloat16" else array


def _is_alive(session: Any) -> bool:
    with contextlib.suppress(Exception):
        session.get_function("tvm.rpc.server.upload")
        return True
    return False


def _reason(error: BaseException) -> str:
    """The text without the stack of the other side, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(line for line in lines if not line.startswith("File "))[:500] or repr(error)
