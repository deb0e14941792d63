"""Errors of a database driver, in words that say what the user can do."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from db.errors import ForeignStoreError, StoreDamagedError, StoreError, StoreReadOnlyError
from db.filesystem import is_full, is_url, lock_problem

BUSY_TIMEOUT_S = 60.0
"""How long a command waits for another one to finish writing."""

_OTHER_FILE = "name another file with --db"
_USE_LOCAL = (
    "keep the database on a local disk: export ORCHESTRATE_DB=/local/path/results.db (the runs folder may stay)"
)
_OTHER_SCHEMA = re.compile(
    r"no such (table|view|column): |table \w+ (has no column|already exists)|view \w+ already exists"
    r"|duplicate column name: |error in view \w+: no such "
)
"""What SQLite says where a statement of ours meets other tables or columns than its revision has."""
_OTHER_SCHEMA_STATES = frozenset({"42P01", "42P07", "42701", "42703"})
"""PostgreSQL's codes for the same: undefined_table, duplicate_table, duplicate_column, undefined_column."""


def store_error(database: str, error: DBAPIError) -> StoreError | ForeignStoreError | None:
    """Return our error for what can happen to any database; None for what only a bug of ours can cause."""
    name = getattr(error.orig, "sqlite_errorname", None) or ""  # empty for another database
    message = str(error.orig).strip()
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_PROTOCOL")):
        return _not_usable_now(database, name, message)
    if name == "SQLITE_FULL":
        return _full(database)
    if name.startswith("SQLITE_READONLY"):
        return StoreReadOnlyError("the database is read-only", where=database, why=message, hint=_OTHER_FILE)
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_PERM")):
        return _cannot_open(database)
    if name.startswith("SQLITE_NOTADB"):
        hint = another_or_anew(database)
        return ForeignStoreError("not an SQLite database; left as it is", where=database, hint=hint)
    state = getattr(error.orig, "sqlstate", None)
    if name.startswith("SQLITE_CORRUPT") or state in _OTHER_SCHEMA_STATES or (name and _OTHER_SCHEMA.match(message)):
        return damaged(database, message)
    if not name and type(error).__name__ in {"OperationalError", "InterfaceError"}:
        return StoreError("the database cannot be used", where=database, why=message)
    return None


def _not_usable_now(database: str, name: str, message: str) -> StoreError:
    """Tell apart what SQLite reports as busy or as an I/O error: no locks, a full disk, or another command."""
    folder = Path(database).parent
    if Path(database).is_dir():
        return _cannot_open(database)
    if problem := lock_problem(folder):
        return cannot_lock(database, problem)
    if is_full(folder):
        return _full(database)
    if name.startswith(("SQLITE_IOERR", "SQLITE_PROTOCOL")):
        return StoreError("reading or writing the database failed", where=database, why=message, hint=_USE_LOCAL)
    what = f"another command has been writing for {BUSY_TIMEOUT_S:.0f} s"
    return StoreError(what, where=database, hint="try again when it is done")


def damaged(database: str, why: str) -> StoreDamagedError:
    """Return the error for a database of ours whose content cannot be what we wrote."""
    return StoreDamagedError("the database is damaged", where=database, why=why, hint=create_again(database))


def create_again(database: str) -> str:
    """Return the hint for a database of ours that cannot be repaired."""
    if is_url(database):
        return "create another database and name it with --db; orchestrate collect fills it from the runs folder"
    return "run orchestrate db rebuild, which creates it again from the runs folder and keeps this file"


def another_or_anew(database: str) -> str:
    """Return the hint for a database of another program, or ours and damaged beyond recognition."""
    if is_url(database):
        return "name another database with --db"
    mv = f"mv {shlex.quote(database)} {shlex.quote(f'{database}.damaged')}"
    return f"{_OTHER_FILE}; if it was orchestrate's: {mv}, then orchestrate collect, which reads the runs folder again"


def _full(database: str) -> StoreReadOnlyError:
    return StoreReadOnlyError("the disk is full", where=database, hint="free some space and try again")


def _cannot_open(database: str) -> StoreError:
    path = Path(database)
    if path.is_dir():
        return StoreError("the database is a folder", where=database, hint="name a file with --db")
    if os.access(path, os.R_OK):
        why = "no permission to write its folder, which an open database needs"
        return StoreReadOnlyError("the database is read-only", where=database, why=why, hint=_OTHER_FILE)
    if path.exists():
        return StoreError("the database cannot be read", where=database, why="no permission", hint=_OTHER_FILE)
    if not path.parent.is_dir():
        hint = f"mkdir -p {shlex.quote(str(path.parent))}"
        return StoreError("the database's folder does not exist", where=database, hint=hint)
    if os.access(path.parent, os.W_OK):
        return StoreError("there is no database", where=database, hint="orchestrate collect")
    why = "no permission to write the folder"
    return StoreError("the database cannot be created here", where=database, why=why, hint=_OTHER_FILE)


def cannot_lock(database: str, problem: str) -> StoreError:
    what = "files cannot be locked here, so a database would not be safe"
    return StoreError(what, where=database, why=problem, hint=_USE_LOCAL)
