"""Show all runs live, until you leave.

The full screen shows states, progress, why runs wait, what failed, and the log of a run. q leaves, and nothing stops.
Where the output is no terminal, each change is printed as a line, until no run is live any more.

Example: orchestrate watch
"""

from __future__ import annotations

import sys

import typer

from orchestrator.cli import options, output
from orchestrator.cli.full_screen import FullScreen
from orchestrator.cli.monitor import EXIT_INTERRUPTED, Monitor, follow
from orchestrator.cli.progress import Lines, summarize
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace

ORDER = 60

_LEFT = "nothing was stopped; orchestrate watch shows this again"


def watch(
    recover: options.RecoverOption = True,
    runs: options.RunsOption = DEFAULT_RUNS,
    database: options.DatabaseOption = DEFAULT_DATABASE,
) -> None:
    workspace = Workspace.at(runs=runs, database=database)
    monitor = Monitor(workspace, recover=recover)
    try:
        if sys.stdout.isatty():
            follow(monitor.poll, FullScreen(workspace), until_over=False)
            output.print_message(_LEFT)
        else:
            seen, _ = follow(monitor.poll, Lines(output.print_line, from_start=False))
            output.print_line(summarize(seen) if seen.total else "no runs yet; next: orchestrate submit")
    except KeyboardInterrupt:
        output.print_message(_LEFT)
        raise typer.Exit(EXIT_INTERRUPTED) from None
