"""The seam between submitter, tracker and the ways of carrying out runs: local mode is one, a scheduler another.

Deliveries happen at least once (a killed ``submit`` is made up for by the next command), starts at most once: an
executor sees to the latter by the attempt's token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workloads.contract import ResourceShape, RunSpec, State, Submission
from workloads.files.json_file import write_json
from workloads.files.run_dir import AttemptDir, RunDir


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt that may be sent: its intent is recorded in the store."""

    runs: Path
    """The runs folder."""
    spec: RunSpec
    submission: Submission

    @property
    def token(self) -> str:
        return self.submission.token

    @property
    def number(self) -> int:
        """Of the attempt."""
        return self.submission.attempt

    @property
    def shape(self) -> ResourceShape:
        return self.submission.shape

    @property
    def run(self) -> RunDir:
        """The run's folder, which may not be there yet."""
        return RunDir.of(self.runs, self.spec.run_id)

    @property
    def attempt(self) -> AttemptDir:
        """The attempt's folder, which may not be there yet."""
        return self.run.attempt(self.number)

    def materialize(self) -> None:
        """Make the files of the run and the attempt; a submission that is there stays, as it may have the job id."""
        attempt = self.attempt.create()
        if not attempt.submission.exists():
            self.run.write_spec(self.spec)
            write_json(attempt.submission, {**self.submission.to_json(), "job_id": None}, durable=False)


SUBMIT_LIMIT = "no_room"
"""Reason of what stays planned because this user's queue is full."""
UNREACHABLE = "unreachable"
"""Reason of what stays planned because the scheduler's commands find no scheduler."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of one request."""

    token: str
    state: State
    """``pending``; ``submitting`` while nobody can say; ``failed`` when it was refused; ``planned`` without room, or
    without a scheduler."""
    job_id: str | None = None
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """What the witnesses say of one attempt."""

    state: State
    reason: str = ""
    """A word for tables and filters."""
    message: str = ""
    """A sentence for people."""
    job_id: str | None = None
    """Where the attempt's own files may not tell it."""


@dataclass(frozen=True, slots=True)
class ForcedCancel:
    """What came of ending an attempt that did not end when it was asked to."""

    token: str
    ended: bool
    what: str = ""
    """What was found and done, for people; empty when it had ended by itself."""
    hint: str = ""
    """What is left to do."""


class Executor(Protocol):
    """One way of carrying out attempts."""

    cancel_wait_s: float
    """How long it takes at most until an attempt whose end was asked for has ended; 0 does not wait,
    and insists on nothing."""

    def capacity(self) -> int | None:
        """How many attempts are taken now; None when there is no limit."""

    def submit(self, requests: Sequence[Request], *, patient: bool = True) -> list[Receipt]:
        """Hand attempts over, in order. One that was handed over before does no harm.

        Args:
            patient: wait for word of an earlier request that is in doubt.
        """

    def status(self, attempts: Iterable[tuple[AttemptDir, str, State]], *, fresh: bool = False) -> list[Status]:
        """What is known now of each attempt, given as directory, token and the state that the store has.

        Args:
            fresh: do not rest on what was heard a moment ago.
        """

    def cancel(self, attempts: Sequence[tuple[AttemptDir, str]]) -> None:
        """Ask for an end of attempts, given as directory and token; one that has ended stays as it is."""

    def force_cancel(self, attempts: Sequence[tuple[AttemptDir, str]]) -> list[ForcedCancel]:
        """End attempts, given as directory and token, that were asked to and have not :attr:`cancel_wait_s` later."""

    def supersede(self, attempts: Sequence[tuple[AttemptDir, str]]) -> None:
        """See to it that attempts which ended, given as directory and token, do not come back: later ones take over."""

    def ensure_running(self) -> None:
        """See to it that what was sent goes on."""
