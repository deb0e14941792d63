"""Options that several verbs have, and a check for options that cannot be combined."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import typer

from orchestrator.cli import completion
from workloads.errors import InputError

_T = TypeVar("_T")


def are_written(context: typer.Context, *names: str) -> bool:
    """Return whether all of these options are on the command line itself, not in the environment.

    False while a shell completes the line, as errors would garble it.
    """
    # Compared by name: some releases of typer vendor click (typer/_click), with an enumeration of its own.
    sources = [context.get_parameter_source(name) for name in names]
    return not context.resilient_parsing and all(s is not None and s.name == "COMMANDLINE" for s in sources)


def require_exclusive(context: typer.Context, one: str, other: str, why: str) -> None:
    """Raise InputError when two parameters are both written and one of them would be ignored."""
    if are_written(context, one, other):
        written = {parameter.name: max(parameter.opts, key=len) for parameter in context.command.params}
        what = f"{written[one]} and {written[other]} cannot be combined"
        raise InputError(what, where=context.command_path, why=why, hint="remove one of them")


def _require_one_target(context: typer.Context, value: _T) -> _T:
    """Allow ``--local`` beside a cluster that the environment names, not beside ``--cluster``."""
    require_exclusive(context, "local", "cluster", "runs go to this machine or to a cluster")
    return value


ExperimentOption = Annotated[
    Path, typer.Option("--experiment", "-e", help="Experiment file.", envvar="ORCHESTRATE_EXPERIMENT")
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        "-c",
        help="Cluster file, or the name of a shipped profile.",
        envvar="ORCHESTRATE_CLUSTER",
        autocompletion=completion.cluster_names,
        callback=_require_one_target,
    ),
]
LocalOption = Annotated[
    bool, typer.Option("--local", help="Run on this machine instead of a cluster.", callback=_require_one_target)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a training key for this command; repeatable.",
        autocompletion=completion.settings,
    ),
]
RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of run directories.", envvar="ORCHESTRATE_RUNS")]
DatabaseOption = Annotated[
    str, typer.Option("--db", help="Database: a file, or a postgresql:// URL.", envvar="ORCHESTRATE_DB")
]
RecoverOption = Annotated[
    bool,
    typer.Option(
        "--recover/--no-recover",
        help="Resubmit runs that ended by time limit, memory, node failure or preemption, within bounds.",
    ),
]
DataOption = Annotated[Path | None, typer.Option("--data", help="Folder of data sets.", envvar="ORCHESTRATE_DATA")]
WaitOption = Annotated[bool, typer.Option("--wait", "-w", help="Show progress until all runs have ended.")]
