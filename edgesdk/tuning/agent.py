"""Speaks with the measuring agent (`device_scripts/agent/`), whose README describes the protocol.

The agent is pushed into a folder of its own, started through the transport, and talked to on that
channel; it removes the folder when the channel closes. Candidates are sent ahead: while one is
measured, the next ones arrive.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import posixpath
import secrets
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from edgesdk.compiler import link
from edgesdk.deploy.facts import DeviceFacts, check_device, contract_of, read_facts
from edgesdk.deploy.transport.base import DeviceTimeoutError, Stream, Transport
from edgesdk.errors import DeviceError, DeviceUnreachableError
from edgesdk.toolchain import load_toolchain
from edgesdk.tuning.measure import (
    DTYPES,
    DeviceState,
    ErrorKind,
    Measurer,
    MeasureRequest,
    MeasureResult,
    check_request,
)

if TYPE_CHECKING:
    from edgesdk.profiles import TargetProfile

VERSION = 1
MAX_PAYLOAD_BYTES = 1 << 20
# One is measured, one lies ready, one is on its way.
WINDOW = 3

_MAGIC = b"EDGA"
_HEADER = struct.Struct("<4sHHIII")  # magic, version, type, payload bytes and CRC, header CRC
_PUT, _DROP, _MEASURE, _HELLO, _RESULT, _ERROR = 1, 2, 3, 16, 17, 18
_PUT_HEAD = struct.Struct("<32sQQ")
_CHUNK_BYTES = MAX_PAYLOAD_BYTES - _PUT_HEAD.size
_MEASURE_NUMBERS = struct.Struct("<4I3d2Q")
_STATE = struct.Struct("<qdb")

_FAILURES: tuple[ErrorKind, ...] = (
    *("", "load", "crash", "timeout"),
    *("memory", "wrong", "kernel", "device"),
)
_OUTPUT_FLAG = 1

_START_LIMIT_S = 60.0
_END_LIMIT_S = 10.0
# How long the agent may be silent beyond what the candidate may take: what was sent ahead is still
# on its way, perhaps over a slow link.
_GRACE_S = 120.0
_READY_S = 0.001
_LAST_LINES = 3


@dataclass(frozen=True)
class _Pending:
    ticket: int
    candidate: int
    timeout_s: float


class Agent(Measurer):
    """An agent that runs on the device behind `transport`, built with the toolchain of `profile`.

    Ends with `close` or its `with` block; the transport stays open. The constructor raises
    ToolMissingError when the toolchain is missing, DeviceMismatchError when what it builds cannot
    run there, DeviceError when the agent does not start, DeviceUnreachableError.
    """

    def __init__(self, transport: Transport, profile: TargetProfile) -> None:
        toolchain = load_toolchain(profile.toolchain)
        toolchain.require(profile.machine)
        self._facts = read_facts(transport)
        check_device(contract_of(profile), self._facts, name=transport.name)
        self._name = transport.name
        self._transport = transport
        self._blobs: dict[str, int] = {}
        self._pending: deque[_Pending] = deque()
        self._tickets = 0
        self._received = bytearray()
        self._failed = False
        self._closed = False
        self._folder = posixpath.join(transport.work_dir, "agents", f"run-{secrets.token_hex(8)}")
        program = posixpath.join(self._folder, "edgesdk-agent")
        self._stream: Stream | None = None
        try:
            transport.upload(link.agent(toolchain), program, executable=True)
            self._stream = transport.open_stream([program, self._folder])
            self.pid, self.cpus, self.pointer_bits = struct.unpack("<III", self._hello())
        except BaseException:
            self._failed = True
            with contextlib.suppress(DeviceError, DeviceUnreachableError):
                self.close()
            raise

    @property
    def facts(self) -> DeviceFacts:
        return self._facts

    @property
    def folder(self) -> str:
        """The agent's folder on the device."""
        return self._folder

    def put(self, data: bytes) -> str:
        digest = hashlib.sha256(data)
        name = digest.hexdigest()
        if name not in self._blobs:
            for frame in _put_frames(digest.digest(), data):
                self._send(frame)
            self._blobs[name] = len(data)
        return name

    def drop(self, blob: str) -> None:
        del self._blobs[blob]
        self._send(frame_bytes(_DROP, bytes.fromhex(blob)))

    def measure(self, requests: Iterable[MeasureRequest]) -> Iterator[MeasureResult]:
        waiting = iter(requests)
        own: set[int] = set()
        more = True
        while more or own:
            if more and len(self._pending) < WINDOW:
                # To get the next request may take long: what is ready goes first.
                result = self._next_result(own, wait=False) if own else None
                if result is not None:
                    yield result
                    continue
                request = next(waiting, None)
                if request is None:
                    more = False
                else:
                    own.add(self._request(request))
                continue
            result = self._next_result(own, wait=True)
            if result is not None:
                yield result

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._stream is None:
            self._remove_folder()
            return
        with contextlib.closing(self._stream):
            ended = self._end()
        if not ended:
            self._remove_folder()

    def _end(self) -> bool:
        """Lets the agent end itself; returns whether it did, and so has removed its folder."""
        assert self._stream is not None
        self._stream.close_input()
        deadline = time.monotonic() + _END_LIMIT_S
        with contextlib.suppress(DeviceError, DeviceUnreachableError):
            while (left := deadline - time.monotonic()) > 0:
                if not self._stream.read(1 << 16, timeout_s=left):
                    return not self._failed
        return False

    def _remove_folder(self) -> None:
        with contextlib.suppress(DeviceError, DeviceUnreachableError):  # gone with the device
            self._transport.run(["rm", "-rf", self._folder], timeout_s=_START_LIMIT_S)

    def _request(self, request: MeasureRequest) -> int:
        check_request(request, self._blobs)
        library = request.library.read_bytes()
        digest = hashlib.sha256(library).digest()
        self._tickets += 1
        ticket = self._tickets
        self._pending.append(_Pending(ticket, request.candidate, request.timeout_s))
        frames = [frame_bytes(_MEASURE, _measure_payload(ticket, digest, request))]
        if digest.hex() not in self._blobs:  # else it was put by the caller, and stays
            # The agent keeps it until it has been measured.
            frames = [*_put_frames(digest, library), *frames, frame_bytes(_DROP, digest)]
        self._send(b"".join(frames))
        return ticket

    def _next_result(self, own: set[int], *, wait: bool) -> MeasureResult | None:
        """The next result if it is one of `own`, which then loses it.

        What an abandoned `measure` has asked for is passed over.
        """
        expected = self._pending[0]
        frame = self._receive(expected.timeout_s + _GRACE_S if wait else _READY_S, patient=not wait)
        if frame is None:
            return None
        kind, payload = frame
        if kind != _RESULT:
            self._protocol_error(f"it sent a frame of type {kind} instead of a result")
        try:
            ticket, result = _result_from(expected.candidate, payload)
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            self._protocol_error(f"its result cannot be read: {error}")
        if ticket != expected.ticket:
            self._protocol_error(f"it sent result {ticket}, expected was {expected.ticket}")
        self._pending.popleft()
        if ticket not in own:
            return None
        own.remove(ticket)
        return result

    def _hello(self) -> bytes:
        frame = self._receive(_START_LIMIT_S)
        assert frame is not None
        kind, payload = frame
        if kind != _HELLO:
            self._protocol_error(f"it began with a frame of type {kind}")
        return payload

    def _send(self, frames: bytes) -> None:
        self._check_usable()
        assert self._stream is not None
        try:
            self._stream.write(frames)
        except DeviceUnreachableError:
            self._failed = True
            raise
        except DeviceError:
            # It has ended. Perhaps it said why before that.
            while self._receive(_END_LIMIT_S) is not None:
                pass

    def _receive(self, timeout_s: float, *, patient: bool = False) -> tuple[int, bytes] | None:
        """Returns the next frame's type and payload.

        Raises DeviceError when there is none within `timeout_s`; with `patient`, returns None then.
        """
        self._check_usable()
        assert self._stream is not None
        deadline = time.monotonic() + timeout_s
        while True:
            frame = self._take_frame()
            if frame is not None:
                return frame
            try:
                left = max(deadline - time.monotonic(), _READY_S)
                chunk = self._stream.read(1 << 16, timeout_s=left)
            except DeviceTimeoutError:
                if patient:
                    return None
                self._failed = True
                raise DeviceError(
                    f"{self._name}: the measuring agent has been silent for {timeout_s:g} s",
                    hint=f"does the device still answer? edgesdk devices check {self._name}",
                ) from None
            except DeviceUnreachableError:
                self._failed = True
                raise
            if not chunk:
                self._ended()
            self._received += chunk

    def _take_frame(self) -> tuple[int, bytes] | None:
        data = self._received
        if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
            self._protocol_error(f"it sent what is no frame: {bytes(data[:16])!r}")
        if len(data) < _HEADER.size:
            return None
        _, version, kind, size, payload_crc, header_crc = _HEADER.unpack_from(data)
        if zlib.crc32(data[: _HEADER.size - 4]) != header_crc:
            self._protocol_error("the header of a frame has a wrong checksum")
        if version != VERSION:
            self._protocol_error(f"it speaks version {version}, not {VERSION}")
        if size > MAX_PAYLOAD_BYTES:
            self._protocol_error(f"it sent a frame of {size} bytes")
        if len(data) < _HEADER.size + size:
            return None
        payload = bytes(data[_HEADER.size : _HEADER.size + size])
        if zlib.crc32(payload) != payload_crc:
            self._protocol_error(f"a frame of {size} bytes has a wrong checksum")
        del data[: _HEADER.size + size]
        if kind == _ERROR:
            self._protocol_error(f"it refuses what it was sent: {_text(payload, 0)[0]}")
        return kind, payload

    def _check_usable(self) -> None:
        if self._failed or self._closed:
            raise DeviceError(f"{self._name}: the measuring agent has ended", hint="start another")

    def _protocol_error(self, what: str) -> NoReturn:
        self._failed = True
        raise DeviceError(
            f"{self._name}: the talk with the measuring agent broke: {what}",
            hint="try again; if it happens again, something garbles the connection",
        )

    def _ended(self) -> NoReturn:
        self._failed = True
        assert self._stream is not None
        deadline = time.monotonic() + 1.0
        while not (said := self._stream.stderr_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.02)  # over SSH it comes on its own way
        lines = [line.strip() for line in said.splitlines()][-_LAST_LINES:]
        why = " / ".join(lines) or "without a word: was it killed?"
        raise DeviceError(
            f"{self._name}: the measuring agent ended: {why}",
            hint=f"edgesdk devices check {self._name}",
        )


def frame_bytes(kind: int, payload: bytes) -> bytes:
    """Returns the frame of type `kind` around `payload`."""
    head = _HEADER.pack(_MAGIC, VERSION, kind, len(payload), zlib.crc32(payload), 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def _put_frames(key: bytes, data: bytes) -> Iterator[bytes]:
    view = memoryview(data)
    for offset in range(0, max(1, len(data)), _CHUNK_BYTES):
        head = _PUT_HEAD.pack(key, offset, len(data))
        yield frame_bytes(_PUT, head + view[offset : offset + _CHUNK_BYTES])


def _measure_payload(ticket: int, library: bytes, request: MeasureRequest) -> bytes:
    symbol = request.symbol.encode()
    parts = [
        struct.pack("<Q32sH", ticket, library, len(symbol)),
        symbol,
        _MEASURE_NUMBERS.pack(
            request.number,
            request.repeat,
            request.warmup,
            request.threads,
            request.min_repeat_ms,
            request.tolerance,
            request.timeout_s,
            request.flush_cache_bytes,
            request.memory_limit_bytes,
        ),
        struct.pack("<H", len(request.arguments)),
    ]
    for argument in request.arguments:
        flags = _OUTPUT_FLAG if argument.is_output else 0
        dims = len(argument.shape)
        parts.append(struct.pack("<BBB", flags, DTYPES.index(argument.dtype) + 1, dims))
        parts.append(struct.pack(f"<{dims}q", *argument.shape))
        parts.append(bytes.fromhex(argument.blob))
    return b"".join(parts)


def _result_from(candidate: int, payload: bytes) -> tuple[int, MeasureResult]:
    ticket, failure = struct.unpack_from("<QB", payload)
    error, at = _text(payload, 9)
    (relative,) = struct.unpack_from("<d", payload, at)
    at += 8
    before = _state(payload, at)
    after = _state(payload, at + _STATE.size)
    at += 2 * _STATE.size
    (count,) = struct.unpack_from("<I", payload, at)
    samples = struct.unpack_from(f"<{count}d", payload, at + 4)
    kind = _FAILURES[failure]
    return ticket, MeasureResult(candidate, kind, error, samples, relative, before, after)


def _state(payload: bytes, at: int) -> DeviceState:
    clock_khz, temperature_c, throttled = _STATE.unpack_from(payload, at)
    return DeviceState(
        clock_khz=None if clock_khz < 0 else clock_khz,
        temperature_c=None if math.isnan(temperature_c) else temperature_c,
        throttled=None if throttled < 0 else bool(throttled),
    )


def _text(payload: bytes, at: int) -> tuple[str, int]:
    """The text at `at`, and where it ends."""
    (length,) = struct.unpack_from("<H", payload, at)
    end = at + 2 + length
    return payload[at + 2 : end].decode("utf-8", "replace"), end
