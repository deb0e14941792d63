"""What was sent, as the store knows it: intents before a submission, then what witnesses say of each attempt.

An intent is committed before anything is sent, under the database's write lock. Two submits at once therefore never
send the same run twice, and a submit that is killed leaves a token by which the next command finds its job.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import and_, exists, func, insert, select, true, update

from db.engine import Store
from db.models import attempts, results, runs
from db.rows import canonical_json, run_row, upsert
from workloads.contract import RunSpec, State
from workloads.rundir import RunDir

_newer = attempts.alias()
_LIVE = [state.value for state in State if state.live]

_NEWEST = select(attempts.c.run_id, attempts.c.attempt, attempts.c.state).where(
    attempts.c.attempt
    == select(func.max(_newer.c.attempt)).where(_newer.c.run_id == attempts.c.run_id).scalar_subquery()
)
"""Each run's newest attempt."""


@dataclass(frozen=True, slots=True)
class Intent:
    """Leave to send one attempt of a run. ``submission.json`` repeats all of it."""

    token: str
    """Unique; goes into the job, so that it can be found again."""
    run_id: str
    attempt: int
    submitted_at: str
    """UTC, ISO 8601."""


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """An attempt as the store has it."""

    run_id: str
    label: str
    attempt: int
    token: str | None
    target: str
    state: State
    reason: str
    message: str
    job_id: str | None
    submitted_at: str | None
    started_at: str | None
    time_limit_s: int | None
    shape: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Mark:
    """What a witness says of an attempt. ``None`` leaves what the store has."""

    run_id: str
    attempt: int
    state: State
    job_id: str | None = None
    reason: str | None = None
    message: str | None = None
    ended_at: str | None = None


def record_intents(
    store: Store,
    runs_folder: Path,
    wanted: Sequence[tuple[RunSpec, Mapping[str, Any]]],
    target: str,
    *,
    newest_known: Mapping[str, int] | None = None,
) -> list[Intent]:
    """Record that these runs are about to be sent, in one transaction.

    A run that has a live attempt is passed over, so is one that got a newer attempt than the caller knew of: somebody
    else sent it meanwhile. What is returned may be sent, and nothing else.

    Args:
        store: open for writing.
        runs_folder: where attempts that the store does not know yet may lie; their numbers are not used again.
        wanted: each run with its resource shape.
        target: ``local`` or the cluster's name.
        newest_known: run id to newest attempt when the plan was made, 0 or absent for none.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    intents = []
    with store.write() as connection:
        known = {run_id: (attempt, State(state)) for run_id, attempt, state in connection.execute(_NEWEST)}
        run_rows, attempt_rows = [], []
        for spec, shape in wanted:
            newest, state = known.get(spec.run_id, (0, State.PLANNED))
            if state.live or (newest_known is not None and newest > newest_known.get(spec.run_id, 0)):
                continue
            on_disk = RunDir.of(runs_folder, spec.run_id).attempts()
            attempt = max(newest, on_disk[-1].number if on_disk else 0) + 1
            intent = Intent(uuid.uuid4().hex[:16], spec.run_id, attempt, now)
            intents.append(intent)
            known[spec.run_id] = (attempt, State.SUBMITTING)
            run_rows.append(run_row(spec))
            attempt_rows.append(
                {
                    "run_id": spec.run_id,
                    "attempt": attempt,
                    "token": intent.token,
                    "target": target,
                    "state": State.SUBMITTING.value,
                    "reason": "",
                    "message": "",
                    "submitted_at": now,
                    "time_limit_s": spec.execution.time_limit_s,
                    "shape": canonical_json(shape),
                }
            )
        if intents:
            upsert(connection, runs, run_rows)
            connection.execute(insert(attempts), attempt_rows)
    return intents


def mark(
    store: Store,
    run_id: str,
    attempt: int,
    state: State,
    *,
    job_id: str | None = None,
    reason: str | None = None,
    message: str | None = None,
    ended_at: str | None = None,
) -> bool:
    """Record what a witness says of one attempt; returns whether the store took it (see :func:`mark_all`)."""
    return mark_all(store, [Mark(run_id, attempt, state, job_id, reason, message, ended_at)]) == 1


def mark_all(store: Store, marks: Iterable[Mark]) -> int:
    """Record what witnesses say of attempts, in one transaction; returns how many the store took.

    The job's own result has the last word: an attempt that has one keeps its state. A live state does not bring an
    ended attempt back to life, except a lost one.
    """
    taken = 0
    with store.write() as connection:
        for m in marks:
            said = {"job_id": m.job_id, "reason": m.reason, "message": m.message, "ended_at": m.ended_at}
            here = and_(attempts.c.run_id == m.run_id, attempts.c.attempt == m.attempt)
            has_result = exists().where(results.c.run_id == attempts.c.run_id, results.c.attempt == attempts.c.attempt)
            reachable = attempts.c.state.in_([*_LIVE, State.LOST.value]) if m.state.live else true()
            done = connection.execute(
                update(attempts)
                .where(here, ~has_result, reachable)
                .values(state=m.state.value, **{k: v for k, v in said.items() if v is not None})
            )
            taken += done.rowcount
    return taken


def live(store: Store) -> list[AttemptRecord]:
    """Attempts that may still be going on, oldest submission first."""
    with store.read() as connection:
        rows = connection.execute(
            select(attempts, runs.c.label)
            .join(runs, runs.c.run_id == attempts.c.run_id)
            .where(attempts.c.state.in_(_LIVE))
            .order_by(attempts.c.submitted_at, attempts.c.run_id)
        )
        return [
            AttemptRecord(
                run_id=row.run_id,
                label=row.label,
                attempt=row.attempt,
                token=row.token,
                target=row.target,
                state=State(row.state),
                reason=row.reason,
                message=row.message,
                job_id=row.job_id,
                submitted_at=row.submitted_at,
                started_at=row.started_at,
                time_limit_s=row.time_limit_s,
                shape=json.loads(row.shape),
            )
            for row in rows
        ]
