"""Attempts as the store knows them: intents recorded before a submission, then the status of each attempt.

An intent is committed before its job is submitted, under the database's write lock. So two submits at once never submit
the same run twice, and a submit that is killed leaves a token by which the next command finds its job.
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

from sqlalchemy import ColumnElement, Connection, delete, func, or_, select

from db.connect import Store
from db.models import attempts, runs
from db.rows import run_rows, typed_all, upsert
from workloads.contract import RANK_LOST, RecoveryRecord, ResourceShape, RunSpec, State
from workloads.contract.flat import flat, from_flat
from workloads.files.run_dir import newest_attempt

_LIVE = [state.value for state in State if state.live]
_ENDED_BADLY = [state.value for state in State if state.ended_badly]

_same_run = attempts.alias()
_IS_NEWEST = (
    attempts.c.attempt
    == select(func.max(_same_run.c.attempt)).where(_same_run.c.run_id == attempts.c.run_id).scalar_subquery()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """An attempt as the store has it; fields mean the same as in :class:`workloads.contract.Submission`."""

    run_id: str
    label: str
    attempt: int
    token: str | None
    target: str
    state: State
    reason: str = ""
    message: str = ""
    job_id: str | None = None
    submitted_at: str | None = None
    started_at: str | None = None
    time_limit_s: int | None = None
    shape: ResourceShape = field(default_factory=ResourceShape)
    recovery: RecoveryRecord | None = None


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    """The state that was observed of an attempt. ``None`` keeps what the store has."""

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
    """Record that these runs are about to be submitted, in one transaction; return the intents that may be submitted.

    Runs with a live attempt are skipped, and so are runs with a newer attempt than the caller knew of: another command
    submitted those in the meantime.

    Args:
        store: open for writing.
        runs_folder: may have attempts that the store does not know; their numbers are not used again.
        wanted: each run with its resource shape.
        target: ``local`` or the cluster's name.
        newest_known: run id to its newest attempt when the plan was created, 0 or absent for none.
        recoveries: run id to why recovery resubmits it; absent where a person submits it.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    intents: list[AttemptRecord] = []
    specs: list[RunSpec] = []
    with store.write() as connection:
        known = _newest_attempts(connection)
        for spec, shape in wanted:
            newest, state = known.get(spec.run_id, _NONE)
            if _is_submitted(newest, state, spec.run_id, newest_known):
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
            upsert(connection, attempts, typed_all(attempts, list(map(_attempt_values, intents))))
    return intents


def _attempt_values(intent: AttemptRecord) -> dict[str, Any]:
    recovery = flat(intent.recovery) if intent.recovery else None
    return {**flat(intent), "shape": intent.shape.to_json(), "recovery": recovery}


def already_submitted(store: Store, run_ids: Iterable[str], newest_known: Mapping[str, int] | None = None) -> set[str]:
    """Return those runs for which :func:`record_intents` would record nothing now."""
    with store.read() as connection:
        known = _newest_attempts(connection)
    return {run_id for run_id in run_ids if _is_submitted(*known.get(run_id, _NONE), run_id, newest_known)}


_NONE = (0, State.PLANNED)
"""Number and state of the newest attempt where a run has none."""


def _newest_attempts(connection: Connection) -> dict[str, tuple[int, State]]:
    query = select(attempts.c.run_id, attempts.c.attempt, attempts.c.state).where(_IS_NEWEST)
    return {run_id: (attempt, State(state)) for run_id, attempt, state in connection.execute(query)}


def _is_submitted(newest: int, state: State, run_id: str, newest_known: Mapping[str, int] | None) -> bool:
    return state.live or (newest_known is not None and newest > newest_known.get(run_id, 0))


def withdraw_intents(store: Store, tokens: Sequence[str]) -> None:
    """Delete intents that were not submitted."""
    with store.write() as connection:
        pending = attempts.c.state == State.SUBMITTING.value
        connection.execute(delete(attempts).where(pending, attempts.c.token.in_(tokens)))


def update_statuses(store: Store, updates: Iterable[StatusUpdate]) -> int:
    """Record new states of attempts, in one transaction; return how many the store accepted.

    An attempt that has a result keeps its state, unless the rank that wrote the result only lost its peer. A live state
    does not replace an ended one, except a lost one.
    """
    rows = [{**flat(update), "state": update.state.value, "ends": not update.state.live} for update in updates]
    if not rows:
        return 0
    with store.write() as connection:
        return connection.exec_driver_sql(_update_sql(connection.dialect.name), rows).rowcount


@cache
def _update_sql(dialect: str) -> str:
    """Return one statement for all updates, which the driver runs: SQLAlchemy's own takes as long again per row."""
    value = ":{}".format if dialect == "sqlite" else "%({})s".format
    optional = ", ".join(
        f"{name} = coalesce({value(name)}, {name})" for name in ("job_id", "reason", "message", "ended_at")
    )
    replaceable = ", ".join(f"'{state}'" for state in (*_LIVE, State.LOST.value))
    return (
        f"UPDATE attempts SET state = {value('state')}, {optional} "  # noqa: S608
        f"WHERE run_id = {value('run_id')} AND attempt = {value('attempt')} "
        f"AND ({value('ends')} OR state IN ({replaceable})) "
        "AND NOT EXISTS (SELECT 1 FROM results WHERE results.run_id = attempts.run_id "
        f"AND results.attempt = attempts.attempt AND results.reason <> '{RANK_LOST}')"
    )


def live_attempts(store: Store) -> list[AttemptRecord]:
    """Return the attempts whose state is live, oldest submission first."""
    return _records(store, attempts.c.state.in_(_LIVE), (attempts.c.submitted_at, attempts.c.run_id))


def known_tokens(store: Store) -> set[str]:
    """Return the tokens of all attempts."""
    with store.read() as connection:
        return set(connection.execute(select(attempts.c.token).where(attempts.c.token.is_not(None))).scalars())


def attempt_histories(store: Store) -> dict[str, list[AttemptRecord]]:
    """Return all attempts, oldest first, of each run whose newest ended without a result or was resubmitted."""
    chosen = or_(attempts.c.state.in_(_ENDED_BADLY), attempts.c.recovery.is_not(None))
    run_ids = select(attempts.c.run_id).where(_IS_NEWEST, chosen)
    found: dict[str, list[AttemptRecord]] = {}
    for record in _records(store, attempts.c.run_id.in_(run_ids), (attempts.c.run_id, attempts.c.attempt)):
        found.setdefault(record.run_id, []).append(record)
    return found


def _records(store: Store, where: ColumnElement[bool], order: Iterable[ColumnElement[Any]]) -> list[AttemptRecord]:
    columns = [attempts.c[name] for name in AttemptRecord.__dataclass_fields__ if name != "label"]
    query = select(*columns, runs.c.label).join(runs, runs.c.run_id == attempts.c.run_id).where(where).order_by(*order)
    with store.read() as connection:
        return [_record(**row) for row in connection.execute(query).mappings()]


def _record(*, state: str, shape: str, recovery: str | None, **values: Any) -> AttemptRecord:
    parsed = None if recovery is None else from_flat(RecoveryRecord, json.loads(recovery))
    return AttemptRecord(**values, state=State(state), shape=_shape(shape), recovery=parsed)


@lru_cache(maxsize=1024)
def _shape(text: str) -> ResourceShape:
    """Parse the column ``shape``, cached: thousands of attempts have a few shapes."""
    return from_flat(ResourceShape, json.loads(text))
