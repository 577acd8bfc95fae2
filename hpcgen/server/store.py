"""The state of the server: files and batches in SQLite. A change is durable when the call returns.

Several processes and threads use it at once: each thread has its own connection, and a change of status happens only if
the status is what the caller thinks it is.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""States from which a batch goes on."""
BUSY_SECONDS = 30.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, lines INTEGER NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER
);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, seq);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, status TEXT NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER,
    failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    output_file_id TEXT, error_file_id TEXT, errors BLOB NOT NULL DEFAULT x'5b5d', metadata BLOB,
    output_seconds INTEGER, lines INTEGER NOT NULL DEFAULT 0, ending TEXT
);
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner, seq);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
CREATE TABLE IF NOT EXISTS engine (
    one INTEGER PRIMARY KEY CHECK (one = 1), updated_at REAL NOT NULL, phase TEXT NOT NULL, sequences INTEGER NOT NULL,
    prefill_tokens INTEGER NOT NULL, decode_tokens INTEGER NOT NULL
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    lines: int
    """Newlines in it: about the requests of a batch."""
    created_at: int
    """Unix time, in seconds, as all times here."""
    expires_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """Fields are those of OpenAI's batch object."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    """How long its output files are kept; None: until they are deleted."""
    lines: int = 0
    ending: str | None = None
    """What it ends as, 'completed' or 'expired', once it is `finalizing`: a restart must not find otherwise."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the engine of a local server last said of itself."""

    updated_at: float
    phase: str
    sequences: int
    prefill_tokens: int
    decode_tokens: int


class Full(Exception):
    """No more is admitted now."""


class Store:
    """Files and batches of all owners."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        path.touch(0o600)
        with self._changing() as connection:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)

    def add_file(self, file: StoredFile, most: int | None = None) -> None:
        """Raises Full where the owner has `most` files already."""
        with self._changing() as connection:
            if most is not None:
                (count,) = connection.execute("SELECT count(*) FROM files WHERE owner = ?", (file.owner,)).fetchone()
                if count >= most:
                    raise Full
            _insert(connection, "files", _columns(file))

    def file(self, owner: str, id: str) -> StoredFile | None:
        rows = self._select("files", "owner = ? AND id = ? AND coalesce(expires_at > ?, 1)", (owner, id, time.time()))
        return _file(rows[0]) if rows else None

    def files(
        self, owner: str, limit: int, after: str | None = None, purpose: str | None = None, rising: bool = False
    ) -> list[StoredFile] | None:
        """A page, newest first or else rising; None where there is no file `after`."""
        condition, values = "owner = ? AND coalesce(expires_at > ?, 1)", [owner, time.time()]
        if purpose is not None:
            condition, values = f"{condition} AND purpose = ?", [*values, purpose]
        rows = self._page("files", condition, values, owner, limit, after, rising)
        return None if rows is None else [_file(row) for row in rows]

    def delete_file(self, owner: str, id: str) -> bool:
        """Whether there was one."""
        with self._changing() as connection:
            return connection.execute("DELETE FROM files WHERE owner = ? AND id = ?", (owner, id)).rowcount == 1

    def forget_expired_files(self) -> list[str]:
        """Deletes the entries of files whose time is over; their ids."""
        with self._changing() as connection:
            rows = connection.execute("SELECT id FROM files WHERE expires_at <= ?", (time.time(),)).fetchall()
            connection.executemany("DELETE FROM files WHERE id = ?", rows)
            return [row[0] for row in rows]

    def all_file_ids(self) -> set[str]:
        return {row["id"] for row in self._connection.execute("SELECT id FROM files")}

    def add_batch(self, batch: StoredBatch, most_batches: int, most_requests: int) -> None:
        """Raises Full where that many batches, or requests in them, are unfinished."""
        with self._changing() as connection:
            marks = ",".join("?" * len(OPEN))
            unfinished = "coalesce(sum(max(lines - completed - failed, 0)), 0)"
            query = f"SELECT count(*), {unfinished} FROM batches WHERE status IN ({marks})"
            batches, requests = connection.execute(query, OPEN).fetchone()
            if batches and (batches >= most_batches or requests + batch.lines > most_requests):
                raise Full
            _insert(connection, "batches", _columns(batch))

    def batch(self, owner: str, id: str) -> StoredBatch | None:
        rows = self._select("batches", "owner = ? AND id = ?", (owner, id))
        return _batch(rows[0]) if rows else None

    def batches(self, owner: str, limit: int, after: str | None = None) -> list[StoredBatch] | None:
        """A page, newest first; None where there is no batch `after`."""
        rows = self._page("batches", "owner = ?", [owner], owner, limit, after, rising=False)
        return None if rows is None else [_batch(row) for row in rows]

    def batches_in(self, *statuses: str) -> list[StoredBatch]:
        """Batches of all owners in one of these states, oldest first."""
        marks = ",".join("?" * len(statuses))
        return [_batch(row) for row in self._select("batches", f"status IN ({marks}) ORDER BY seq", statuses)]

    def all_batch_ids(self) -> set[str]:
        return {row["id"] for row in self._connection.execute("SELECT id FROM batches")}

    def any_batch(self, id: str) -> StoredBatch:
        """Whoever owns it. Raises KeyError where there is none."""
        rows = self._select("batches", "id = ?", (id,))
        if not rows:
            raise KeyError(id)
        return _batch(rows[0])

    def batches_without_files(self) -> set[str]:
        """Ended batches that none of their output files is left of; of one that never had any, not the input either."""
        marks = ",".join("?" * len(OPEN))
        outputs = "coalesce(output_file_id, error_file_id) IS NOT NULL"
        query = (
            f"SELECT id FROM batches WHERE status NOT IN ({marks}) AND NOT EXISTS (SELECT 1 FROM files WHERE files.id "
            f"IN (output_file_id, error_file_id) OR (files.id = input_file_id AND NOT {outputs}))"
        )
        return {row["id"] for row in self._connection.execute(query, OPEN)}

    def batch_counts(self) -> dict[str, int]:
        """How many batches are in each state."""
        return dict(self._connection.execute("SELECT status, count(*) FROM batches GROUP BY status").fetchall())

    def request_counts(self) -> tuple[int, int]:
        """Requests completed and failed, of all batches."""
        query = "SELECT coalesce(sum(completed), 0), coalesce(sum(failed), 0) FROM batches"
        return tuple(self._connection.execute(query).fetchone())

    def update_batch(self, id: str, expected: Sequence[str], **changes: Any) -> bool:
        """Changes a batch if its status is one of the `expected`; whether it was."""
        with self._changing() as connection:
            return _update(connection, id, expected, changes)

    def deliver(self, id: str, expected: Sequence[str], files: Sequence[StoredFile], **changes: Any) -> bool:
        """As `update_batch`, and its output files exist from the same instant on."""
        with self._changing() as connection:
            if not _update(connection, id, expected, changes):
                return False
            for file in files:
                _insert(connection, "files", _columns(file))
            return True

    def set_engine(self, state: EngineState) -> None:
        with self._changing() as connection:
            values = [getattr(state, field.name) for field in fields(state)]
            connection.execute("INSERT OR REPLACE INTO engine VALUES (1, ?, ?, ?, ?, ?)", values)

    def engine(self) -> EngineState | None:
        row = self._connection.execute("SELECT * FROM engine").fetchone()
        return EngineState(*tuple(row)[1:]) if row else None

    @property
    def _connection(self) -> sqlite3.Connection:
        """This thread's."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            self._local.connection = connection
        return connection

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that may write."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def _select(self, table: str, condition: str, values: Sequence[Any]) -> list[sqlite3.Row]:
        return self._connection.execute(f"SELECT * FROM {table} WHERE {condition}", values).fetchall()

    def _page(
        self, table: str, condition: str, values: list[Any], owner: str, limit: int, after: str | None, rising: bool
    ) -> list[sqlite3.Row] | None:
        if after is not None:
            cursor = self._select(table, "owner = ? AND id = ?", (owner, after))
            if not cursor:
                return None
            condition = f"{condition} AND seq {'>' if rising else '<'} ?"
            values = [*values, cursor[0]["seq"]]
        order = "ASC" if rising else "DESC"
        return self._select(table, f"{condition} ORDER BY seq {order} LIMIT ?", [*values, limit])


def _columns(row: StoredFile | StoredBatch) -> dict[str, Any]:
    return {field.name: _encoded(field.name, getattr(row, field.name)) for field in fields(row)}


def _encoded(name: str, value: Any) -> Any:
    return msgspec.json.encode(value) if name in ("errors", "metadata") and value is not None else value


def _insert(connection: sqlite3.Connection, table: str, columns: dict[str, Any]) -> None:
    marks = ",".join("?" * len(columns))
    connection.execute(f"INSERT INTO {table} ({','.join(columns)}) VALUES ({marks})", list(columns.values()))


def _update(connection: sqlite3.Connection, id: str, expected: Sequence[str], changes: dict[str, Any]) -> bool:
    assignments = ",".join(f"{name} = ?" for name in changes)
    values = [_encoded(name, value) for name, value in changes.items()]
    marks = ",".join("?" * len(expected))
    query = f"UPDATE batches SET {assignments} WHERE id = ? AND status IN ({marks})"
    return connection.execute(query, [*values, id, *expected]).rowcount == 1


def _file(row: sqlite3.Row) -> StoredFile:
    return StoredFile(**{field.name: row[field.name] for field in fields(StoredFile)})


def _batch(row: sqlite3.Row) -> StoredBatch:
    values = {field.name: row[field.name] for field in fields(StoredBatch)}
    for name in ("errors", "metadata"):
        values[name] = None if values[name] is None else msgspec.json.decode(values[name])
    return StoredBatch(**values)
