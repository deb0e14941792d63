"""The first verbs of a workspace: init and doctor."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import output
from orchestrator.cli.completion import profile_names, study_names
from orchestrator.cli.options import (
    ClusterOption,
    DatabaseOption,
    DataOption,
    ExperimentOption,
    LocalOption,
    RunsOption,
    insist_apart,
)
from orchestrator.cli.refreshing import insist_on_runs_folder
from orchestrator.errors import InputError
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_EXPERIMENT, DEFAULT_RUNS, Workspace

app = typer.Typer()


@app.command()
def init(
    context: typer.Context,
    study: Annotated[
        str, typer.Option("--study", "-s", help="Which starter study.", autocompletion=study_names)
    ] = "demo",
    experiment: ExperimentOption = DEFAULT_EXPERIMENT,
    cluster: Annotated[bool, typer.Option("--cluster", help="Write a cluster.toml for this site instead.")] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile", metavar="NAME", help="With --cluster: this shipped profile.", autocompletion=profile_names
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is already there.")] = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="List the starter studies, with --cluster the shipped profiles, and stop.")
    ] = False,
) -> None:
    """Write a starter experiment.toml, or a cluster.toml for this site.

    With --cluster: the shipped profile whose host names match this one, else what Slurm says of partitions, GPUs, your
    accounts and limits.

    Example: orchestrate init --study demo

    Example: orchestrate init --cluster
    """
    insist_apart(context, "cluster", "study", "a study is an experiment file, and --cluster writes a cluster file")
    insist_apart(context, "cluster", "experiment", "--cluster writes a cluster file, always cluster.toml")
    insist_apart(context, "list_all", "study", "--list shows every study and writes none")
    if profile is not None and not cluster:
        raise InputError("--profile names a shipped profile of a cluster", hint="add --cluster")
    if cluster:
        _init_cluster(profile, force=force, list_all=list_all)
        return
    from orchestrator.cluster import cluster_file
    from orchestrator.config import starter_studies

    if list_all:
        for name in starter_studies.names():
            typer.echo(f"{name}: {starter_studies.summary(name)}")
        return
    text = starter_studies.read(study)
    _write(experiment, text, "an experiment file", force=force, other="--experiment writes another file")
    # Beside a cluster file, "--local" would send a reader to train on a login node.
    local = "" if Path(cluster_file.DEFAULT_FILE).exists() or os.environ.get("ORCHESTRATE_CLUSTER") else " --local"
    read_anyway = experiment == Path(os.environ.get("ORCHESTRATE_EXPERIMENT") or DEFAULT_EXPERIMENT)
    other = "" if read_anyway else f" -e {shlex.quote(str(experiment))}"
    output.talk(f"wrote {experiment} (study {study}); next: orchestrate plan{other}{local}")


def _init_cluster(profile: str | None, *, force: bool, list_all: bool) -> None:
    from orchestrator.cluster import cluster_file

    if list_all:
        for name, text in cluster_file.shipped().items():
            first = text.partition("\n")[0].removeprefix("# ")
            typer.echo(f"{name}: {first}")
        return
    from orchestrator.backends.slurm import commands
    from orchestrator.cluster import discovery

    def run(*argv: str) -> tuple[bool, str]:
        answer = commands.run(*argv)
        if answer.ok or answer.exit_code is None:
            return answer.ok, answer.stdout if answer.ok else answer.text
        return False, f"exit code {answer.exit_code}: {answer.text or 'it says nothing'}"

    path = Path(cluster_file.DEFAULT_FILE)
    if path.exists() and not force:
        _refuse_to_overwrite(path, "a cluster file", "")
    made = discovery.compose(profile, run)
    _write(path, made.text, "a cluster file", force=force)
    for note in made.notes:
        output.talk(f"to do in {path}: {note}")
    output.talk(f"wrote {path} (cluster {made.name}, from {made.origin}); next: orchestrate doctor")


def _write(path: Path, text: str, what: str, *, force: bool, other: str = "") -> None:
    if path.exists() and not force:
        _refuse_to_overwrite(path, what, other)
    path.write_text(text, encoding="utf-8", newline="\n")


def _refuse_to_overwrite(path: Path, what: str, other: str) -> None:
    hint = ", ".join(filter(None, ("--force overwrites it", other)))
    raise InputError(f"{what} is already here, and it was not touched", where=str(path), hint=hint)


@app.command()
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
    """Say whether this machine, cluster and data are usable, and what to fix.

    On a cluster: what Slurm says of accounts, limits and queues, and of each planned script, which nothing queues. Exit
    code 1 when something must be fixed first.

    Example: orchestrate doctor --local

    Example: orchestrate doctor --probe
    """
    from orchestrator.doctor.machine import Verdict, examine

    workspace = Workspace.at(runs=runs, database=database, data_root=data, experiment=experiment)
    probe_s = 60.0 * probe_minutes if probe else 0.0
    insist_on_runs_folder(workspace)
    findings = list(examine(workspace, local=local, cluster=cluster, probe_s=probe_s))
    rows = [{"subject": f.subject, "verdict": f.verdict.value, "what": f.what, "fix": f.fix} for f in findings]
    output.rows(rows, ["subject", "verdict", "what", "fix"], output.Format.JSON if json else output.Format.TABLE)
    if any(f.verdict is Verdict.FAIL for f in findings):
        raise typer.Exit(1)
