"""The first verbs of a workspace: init and doctor."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli import output
from orchestrator.cli.workspace import (
    DEFAULT_DATABASE,
    DEFAULT_EXPERIMENT,
    DEFAULT_RUNS,
    ClusterOption,
    DatabaseOption,
    DataOption,
    ExperimentOption,
    LocalOption,
    RunsOption,
    Workspace,
)
from orchestrator.errors import InputError

app = typer.Typer()


@app.command()
def init(
    study: Annotated[str, typer.Option("--study", "-s", help="Which starter study.")] = "demo",
    experiment: ExperimentOption = DEFAULT_EXPERIMENT,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an experiment file that is already there.")] = False,
    list_studies: Annotated[bool, typer.Option("--list", help="List the starter studies and stop.")] = False,
) -> None:
    """Write a starter experiment.toml.

    Example: orchestrate init --study demo
    """
    from orchestrator import studies

    if list_studies:
        for name in studies.names():
            typer.echo(f"{name}: {studies.summary(name)}")
        return
    text = studies.read(study)
    if experiment.exists() and not force:
        raise InputError(
            "an experiment file is already here, and it was not touched",
            where=str(experiment),
            hint="--force overwrites it, --experiment writes another file",
        )
    experiment.write_text(text, encoding="utf-8", newline="\n")
    output.talk(f"wrote {experiment} (study {study}); next: orchestrate plan --local")


@app.command()
def doctor(
    experiment: ExperimentOption = DEFAULT_EXPERIMENT,
    local: LocalOption = False,
    cluster: ClusterOption = None,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
    data: DataOption = None,
    json: output.JsonOption = False,
) -> None:
    """Say whether this machine, cluster and data are usable, and what to fix.

    Exit code 1 when something must be fixed first.

    Example: orchestrate doctor --local
    """
    from orchestrator.doctor import Verdict, examine

    workspace = Workspace.at(runs=runs, database=database, data_root=data, experiment=experiment)
    findings = list(examine(workspace, local=local, cluster=cluster))
    rows = [{"subject": f.subject, "verdict": f.verdict.value, "what": f.what, "fix": f.fix} for f in findings]
    output.rows(rows, ["subject", "verdict", "what", "fix"], output.Format.JSON if json else output.Format.TABLE)
    if any(f.verdict is Verdict.FAIL for f in findings):
        raise typer.Exit(1)
