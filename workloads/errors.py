"""Base classes of all errors that users see, on login nodes and in jobs.

OrchestrateError
├── InputError               what the user wrote or requested is wrong            exit 2
├── OperationError           a disk, Slurm or another process failed              exit 1
└── JobError                 raised in a job; has a failure class for the database
    ├── WrongHardwareError   the job has other devices than planned
    ├── DatasetError         the data set is missing, damaged or differs from the planned one
    ├── CodeChangedError     code or packages differ from the submitted ones
    └── HangError            no progress for ``hang_timeout_s``

The login side adds more in ``orchestrator.errors`` and ``db.errors``.
"""

from __future__ import annotations

from typing import ClassVar


class OrchestrateError(Exception):
    """An error with what is wrong, where, why, and how to fix it.

    Args:
        what: one sentence without a full stop.
        where: ``file: key``, a path, or an option.
        why: the cause, when it is not evident from ``what``.
        hint: the fix, an imperative with a command or a key.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.why = why
        self.hint = hint
        super().__init__(self.text())

    def text(self) -> str:
        """Return the message on several lines, as the command line and the database show it."""
        head = f"{self.where}: {self.what}" if self.where else self.what
        lines = [head]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.hint:
            lines.append(f"  fix: {self.hint}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


class InputError(OrchestrateError):
    """What the user wrote or requested is wrong."""

    exit_code = 2


class OperationError(OrchestrateError):
    """The request is valid, but a disk, Slurm or another process failed."""


class JobError(OrchestrateError):
    """Raised in a job; the database shows ``failure_class`` as ``reason``."""

    failure_class: ClassVar[str] = "program_error"


class WrongHardwareError(JobError):
    """The job has other devices than planned."""

    failure_class = "wrong_hardware"


class DatasetError(JobError):
    """The data set is missing, damaged, or differs from the planned one."""

    failure_class = "dataset"


class CodeChangedError(JobError):
    """The code or the packages of a job differ from the submitted ones."""

    failure_class = "code_changed"


class HangError(JobError):
    """A rank made no progress for ``hang_timeout_s``."""

    failure_class = "hang"
