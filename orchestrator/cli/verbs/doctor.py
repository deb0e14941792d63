"""Say whether this machine, cluster and data are usable, and what to fix.

On a cluster: what Slurm says of accounts, limits and queues, and of each planned script, which nothing queues. Exit
code 1 when something must be fixed first.

Example: orchestrate doctor --local

Example: orchestrate doctor --probe
"""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli import output
from orchestrator.cli.options import (
    ClusterOption,
    DatabaseOption,
    DataOption,
    ExperimentOption,
    LocalOption,
    RunsOption,
)
from orchestrator.cli.workspace_checks import insist_on_runs_folder
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_EXPERIMENT, DEFAULT_RUNS, Workspace

ORDER = 20


def doctor(
    experiment: ExperimentOption = DEFAULT_EXPERIMENT,
    local: LocalOption = False,
    cluster: ClusterOption = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also send short jobs that tell what compute nodes see.")
    ] = False,
    probe_minutes: Annotated[
        int, typer.Option("--probe-minutes", min=1, help="How long to wait for them; then they are cancelled.")
    ] = 10,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
    data: DataOption = None,
    json: output.JsonOption = False,
) -> None:
    from orchestrator.doctor.machine import Verdict, examine

    workspace = Workspace.at(runs=runs, database=database, data_root=data, experiment=experiment)
    probe_s = 60.0 * probe_minutes if probe else 0.0
    insist_on_runs_folder(workspace)
    findings = list(examine(workspace, local=local, cluster=cluster, probe_s=probe_s))
    rows = [{"subject": f.subject, "verdict": f.verdict.value, "what": f.what, "fix": f.fix} for f in findings]
    output.rows(rows, ["subject", "verdict", "what", "fix"], output.Format.JSON if json else output.Format.TABLE)
    if any(f.verdict is Verdict.FAIL for f in findings):
        raise typer.Exit(1)
