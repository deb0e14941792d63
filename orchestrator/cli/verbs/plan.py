"""Show what would run, what is done, what is excluded and why.

Nothing is submitted. The plan is saved as plan.json, which orchestrate submit reads.

Example: orchestrate plan --local

Example: orchestrate plan --cluster cluster.toml --set epochs=1 --scripts
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from orchestrator.cli import options, output
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_EXPERIMENT, DEFAULT_RUNS, Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from orchestrator.planning import plan as plans
    from orchestrator.planning import planner

ORDER = 30

MAX_ROWS = 40
"""More runs are shown as counts by model, strategy and hardware."""


def plan(
    experiment: options.ExperimentOption = DEFAULT_EXPERIMENT,
    local: options.LocalOption = False,
    cluster: options.ClusterOption = None,
    sets: options.SetOption = None,
    scripts: Annotated[bool, typer.Option("--scripts", help="Print the job scripts exactly as submitted.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Show one row for each run, however many.")] = False,
    json: output.JsonOption = False,
    runs: options.RunsOption = DEFAULT_RUNS,
    database: options.DatabaseOption = DEFAULT_DATABASE,
    data: options.DataOption = None,
) -> None:
    workspace = Workspace.at(runs=runs, database=database, data_root=data, experiment=experiment)
    made = planner.current_plan(workspace, local=local, cluster=cluster, sets=sets or [], fresh=True)
    if json:
        output.print_json(made.to_json())
    elif scripts:
        for script in made.scripts:
            typer.echo(script.text, nl=not script.text.endswith("\n"))
        if not made.scripts:
            why = "runs on this machine have none" if made.cluster is None else "nothing is to be submitted"
            output.print_message(f"no job scripts: {why}; {summarize(made)}")
    else:
        _print_plan(made, every=every)


def _print_plan(made: plans.Plan, *, every: bool) -> None:
    if made.runs and (every or len(made.runs) <= MAX_ROWS):
        rows = [
            {
                "run_id": run.cell.run_id,
                "label": run.cell.label,
                "state": run.state.label,
                "hardware": str(run.cell.train.hardware),
                "cpus": run.cell.train.cpus,
                "why": run.why,
            }
            for run in made.runs
        ]
        output.print_rows(rows, ["run_id", "label", "state", "hardware", "cpus", output.Column("why", below=1)])
    elif made.runs:
        trains = [(run.cell.train, run.state.label) for run in made.runs]
        alike = Counter((train.model, train.strategy, str(train.hardware), state) for train, state in trains)
        names = ["model", "strategy", "hardware", "state", "runs"]
        output.print_rows([dict(zip(names, (*key, n), strict=True)) for key, n in alike.items()], names)
    if made.excluded:
        causes = Counter((cell.rule, cell.why) for cell in made.excluded)
        rows = [{"excluded": n, "rule": rule, "why": why} for (rule, why), n in causes.items()]
        output.print_rows(rows, ["excluded", "rule", "why"])
    if made.scripts:
        _print_arrays(made)
    for check in made.checks:
        fix = f"; {check.fix}" if check.fix else ""
        output.print_message(f"{'must be fixed' if check.blocking else 'note'}: {check.what}{fix}")
    typer.echo(summarize(made))


def _print_arrays(made: plans.Plan) -> None:
    num_runs = Counter(run.shape for run in made.to_submit())
    rows = [
        {
            "array": script.name,
            "runs": num_runs[script.shape],
            "gpu_hours_limit": num_runs[script.shape] * script.shape.gpu_hours_limit,
            "partition": script.shape.partition,
            "qos": script.shape.qos,
        }
        for script in made.scripts
    ]
    hours = output.Column("gpu_hours_limit", text=lambda row: f"{row['gpu_hours_limit']:.2f}")
    output.print_rows(rows, ["array", "runs", hours, "partition", "qos"])


def summarize(made: plans.Plan) -> str:
    """Return the plan in one line: how many cells, in which state, and what they would cost."""
    counts = made.counts()
    parts = [f"{counts[state]} {state.label}" for state in counts]
    if made.excluded:
        parts.append(f"{len(made.excluded)} excluded")
    if made.merged:
        parts.append(f"{made.merged} merged as duplicates")
    cells = counted(len(made.runs) + len(made.excluded), "cell")
    hours = made.gpu_hours
    if not any(run.shape.gpus for run in made.runs):
        cost = ""
    elif hours.expected is None or hours.low is None:
        cost = f", at most {hours.high:.1f} GPU-hours ({hours.basis})"
    else:
        cost = f", {hours.expected:.1f} GPU-hours ({hours.low:.1f}-{hours.high:.1f}; {hours.basis})"
    return f"{cells} for {made.target}: {', '.join(parts) or 'none'}; {len(made.to_submit())} to submit{cost}"
