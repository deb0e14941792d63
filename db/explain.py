"""From what a database driver says to what the user can do about it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from db.errors import StoreDamagedError, StoreError, StoreReadOnlyError
from db.filesystem import is_full, lock_problem

BUSY_TIMEOUT_S = 60.0
"""How long a command waits for another one's write."""


ANOTHER = "name another file with --db"
_ELSEWHERE = (
    "keep the database on a local disk: export ORCHESTRATE_DB=/local/path/results.db (the runs folder may stay)"
)


def explain(database: str, error: DBAPIError) -> StoreError | None:
    """Our error for what can happen to any database; None for what only a mistake of ours can cause."""
    name = sqlite_name(error)
    folder = Path(database).parent
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_PROTOCOL")):
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
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return StoreDamagedError(
            "the database is damaged",
            where=database,
            why=str(error.orig),
            hint="orchestrate db rebuild makes it anew from the runs folder and keeps the damaged file",
        )
    if not name and type(error).__name__ in {"OperationalError", "InterfaceError"}:
        return StoreError("the database cannot be used", where=database, why=str(error.orig).strip())
    return None


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
