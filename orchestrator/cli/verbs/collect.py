"""Read new results from the runs folder into the database.

Only files that changed since the last time are read. orchestrate status and results do this too, results where there is
a database. Damaged and unreadable files are reported, skipped, and tried again the next time.

Example: orchestrate collect
"""

from __future__ import annotations

from orchestrator.cli import options, output
from orchestrator.cli.refresh import print_collected
from orchestrator.errors import InputError, PartlyDoneError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import connect, ingest

ORDER = 100


def collect(
    json: output.JsonOption = False,
    runs: options.RunsOption = DEFAULT_RUNS,
    database: options.DatabaseOption = DEFAULT_DATABASE,
) -> None:
    workspace = Workspace.at(runs=runs, database=database)
    if not workspace.runs.is_dir():
        raise InputError(
            "there is no runs folder", where=str(workspace.runs), hint="orchestrate submit, or name it with --runs"
        )
    with connect.open_store(workspace.database) as store:
        report = ingest.collect(store, workspace.runs)
    print_collected("new or changed", report, json=json)
    if report.problems:
        raise PartlyDoneError(
            f"skipped {counted(len(report.problems), 'file or folder', 'files or folders')}",
            hint="repair them; every collect tries them again",
        )
