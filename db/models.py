"""The tables and views of the store, derived from the contract: a field, its key in files and its column share a name.

Core tables rather than mapped classes: importing SQLAlchemy's ORM costs every command that opens the store a tenth of a
second, and rows move in bulk. ``runs`` has the fields of ``TrainConfig``, ``results`` those of a result, metrics
included. A new database is created from here; ``db.schema`` says what existing ones need.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

from workloads.contract import TrainConfig, result_fields

metadata = sa.MetaData()


class JsonObject(sa.Text):
    """An object as canonical JSON text (sorted keys, no spaces)."""


class JsonList(sa.Text):
    """A list as canonical JSON text."""


_TYPES: dict[str, type[TypeEngine[Any]]] = {
    "str": sa.Text,
    "Hardware": sa.Text,
    "int": sa.BigInteger,
    "float": sa.Double,
    "bool": sa.Boolean,
    "dict": JsonObject,
    "list": JsonList,
}
"""Column types by what stands before the bracket of an annotation."""


def _columns(**annotations: str) -> list[sa.Column[Any]]:
    """Return a column for each field; those that may be None are nullable."""
    columns = []
    for name, annotation in annotations.items():
        base = annotation.removesuffix(" | None")
        columns.append(sa.Column(name, _TYPES[base.partition("[")[0]], nullable=base != annotation))
    return columns


def _table(name: str, *columns: Any, key: tuple[str, ...]) -> sa.Table:
    return sa.Table(name, metadata, *columns, sa.PrimaryKeyConstraint(*key), sqlite_with_rowid=False)


def _attempt_table(name: str, *columns: sa.Column[Any], further_key: tuple[str, ...] = ()) -> sa.Table:
    """Create a table whose rows belong to an attempt, several of them where there is a further key."""
    parent = sa.ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.attempt"])
    key = ("run_id", "attempt", *further_key)
    return _table(name, *_columns(run_id="str", attempt="int"), *columns, parent, key=key)


runs = _table(
    "runs",
    *_columns(run_id="str", label="str", experiment="str", **{f.name: str(f.type) for f in fields(TrainConfig)}),
    key=("run_id",),
)

attempts = _table(
    "attempts",
    *_columns(run_id="str", attempt="int"),
    sa.Column("token", sa.Text, unique=True),
    *_columns(target="str", state="str", reason="str", message="str", job_id="str | None"),
    *_columns(submitted_at="str | None", started_at="str | None", ended_at="str | None", time_limit_s="int | None"),
    *_columns(shape="dict", recovery="dict | None"),
    sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
    key=("run_id", "attempt"),
)
"""``recovery``: why recovery resubmitted the run; null where a person submitted it."""

_OWN_TABLES = {"per_class", "memory_by_rank"}
"""Lists of a result that are rows of ``classes`` and ``ranks``."""

results = _attempt_table(
    "results",
    *_columns(**{k: v for k, v in result_fields().items() if k not in {"run_id", "attempt"} | _OWN_TABLES}),
    *_columns(code_digest="str | None", packages_digest="str | None"),
)
"""One row per ``result.json``."""

_MEMORY = dict.fromkeys(("allocated_memory_bytes", "peak_memory_bytes"), "int | None")
_MEASURED = ("train_loss", "test_loss", "test_accuracy", "epoch_time_s", "evaluate_s", "samples_per_s", "lr")

epochs = _attempt_table(
    "epochs",
    *_columns(epoch="int", steps="int | None", **dict.fromkeys(_MEASURED, "float | None"), **_MEMORY, diverged="bool"),
    further_key=("epoch",),
)
"""``diverged``: the epoch's training or test loss was NaN or infinite, and is null here."""

classes = _attempt_table(
    "classes",
    *_columns(class_index="int", class_name="str", precision="float | None", recall="float | None"),
    *_columns(f1="float | None", support="int | None"),
    further_key=("class_index",),
)
"""Test metrics of each class of a result."""

ranks = _attempt_table("ranks", *_columns(rank="int", **_MEMORY), further_key=("rank",))
"""Memory of each rank of a result."""

ingested = _table("ingested", *_columns(path="str", size="int", mtime_ns="int", read_bytes="int"), key=("path",))
"""Each file as it was when ``collect`` last read it, and how far it was read."""

schema_revision = sa.Table("orchestrate_revision", metadata, sa.Column("version_num", sa.String(32), primary_key=True))
"""One row, which Alembic reads and writes: the revision of the schema."""

CONTENT = (runs, attempts, results, epochs, classes, ranks)
"""The tables that follow from the run directories, parents before children."""


def _summary_parts() -> list[tuple[str, sa.ColumnClause[Any]]]:
    """Return (SQL expression, column) for each column of the view ``summary``."""
    first_submitted = "(SELECT min(n.submitted_at) FROM attempts n WHERE n.run_id = r.run_id)"
    of_attempt = ["target", "job_id", "submitted_at", "started_at", "ended_at", "time_limit_s"]
    # The state and times shown are the newest attempt's, which may be a later one than the attempt that was measured.
    not_shown = {"run_id", "attempt", "state", "reason", "message", "started_at", "ended_at", "provenance"}
    return [
        *((f"r.{c.name}", c) for c in runs.c),
        (first_submitted, sa.column("first_submitted_at", sa.Text)),
        ("a.attempt", attempts.c.attempt),
        ("coalesce(a.state, 'planned')", attempts.c.state),
        *((f"coalesce(a.{name}, '')", attempts.c[name]) for name in ("reason", "message")),
        *((f"a.{name}", attempts.c[name]) for name in of_attempt),
        ("s.attempt", sa.column("measured_attempt", sa.BigInteger)),
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

summary = sa.table("summary", *(sa.column(c.name, c.type) for _, c in _summary_parts()))
