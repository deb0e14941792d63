"""Witnesses -> state: brings the store up to date with what queues, supervisors and run directories say.

What a witness means is decided by each executor's pure table: ``executors.witnesses`` for local mode,
``executors.slurm_states`` for Slurm. An attempt whose target has no executor here keeps the state that the store has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.backends.base import Executor
from orchestrator.backends.local.executor import LocalExecutor
from orchestrator.backends.slurm.executor import SlurmExecutor
from orchestrator.backends.slurm.records import ArrayFolder
from orchestrator.cluster.resources import LOCAL
from orchestrator.tracking.assess import Assessment, assess_runs
from orchestrator.tracking.recovery import RecoveryAction
from workloads.contract import State
from workloads.files.json_file import read_json
from workloads.files.run_dir import AttemptDir, RunDir

if TYPE_CHECKING:
    from db.attempt_files import IngestProblem
    from db.connect import Store
    from db.submissions import AttemptRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a running attempt is, by its rank 0."""

    phase: str = ""
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    samples_per_s: float | None = None
    silent_s: float | None = None
    """Seconds since it last said so."""


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
    """What is to be done about its end, else what was done (``recovery.RecoveryAction``); empty for nothing."""
    recovery_message: str = ""
    """The same in a sentence."""
    recoveries: int = 0
    """How often it was sent again by itself since people last sent it."""
    progress: Progress

    @property
    def will_resubmit(self) -> bool:
        """Whether it has ended, and recovery is to send it again."""
        return self.state.ended_badly and bool(self.recovery) and RecoveryAction(self.recovery).resubmits


def find_executor(target: str, runs: Path) -> Executor | None:
    """What carries out attempts of a target; None when nothing here does."""
    return LocalExecutor(runs) if target == LOCAL else SlurmExecutor.of(runs, target)


def refresh(store: Store, runs: Path, *, fresh: bool = False) -> list[IngestProblem]:
    """Take in what ended, then ask the witnesses about every attempt that may still be going on.

    Args:
        store: open for writing.
        runs: the runs folder.
        fresh: ask them anew, even if they were asked a moment ago.

    Returns:
        Files that could not be taken in.
    """
    from db.ingest import collect
    from db.submissions import StatusUpdate, live_attempts, update_statuses

    unread = _lay_out_unknown(store, runs)
    problems = collect(store, runs).problems
    marks = []
    by_target: dict[str, list[AttemptRecord]] = {}
    for record in live_attempts(store):
        by_target.setdefault(record.target, []).append(record)
    for target, records in by_target.items():
        executor = find_executor(target, runs)
        if executor is None:
            continue
        places = [attempt_dir(runs, record) for record in records]
        asked = [(place, record.token or "", record.state) for place, record in zip(places, records, strict=True)]
        for record, place, found in zip(records, places, executor.status(asked, fresh=fresh), strict=True):
            mark = StatusUpdate(
                record.run_id,
                record.attempt,
                found.state,
                job_id=job_id(place) or found.job_id or record.job_id,
                reason=found.reason,
                message=found.message,
            )
            known = (record.state, record.job_id, record.reason, record.message)
            if (mark.state, mark.job_id, mark.reason, mark.message) != known:
                marks.append(mark)
    if marks:
        update_statuses(store, marks)
        if any(not mark.state.live for mark in marks):
            problems = collect(store, runs).problems
    return unread + problems


def _lay_out_unknown(store: Store, runs: Path) -> list[IngestProblem]:
    """Make the folders of what waits in Slurm and a store does not know that came later; what cannot be made."""
    from db.attempt_files import ingest_problem
    from db.submissions import known_tokens

    arrays = ArrayFolder(runs)
    records = arrays.open()
    known = known_tokens(store) if records else set()
    problems = []
    for record in records:
        unknown = [index for index, task in enumerate(record.tasks) if task.token not in known]
        try:
            if unknown:
                arrays.create_run_folders(record, unknown)
        except (OSError, ValueError) as error:
            problems.append(ingest_problem(arrays.of(record), error))
    return problems


def statuses(store: Store, runs: Path, known: Mapping[str, Assessment] | None = None) -> list[RunStatus]:
    """Every run of the store, as the last :func:`refresh` left it, with the progress of those that run.

    Args:
        store: open.
        runs: the runs folder.
        known: the assess_runs, if somebody has them.
    """
    from db.queries import run_records

    records = sorted(run_records(store).values(), key=lambda record: (record.experiment, record.label, record.run_id))
    recovery: dict[str, dict[str, Any]] = {
        run_id: {
            "recovery": assessment.action,
            "recovery_message": assessment.message,
            "recoveries": assessment.recoveries,
        }
        for run_id, assessment in (assess_runs(store, runs) if known is None else known).items()
    }
    return [
        RunStatus(
            run_id=record.run_id,
            label=record.label,
            experiment=record.experiment,
            state=record.state,
            reason=record.reason,
            message=record.message,
            attempt=record.attempt,
            job_id=record.job_id,
            target=record.target,
            progress=progress(RunDir.of(runs, record.run_id).attempt(record.attempt))
            if record.state is State.RUNNING
            else Progress(),
            **recovery.get(record.run_id, {}),
        )
        for record in records
    ]


def attempt_dir(runs: Path, record: AttemptRecord) -> AttemptDir:
    return RunDir.of(runs, record.run_id).attempt(record.attempt)


def job_id(attempt: AttemptDir) -> str | None:
    """The job id that the attempt's own files have."""
    found = _object(attempt.submission).get("job_id")
    return None if found is None else str(found)


def progress(attempt: AttemptDir) -> Progress:
    """What rank 0 last said; nothing known when it said nothing readable."""
    data = _object(attempt.progress(0))
    at = _number(data.get("time"))
    return Progress(
        phase=str(data.get("phase", "")),
        epoch=_whole(data.get("epoch")),
        epochs=_whole(data.get("epochs")),
        step=_whole(data.get("step")),
        steps=_whole(data.get("steps")),
        samples_per_s=_number(data.get("samples_per_s")),
        silent_s=None if at is None else max(0.0, time.time() - at),
    )


def _object(path: Path) -> Mapping[str, Any]:
    try:
        data = read_json(path)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None
