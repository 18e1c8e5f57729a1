"""Tuning records: every trial of every session of a user, in one SQLite database.

A trial is committed when it is added, so a killed process loses the trial in flight at most, and
several processes may add at once. docs/records.md describes what is kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edgesdk.resources import data_home
from edgesdk.tuning.database import RecordsError, connect, explained, transaction
from edgesdk.tuning.devicekey import DeviceKey, Level, level_of, nearness
from edgesdk.tuning.trial import (
    DEVICE_ERROR,
    Session,
    SessionEnd,
    TrialRecord,
    canonical,
    target_key,
    winner,
)

__all__ = [
    "DEVICE_ERROR",
    "DeviceKey",
    "Records",
    "RecordsError",
    "Session",
    "Summary",
    "TrialRecord",
    "Where",
    "canonical",
    "records_path",
    "target_key",
]

FILE_NAME = "records.db"

# In the order of TrialRecord, but for the device, whose columns are at the end.
_COLUMNS = (
    "t.workload, t.target, t.candidate, t.samples_s, t.error_kind, t.error, t.session, t.kernel,"
    " t.created, t.edgesdk, t.extra, d.model, d.cpu, d.cores, d.isa, d.tvm, d.gpu, d.driver"
)
_FROM = "FROM trials t JOIN devices d ON t.device = d.fingerprint"


@dataclass(frozen=True)
class Where:
    """Which trials are meant: those that fit every field that is given.

    `device` is a fingerprint; `device_text` a part of a fingerprint or of the name of a board, CPU
    or GPU, in any case; `before` counts seconds since 1970.
    """

    workload: str | None = None
    target: str | None = None
    device: str | None = None
    device_text: str | None = None
    session: str | None = None
    failed: bool | None = None
    before: float | None = None


@dataclass(frozen=True)
class Summary:
    """All trials of one kernel for one target on one kind of device.

    `best_s` is the cost of the candidate that would be used, None if there is none; `newest` counts
    seconds since 1970.
    """

    workload: str
    kernel: str
    target: str
    device: DeviceKey
    trials: int
    failed: int
    best_s: float | None
    newest: float


def records_path(path: Path | None = None) -> Path:
    """Returns where the records are: `path`, or else the user's database."""
    return path if path is not None else data_home() / FILE_NAME


class Records:
    """An open database. Use it as a context manager, in the thread that opened it.

    Every method raises RecordsError when the file is damaged, locked by another process for more
    than 30 s, or cannot be written.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path

    @classmethod
    def open(
        cls, path: Path | None = None, *, create: bool = True, read_only: bool = False
    ) -> Self:
        """Opens the database at `path`, or the user's own.

        Without `create`, or with `read_only`, it must exist. Raises RecordsError if it is no
        database of records, is damaged, or was written by a newer edgesdk; it is left as it is
        then.
        """
        path = records_path(path)
        if (read_only or not create) and not path.exists():
            raise RecordsError(
                f"there are no tuning records at {path}",
                hint="edgesdk tune MODEL --target T makes some",
            )
        return cls(connect(path, read_only=read_only), path)

    def close(self) -> None:
        """Closes the database; everything added is in it already."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Makes one commit of all that is added inside: much faster, and all or nothing."""
        return transaction(self._connection, self.path)

    def add(self, record: TrialRecord) -> bool:
        """Adds one trial, committed at once; returns False if exactly this one is there already.

        Raises ValueError or TypeError if `candidate` or `extra` is not plain JSON data.
        """
        values = _values(record)
        device = record.device
        with self.transaction():
            self._connection.execute(
                "INSERT OR IGNORE INTO devices VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (device.fingerprint, *astuple(device)),
            )
            done = self._connection.execute(
                f"INSERT OR IGNORE INTO trials VALUES (NULL{', ?' * len(values)})", values
            )
        return done.rowcount == 1

    def tried(self, workload: str, target: str, device: DeviceKey) -> set[str]:
        """Returns canonical() of the candidates that need no trial on this kind of device again.

        Those that failed only through the device do.
        """
        with explained(self.path):
            rows = self._connection.execute(
                "SELECT DISTINCT candidate FROM trials"
                " WHERE workload = ? AND target = ? AND device = ? AND error_kind != ?",
                (workload, target, device.fingerprint, DEVICE_ERROR),
            )
            return {candidate for (candidate,) in rows}

    def best(
        self,
        workload: str,
        target: str,
        device: DeviceKey,
        *,
        accept: Callable[[dict[str, Any]], bool] = lambda candidate: True,
    ) -> tuple[TrialRecord, Level] | None:
        """Returns the fastest candidate (see winner()) and how near its device is (see level_of()).

        The nearest device that has one is taken: costs on different devices are not compared.
        Candidates that `accept` refuses are passed over.
        """
        known = self._devices_with(workload, target)
        levels: tuple[Level, ...] = ("device", "model", "cpu")
        for level in levels:
            near = [(d, trials) for d, trials in known if level_of(device, d) == level]
            near.sort(key=lambda item: (nearness(device, item[0]), item[1]), reverse=True)
            for other, _ in near:
                trials = self.trials(Where(workload, target, other.fingerprint))
                won = winner(trial for trial in trials if accept(trial.candidate))
                if won is not None:
                    return won, level
        return None

    def trials(self, where: Where | None = None) -> Iterator[TrialRecord]:
        """Yields trials in the order in which they were added."""
        clause, values = _clause(where)
        with explained(self.path):
            rows = self._connection.execute(
                f"SELECT {_COLUMNS} {_FROM} {clause} ORDER BY t.id", values
            )
            for row in rows:
                yield _record(row)

    def count(self, where: Where | None = None) -> int:
        """Returns how many trials are meant."""
        clause, values = _clause(where)
        with explained(self.path):
            row = self._connection.execute(f"SELECT count(*) {_FROM} {clause}", values).fetchone()
        return int(row[0])

    def summaries(self, where: Where | None = None) -> list[Summary]:
        """Returns one Summary for each kernel, target and kind of device, the newest first."""
        groups: dict[tuple[str, str, DeviceKey], list[TrialRecord]] = {}
        for trial in self.trials(where):
            groups.setdefault((trial.workload, trial.target, trial.device), []).append(trial)
        found = []
        for (workload, target, device), trials in groups.items():
            won = winner(trials)
            found.append(
                Summary(
                    workload=workload,
                    kernel=trials[-1].kernel,
                    target=target,
                    device=device,
                    trials=len(trials),
                    failed=sum(not t.ok for t in trials),
                    best_s=None if won is None else won.cost_s,
                    newest=max(t.created for t in trials),
                )
            )
        return sorted(found, key=lambda s: s.newest, reverse=True)

    def prune(self, where: Where) -> int:
        """Deletes the trials that are meant, and finished sessions that have none left.

        Returns how many trials that were. The file shrinks.
        """
        clause, values = _clause(where)
        with self.transaction():
            gone = self._connection.execute(
                f"DELETE FROM trials WHERE id IN (SELECT t.id {_FROM} {clause})", values
            ).rowcount
            self._connection.execute(
                "DELETE FROM sessions WHERE state = 'finished'"
                " AND id NOT IN (SELECT session FROM trials)"
            )
            self._connection.execute(
                "DELETE FROM devices WHERE fingerprint NOT IN (SELECT device FROM trials)"
            )
        with explained(self.path):
            self._connection.execute("VACUUM")
        return gone

    def start_session(self, session: Session) -> None:
        """Adds `session`, or marks it as running again when it is known."""
        s = session
        with explained(self.path):
            self._connection.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, 'running', ?, NULL)"
                " ON CONFLICT (id) DO UPDATE SET state = 'running', finished = NULL",
                (
                    s.id,
                    s.model,
                    s.model_sha256,
                    s.target,
                    s.device,
                    canonical(s.options),
                    s.started,
                ),
            )

    def end_session(self, session_id: str, state: SessionEnd) -> None:
        """Says how a session ended."""
        with explained(self.path):
            self._connection.execute(
                "UPDATE sessions SET state = ?, finished = ? WHERE id = ?",
                (state, time.time(), session_id),
            )

    def unfinished(self, model_sha256: str, target: str, device: DeviceKey) -> Session | None:
        """Returns the last session of this model, target and device, unless that one finished."""
        found = self.sessions(model_sha256, target, device.fingerprint)
        return found[0] if found and found[0].state != "finished" else None

    def sessions(
        self, model_sha256: str | None = None, target: str | None = None, device: str | None = None
    ) -> list[Session]:
        """Returns the sessions that fit what is given, the newest first."""
        with explained(self.path):
            rows = self._connection.execute(
                "SELECT * FROM sessions WHERE model_sha256 = coalesce(?, model_sha256)"
                " AND target = coalesce(?, target) AND device = coalesce(?, device)"
                " ORDER BY started DESC, rowid DESC",
                (model_sha256, target, device),
            ).fetchall()
        return [_session(*row) for row in rows]

    def _devices_with(self, workload: str, target: str) -> list[tuple[DeviceKey, int]]:
        """The devices with measurements of a kernel, and how many."""
        with explained(self.path):
            rows = self._connection.execute(
                "SELECT d.model, d.cpu, d.cores, d.isa, d.tvm, d.gpu, d.driver, count(*)"
                f" {_FROM} WHERE t.workload = ? AND t.target = ? AND t.ok GROUP BY t.device",
                (workload, target),
            ).fetchall()
        return [(DeviceKey(*row[:-1]), row[-1]) for row in rows]


def _values(record: TrialRecord) -> tuple[Any, ...]:
    """The columns of `trials` after the id; the digest is over everything that the trial says."""
    r = record
    # JSON has no NaN and no infinity; both mean a sample that cannot be true.
    samples = canonical([s if math.isfinite(s) else None for s in r.samples_s])
    key = (r.workload, r.target, r.device.fingerprint, canonical(r.candidate), samples)
    # What a device said may hold bytes that are no text.
    error = r.error.encode("utf-8", "replace").decode()
    rest = (r.error_kind, error, r.session, r.kernel, float(r.created), r.edgesdk)
    extra = canonical(r.extra)
    digest = hashlib.sha256(canonical([*key, *rest, extra]).encode()).hexdigest()
    return (digest, *key, int(r.ok), *rest, extra)


def _record(row: tuple[Any, ...]) -> TrialRecord:
    workload, target, candidate, samples, error_kind, error, session, kernel = row[:8]
    created, edgesdk, extra, *device = row[8:]
    return TrialRecord(
        workload=workload,
        target=target,
        device=DeviceKey(*device),
        candidate=json.loads(candidate),
        samples_s=tuple(math.nan if s is None else s for s in json.loads(samples)),
        error_kind=error_kind,
        error=error,
        session=session,
        kernel=kernel,
        created=created,
        edgesdk=edgesdk,
        extra=json.loads(extra),
    )


def _session(id: str, model: str, model_sha256: str, target: str, *rest: Any) -> Session:
    device, options, state, started, finished = rest
    return Session(
        id, model, model_sha256, target, device, json.loads(options), state, started, finished
    )


def _clause(where: Where | None) -> tuple[str, list[Any]]:
    where = where or Where()
    tests: list[tuple[str, Any]] = [
        ("t.workload = ?", where.workload),
        ("t.target = ?", where.target),
        ("t.device = ?", where.device),
        (
            "instr(lower(d.fingerprint || char(10) || d.model || char(10) || d.cpu || char(10)"
            " || d.gpu), lower(?))",
            where.device_text,
        ),
        ("t.session = ?", where.session),
        ("t.ok != ?", where.failed),
        ("t.created < ?", where.before),
    ]
    used = [(test, value) for test, value in tests if value is not None]
    clause = "WHERE " + " AND ".join(test for test, _ in used) if used else ""
    return clause, [value for _, value in used]
