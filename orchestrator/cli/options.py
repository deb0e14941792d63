"""Options that several commands have, and what is asked about the options of one command together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import typer

from orchestrator.cli import completion
from workloads.errors import InputError

_Given = TypeVar("_Given")


def all_written(context: typer.Context, *names: str) -> bool:
    """Whether all of these options stand on the command line itself, not in the environment.

    Never while a shell completes the line: it shows no errors.
    """
    # Told by its word: some releases of typer bring click's enumeration along, others import it.
    sources = [context.get_parameter_source(name) for name in names]
    return not context.resilient_parsing and all(s is not None and s.name == "COMMANDLINE" for s in sources)


def insist_apart(context: typer.Context, one: str, other: str, why: str) -> None:
    """Raises InputError when two parameters are both written of which one would be ignored, with why that is so."""
    if all_written(context, one, other):
        written = {parameter.name: max(parameter.opts, key=len) for parameter in context.command.params}
        raise InputError(
            f"{written[one]} and {written[other]} contradict each other",
            where=context.command_path,
            why=why,
            hint="leave one of the two out",
        )


def _one_target(context: typer.Context, value: _Given) -> _Given:
    """Where runs go is said once; against a cluster that the environment names, ``--local`` is the exception."""
    insist_apart(context, "local", "cluster", "runs go to this machine or to a cluster")
    return value


ExperimentOption = Annotated[
    Path, typer.Option("--experiment", "-e", help="The experiment file.", envvar="ORCHESTRATE_EXPERIMENT")
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        "-c",
        help="The cluster file, or the name of a shipped profile.",
        envvar="ORCHESTRATE_CLUSTER",
        autocompletion=completion.cluster_names,
        callback=_one_target,
    ),
]
LocalOption = Annotated[
    bool, typer.Option("--local", help="Run on this machine instead of a cluster.", callback=_one_target)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a training key for this once; repeatable.",
        autocompletion=completion.settings,
    ),
]
RunsOption = Annotated[Path, typer.Option("--runs", help="The folder of run directories.", envvar="ORCHESTRATE_RUNS")]
DatabaseOption = Annotated[
    str, typer.Option("--db", help="The database: a file, or a postgresql:// URL.", envvar="ORCHESTRATE_DB")
]
RecoverOption = Annotated[
    bool,
    typer.Option(
        "--recover/--no-recover", help="Send runs again that time, memory, nodes or preemption ended, within bounds."
    ),
]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="The folder that holds data sets.", envvar="ORCHESTRATE_DATA")
]
