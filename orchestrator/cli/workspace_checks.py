"""What a verb requires of its workspace, with the command that provides it."""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import connect, errors, queries
    from orchestrator.cluster import cluster_file


def require_runs_folder(workspace: Workspace) -> None:
    """Check that the runs folder belongs to the database: else a typo or an unmounted disk makes every run lost.

    Raises:
        InputError: the database has runs, and the runs folder does not exist or is empty.
    """
    folder = workspace.runs
    exists = folder.is_dir()
    if not workspace.has_database or (exists and any(folder.iterdir())):
        return
    try:
        with connect.open_store(workspace.database, read_only=True) as store:
            submitted = sum(record.attempt > 0 for record in queries.run_records(store).values())
    except errors.StoreError:
        return  # empty or damaged: the next one who opens it reports that
    if submitted:
        raise InputError(
            "the runs folder is empty" if exists else "there is no runs folder",
            where=str(folder),
            why=f"{workspace.database} has {counted(submitted, 'run')}, and none has files there",
            hint="name their folder with --runs or ORCHESTRATE_RUNS; for a new folder, name a new database with --db",
        )


def require_database(workspace: Workspace) -> None:
    """Raise InputError where there is no database; a misspelled name creates none."""
    if not workspace.has_database:
        raise InputError(
            "there is no database",
            where=workspace.database,
            hint=f"orchestrate collect{_db_option(workspace)} creates it from the runs folder, --db names another",
        )


def require_results(workspace: Workspace) -> None:
    """Raise InputError where nothing was submitted, or there is no database of what was."""
    require_workspace(workspace)
    require_database(workspace)


def require_workspace(workspace: Workspace) -> None:
    """Raise InputError where nothing was submitted yet."""
    if workspace.is_empty:
        raise InputError(
            "nothing was submitted here yet",
            where=str(workspace.runs.parent),
            why=f"neither {workspace.runs.name} nor {Path(workspace.database).name} exists",
            hint=f"orchestrate submit{_db_option(workspace)}, or name the places with --runs and --db",
        )


def default_cluster() -> cluster_file.ClusterProfile | None:
    """Return the cluster that ``plan`` takes without options here; None for this machine.

    Raises:
        InputError: its file cannot be read.
    """
    named = os.environ.get("ORCHESTRATE_CLUSTER")
    return cluster_file.choose(
        local=False, named=Path(named) if named else None, cwd=Path.cwd(), hostname=socket.gethostname()
    )


def _db_option(workspace: Workspace) -> str:
    """Return the option with which other commands find this database; empty where they find it without."""
    default = Workspace.at(database=os.environ.get("ORCHESTRATE_DB") or DEFAULT_DATABASE).database
    return "" if workspace.database == default else f" --db {shlex.quote(workspace.database)}"
