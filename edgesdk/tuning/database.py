"""The SQLite file behind the records: opening it, checking it, and what its errors mean.

SQLite's write-ahead log lets readers read while one process writes, and a process that is killed
leaves a file that the next one opens as it was at the last commit.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from edgesdk.errors import ConfigError

SCHEMA_VERSION = 1

_APPLICATION_ID = 0x45534B52  # "ESKR", in the file's header
_BUSY_TIMEOUT_S = 30.0

_TABLES = (
    """CREATE TABLE devices (
        fingerprint TEXT PRIMARY KEY, model TEXT NOT NULL, cpu TEXT NOT NULL,
        cores INTEGER NOT NULL, isa TEXT NOT NULL, tvm TEXT NOT NULL, gpu TEXT NOT NULL,
        driver TEXT NOT NULL
    ) WITHOUT ROWID""",
    """CREATE TABLE trials (
        id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, workload TEXT NOT NULL,
        target TEXT NOT NULL, device TEXT NOT NULL REFERENCES devices, candidate TEXT NOT NULL,
        samples_s TEXT NOT NULL, ok INTEGER NOT NULL, error_kind TEXT NOT NULL, error TEXT NOT NULL,
        session TEXT NOT NULL, kernel TEXT NOT NULL, created REAL NOT NULL, edgesdk TEXT NOT NULL,
        extra TEXT NOT NULL
    )""",
    "CREATE INDEX trials_by_key ON trials (workload, target, device)",
    "CREATE INDEX trials_by_session ON trials (session)",
    """CREATE TABLE sessions (
        id TEXT PRIMARY KEY, model TEXT NOT NULL, model_sha256 TEXT NOT NULL, target TEXT NOT NULL,
        device TEXT NOT NULL, options TEXT NOT NULL, state TEXT NOT NULL, started REAL NOT NULL,
        finished REAL
    )""",
)


class RecordsError(ConfigError):
    """The database of records is damaged, foreign, newer than this edgesdk or not usable."""


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Opens the database at `path`, which is made if it is missing and not `read_only`.

    Raises RecordsError if the file is no database of records, is damaged, or was written by a newer
    edgesdk; it is left as it is then.
    """
    with explained(path):
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = _open(path, read_only=read_only)
        try:
            _check(connection, path, read_only=read_only)
        except BaseException:
            connection.close()
            raise
    return connection


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Makes one commit of what is done inside; inside another transaction, part of that one."""
    with explained(path):
        if connection.in_transaction:
            yield
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            # On a full disk SQLite has rolled back already.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns SQLite's errors about the file `path` into RecordsError."""
    try:
        yield
    except sqlite3.Error as error:
        raise _explain(error, path) from error
    except OSError as error:
        raise RecordsError(
            f"cannot open the tuning records {path}: {error.strerror or error}",
            hint="use another file: --records PATH",
        ) from error


def _open(path: Path, *, read_only: bool) -> sqlite3.Connection:
    if path.is_dir():
        raise RecordsError(f"{path} is a folder, no database", hint="--records takes a file")
    uri = path.absolute().as_uri()
    if read_only:
        # Files beside the database, which reading needs too, can only be made in a folder that can
        # be written; where it cannot, nobody else writes either.
        uri += "?mode=ro" if os.access(path.parent, os.W_OK) else "?immutable=1"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)


def _check(connection: sqlite3.Connection, path: Path, *, read_only: bool) -> None:
    connection.execute("BEGIN")  # the three are of one moment: another process may create it now
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    if (application, version, tables) == (0, 0, 0) and not read_only:
        _create(connection)
    elif application != _APPLICATION_ID:
        raise RecordsError(
            f"{path} is a database, but none of tuning records",
            hint="use another file: --records PATH",
        )
    elif version != SCHEMA_VERSION:
        raise RecordsError(
            f"the tuning records {path} were written by a newer edgesdk"
            f" (version {version} of the format; this one knows {SCHEMA_VERSION})",
            hint="update edgesdk, or use another file: --records PATH",
        )
    # A damaged page would show only when it is read, maybe hours into a session.
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)
    # A commit is safe from a killed process without a sync; only a power cut can take the last ones
    # back, and never damages the file.
    connection.execute("PRAGMA synchronous = NORMAL")


def _create(connection: sqlite3.Connection) -> None:
    _set_wal(connection)
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Two processes may have found the file missing.
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _TABLES:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _set_wal(connection: sqlite3.Connection) -> None:
    # The one statement that does not wait when another process does the same.
    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _explain(error: sqlite3.Error, path: Path) -> RecordsError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    elsewhere = "use another file: --records PATH"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return RecordsError(
            f"another program kept the tuning records {path} locked for {_BUSY_TIMEOUT_S:g} s",
            hint=f"see which: fuser -v {path}",
        )
    if code == sqlite3.SQLITE_FULL:
        return RecordsError(
            f"no space for the tuning records {path}", hint=f"free some space, or {elsewhere}"
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return RecordsError(f"cannot open the tuning records {path}: {error}", hint=elsewhere)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        what = " ".join(str(error).split())
        return RecordsError(
            f"the tuning records {path} are damaged: {what}",
            hint=f"put the file aside and start anew: mv {path} {path}.damaged",
        )
    return RecordsError(f"the tuning records {path} cannot be used: {error}", hint=elsewhere)
