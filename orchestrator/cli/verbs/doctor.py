"""Check whether this machine, cluster and data are usable, and say what to fix.

On a cluster it also checks the cluster file against Slurm's accounts, limits and partitions, and lets Slurm check each
planned script without queuing it. The exit code is 1 when something must be fixed first.

Example: orchestrate doctor --local

Example: orchestrate doctor --probe
"""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli import options, output
from orchestrator.cli.refresh import require_runs_folder
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_EXPERIMENT, DEFAULT_RUNS, Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from orchestrator.doctor import machine

ORDER = 20


def doctor(
    experiment: options.ExperimentOption = DEFAULT_EXPERIMENT,
    local: options.LocalOption = False,
    cluster: options.ClusterOption = None,
    probe: Annotated[bool, typer.Option("--probe", help="Also submit short jobs that check compute nodes.")] = False,
    probe_minutes: Annotated[
        int, typer.Option("--probe-minutes", min=1, help="How long to wait for these jobs before cancelling them.")
    ] = 10,
    runs: options.RunsOption = DEFAULT_RUNS,
    database: options.DatabaseOption = DEFAULT_DATABASE,
    data: options.DataOption = None,
    json: output.JsonOption = False,
) -> None:
    workspace = Workspace.at(runs=runs, database=database, data_root=data, experiment=experiment)
    require_runs_folder(workspace)
    probe_s = 60.0 * probe_minutes if probe else 0.0
    findings = list(machine.examine(workspace, local=local, cluster=cluster, probe_s=probe_s))
    rows = [{"subject": f.subject, "verdict": f.level.value, "what": f.what, "fix": f.fix} for f in findings]
    output.print_rows(rows, ["subject", "verdict", "what", "fix"], output.Format.JSON if json else output.Format.TABLE)
    if any(f.level is machine.Level.FAIL for f in findings):
        raise typer.Exit(1)
