"""From what a database driver says to what the user can do about it."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from db.errors import ForeignStoreError, StoreDamagedError, StoreError, StoreReadOnlyError, StoreSchemaError
from db.filesystem import is_full, is_url, lock_problem

BUSY_TIMEOUT_S = 60.0
"""How long a command waits for another one's write."""


ANOTHER = "name another file with --db"
_ELSEWHERE = (
    "keep the database on a local disk: export ORCHESTRATE_DB=/local/path/results.db (the runs folder may stay)"
)


def store_error(database: str, error: DBAPIError) -> StoreError | ForeignStoreError | None:
    """Our error for what can happen to any database; None for what only a mistake of ours can cause."""
    name = sqlite_name(error)
    folder = Path(database).parent
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_PROTOCOL")):
        if Path(database).is_dir():
            return _cannot_open(database)
        if problem := lock_problem(folder):
            return cannot_lock(database, problem)
        if is_full(folder):
            return _full(database)
        if name.startswith(("SQLITE_IOERR", "SQLITE_PROTOCOL")):
            return StoreError(
                "reading or writing the database failed", where=database, why=str(error.orig), hint=_ELSEWHERE
            )
        return StoreError(
            f"another command has been writing for {BUSY_TIMEOUT_S:.0f} s",
            where=database,
            hint="try again when it is done",
        )
    if name == "SQLITE_FULL":
        return _full(database)
    if name.startswith("SQLITE_READONLY"):
        return StoreReadOnlyError("the database may only be read", where=database, why=str(error.orig), hint=ANOTHER)
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_PERM")):
        return _cannot_open(database)
    if name.startswith("SQLITE_NOTADB"):
        return ForeignStoreError(
            "not an SQLite database; left as it is", where=database, hint=another_or_anew(database)
        )
    if name.startswith("SQLITE_CORRUPT") or _is_of_another_schema(error):
        return damaged(database, str(error.orig).strip())
    if not name and type(error).__name__ in {"OperationalError", "InterfaceError"}:
        return StoreError("the database cannot be used", where=database, why=str(error.orig).strip())
    return None


def _is_of_another_schema(error: DBAPIError) -> bool:
    """Whether a statement of ours met other tables or columns than its revision has."""
    if sqlite_name(error):
        return _OTHER_SCHEMA.match(str(error.orig)) is not None
    return (getattr(error.orig, "sqlstate", None) or "") in _OTHER_SCHEMA_STATES


_OTHER_SCHEMA = re.compile(
    r"no such (table|view|column): |table \w+ (has no column|already exists)|view \w+ already exists"
    r"|duplicate column name: |error in view \w+: no such "
)
_OTHER_SCHEMA_STATES = frozenset({"42P01", "42P07", "42701", "42703"})
"""PostgreSQL's: a table or view that is missing or there already, a column that is twice or missing."""


def damaged(database: str, why: str) -> StoreDamagedError:
    """Return the error for a database of ours whose content cannot be what we wrote."""
    return StoreDamagedError("the database is damaged", where=database, why=why, hint=_create_again(database))


def missing_column(database: str, table: str, column: str) -> StoreSchemaError:
    """Return the error for a column of the models that no migration adds."""
    return StoreSchemaError(
        f"{table} has no column {column}, which the model declares",
        where=database,
        why="the schema is of the newest revision, and its migrations do not add the column",
        hint=f"add a migration in db/migrations/versions, or {_create_again(database)}",
    )


def _create_again(database: str) -> str:
    if is_url(database):
        return "create another database and name it with --db; orchestrate collect fills it from the runs folder"
    return "run orchestrate db rebuild, which creates it again from the runs folder and keeps this file"


def another_or_anew(database: str) -> str:
    """The ways on from what may be another program's, or ours and damaged beyond recognition."""
    if is_url(database):
        return "name another database with --db"
    moved = f"mv {shlex.quote(database)} {shlex.quote(f'{database}.damaged')}"
    return f"{ANOTHER}; if it was orchestrate's, {moved}, then orchestrate collect makes it anew from the runs folder"


def _full(database: str) -> StoreReadOnlyError:
    return StoreReadOnlyError("the disk is full", where=database, hint="free some space and try again")


def _cannot_open(database: str) -> StoreError:
    path = Path(database)
    if path.is_dir():
        return StoreError("the database is a folder", where=database, hint="name a file with --db")
    if os.access(path, os.R_OK):
        why = "its folder may not be written, which an open database needs"
        return StoreReadOnlyError("the database may only be read", where=database, why=why, hint=ANOTHER)
    if path.exists():
        return StoreError("the database may not be read", where=database, why="no permission", hint=ANOTHER)
    if not path.parent.is_dir():
        hint = f"mkdir -p {shlex.quote(str(path.parent))}"
        return StoreError("the database's folder does not exist", where=database, hint=hint)
    if os.access(path.parent, os.W_OK):
        return StoreError("there is no database", where=database, hint="orchestrate collect")
    return StoreError("no database can be made here", where=database, why="the folder may not be written", hint=ANOTHER)


def cannot_lock(database: str, problem: str) -> StoreError:
    return StoreError(
        "files cannot be locked here, so a database is not safe", where=database, why=problem, hint=_ELSEWHERE
    )


def sqlite_name(error: DBAPIError) -> str:
    """``SQLITE_BUSY`` and the like; empty for another database."""
    return getattr(error.orig, "sqlite_errorname", None) or ""
