"""Observations -> store: updates the store with the status that the executors report of each live attempt.

Each backend decides by its own pure function: ``backends.local.status.status_of`` and
``backends.slurm.status.status_of``. An attempt whose target has no executor here keeps its recorded state.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.backends.base import Attempt, Executor
from orchestrator.backends.local.executor import LocalExecutor
from orchestrator.backends.slurm.executor import SlurmExecutor
from orchestrator.backends.slurm.records import ArrayFolder
from orchestrator.cluster.resources import LOCAL
from orchestrator.tracking.assess import Assessment, assess_runs
from orchestrator.tracking.recovery import RecoveryAction
from workloads.contract import State
from workloads.files.array_record import create_run_folders
from workloads.files.json_file import read_object_or_empty
from workloads.files.run_dir import AttemptDir, RunDir
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import attempt_files, ingest, queries, submissions

if TYPE_CHECKING:
    from db.attempt_files import IngestProblem
    from db.connect import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a running attempt is, according to its rank 0."""

    phase: str = ""
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    samples_per_s: float | None = None
    silent_s: float | None = None
    """Seconds since rank 0 wrote this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run as ``status`` shows it."""

    run_id: str
    label: str
    experiment: str
    state: State
    reason: str
    message: str
    attempt: int
    job_id: str | None
    target: str | None
    recovery: str = ""
    """What recovery will do, else what it did (``RecoveryAction``); empty for nothing."""
    recovery_message: str = ""
    """The same in a sentence."""
    recoveries: int = 0
    """How often recovery resubmitted the run since a person last submitted it."""
    progress: Progress

    @property
    def will_resubmit(self) -> bool:
        """Whether the run has ended and recovery will resubmit it."""
        return self.state.ended_badly and bool(self.recovery) and RecoveryAction(self.recovery).resubmits


_SHARED_FIELDS = {f.name for f in fields(RunStatus)} - {"recovery", "recovery_message", "recoveries", "progress"}
"""Fields of a :class:`RunStatus` that a record of the store has, too."""


def find_executor(target: str, runs: Path) -> Executor | None:
    """Return the executor of a target; None if nothing was ever submitted to it from here."""
    return LocalExecutor(runs) if target == LOCAL else SlurmExecutor.of(runs, target)


def refresh(store: Store, runs: Path, *, fresh: bool = False) -> list[IngestProblem]:
    """Ingest new files, then update every live attempt with the status that its executor reports.

    ``fresh``: query Slurm even if it answered a moment ago. Returns the files that could not be ingested.
    """
    unread = _create_unknown_run_folders(store, runs)
    problems = ingest.collect(store, runs).problems
    updates = []
    by_target: dict[str, list[submissions.AttemptRecord]] = {}
    for record in submissions.live_attempts(store):
        by_target.setdefault(record.target, []).append(record)
    for target, records in by_target.items():
        executor = find_executor(target, runs)
        if executor is None:
            continue
        attempts = [Attempt.of(runs, record) for record in records]
        found = executor.status(attempts, fresh=fresh)
        for record, attempt, status in zip(records, attempts, found, strict=True):
            job_id = read_job_id(attempt.directory) or status.job_id or record.job_id
            new = (status.state, job_id, status.reason, status.message)
            if new != (record.state, record.job_id, record.reason, record.message):
                updates.append(submissions.StatusUpdate(record.run_id, record.attempt, *new))
    if updates:
        submissions.update_statuses(store, updates)
        if any(not update.state.live for update in updates):
            problems = ingest.collect(store, runs).problems
    return unread + problems


def _create_unknown_run_folders(store: Store, runs: Path) -> list[IngestProblem]:
    """Create the folders of waiting Slurm tasks that the store does not know, as it is new; return what failed."""
    arrays = ArrayFolder(runs)
    records = arrays.read()
    known = submissions.known_tokens(store) if records else set()
    problems = []
    for record in records:
        unknown = [index for index, task in enumerate(record.tasks) if task.token not in known]
        try:
            if unknown:
                create_run_folders(arrays.of(record), unknown)
        except (OSError, ValueError) as error:
            problems.append(attempt_files.IngestProblem.of(arrays.of(record), error))
    return problems


def statuses(store: Store, runs: Path, assessments: Mapping[str, Assessment] | None = None) -> list[RunStatus]:
    """Return every run of the store, as the last :func:`refresh` left it, with the progress of running ones."""
    known = assess_runs(store, runs) if assessments is None else assessments
    found = []
    for record in sorted(queries.run_records(store).values(), key=lambda r: (r.experiment, r.label, r.run_id)):
        directory = RunDir.of(runs, record.run_id).attempt(record.attempt)
        values: dict[str, Any] = {name: getattr(record, name) for name in _SHARED_FIELDS}
        if a := known.get(record.run_id):
            values |= {"recovery": a.action, "recovery_message": a.message, "recoveries": a.recoveries}
        progress = read_progress(directory) if record.state is State.RUNNING else Progress()
        found.append(RunStatus(**values, progress=progress))
    return found


def read_job_id(directory: AttemptDir) -> str | None:
    """Return the job id that the attempt's own files have."""
    job_id = read_object_or_empty(directory.submission).get("job_id")
    return None if job_id is None else str(job_id)


def read_progress(directory: AttemptDir) -> Progress:
    """Return what rank 0 last wrote; an empty progress if the file is missing or damaged."""
    data = read_object_or_empty(directory.progress(0))
    numbers = {name: data.get(name) for name in ("epoch", "epochs", "step", "steps")}
    written_at = _number(data.get("time"))
    return Progress(
        phase=str(data.get("phase", "")),
        **{name: value if isinstance(value, int) else None for name, value in numbers.items()},
        samples_per_s=_number(data.get("samples_per_s")),
        silent_s=None if written_at is None else max(0.0, time.time() - written_at),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
