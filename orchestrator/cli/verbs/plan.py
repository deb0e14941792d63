"""Show what would run, what is done, what is excluded and why.

Nothing is sent. The plan is kept in plan.json, which submit carries out.

Example: orchestrate plan --local

Example: orchestrate plan --cluster cluster.toml --set epochs=1 --scripts
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import output
from orchestrator.cli.options import (
    ClusterOption,
    DatabaseOption,
    DataOption,
    ExperimentOption,
    LocalOption,
    RunsOption,
    SetOption,
)
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_EXPERIMENT, DEFAULT_RUNS, Workspace

if TYPE_CHECKING:
    from orchestrator.planning.plan import Hours, Plan

ORDER = 30


ROWS_SHOWN = 40
"""More runs than this are shown as counts by model, strategy and hardware."""


def plan(
    experiment: ExperimentOption = DEFAULT_EXPERIMENT,
    local: LocalOption = False,
    cluster: ClusterOption = None,
    sets: SetOption = None,
    scripts: Annotated[bool, typer.Option("--scripts", help="Print the job scripts, byte for byte.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Show every run, however many.")] = False,
    json: output.JsonOption = False,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
    data: DataOption = None,
) -> None:
    from orchestrator.planning import planner

    workspace = Workspace.at(runs=runs, database=database, data_root=data, experiment=experiment)
    made = planner.current(workspace, local=local, cluster=cluster, sets=sets or [], fresh=True)
    if json:
        output.facts(made.to_json())
        return
    if scripts:
        for script in made.scripts:
            typer.echo(script.text, nl=not script.text.endswith("\n"))
        if not made.scripts:
            why = "runs of this machine have none" if made.site is None else "nothing is to be sent"
            output.talk(f"no job scripts: {why}; {summary(made)}")
        return
    _show(made, every=every)


def _show(made: Plan, *, every: bool) -> None:
    columns: list[str | output.Column]
    if every or len(made.runs) <= ROWS_SHOWN:
        columns = ["run_id", "label", "state", "hardware", "cpus", output.Column("why", below=1)]
        rows = [
            {
                "run_id": run.cell.run_id,
                "label": run.cell.label,
                "state": run.action.words,
                "hardware": str(run.cell.train.hardware),
                "cpus": run.cell.train.cpus,
                "why": run.why,
            }
            for run in made.runs
        ]
    else:
        counts = Counter(
            (run.cell.train.model, run.cell.train.strategy, str(run.cell.train.hardware), run.action.words)
            for run in made.runs
        )
        names = ["model", "strategy", "hardware", "state", "runs"]
        columns = [*names]
        rows = [dict(zip(names, (*key, count), strict=True)) for key, count in counts.items()]
    if rows:
        output.rows(rows, columns, output.Format.TABLE)
    excluded = Counter((e.rule, e.why) for e in made.excluded)
    if excluded:
        output.rows(
            [{"excluded": n, "rule": rule, "why": why} for (rule, why), n in excluded.items()],
            ["excluded", "rule", "why"],
            output.Format.TABLE,
        )
    if made.scripts:
        hours = output.Column("gpu_hours_limit", text=lambda row: f"{row['gpu_hours_limit']:.2f}")
        output.rows(_arrays(made), ["array", "runs", hours, "partition", "qos"], output.Format.TABLE)
    for check in made.checks:
        fix = f"; {check.fix}" if check.fix else ""
        output.talk(f"{'must be fixed' if check.blocking else 'note'}: {check.what}{fix}")
    typer.echo(summary(made))


def summary(made: Plan) -> str:
    """The plan in one line: what there is, what is new, and what it would cost."""
    counts = made.counts()
    parts = [f"{counts[action]} {action.words}" for action in counts]
    if made.excluded:
        parts.append(f"{len(made.excluded)} excluded")
    if made.merged:
        parts.append(f"{made.merged} merged as duplicates")
    cells = counted(len(made.runs) + len(made.excluded), "cell")
    to_send = len(made.to_send())
    cost = f", {_hours(made.gpu_hours)}" if any(run.shape.gpus for run in made.runs) else ""
    return f"{cells} for {made.target}: {', '.join(parts) or 'none'}; {to_send} to send{cost}"


def _hours(hours: Hours) -> str:
    if hours.expected is None or hours.low is None:
        return f"at most {hours.high:.1f} GPU-hours ({hours.basis})"
    return f"{hours.expected:.1f} GPU-hours ({hours.low:.1f}-{hours.high:.1f}; {hours.basis})"


def _arrays(made: Plan) -> list[dict[str, Any]]:
    by_shape = Counter(run.shape for run in made.to_send())
    return [
        {
            "array": script.name,
            "runs": by_shape[script.shape],
            "gpu_hours_limit": by_shape[script.shape] * script.shape.gpu_hours_limit,
            "partition": script.shape.partition,
            "qos": script.shape.qos,
        }
        for script in made.scripts
    ]
