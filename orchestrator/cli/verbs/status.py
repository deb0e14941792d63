"""Show the state of every run and why.

It also updates the database, finishes an interrupted submit, restarts the local queue if it died while runs wait, and
resubmits runs that ended without a result, as [cluster.NAME.recovery] allows.

Example: orchestrate status --json
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from orchestrator.cli import options, output
from orchestrator.cli.refresh import refresh_runs
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from orchestrator.tracking import tracker

ORDER = 50


def status(
    recover: options.RecoverOption = True,
    json: output.JsonFormatOption = False,
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002 (the option's name)
    runs: options.RunsOption = DEFAULT_RUNS,
    database: options.DatabaseOption = DEFAULT_DATABASE,
) -> None:
    workspace = Workspace.at(runs=runs, database=database)
    style = output.resolve_format(format, json)
    rows = [_row(run) for run in refresh_runs(workspace, recover=recover)]
    if not rows and style is output.Format.TABLE:
        output.print_message("no runs yet; next: orchestrate submit")
        return
    columns = [*_machine_columns()] if style.for_machines else _TABLE_COLUMNS
    output.print_rows(rows, columns, style)


def _row(run: tracker.RunStatus) -> dict[str, Any]:
    row = {name: getattr(run, name) for name in run.__dataclass_fields__ if name != "progress"}
    return {**row, "state": run.state.value, **asdict(run.progress)}


def _machine_columns() -> list[str]:
    names = (*tracker.RunStatus.__dataclass_fields__, *tracker.Progress.__dataclass_fields__)
    return [name for name in names if name != "progress"]


_TABLE_COLUMNS: list[str | output.Column] = [
    "run_id",
    "label",
    output.Column("state"),
    output.Column(
        "reason",
        text=lambda row: "; ".join(filter(None, (row["message"] or row["reason"], row["recovery_message"]))),
        below=1,
    ),
    output.Column("attempt", below=2),
    output.Column("epoch", text=lambda row: f"{row['epoch']}/{row['epochs']}" if row["epochs"] else "", below=2),
    output.Column("samples_per_s", below=2),
    output.Column("silent_s", "silent (s)", below=2),
]
