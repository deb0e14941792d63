"""Where a command finds its files: defaults, environment variables and options, resolved once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from orchestrator.cli import completion
from orchestrator.cli.options import all_written
from workloads.errors import InputError

if TYPE_CHECKING:
    from orchestrator.profile import ClusterProfile

ExperimentOption = Annotated[
    Path, typer.Option("--experiment", "-e", help="The experiment file.", envvar="ORCHESTRATE_EXPERIMENT")
]
_Given = TypeVar("_Given")


def _one_target(context: typer.Context, value: _Given) -> _Given:
    """Where runs go is said once; against a cluster that the environment names, ``--local`` is the exception."""
    if all_written(context, "local", "cluster"):
        raise InputError(
            "--local and --cluster contradict each other",
            where=context.command_path,
            why="runs go to this machine or to a cluster",
            hint="leave one of the two out",
        )
    return value


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

DEFAULT_EXPERIMENT = Path("experiment.toml")
DEFAULT_RUNS = Path("runs")
DEFAULT_DATABASE = "results.db"


@dataclass(frozen=True, slots=True)
class Workspace:
    """Absolute places of one invocation. Symbolic links are resolved, so a job sees the same paths."""

    runs: Path
    database: str
    """An absolute file name, or a URL."""
    data_root: Path | None
    experiment: Path = field(default=DEFAULT_EXPERIMENT)

    @property
    def has_database(self) -> bool:
        """Whether there may be one: a file of that name, or a server."""
        return "://" in self.database or Path(self.database).exists()

    @property
    def is_empty(self) -> bool:
        """Whether no run was ever sent from here."""
        return not self.has_database and not self.runs.exists()

    @classmethod
    def at(
        cls,
        *,
        runs: Path = DEFAULT_RUNS,
        database: str = DEFAULT_DATABASE,
        data_root: Path | None = None,
        experiment: Path = DEFAULT_EXPERIMENT,
    ) -> Workspace:
        return cls(
            runs=_absolute(str(runs), "the runs folder"),
            database=database if "://" in database else str(_absolute(database, "the database")),
            data_root=_absolute(str(data_root), "the data folder") if data_root is not None else None,
            experiment=experiment,
        )

    def at_site(self, profile: ClusterProfile | None) -> Workspace:
        """With the data folder of a cluster file, unless an option or the environment names another."""
        if profile is None or not profile.data or self.data_root is not None:
            return self
        return replace(self, data_root=Path(profile.data))

    @property
    def plan_file(self) -> Path:
        """The plan that ``orchestrate plan`` leaves for ``orchestrate submit``: beside the runs folder."""
        return self.runs.parent / "plan.json"


def _absolute(given: str, what: str) -> Path:
    """The resolved path.

    Raises:
        InputError: it can lead nowhere.
    """
    try:
        return Path(os.path.expandvars(given)).expanduser().resolve()
    except FileNotFoundError as error:
        raise InputError("the working directory is gone", hint="cd to a folder that exists") from error
    # Path's words for an unknown home and, before Python 3.13, for a loop of links.
    except (OSError, RuntimeError) as error:
        why = error.strerror or "" if isinstance(error, OSError) else str(error).rstrip(".")
        raise InputError(f"{what} cannot be found by this name", where=given, why=why) from error
