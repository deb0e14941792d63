"""The interface between the commands and the backends: local mode and Slurm implement one ``Executor`` protocol.

A request may be submitted more than once: the next command repeats what a killed ``submit`` left undone. An attempt
starts at most once; each executor ensures that by the attempt's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from workloads.contract import RunSpec, State, Submission
from workloads.files.json_file import read_json, write_json
from workloads.files.run_dir import AttemptDir, RunDir

if TYPE_CHECKING:
    from db.submissions import AttemptRecord

SUBMIT_LIMIT = "submit_limit"
"""Reason of a run that stays planned because the site's limit of queued jobs is reached."""
UNREACHABLE = "unreachable"
"""Reason of a run that stays planned because the Slurm clients find no controller."""
SILENCE_S = 900.0
"""An attempt without a sign of life for this long is lost if nothing else lists it."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One execution of a run, as executors get it."""

    token: str
    directory: AttemptDir
    """May not exist yet."""
    recorded: State = State.SUBMITTING
    """The state in the store."""

    @classmethod
    def of(cls, runs: Path, record: AttemptRecord) -> Attempt:
        """Return the attempt of a row of the store."""
        directory = RunDir.of(runs, record.run_id).attempt(record.attempt)
        return cls(record.token or "", directory, record.state)

    @property
    def run_id(self) -> str:
        return self.directory.path.parent.parent.name

    @property
    def number(self) -> int:
        return self.directory.number


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt to submit. Its intent is in the store."""

    runs: Path
    spec: RunSpec
    submission: Submission

    @property
    def token(self) -> str:
        return self.submission.token

    @property
    def number(self) -> int:
        return self.submission.attempt

    @property
    def run(self) -> RunDir:
        return RunDir.of(self.runs, self.spec.run_id)

    @property
    def directory(self) -> AttemptDir:
        """May not exist yet."""
        return self.run.attempt(self.number)

    def materialize(self) -> None:
        """Create the files of run and attempt. An existing ``submission.json`` stays: it may have the job id."""
        directory = self.directory.create()
        if not directory.submission.exists():
            self.run.write_spec(self.spec)
            write_json(directory.submission, {**self.submission.to_json(), "job_id": None}, durable=False)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer to one request."""

    token: str
    state: State
    """``pending`` if accepted, ``failed`` if rejected, ``submitting`` without an answer, ``planned`` to try later."""
    job_id: str | None = None
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of one attempt, with reason and message. That of an ended attempt is stored in ``exit.json``."""

    state: State
    reason: str = ""
    """A word for tables and filters."""
    message: str = ""
    """A sentence for people."""
    exit_codes: tuple[int | None, ...] = ()
    """By rank; negative for a signal, None for a rank that nobody waited for."""
    nodes: str = ""
    """Where it ran, as Slurm reports it; empty in local mode and where unknown."""
    job_id: str | None = None
    """The executor's, for when the attempt's files do not have it."""

    def write_exit(self, directory: AttemptDir, *, ended_at: str = "") -> None:
        """Write ``exit.json``. ``ended_at`` is UTC in ISO 8601; the default is now."""
        data = {"state": self.state.value, "reason": self.reason, "message": self.message}
        data |= {"nodes": self.nodes} if self.nodes else {}
        ended_at = ended_at or datetime.now(UTC).isoformat(timespec="seconds")
        write_json(directory.exit, {**data, "exit_codes": list(self.exit_codes), "ended_at": ended_at})

    @classmethod
    def read_exit(cls, directory: AttemptDir) -> Status | None:
        """Read ``exit.json``; None if it is missing or damaged."""
        try:
            data = read_json(directory.exit)
            state, codes = State(data["state"]), tuple(data["exit_codes"])
            return cls(state, str(data["reason"]), str(data["message"]), codes, str(data.get("nodes", "")))
        except (OSError, ValueError, KeyError, TypeError):
            return None


CANCELLED = Status(State.CANCELLED, "cancelled", "stopped by orchestrate cancel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What both backends observe of one attempt."""

    recorded: State
    """The state in the store."""
    exit: Status | None = None
    """``exit.json``."""
    result: Status | None = None
    """``result.json``."""
    cancelling: bool = False
    """``orchestrate cancel`` was called for it."""
    silent_s: float | None = None
    """Seconds since its files last changed; None without files."""
    submit_host: str | None = None
    """Where a submit is at work: empty for this host, None for nowhere."""


@dataclass(frozen=True, slots=True)
class ForcedCancel:
    """The outcome of ending an attempt that did not end on request."""

    token: str
    ended: bool
    message: str = ""
    """What was found and done; empty if it had ended by itself."""
    hint: str = ""
    """What remains to be done."""


class Executor(Protocol):
    """A backend: executes attempts."""

    cancel_wait_s: float
    """How long a cancelled attempt may take to end before ``force_cancel``; 0: do not wait, do not force."""

    def capacity(self) -> int | None:
        """Return how many attempts can be submitted now; None without a limit."""

    def submit(self, requests: Sequence[Request], *, wait: bool = True) -> list[Receipt]:
        """Submit attempts in order; again is harmless. ``wait`` for the outcome of earlier ones without an answer."""

    def status(self, attempts: Sequence[Attempt], *, fresh: bool = False) -> list[Status]:
        """Return the status of each attempt. ``fresh``: query Slurm even if it answered a moment ago."""

    def cancel(self, attempts: Sequence[Attempt]) -> None:
        """Request the end of attempts; an ended one stays as it is."""

    def force_cancel(self, attempts: Sequence[Attempt]) -> list[ForcedCancel]:
        """End attempts that have not ended :attr:`cancel_wait_s` after ``cancel``."""

    def supersede(self, attempts: Sequence[Attempt]) -> None:
        """Prevent ended attempts from starting again: later ones replace them."""

    def ensure_running(self) -> None:
        """Start what executes the submitted attempts, if it has stopped."""
