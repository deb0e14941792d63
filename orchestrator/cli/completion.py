"""What the shell offers behind a verb: runs, columns, keys, studies, clusters. Never an error: only a key was hit."""

from __future__ import annotations

import glob
from pathlib import Path

import typer

from orchestrator.errors import OrchestrateError


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Labels of the runs of this folder, and ids once one is begun."""
    from orchestrator.cli.workspace import DEFAULT_DATABASE, Workspace

    try:
        workspace = Workspace.at(database=str(ctx.params.get("database") or DEFAULT_DATABASE))
        if not workspace.has_database:
            return []
        from db.engine import open_store
        from db.queries import run_states

        with open_store(workspace.database, read_only=True) as store:
            known = run_states(store).values()
    except (OrchestrateError, OSError):
        return []
    names = [record.label for record in known] + [record.run_id for record in known if incomplete]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def study_names(incomplete: str) -> list[str]:
    """Starter studies."""
    from orchestrator import studies

    return [name for name in studies.names() if name.startswith(incomplete)]


def cluster_names(incomplete: str) -> list[str]:
    """What ``--cluster`` takes: shipped profiles, and files here."""
    folder, slash, begun = incomplete.rpartition("/")
    here = sorted(Path(folder + slash or ".").glob(f"{glob.escape(begun)}*"))
    files = [
        f"{folder}{slash}{path.name}{'/' * path.is_dir()}" for path in here if path.is_dir() or path.suffix == ".toml"
    ]
    return [*profile_names(incomplete), *files]


def settings(incomplete: str) -> list[str]:
    """``KEY=`` of ``--set``; behind it, what is installed of models, data sets and strategies."""
    from orchestrator.keys import KEYS
    from orchestrator.plugins import Plugins

    key, assigned, value = incomplete.partition("=")
    if not assigned:
        return [f"{name}=" for name in KEYS if name.startswith(key)]
    known = Plugins.installed().names(key) if key in ("model", "dataset", "strategy") else ()
    return [f"{key}={name}" for name in known if name.startswith(value)]


def column(incomplete: str) -> list[str]:
    """A column of results."""
    from db.queries import SUMMARY_COLUMNS

    return [name for name in SUMMARY_COLUMNS if name.startswith(incomplete)]


def columns(incomplete: str) -> list[str]:
    """The last of several columns with commas between."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in column(last)]


def profile_names(incomplete: str) -> list[str]:
    """Shipped profiles of clusters."""
    from orchestrator import cluster

    return [name for name in cluster.shipped() if name.startswith(incomplete)]
