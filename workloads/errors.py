"""The root of every error a user sees; both sides of the wire raise from here.

OrchestrateError
├── InputError               what the user wrote or asked for is wrong            exit 2
├── OperationError           the operation was fine, the world was not            exit 1
└── JobError                 raised inside a job; carries a failure class for the store
    ├── WrongHardwareError   the job was given other devices than the plan asked for
    ├── DatasetError         the data set is missing, damaged or not the one that was planned
    ├── CodeChangedError     code or packages are not those that were submitted
    └── HangError            no progress for ``hang_timeout_s``

The login side adds its own leaves in ``orchestrator.errors`` and ``db.errors``.
"""

from __future__ import annotations

from typing import ClassVar


class OrchestrateError(Exception):
    """An error that says what is wrong, where, why, and what to do about it.

    Args:
        what: one sentence, no trailing stop.
        where: the place, as ``file: key`` or a path.
        why: the cause, when it is not evident from ``what``.
        hint: what the user can do next, often a command.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.why = why
        self.hint = hint
        super().__init__(self.text())

    def text(self) -> str:
        """The message on several lines, as the command line and the store show it."""
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
    """What the user wrote or asked for cannot be done as written."""

    exit_code = 2


class OperationError(OrchestrateError):
    """The request was fine; something in the world (disk, scheduler, process) failed."""


class JobError(OrchestrateError):
    """Raised inside a job. ``failure_class`` is the word that reaches the store as ``reason``."""

    failure_class: ClassVar[str] = "program_error"


class WrongHardwareError(JobError):
    """The job was given something else than the plan asked for."""

    failure_class = "wrong_hardware"


class DatasetError(JobError):
    """The data set is missing, damaged, or not the one that was planned."""

    failure_class = "dataset"


class CodeChangedError(JobError):
    """The code or the packages that a job would run are not those that were submitted."""

    failure_class = "code_changed"


class HangError(JobError):
    """A rank made no progress for ``hang_timeout_s``."""

    failure_class = "hang"
