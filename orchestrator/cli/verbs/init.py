"""Write a starter experiment.toml, or a cluster.toml for this site.

With --cluster: the shipped profile whose host names match this one, else what Slurm says of partitions, GPUs, your
accounts and limits.

Example: orchestrate init --study demo

Example: orchestrate init --cluster
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import output
from orchestrator.cli.completion import profile_names, study_names
from orchestrator.cli.options import (
    ExperimentOption,
    insist_apart,
)
from orchestrator.errors import InputError
from orchestrator.workspace import DEFAULT_EXPERIMENT

ORDER = 10


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
