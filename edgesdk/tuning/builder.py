"""Builds candidates fast: a process that has TVM loaded forks a worker for every build.

The parent of the workers (the "nursery") is a fresh Python process, so nothing of the caller's (its
threads, its main module, a notebook) gets into the workers. A build that hangs or eats memory is
ended with its whole process group and costs nothing but itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgesdk
from edgesdk.errors import EdgeSdkError

if TYPE_CHECKING:
    from edgesdk.profiles import TargetProfile
    from edgesdk.toolchain import Toolchain

_START = (
    "import sys; sys.path.append(sys.argv[1]);from edgesdk.tuning.builder import nursery; nursery()"
)
_LENGTH = struct.Struct("<Q")
# What C++, the compiler and the linker say when they get no more.
_OUT_OF_MEMORY = ("bad_alloc", "out of memory", "Cannot allocate memory", "memory exhausted")


@dataclass(frozen=True)
class BuildTask:
    """What all candidates of one kernel share. `function` is the unscheduled PrimFunc as JSON."""

    workload: str
    function: str


@dataclass(frozen=True)
class BuildRequest:
    """`number` names the candidate in the session; `output` is the library to write."""

    number: int
    workload: str
    candidate: dict[str, Any]
    output: Path


@dataclass(frozen=True)
class BuildResult:
    """`error_kind`: "" (built), "schedule" (knobs do not fit), "build", "timeout", "memory"."""

    number: int
    error_kind: str
    error: str
    seconds: float


class Builder:
    """A pool of build workers. Use it as a context manager."""

    def __init__(
        self,
        profile: TargetProfile,
        toolchain: Toolchain,
        *,
        workers: int | None = None,
        timeout_s: float = 60.0,
        memory_limit_bytes: int = 4 << 30,
    ) -> None:
        self._workers = workers or len(os.sched_getaffinity(0))
        self._settings = {
            "profile": profile,
            "toolchain": toolchain,
            "timeout_s": timeout_s,
            "memory_limit_bytes": memory_limit_bytes,
            "workers": self._workers,
        }
        self._known: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Builder:
        self._process = subprocess.Popen(
            # Nothing in the user's folder may stand for a module: -P.
            [sys.executable, "-P", "-c", _START, str(Path(edgesdk.__file__).parents[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._send(self._settings)
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        process.wait()

    def add_task(self, task: BuildTask) -> None:
        """Makes a kernel known to the workers, before its candidates are built."""
        if task.workload not in self._known:
            self._known.add(task.workload)
            self._send(task)

    def build(self, requests: Iterable[BuildRequest]) -> Iterator[BuildResult]:
        """Builds all `requests`, as many at a time as there are workers; results in their order.

        Raises EdgeSdkError if the workers' parent died.
        """
        waiting = iter(requests)
        order: deque[int] = deque()
        done: dict[int, BuildResult] = {}

        def send_next() -> None:
            # Few at a time: both ends would wait for each other if the pipes were full.
            request = next(waiting, None)
            if request is not None:
                order.append(request.number)
                self._send(request)

        for _ in range(2 * self._workers):
            send_next()
        while order:
            while order and order[0] in done:
                yield done.pop(order.popleft())
            if order:
                result = self._receive()
                done[result.number] = result
                send_next()

    def _send(self, item: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            _write(self._process.stdin, item)
        except BrokenPipeError:
            raise self._died() from None

    def _receive(self) -> BuildResult:
        assert self._process is not None and self._process.stdout is not None
        result = _read(self._process.stdout)
        if result is None:
            raise self._died()
        assert isinstance(result, BuildResult)
        return result

    def _died(self) -> EdgeSdkError:
        return EdgeSdkError(
            "the builders' parent process ended", hint="its messages stand above; is memory short?"
        )


# What follows runs in the nursery and its workers.


@dataclass
class _Running:
    request: BuildRequest
    pid: int
    pipe: Any
    deadline: float
    started: float


def nursery() -> None:
    """Main loop of the workers' parent: reads tasks and requests from stdin, forks, reports."""
    # The protocol has stdin and stdout for itself: what a compiler prints goes to stderr.
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    settings = _read(requests)
    if settings is None:
        return
    import tvm

    import edgesdk.compiler.codegen
    import edgesdk.schedules  # noqa: F401

    target = tvm.target.Target(settings["profile"].tvm)
    tasks: dict[str, Any] = {}
    queue: deque[BuildRequest] = deque()
    running: list[_Running] = []
    try:
        while True:
            while queue and len(running) < settings["workers"]:
                request = queue.popleft()
                running.append(_start(request, tasks[request.workload], target, settings))
            wait_s = min((r.deadline - time.monotonic() for r in running), default=3600.0)
            watched = [requests, *(r.pipe for r in running)]
            ready, _, _ = select.select(watched, [], [], max(0.0, wait_s))
            for worker in list(running):
                if worker.pipe in ready or time.monotonic() >= worker.deadline:
                    running.remove(worker)
                    _write(results, _finish(worker))
            if requests in ready:
                item = _read(requests)
                if item is None:
                    return
                if isinstance(item, BuildTask):
                    tasks[item.workload] = tvm.ir.load_json(item.function)
                else:
                    queue.append(item)
    except BrokenPipeError:
        pass
    finally:  # the session ended, or was killed
        for worker in running:
            _kill(worker)


def _start(request: BuildRequest, function: Any, target: Any, settings: dict[str, Any]) -> _Running:
    reader, writer = os.pipe()
    now = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.setpgid(0, 0)
            # What a compiler says while it dies is the reason; the terminal is the live table's.
            log = os.open(_log(request), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            limit = settings["memory_limit_bytes"] + _address_space_bytes()
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            outcome = _build(request, function, target, settings)
            with os.fdopen(writer, "wb") as answer:
                pickle.dump(outcome, answer)
        finally:
            os._exit(0)  # never back into the parent's loop
    os.close(writer)
    pipe = os.fdopen(reader, "rb", buffering=0)
    return _Running(request, pid, pipe, now + settings["timeout_s"], now)


def _address_space_bytes() -> int:
    """What the process has mapped already: the limit counts that, too."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def _build(
    request: BuildRequest, function: Any, target: Any, settings: dict[str, Any]
) -> tuple[str, str]:
    from edgesdk.compiler import codegen
    from edgesdk.compiler.candidate import link_gpu_candidate
    from edgesdk.schedules import apply_candidate

    profile = settings["profile"]
    try:
        try:
            scheduled = apply_candidate(function, profile, request.candidate)
        except MemoryError:
            raise
        except Exception as error:  # TVM raises many types
            return "schedule", f"{type(error).__name__}: {codegen.last_words(error)[:300]}"
        if profile.gpu is not None:
            link_gpu_candidate(
                function, scheduled, profile, settings["toolchain"], output=request.output
            )
            return "", ""
        kernel = request.output.with_suffix(".o")
        codegen.write_object({"candidate": scheduled}, target, kernel)
        settings["toolchain"].link_shared(
            [kernel], request.output, soname=request.output.name, flags=("-Wl,-z,undefs",)
        )
        kernel.unlink()
    except MemoryError:
        return "memory", "the build needed more memory than it may have"
    except Exception as error:
        text = f"{type(error).__name__}: {codegen.last_words(error)[:300]}"
        return _kind_of(str(error)), text
    return "", ""


def _finish(worker: _Running) -> BuildResult:
    """Reaps a worker that is done, or ends one that is past its time."""
    seconds = time.monotonic() - worker.started
    number = worker.request.number
    in_time = time.monotonic() < worker.deadline
    data = b""
    if in_time:
        while chunk := os.read(worker.pipe.fileno(), 1 << 16):
            data += chunk
    status = _kill(worker)
    said = _said(worker.request)
    if not in_time:
        return BuildResult(number, "timeout", f"not built within {seconds:.0f} s", seconds)
    if not data:
        text = f"the compiler ended with {os.waitstatus_to_exitcode(status)}: {said}"
        return BuildResult(number, _kind_of(said), text, seconds)
    kind, text = pickle.loads(data)
    return BuildResult(number, kind, text, seconds)


def _kind_of(text: str) -> str:
    return "memory" if any(words in text for words in _OUT_OF_MEMORY) else "build"


def _log(request: BuildRequest) -> Path:
    return request.output.with_suffix(".log")


def _said(request: BuildRequest) -> str:
    """What a worker printed, in one line; its file is removed."""
    try:
        text = _log(request).read_text(encoding="utf-8", errors="replace")
        _log(request).unlink()
    except FileNotFoundError:  # it was ended before it made one
        return ""
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())[-300:]


def _kill(worker: _Running) -> int:
    """Ends a worker, if it has not ended, with all that it started; returns its status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    # Right after the fork it has no group of its own yet.
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)
    worker.pipe.close()
    return os.waitpid(worker.pid, 0)[1]


def _write(stream: Any, item: Any) -> None:
    data = pickle.dumps(item)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: Any) -> Any | None:
    """The next item, or None at the end of the stream."""
    header = _read_exactly(stream, _LENGTH.size)
    if header is None:
        return None
    data = _read_exactly(stream, _LENGTH.unpack(header)[0])
    return None if data is None else pickle.loads(data)


def _read_exactly(stream: Any, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        chunk = stream.read(count - len(data))
        if not chunk:
            return None
        data += chunk
    return data
