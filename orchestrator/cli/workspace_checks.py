"""Checks."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import InputError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, Workspace

if TYPE_CHECKING:
    pass


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.workspace import Workspace


def insist_on_database(workspace: Workspace) -> None:
    """Raises InputError where there is none: a misspelt name makes no file."""
    if not workspace.has_database:
        raise InputError(
            "there is no database",
            where=workspace.database,
            hint=f"orchestrate collect{_named(workspace)} makes it from the runs folder, --db names another",
        )


def insist_on_results(workspace: Workspace) -> None:
    """Raises InputError where no run was ever sent from here, or there is no database of those that were."""
    insist_on_something(workspace)
    insist_on_database(workspace)


def insist_on_something(workspace: Workspace) -> None:
    """Raises InputError where no run was ever sent from here."""
    if workspace.is_empty:
        raise InputError(
            "there is nothing here yet",
            where=str(workspace.runs.parent),
            why=f"neither {workspace.runs.name} nor {Path(workspace.database).name} exists",
            hint=f"orchestrate submit{_named(workspace)}, or name the places with --runs and --db",
        )


def _named(workspace: Workspace) -> str:
    """The option that other commands need to find this database; none where they find it by themselves."""
    usual = Workspace.at(database=os.environ.get("ORCHESTRATE_DB") or DEFAULT_DATABASE).database
    return "" if workspace.database == usual else f" --db {shlex.quote(workspace.database)}"


def insist_on_runs_folder(workspace: Workspace) -> None:
    """See to it that runs are not taken for lost because another folder was looked into, or a disk is not mounted.

    Raises:
        InputError: the runs folder is not there or has nothing in it, and the database knows runs.
    """
    folder = workspace.runs
    there = folder.is_dir()
    if not workspace.has_database or (there and any(folder.iterdir())):
        return
    from db.connect import open_store
    from db.errors import StoreError
    from db.queries import run_records

    try:
        with open_store(workspace.database, read_only=True) as store:
            known = sum(record.attempt > 0 for record in run_records(store).values())
    except StoreError:
        return  # empty, or it cannot be used: whoever uses it next says so
    if known:
        raise InputError(
            "the runs folder is empty" if there else "there is no runs folder",
            where=str(folder),
            why=f"{workspace.database} knows {counted(known, 'run')}, and nothing of them is there",
            hint="name their folder with --runs or ORCHESTRATE_RUNS; a new folder wants a new database too, with --db",
        )
