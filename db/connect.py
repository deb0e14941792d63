"""Opening the store: an SQLite file, or a PostgreSQL database by URL, always at the schema of this code.

Compute nodes never open it. SQLite's write-ahead log is used on a local disk only: it needs shared memory, which
NFS, Lustre and BeeGFS lack (sqlite.org/wal.html). Every write transaction takes the write lock as it begins: one that
reads first and writes later fails at once, whatever the time-out, when another process wrote in between
(SQLITE_BUSY_SNAPSHOT).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import QueuePool

from db.error_messages import BUSY_TIMEOUT_S, cannot_lock, store_error
from db.filesystem import SQLITE_URL, is_local, is_url, lock_problem
from db.schema import ensure_current
from workloads.errors import InputError

log = logging.getLogger(__name__)

_WRITE_LOCK = 0x6F726368
"""Key of PostgreSQL's advisory lock: one writer at a time, as in SQLite."""


@dataclass(frozen=True)
class Store(AbstractContextManager["Store"]):
    """An open database; a context manager that closes it."""

    database: str
    engine: Engine
    read_only: bool

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a connection that sees one state of the database throughout."""
        with self._errors_explained(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction that holds the write lock from its start; an error rolls it back."""
        with self._errors_explained(), self.engine.execution_options(write_lock=True).begin() as connection:
            yield connection

    def close(self) -> None:
        self.engine.dispose()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Turn errors of the driver into errors that say what the user can do."""
        try:
            yield
        except DBAPIError as error:
            if explained := store_error(self.database, error):
                raise explained from error
            raise


def open_store(database: str, *, read_only: bool = False) -> Store:
    """Open a store; create it, or upgrade its schema, where necessary.

    Args:
        database: an SQLite file, or a ``postgresql://`` URL.
        read_only: no SQL can write anything. The store must exist, at the newest schema.

    Raises:
        ForeignStoreError: it is not ours, or a newer version wrote it; it is as it was.
        StoreDamagedError: the file is damaged, or lacks tables or columns that no migration adds; it is as it was.
        StoreError: it cannot be opened, created or locked, or is to be read and of an older schema.
        InputError: the PostgreSQL driver is not installed, or the URL is not valid.
    """
    database = database.removeprefix(SQLITE_URL)
    store = (_postgresql if is_url(database) else _sqlite)(database, read_only)
    try:
        fresh = ensure_current(store)
        if store.is_sqlite and not read_only:
            _choose_journal(store, fresh=fresh)
    except BaseException:
        store.close()
        raise
    return store


def set_aside(database: str) -> Path:
    """Rename a damaged SQLite file and its journals; return the new name."""
    path = Path(database.removeprefix(SQLITE_URL))
    kept = path.with_name(f"{path.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(f"{kept}{suffix}")
    return kept


def _sqlite(database: str, read_only: bool) -> Store:
    path = Path(database)
    if not read_only and not path.exists() and (problem := lock_problem(path.parent)):
        raise cannot_lock(str(path), problem)
    engine = create_engine(
        "sqlite://", creator=partial(_connect_sqlite, path, read_only=read_only), poolclass=QueuePool
    )

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("write_lock")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return Store(str(path), engine, read_only)


def _connect_sqlite(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """Connect with the busy time-out set from the start, so that no pragma fails on a busy database."""
    uri = f"file:{quote(os.fsencode(path.absolute()))}?mode={'ro' if read_only else 'rwc'}"
    # isolation_level None keeps sqlite3 from writing a BEGIN of its own, which would not take the write lock.
    options: dict[str, Any] = {"timeout": BUSY_TIMEOUT_S, "isolation_level": None, "check_same_thread": False}
    connect = partial(sqlite3.connect, uri=True, **options)
    connection = connect(uri)
    if not read_only:
        connection.execute("PRAGMA foreign_keys = ON")
        return connection
    try:
        connection.execute("PRAGMA schema_version")
    except sqlite3.OperationalError:
        connection.close()
        # In a folder without write permission, or on a full disk, SQLite cannot create a write-ahead log's shared
        # memory. It needs none where the file is declared immutable (sqlite.org/wal.html, "Read-Only Databases").
        log_file = path.with_name(path.name + "-wal")
        if not path.exists() or (log_file.exists() and log_file.stat().st_size > 0):
            raise
        connection = connect(uri + "&immutable=1")
    connection.execute("PRAGMA query_only = ON")
    connection.set_authorizer(_allow_reading)
    return connection


_READING = frozenset(
    getattr(sqlite3, f"SQLITE_{action}") for action in ("SELECT", "READ", "FUNCTION", "RECURSIVE", "TRANSACTION")
)
_READING_PRAGMAS = frozenset({"foreign_key_list", "index_list", "table_info", "table_list", "table_xinfo"})


def _allow_reading(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """SQLite's authorizer: with ``mode=ro`` alone, ATTACH and VACUUM INTO could still create files."""
    allowed = action in _READING
    if action == sqlite3.SQLITE_PRAGMA:
        allowed = first in _READING_PRAGMAS or (first in {"journal_mode", "read_uncommitted"} and second is None)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _postgresql(database: str, read_only: bool) -> Store:
    try:
        database.encode()
        url = make_url(database)
    except (ArgumentError, UnicodeEncodeError) as error:
        raise InputError(f"{database!r} is not a database URL", hint=_URL_HINT) from error
    where = str(url.render_as_string(hide_password=True))
    if url.drivername.split("+")[0] not in {"postgresql", "postgres"}:
        raise InputError(f"{url.drivername!r} is not a supported database", where=where, hint=_URL_HINT)
    try:
        (url.host or "").encode("idna")  # as the resolver does
    except UnicodeError as error:
        raise InputError(f"{url.host!r} is not a valid host name", where=where, hint=_URL_HINT) from error
    options = {"options": "-c default_transaction_read_only=on"} if read_only else {}
    try:
        engine = create_engine(url.set(drivername="postgresql+psycopg"), connect_args=options)
    except ModuleNotFoundError as error:
        hint = 'pip install "orchestrate-hpc[postgres]"'
        raise InputError("the PostgreSQL driver is not installed", where=where, hint=hint) from error

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get("write_lock"):
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITE_LOCK})")

    return Store(where, engine, read_only)


_URL_HINT = "give a file name, or postgresql://USER@HOST/DATABASE"


def _choose_journal(store: Store, *, fresh: bool) -> None:
    """Set a write-ahead log on a local disk, a rollback journal elsewhere; warn about the latter once."""
    with store.read() as connection:
        cursor = connection.connection.cursor()
        mode = str(cursor.execute("PRAGMA journal_mode").fetchone()[0])
        if not fresh and mode != "wal":
            return
        local = is_local(Path(store.database).parent)
        wanted = "wal" if local else "delete"
        if mode != wanted:
            try:
                mode = str(cursor.execute(f"PRAGMA journal_mode = {wanted}").fetchone()[0])
            except sqlite3.OperationalError:
                # Another command is using the database; it sets the mode too.
                return
    if mode != "wal":
        reason = "SQLite refused a write-ahead log here" if local else "not on a local disk"
        log.warning("%s: %s, so commands that write at the same time take turns", store.database, reason)
