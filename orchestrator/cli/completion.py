"""What the shell offers behind a verb: runs, starter studies, shipped profiles. Never an error: only a key was hit."""

from __future__ import annotations

import typer

from orchestrator.cli.workspace import DEFAULT_DATABASE, Workspace
from orchestrator.errors import OrchestrateError


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Labels of the runs of this folder, and ids once one is begun."""
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


def profile_names(incomplete: str) -> list[str]:
    """Shipped profiles of clusters."""
    from orchestrator import cluster

    return [name for name in cluster.shipped() if name.startswith(incomplete)]
