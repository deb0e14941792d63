"""What the other parts ask the store."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select

from db.engine import Store
from db.models import summary
from workloads.contract import Hardware, State


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as the store has it: the state of its newest attempt, and what its newest successful one was made from."""

    run_id: str
    label: str
    experiment: str
    state: State
    """``planned`` when it has no attempt."""
    attempt: int
    """Newest; 0 when there is none."""
    reason: str
    message: str
    job_id: str | None
    target: str | None
    code_digest: str | None
    packages_digest: str | None
    dataset_digest: str | None
    total_time_s: float | None
    gpus: int


@dataclass(frozen=True, slots=True)
class Duration:
    """How long a successful run took, for estimates."""

    model: str
    dataset: str
    strategy: str
    hardware: str
    epochs: int
    steps: int | None
    total_time_s: float


def run_states(store: Store) -> dict[str, RunRecord]:
    """Every run by run id, in order of run id."""
    names = [name for name in RunRecord.__dataclass_fields__ if name != "gpus"]
    with store.read() as connection:
        rows = connection.execute(select(*(summary.c[n] for n in names), summary.c.hardware).order_by(summary.c.run_id))
        records = {}
        for row in rows:
            values = {name: getattr(row, name) for name in names}
            values |= {"state": State(row.state), "attempt": row.attempt or 0}
            records[row.run_id] = RunRecord(**values, gpus=Hardware.parse(row.hardware).gpus)
        return records


def durations(store: Store) -> list[Duration]:
    """Measured runs, in order of run id."""
    with store.read() as connection:
        rows = connection.execute(
            select(*(summary.c[name] for name in Duration.__dataclass_fields__))
            .where(summary.c.total_time_s.is_not(None))
            .order_by(summary.c.run_id)
        )
        return [Duration(*row) for row in rows]
