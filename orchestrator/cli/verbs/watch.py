"""Show all runs live, until you leave.

States, progress, what is waited for, what went wrong and the log of a run, on a cluster and on this machine. q
leaves, and nothing stops; come back at any time. Where output is no terminal, each change is a line, until nothing
goes on any more.

Example: orchestrate watch
"""

from __future__ import annotations

import sys

import typer

from orchestrator.cli import output
from orchestrator.cli.full_screen import Screen
from orchestrator.cli.monitor import INTERRUPTED, Looker, attend
from orchestrator.cli.options import DatabaseOption, RecoverOption, RunsOption
from orchestrator.cli.progress import Lines, whole
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace

ORDER = 60


def watch(
    recover: RecoverOption = True, runs: RunsOption = DEFAULT_RUNS, database: DatabaseOption = DEFAULT_DATABASE
) -> None:
    workspace = Workspace.at(runs=runs, database=database)
    looker = Looker(workspace, recover=recover)
    try:
        if sys.stdout.isatty():
            attend(looker.look, Screen(workspace), until_over=False)
            output.talk("nothing was stopped; orchestrate watch shows it again")
        else:
            seen, _ = attend(looker.look, Lines(output.line, from_start=False))
            output.line(whole(seen) if seen.total else "no runs yet; next: orchestrate submit")
    except KeyboardInterrupt:
        output.talk("nothing was stopped; orchestrate watch shows it again")
        raise typer.Exit(INTERRUPTED) from None
