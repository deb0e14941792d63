"""What was sent, as the store knows it: intents before a submission, then what witnesses say of each attempt.

An intent is committed before anything is sent, under the database's write lock. Two submits at once therefore never
send the same run twice, and a submit that is killed leaves a token by which the next command finds its job.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    delete,
    func,
    or_,
    select,
)

from db.connect import Store
from db.models import attempts, runs
from db.rows import canonical_json, run_rows, upsert
from workloads.contract import RANK_LOST, RecoveryRecord, ResourceShape, RunSpec, State
from workloads.files.run_dir import newest_attempt

_newer = attempts.alias()
_LIVE = [state.value for state in State if state.live]
_ENDED_BADLY = [state.value for state in State if state.ended_badly]

_NEWEST = select(attempts.c.run_id, attempts.c.attempt, attempts.c.state).where(
    attempts.c.attempt
    == select(func.max(_newer.c.attempt)).where(_newer.c.run_id == attempts.c.run_id).scalar_subquery()
)
"""Each run's newest attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """An attempt as the store has it."""

    run_id: str
    label: str
    attempt: int
    token: str | None
    """Unique; the job carries it, so that an interrupted submission is found again."""
    target: str
    state: State
    reason: str = ""
    message: str = ""
    job_id: str | None = None
    submitted_at: str | None = None
    """UTC, ISO 8601."""
    started_at: str | None = None
    time_limit_s: int | None = None
    shape: ResourceShape = field(default_factory=ResourceShape)
    recovery: RecoveryRecord | None = None
    """Why it was sent by itself, and what was changed for it; None where people sent it."""


@dataclass(frozen=True, slots=True)
class StatusUpdate:
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
    wanted: Sequence[tuple[RunSpec, ResourceShape]],
    target: str,
    *,
    newest_known: Mapping[str, int] | None = None,
    recoveries: Mapping[str, RecoveryRecord] | None = None,
) -> list[AttemptRecord]:
    """Record that these runs are about to be sent, in one transaction.

    A run that has a live attempt is passed over, so is one that got a newer attempt than the caller knew of: somebody
    else sent it meanwhile. What is returned may be sent, and nothing else.

    Args:
        store: open for writing.
        runs_folder: where attempts that the store does not know yet may lie; their numbers are not used again.
        wanted: each run with its resource shape.
        target: ``local`` or the cluster's name.
        newest_known: run id to newest attempt when the plan was made, 0 or absent for none.
        recoveries: run id to why it is sent again by itself; absent where people send it.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    intents: list[AttemptRecord] = []
    specs: list[RunSpec] = []
    with store.write() as connection:
        known = _newest(connection)
        for spec, shape in wanted:
            newest, state = known.get(spec.run_id, _NONE)
            if _is_taken(newest, state, spec.run_id, newest_known):
                continue
            intent = AttemptRecord(
                run_id=spec.run_id,
                label=spec.label,
                attempt=max(newest, newest_attempt(runs_folder, spec.run_id)) + 1,
                token=os.urandom(8).hex(),
                target=target,
                state=State.SUBMITTING,
                submitted_at=now,
                time_limit_s=spec.execution.time_limit_s,
                shape=shape,
                recovery=(recoveries or {}).get(spec.run_id),
            )
            known[spec.run_id] = (intent.attempt, State.SUBMITTING)
            intents.append(intent)
            specs.append(spec)
        if intents:
            upsert(connection, runs, run_rows(specs))
            shapes = {shape: canonical_json(shape.to_json()) for shape in {intent.shape for intent in intents}}
            upsert(connection, attempts, [_attempt_row(intent, shapes) for intent in intents])
    return intents


def _attempt_row(intent: AttemptRecord, shapes: Mapping[ResourceShape, str]) -> tuple[Any, ...]:
    """The row of an attempt that has not started; ``shapes`` are the texts of the column ``shape``."""
    recovery = canonical_json(intent.recovery.to_json()) if intent.recovery else None
    values = {"state": intent.state.value, "shape": shapes[intent.shape], "recovery": recovery}
    names = [column.name for column in attempts.columns]
    return tuple(values[name] if name in values else getattr(intent, name, None) for name in names)


def already_submitted(store: Store, run_ids: Iterable[str], newest_known: Mapping[str, int] | None = None) -> set[str]:
    """Those runs that :func:`record_intents` would pass over now."""
    with store.read() as connection:
        known = _newest(connection)
    return {run_id for run_id in run_ids if _is_taken(*known.get(run_id, _NONE), run_id, newest_known)}


_NONE = (0, State.PLANNED)
"""The newest attempt of a run that was never sent."""


def _newest(connection: Connection) -> dict[str, tuple[int, State]]:
    return {run_id: (attempt, State(state)) for run_id, attempt, state in connection.execute(_NEWEST)}


def _is_taken(newest: int, state: State, run_id: str, newest_known: Mapping[str, int] | None) -> bool:
    return state.live or (newest_known is not None and newest > newest_known.get(run_id, 0))


def withdraw_intents(store: Store, tokens: Sequence[str]) -> None:
    """Take back intents that nobody took up: it is as if they had not been."""
    with store.write() as connection:
        never_sent = and_(attempts.c.state == State.SUBMITTING.value, attempts.c.token.in_(tokens))
        connection.execute(delete(attempts).where(never_sent))


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
    """Record what a witness says of one attempt; returns whether the store took it (see :func:`update_statuses`)."""
    return update_statuses(store, [StatusUpdate(run_id, attempt, state, job_id, reason, message, ended_at)]) == 1


def update_statuses(store: Store, marks: Iterable[StatusUpdate]) -> int:
    """Record what witnesses say of attempts, in one transaction; returns how many the store took.

    The job's own result has the last word: an attempt that has one keeps its state, unless the rank that wrote it only
    saw its peer go. A live state does not bring an ended attempt back to life, except a lost one.
    """
    said = [
        {
            "run_id": m.run_id,
            "attempt": m.attempt,
            "state": m.state.value,
            "ends": not m.state.live,
            **{name: getattr(m, name) for name in _SAID},
        }
        for m in marks
    ]
    if not said:
        return 0
    with store.write() as connection:
        return connection.exec_driver_sql(_mark_sql(connection.dialect.name), said).rowcount


_SAID = ("job_id", "reason", "message", "ended_at")
"""Fields of a mark that leave alone what the store has where they are None."""


@cache
def _mark_sql(dialect: str) -> str:
    """One statement for any number of marks. Straight to the driver: SQLAlchemy would take as long again for each."""
    given = ":{}".format if dialect == "sqlite" else "%({})s".format
    kept = ", ".join(f"{name} = coalesce({given(name)}, {name})" for name in _SAID)
    reachable = ", ".join(f"'{state}'" for state in (*_LIVE, State.LOST.value))
    return (
        f"UPDATE attempts SET state = {given('state')}, {kept} "  # noqa: S608
        f"WHERE run_id = {given('run_id')} AND attempt = {given('attempt')} "
        f"AND ({given('ends')} OR state IN ({reachable})) "
        "AND NOT EXISTS (SELECT 1 FROM results WHERE results.run_id = attempts.run_id "
        f"AND results.attempt = attempts.attempt AND results.reason <> '{RANK_LOST}')"
    )


def live_attempts(store: Store) -> list[AttemptRecord]:
    """Attempts that may still be going on, oldest submission first."""
    return _records(store, attempts.c.state.in_(_LIVE), (attempts.c.submitted_at, attempts.c.run_id))


def known_tokens(store: Store) -> set[str]:
    """Of every attempt that the store knows."""
    with store.read() as connection:
        return set(connection.execute(select(attempts.c.token).where(attempts.c.token.is_not(None))).scalars())


def attempt_histories(store: Store) -> dict[str, list[AttemptRecord]]:
    """All attempts, oldest first, of each run whose newest one ended without a result or was sent by recovery."""
    newest = select(attempts.c.run_id).where(
        attempts.c.attempt
        == select(func.max(_newer.c.attempt)).where(_newer.c.run_id == attempts.c.run_id).scalar_subquery(),
        or_(attempts.c.state.in_(_ENDED_BADLY), attempts.c.recovery.is_not(None)),
    )
    found: dict[str, list[AttemptRecord]] = {}
    for record in _records(store, attempts.c.run_id.in_(newest), (attempts.c.run_id, attempts.c.attempt)):
        found.setdefault(record.run_id, []).append(record)
    return found


def _records(store: Store, which: ColumnElement[bool], order: Iterable[ColumnElement[Any]]) -> list[AttemptRecord]:
    names = [name for name in AttemptRecord.__dataclass_fields__ if name not in {"label", "state", "shape", "recovery"}]
    query = select(attempts, runs.c.label).join(runs, runs.c.run_id == attempts.c.run_id).where(which).order_by(*order)
    with store.read() as connection:
        return [
            AttemptRecord(
                **{name: getattr(row, name) for name in names},
                label=row.label,
                state=State(row.state),
                shape=_shape(row.shape),
                recovery=None if row.recovery is None else RecoveryRecord.from_json(json.loads(row.recovery)),
            )
            for row in connection.execute(query)
        ]


@lru_cache(maxsize=1024)
def _shape(text: str) -> ResourceShape:
    """A column's shape; many attempts share few."""
    return ResourceShape.from_json(json.loads(text))
