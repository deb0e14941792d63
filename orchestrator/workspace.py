"""Where a command finds its files, from options, environment variables and defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from workloads.errors import InputError

DEFAULT_EXPERIMENT = Path("experiment.toml")
DEFAULT_RUNS = Path("runs")
DEFAULT_DATABASE = "results.db"


@dataclass(frozen=True, slots=True)
class Workspace:
    """The absolute paths of one command, with symbolic links resolved, as jobs see them."""

    runs: Path
    database: str
    """An absolute file name or a URL."""
    data_root: Path | None
    experiment: Path = field(default=DEFAULT_EXPERIMENT)

    @property
    def has_database(self) -> bool:
        """Whether a file of that name exists, or it is a server."""
        return "://" in self.database or Path(self.database).exists()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was submitted from here yet."""
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

    def with_data(self, folder: str) -> Workspace:
        """Return it with the data folder of a cluster file, unless an option or the environment names one."""
        if not folder or self.data_root is not None:
            return self
        return replace(self, data_root=Path(folder))

    @property
    def plan_file(self) -> Path:
        """The plan that ``orchestrate submit`` reads, beside the runs folder."""
        return self.runs.parent / "plan.json"


def _absolute(given: str, what: str) -> Path:
    """Return the resolved path.

    Raises:
        InputError: it cannot be resolved.
    """
    try:
        return Path(os.path.expandvars(given)).expanduser().resolve()
    except FileNotFoundError as error:
        raise InputError("the working directory is gone", hint="cd to a folder that exists") from error
    # pathlib raises RuntimeError for an unknown home folder and, before Python 3.13, for a loop of symbolic links.
    except (OSError, RuntimeError) as error:
        why = error.strerror or "" if isinstance(error, OSError) else str(error).rstrip(".")
        raise InputError(f"{what} cannot be found by this name", where=given, why=why) from error
