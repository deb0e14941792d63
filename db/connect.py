"""Opening the store: an SQLite file, or a PostgreSQL database by URL, always at the schema this code knows.

Compute nodes never come here. SQLite's write-ahead log is used on a local disk only: it needs shared memory, which
NFS, Lustre and BeeGFS lack. Every write transaction takes the write lock as it begins: one that reads first and writes
later fails at once, whatever the time-out, when another process wrote in between.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
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


class Store:
    """An open database; a context manager."""

    def __init__(self, database: str, engine: Engine, *, read_only: bool) -> None:
        self.database = database
        self.engine = engine
        self.read_only = read_only

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that sees one state of the database throughout."""
        with self._explained(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction with the write lock held from its start; committed at the end, rolled back on any error."""
        with self._explained(), self.engine.connect() as connection:
            connection.execution_options(write_lock=True)
            with connection.begin():
                yield connection

    def close(self) -> None:
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what the driver says into what the user can do."""
        try:
            yield
        except DBAPIError as error:
            explained = store_error(self.database, error)
            if explained is None:
                raise
            raise explained from error


def open_store(database: str, *, read_only: bool = False) -> Store:
    """Open a store, made or brought to this schema when it is missing or older.

    Args:
        database: an SQLite file, or a ``postgresql://`` URL.
        read_only: nothing can be written through it, whatever the SQL; it must exist and be current.

    Raises:
        ForeignStoreError: not a store of ours, or written by a newer version; the file is as it was.
        StoreDamagedError: the file is damaged, or lacks tables.
        StoreError: it cannot be opened, created or locked.
        InputError: the PostgreSQL driver is not installed, or the URL is none.
    """
    database = database.removeprefix(SQLITE_URL)
    if is_url(database):
        store = _postgresql(database, read_only=read_only)
    else:
        store = _sqlite(Path(database), read_only=read_only)
    try:
        fresh = ensure_current(store)
        if store.is_sqlite and not read_only:
            _choose_journal(store, fresh=fresh)
    except BaseException:
        store.close()
        raise
    return store


def set_aside(database: str) -> Path:
    """Give a damaged SQLite file another name, its journals with it; returns that name."""
    path = Path(database.removeprefix(SQLITE_URL))
    kept = path.with_name(f"{path.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(f"{kept}{suffix}")
    return kept


def _sqlite(path: Path, *, read_only: bool) -> Store:
    if not read_only and not path.exists() and (problem := lock_problem(path.parent)):
        raise cannot_lock(str(path), problem)
    engine = create_engine(
        "sqlite://", creator=partial(_connect_sqlite, path, read_only=read_only), poolclass=QueuePool
    )

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("write_lock")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return Store(str(path), engine, read_only=read_only)


def _is_filled(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _connect_sqlite(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """``timeout`` sets the busy time-out before anything else happens, so that no pragma fails on a busy database."""
    uri = f"file:{quote(os.fsencode(path.absolute()))}?mode={'ro' if read_only else 'rwc'}"

    def connect(uri: str) -> sqlite3.Connection:
        # We write BEGIN ourselves: the driver's own would start without the write lock.
        return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)

    connection = connect(uri)
    if not read_only:
        connection.execute("PRAGMA foreign_keys = ON")
        return connection
    try:
        connection.execute("PRAGMA schema_version")
    except sqlite3.OperationalError:
        connection.close()
        # A write-ahead log cannot be opened in a folder we may not write, nor on a full disk, unless told that nobody
        # else writes either.
        if not path.exists() or _is_filled(path.with_name(path.name + "-wal")):
            raise
        connection = connect(uri + "&immutable=1")
    connection.execute("PRAGMA query_only = ON")
    connection.set_authorizer(_allow_reading)
    return connection


_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_READING_PRAGMAS = frozenset({"foreign_key_list", "index_list", "table_info", "table_list", "table_xinfo"})
_ASKING_PRAGMAS = frozenset({"journal_mode", "read_uncommitted"})


def _allow_reading(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """SQLite's authorizer: ``mode=ro`` alone would still let ATTACH and VACUUM INTO make files."""
    allowed = (
        action in _READING
        or action == sqlite3.SQLITE_TRANSACTION
        or (action == sqlite3.SQLITE_PRAGMA and first in _READING_PRAGMAS)
        or (action == sqlite3.SQLITE_PRAGMA and first in _ASKING_PRAGMAS and second is None)
    )
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _postgresql(database: str, *, read_only: bool) -> Store:
    try:
        database.encode()
        url = make_url(database)
    except (ArgumentError, UnicodeEncodeError) as error:
        raise InputError(f"{database!r} is not a database URL", hint=_URL_HINT) from error
    if url.drivername.split("+")[0] not in {"postgresql", "postgres"}:
        raise InputError(f"{url.drivername!r} is not a database we know", where=_named(url), hint=_URL_HINT)
    try:
        (url.host or "").encode("idna")  # as the resolver will
    except UnicodeError as error:
        raise InputError(f"{url.host!r} is no name of a host", where=_named(url), hint=_URL_HINT) from error
    options = {"options": "-c default_transaction_read_only=on"} if read_only else {}
    try:
        engine = create_engine(url.set(drivername="postgresql+psycopg"), connect_args=options)
    except ModuleNotFoundError as error:
        raise InputError(
            "the PostgreSQL driver is not installed",
            where=_named(url),
            hint='pip install "orchestrate-hpc[postgres]"',
        ) from error

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get("write_lock"):
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITE_LOCK})")

    return Store(_named(url), engine, read_only=read_only)


_URL_HINT = "a file name, or postgresql://USER@HOST/DATABASE"


def _named(url: Any) -> str:
    return str(url.render_as_string(hide_password=True))


def _choose_journal(store: Store, *, fresh: bool) -> None:
    """Write-ahead log on a local disk, rollback journal elsewhere. Says so once: when it is decided."""
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
                # Another command is in the database; whoever made it with us sets the mode.
                return
    if mode != "wal":
        reason = "SQLite refused a write-ahead log here" if local else "not on a local disk"
        log.warning("%s: %s, so commands that write at the same time take turns", store.database, reason)
