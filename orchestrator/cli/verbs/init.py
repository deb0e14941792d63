"""Write a starter experiment.toml, or a cluster.toml for this site.

The cluster file is the shipped profile whose host names match this one. Without such a profile, it is made from what
Slurm reports about partitions, GPUs, your accounts and limits.

Example: orchestrate init --study demo

Example: orchestrate init --cluster
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import options, output
from orchestrator.cli.completion import profile_names, study_names
from orchestrator.errors import InputError
from orchestrator.workspace import DEFAULT_EXPERIMENT
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from orchestrator.backends.slurm import commands
    from orchestrator.cluster import cluster_file, discovery
    from orchestrator.config import starter_studies

ORDER = 10


def init(
    context: typer.Context,
    study: Annotated[
        str, typer.Option("--study", "-s", metavar="NAME", help="Starter study to write.", autocompletion=study_names)
    ] = "demo",
    experiment: options.ExperimentOption = DEFAULT_EXPERIMENT,
    cluster: Annotated[bool, typer.Option("--cluster", help="Write a cluster.toml for this site instead.")] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME",
            help="With --cluster: write this shipped profile.",
            autocompletion=profile_names,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="List the starter studies, with --cluster the shipped profiles, and exit.")
    ] = False,
) -> None:
    options.require_exclusive(
        context, "cluster", "study", "a study is an experiment file, and --cluster writes a cluster file"
    )
    options.require_exclusive(context, "cluster", "experiment", "--cluster writes a cluster file, always cluster.toml")
    options.require_exclusive(context, "list_all", "study", "--list lists every study and writes none")
    if profile is not None and not cluster:
        raise InputError("--profile names a shipped profile of a cluster", hint="add --cluster")
    if cluster and list_all:
        for name, text in cluster_file.shipped().items():
            typer.echo(f"{name}: {text.splitlines()[0].removeprefix('# ')}")
    elif cluster:
        _write_cluster_file(profile, force=force)
    elif list_all:
        for name in starter_studies.names():
            typer.echo(f"{name}: {starter_studies.summary(name)}")
    else:
        _write_experiment(study, experiment, force=force)


def _write_experiment(study: str, path: Path, *, force: bool) -> None:
    text = starter_studies.read(study)
    if not force:
        _require_absent(path, "an experiment file", "; --experiment writes another file")
    path.write_text(text, encoding="utf-8", newline="\n")
    # Not beside a cluster file: "plan --local" would lead to training on a login node.
    local = "" if Path(cluster_file.DEFAULT_FILE).exists() or os.environ.get("ORCHESTRATE_CLUSTER") else " --local"
    is_default = path == Path(os.environ.get("ORCHESTRATE_EXPERIMENT") or DEFAULT_EXPERIMENT)
    option = "" if is_default else f" -e {shlex.quote(str(path))}"
    output.print_message(f"wrote {path} (study {study}); next: orchestrate plan{option}{local}")


def _write_cluster_file(profile: str | None, *, force: bool) -> None:
    path = Path(cluster_file.DEFAULT_FILE)
    if not force:
        _require_absent(path, "a cluster file")  # before Slurm is queried
    composed = discovery.compose(profile, _run)
    path.write_text(composed.text, encoding="utf-8", newline="\n")
    for note in composed.notes:
        output.print_message(f"to do in {path}: {note}")
    output.print_message(f"wrote {path} (cluster {composed.name}, from {composed.origin}); next: orchestrate doctor")


def _run(*argv: str) -> tuple[bool, str]:
    """Run a Slurm command; return whether it succeeded, and what it printed or why it failed."""
    answer = commands.run(*argv)
    if answer.ok or answer.exit_code is None:
        return answer.ok, answer.stdout if answer.ok else answer.text
    return False, f"exit code {answer.exit_code}: {answer.text or 'no output'}"


def _require_absent(path: Path, what: str, other: str = "") -> None:
    if path.exists():
        hint = f"--force overwrites it{other}"
        raise InputError(f"there already is {what}; it is unchanged", where=str(path), hint=hint)
