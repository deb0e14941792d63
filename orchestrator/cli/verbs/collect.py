"""Read new results from the runs folder into the database.

Only what changed since the last time is read; status and results do it too, results where there is a database.
Files that are damaged or may not be read are named, left out and tried again each time.

Example: orchestrate collect
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.cli import output
from orchestrator.cli.collect_report import _say_collected, say_problems
from orchestrator.cli.options import DatabaseOption, RunsOption
from orchestrator.errors import InputError, PartlyDoneError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace

if TYPE_CHECKING:
    pass

ORDER = 100


def collect(
    json: output.JsonOption = False, runs: RunsOption = DEFAULT_RUNS, database: DatabaseOption = DEFAULT_DATABASE
) -> None:
    workspace = Workspace.at(runs=runs, database=database)
    from db.connect import open_store
    from db.ingest import collect as take_in

    if not workspace.runs.is_dir():
        raise InputError(
            "there is no runs folder", where=str(workspace.runs), hint="orchestrate submit, or name it with --runs"
        )
    with open_store(workspace.database) as store:
        collected = take_in(store, workspace.runs)
    if json:
        output.facts(collected)
    else:
        _say_collected("new or changed", collected)
    say_problems(collected)
    if collected.problems:
        raise PartlyDoneError(
            f"left out: {counted(len(collected.problems), 'file or folder', 'files or folders')}",
            hint="they are tried again each time",
        )
