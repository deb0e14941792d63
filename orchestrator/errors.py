"""Errors of the login side; ``workloads.errors`` has their base classes.

InputError
├── ExperimentError      mistakes in experiment.toml, reported together
└── ClusterError         mistakes in cluster.toml, reported together
OperationError
├── CommandError         a command that we ran failed; has argv, exit code, stdout and stderr
└── PartlyDoneError      some of the work was done                                     exit 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from workloads.errors import InputError, OperationError, OrchestrateError

__all__ = [
    "ClusterError",
    "CommandError",
    "ExperimentError",
    "InputError",
    "Mistake",
    "OperationError",
    "OrchestrateError",
    "PartlyDoneError",
]


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a file."""

    where: str
    """``experiment.toml: matrix.lr[1]``."""
    what: str
    hint: str = ""


class _FileError(InputError):
    """The mistakes in one file, each with its place."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        assert mistakes, "an error without a mistake"
        self.mistakes = tuple(mistakes)
        super().__init__(mistakes[0].what, where=mistakes[0].where, hint=mistakes[0].hint)

    def text(self) -> str:
        lines = []
        for mistake in self.mistakes:
            lines.append(f"{mistake.where}: {mistake.what}")
            if mistake.hint:
                lines.append(f"  fix: {mistake.hint}")
        return "\n".join(lines)


class ExperimentError(_FileError):
    """Mistakes in an experiment file."""


class ClusterError(_FileError):
    """Mistakes in a cluster file."""


class CommandError(OperationError):
    """A command that we ran failed or did not end in time."""

    def __init__(self, argv: Sequence[str], exit_code: int | None, stdout: str, stderr: str, *, hint: str = "") -> None:
        self.argv = tuple(argv)
        self.exit_code_of_command = exit_code
        self.stdout = stdout
        self.stderr = stderr
        ended = "did not end in time" if exit_code is None else f"ended with exit code {exit_code}"
        super().__init__(f"{argv[0]} {ended}", where=" ".join(argv), why=(stderr or stdout).strip(), hint=hint)


class PartlyDoneError(OperationError):
    """Some of the work was done and is kept."""

    exit_code: ClassVar[int] = 3
