"""The tables of the store, derived from the contract so that a field, its file key and its column have one name.

Core tables rather than mapped classes: every command that plans or shows something opens the store, importing the ORM
costs it a tenth of a second, and rows move in bulk. Names and types of ``runs`` and ``results`` come from the
dataclasses; the migrations hold what each revision created, and a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    column,
    event,
    table,
)
from sqlalchemy.types import TypeEngine

from workloads.contract import RunResult, TrainConfig

metadata = MetaData()

_TYPES: dict[str, type[TypeEngine[Any]]] = {
    "str": Text,
    "Hardware": Text,
    "int": BigInteger,
    "float": Double,
    "bool": Boolean,
}

JSON_COLUMNS = frozenset({"strategy_options", "shape", "nonfinite", "provenance", "recovery"})
"""Columns that hold an object as canonical JSON text (sorted keys, no spaces)."""

JSON_LISTS = frozenset({"balance_applied"})
"""Columns that hold a list likewise."""


def _columns(kind: type[Any], without: Iterable[str] = ()) -> list[Column[Any]]:
    """One column for each field of a dataclass; dicts and lists become JSON text, ``| None`` becomes nullable."""
    columns = []
    for f in fields(kind):
        if f.name not in set(without):
            base = str(f.type).removesuffix(" | None")
            type_ = Text if f.name in JSON_COLUMNS | JSON_LISTS else _TYPES[base]
            columns.append(Column(f.name, type_, nullable=base != f.type))
    return columns


runs = Table(
    "runs",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("label", Text, nullable=False),
    Column("experiment", Text, nullable=False),
    *_columns(TrainConfig),
    sqlite_with_rowid=False,
)
"""One row a run."""

attempts = Table(
    "attempts",
    metadata,
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
    Column("shape", Text, nullable=False),
    Column("recovery", Text),
    PrimaryKeyConstraint("run_id", "attempt"),
    sqlite_with_rowid=False,
)
"""One row a submission of a run. ``recovery``: why it was sent again by itself; null where people sent it."""


def _of_attempt() -> list[Column[Any] | ForeignKeyConstraint]:
    return [
        Column("run_id", Text, nullable=False),
        Column("attempt", BigInteger, nullable=False),
        ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"]),
    ]


results = Table(
    "results",
    metadata,
    *_of_attempt(),
    *_columns(RunResult, without={"run_id", "attempt", "per_class", "memory_by_rank"}),
    Column("code_digest", Text),
    Column("packages_digest", Text),
    PrimaryKeyConstraint("run_id", "attempt"),
    sqlite_with_rowid=False,
)
"""One row a ``result.json``; its lists are the tables ``classes`` and ``ranks``."""

epochs = Table(
    "epochs",
    metadata,
    *_of_attempt(),
    Column("epoch", BigInteger, nullable=False),
    Column("steps", BigInteger),
    Column("train_loss", Double),
    Column("test_loss", Double),
    Column("test_accuracy", Double),
    Column("epoch_time_s", Double),
    Column("evaluate_s", Double),
    Column("samples_per_s", Double),
    Column("lr", Double),
    Column("allocated_memory_bytes", BigInteger),
    Column("peak_memory_bytes", BigInteger),
    Column("diverged", Boolean, nullable=False),
    PrimaryKeyConstraint("run_id", "attempt", "epoch"),
    sqlite_with_rowid=False,
)
"""One row an epoch of an attempt. ``diverged``: its training or test loss was NaN or infinite, and is null here."""

classes = Table(
    "classes",
    metadata,
    *_of_attempt(),
    Column("class_index", BigInteger, nullable=False),
    Column("class_name", Text, nullable=False),
    Column("precision", Double),
    Column("recall", Double),
    Column("f1", Double),
    Column("support", BigInteger),
    PrimaryKeyConstraint("run_id", "attempt", "class_index"),
    sqlite_with_rowid=False,
)
"""Test metrics of each class of a result."""

ranks = Table(
    "ranks",
    metadata,
    *_of_attempt(),
    Column("rank", BigInteger, nullable=False),
    Column("allocated_memory_bytes", BigInteger),
    Column("peak_memory_bytes", BigInteger),
    PrimaryKeyConstraint("run_id", "attempt", "rank"),
    sqlite_with_rowid=False,
)
"""Memory of each rank of a result."""

ingested = Table(
    "ingested",
    metadata,
    Column("path", Text, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("mtime_ns", BigInteger, nullable=False),
    Column("read_bytes", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
"""Bookkeeping of ``collect``: each file as it was when it was last read, and how far."""

CONTENT = (runs, attempts, results, epochs, classes, ranks)
"""The tables that the run directories determine, parents before children."""


def _summary_parts() -> list[tuple[str, Column[Any]]]:
    """(SQL expression, column) of the view ``summary``."""
    of_attempt = ["target", "job_id", "submitted_at", "started_at", "ended_at", "time_limit_s"]
    measured = [
        c
        for c in results.c
        if c.name not in {"run_id", "attempt", "state", "reason", "message", "started_at", "ended_at", "provenance"}
    ]
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
        *((f"s.{c.name}", c) for c in measured),
    ]


SUMMARY_SQL = (
    "CREATE VIEW summary AS SELECT "  # noqa: S608 (names of columns)
    + ", ".join(f"{expression} AS {c.name}" for expression, c in _summary_parts())
    + " FROM runs r"
    " LEFT JOIN attempts a ON a.run_id = r.run_id"
    " AND a.attempt = (SELECT max(n.attempt) FROM attempts n WHERE n.run_id = r.run_id)"
    " LEFT JOIN results s ON s.run_id = r.run_id"
    " AND s.attempt = (SELECT max(n.attempt) FROM results n WHERE n.run_id = r.run_id AND n.state = 'succeeded')"
)
"""One row a run: its fields, the state of its newest attempt, and what its newest successful attempt measured."""

CURVES_SQL = (
    "CREATE VIEW curves AS SELECT e.* FROM epochs e"
    " WHERE e.attempt = (SELECT max(n.attempt) FROM epochs n WHERE n.run_id = e.run_id AND n.epoch = e.epoch)"
)
"""The epochs of each run; where a later attempt ran an epoch again, only the later row."""

summary = table("summary", *(column(c.name, c.type) for _, c in _summary_parts()))

for _view in (SUMMARY_SQL, CURVES_SQL):
    event.listen(metadata, "after_create", DDL(_view))  # type: ignore[no-untyped-call]
