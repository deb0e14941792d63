"""Show the state of every run and why.

Also brings the database up to date, finishes a submit that was interrupted, starts the queue again when it is gone
and runs wait, and sends runs again that ended for no fault of theirs, as [cluster.NAME.recovery] says.

Example: orchestrate status --json
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from orchestrator.cli import output
from orchestrator.cli.options import DatabaseOption, RecoverOption, RunsOption
from orchestrator.cli.refresh import refreshed
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace

if TYPE_CHECKING:
    from orchestrator.tracking.tracker import RunStatus

ORDER = 50


def status(
    recover: RecoverOption = True,
    json: output.JsonFormatOption = False,
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002 (the option's name)
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    workspace = Workspace.at(runs=runs, database=database)
    style = output.chosen(format, json)
    rows = [_row(run) for run in refreshed(workspace, recover=recover)]
    if not rows and style is output.Format.TABLE:
        output.talk("no runs yet; next: orchestrate submit")
        return
    columns = list(_row_keys()) if style.for_machines else _status_columns()
    output.rows(rows, columns, style)


def _row(run: RunStatus) -> dict[str, Any]:
    row = {name: getattr(run, name) for name in run.__dataclass_fields__ if name != "progress"}
    return {**row, "state": run.state.value, **asdict(run.progress)}


def _row_keys() -> Iterator[str]:
    from orchestrator.tracking.tracker import Progress, RunStatus

    yield from (name for name in RunStatus.__dataclass_fields__ if name != "progress")
    yield from Progress.__dataclass_fields__


def _reason(row: Mapping[str, Any]) -> str:
    return "; ".join(filter(None, (row["message"] or row["reason"], row["recovery_message"])))


def _status_columns() -> list[str | output.Column]:
    return [
        "run_id",
        "label",
        output.Column("state"),
        output.Column("reason", text=_reason, below=1),
        output.Column("attempt", below=2),
        output.Column("epoch", text=lambda row: f"{row['epoch']}/{row['epochs']}" if row["epochs"] else "", below=2),
        output.Column("samples_per_s", below=2),
        output.Column("silent_s", "silent (s)", below=2),
    ]
