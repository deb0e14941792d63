"""The tables and views of the store, derived from the contract: a field, its key in files and its column share a name.

Core tables rather than mapped classes: importing SQLAlchemy's ORM costs every command that opens the store a tenth of a
second, and rows move in bulk. ``runs`` has the fields of ``TrainConfig``, ``results`` those of a result, metrics
included. A new database is created from here; ``db.schema`` says what existing ones need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    column,
    table,
)
from sqlalchemy.types import TypeEngine

from workloads.contract import TrainConfig, result_fields

metadata = MetaData()


class JsonObject(Text):
    """An object as canonical JSON text (sorted keys, no spaces)."""


class JsonList(Text):
    """A list as canonical JSON text."""


_TYPES: dict[str, type[TypeEngine[Any]]] = {
    "str": Text,
    "Hardware": Text,
    "int": BigInteger,
    "float": Double,
    "bool": Boolean,
    "dict": JsonObject,
    "Mapping": JsonObject,
    "list": JsonList,
}
"""Column types by what stands before the bracket of an annotation."""


def _columns(annotations: Mapping[str, str]) -> list[Column[Any]]:
    """Return a column for each field; those that may be None are nullable."""
    columns = []
    for name, annotation in annotations.items():
        base = annotation.removesuffix(" | None")
        columns.append(Column(name, _TYPES[base.partition("[")[0]], nullable=base != annotation))
    return columns


def _table(name: str, *columns: Any, key: tuple[str, ...]) -> Table:
    return Table(name, metadata, *columns, PrimaryKeyConstraint(*key), sqlite_with_rowid=False)


def _attempt_table(name: str, *columns: Column[Any], key: str | None = None) -> Table:
    """Create a table whose rows belong to an attempt, several of them where there is a further key."""
    return _table(
        name,
        Column("run_id", Text, nullable=False),
        Column("attempt", BigInteger, nullable=False),
        *columns,
        ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),
        key=("run_id", "attempt", key) if key else ("run_id", "attempt"),
    )


runs = _table(
    "runs",
    Column("run_id", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("experiment", Text, nullable=False),
    *_columns({f.name: str(f.type) for f in fields(TrainConfig)}),
    key=("run_id",),
)

attempts = _table(
    "attempts",
    Column("run_id", Text, ForeignKey("runs.run_id"), nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("token", Text, unique=True),
    Column("target", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("job_id", Text),
    Column("submitted_at", Text),
    Column("started_at", Text),
    Column("ended_at", Text),
    Column("time_limit_s", BigInteger),
    Column("shape", JsonObject, nullable=False),
    Column("recovery", JsonObject),
    key=("run_id", "attempt"),
)
"""``recovery``: why recovery resubmitted the run; null where a person submitted it."""

_OWN_TABLES = {"per_class", "memory_by_rank"}
"""Lists of a result that are rows of ``classes`` and ``ranks``."""

results = _attempt_table(
    "results",
    *_columns({k: v for k, v in result_fields().items() if k not in {"run_id", "attempt"} | _OWN_TABLES}),
    Column("code_digest", Text),
    Column("packages_digest", Text),
)
"""One row per ``result.json``."""

_MEMORY = dict.fromkeys(("allocated_memory_bytes", "peak_memory_bytes"), "int | None")

epochs = _attempt_table(
    "epochs",
    Column("epoch", BigInteger, nullable=False),
    Column("steps", BigInteger),
    *_columns(dict.fromkeys(("train_loss", "test_loss", "test_accuracy"), "float | None")),
    *_columns(dict.fromkeys(("epoch_time_s", "evaluate_s", "samples_per_s", "lr"), "float | None")),
    *_columns(_MEMORY),
    Column("diverged", Boolean, nullable=False),
    key="epoch",
)
"""``diverged``: the epoch's training or test loss was NaN or infinite, and is null here."""

classes = _attempt_table(
    "classes",
    Column("class_index", BigInteger, nullable=False),
    Column("class_name", Text, nullable=False),
    *_columns(dict.fromkeys(("precision", "recall", "f1"), "float | None")),
    Column("support", BigInteger),
    key="class_index",
)
"""Test metrics of each class of a result."""

ranks = _attempt_table("ranks", Column("rank", BigInteger, nullable=False), *_columns(_MEMORY), key="rank")
"""Memory of each rank of a result."""

ingested = _table(
    "ingested",
    Column("path", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("mtime_ns", BigInteger, nullable=False),
    Column("read_bytes", BigInteger, nullable=False),
    key=("path",),
)
"""Each file as it was when ``collect`` last read it, and how far it was read."""

schema_revision = Table("orchestrate_revision", metadata, Column("version_num", String(32), primary_key=True))
"""One row, which Alembic reads and writes: the revision of the schema."""

CONTENT = (runs, attempts, results, epochs, classes, ranks)
"""The tables that follow from the run directories, parents before children."""


def _summary_parts() -> list[tuple[str, Column[Any]]]:
    """Return (SQL expression, column) for each column of the view ``summary``."""
    of_attempt = ["target", "job_id", "submitted_at", "started_at", "ended_at", "time_limit_s"]
    # The state and times shown are the newest attempt's, which may be a later one than the attempt that was measured.
    not_shown = {"run_id", "attempt", "state", "reason", "message", "started_at", "ended_at", "provenance"}
    return [
        *((f"r.{c.name}", c) for c in runs.c),
        (
            "(SELECT min(n.submitted_at) FROM attempts n WHERE n.run_id = r.run_id)",
            Column("first_submitted_at", Text),
        ),
        ("a.attempt", attempts.c.attempt),
        ("coalesce(a.state, 'planned')", attempts.c.state),
        ("coalesce(a.reason, '')", attempts.c.reason),
        ("coalesce(a.message, '')", attempts.c.message),
        *((f"a.{name}", attempts.c[name]) for name in of_attempt),
        ("s.attempt", Column("measured_attempt", BigInteger)),
        *((f"s.{c.name}", c) for c in results.c if c.name not in not_shown),
    ]


VIEWS = {
    # One row per run: its fields, the state of its newest attempt, and what its newest successful attempt measured.
    "summary": "SELECT "  # noqa: S608 (names of columns)
    + ", ".join(f"{expression} AS {c.name}" for expression, c in _summary_parts())
    + " FROM runs r"
    " LEFT JOIN attempts a ON a.run_id = r.run_id"
    " AND a.attempt = (SELECT max(n.attempt) FROM attempts n WHERE n.run_id = r.run_id)"
    " LEFT JOIN results s ON s.run_id = r.run_id"
    " AND s.attempt = (SELECT max(n.attempt) FROM results n WHERE n.run_id = r.run_id AND n.state = 'succeeded')",
    # The epochs of each run; where a later attempt repeated an epoch, the later row only.
    "curves": "SELECT e.* FROM epochs e"
    " WHERE e.attempt = (SELECT max(n.attempt) FROM epochs n WHERE n.run_id = e.run_id AND n.epoch = e.epoch)",
}
"""The query of each view by the view's name."""

summary = table("summary", *(column(c.name, c.type) for _, c in _summary_parts()))
