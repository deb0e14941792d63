"""Queries of the store: states, durations, summaries, and the user's own SQL."""

from __future__ import annotations

import difflib
import operator
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Text, cast, or_, select, text
from sqlalchemy.exc import SQLAlchemyError

from db.connect import Store
from db.errors import QueryError
from db.models import CONTENT, ingested, summary
from db.rows import count_rows
from workloads.contract import INT64, Hardware, State
from workloads.errors import InputError


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as the store has it: the state of its newest attempt, and the digests of its newest successful one."""

    run_id: str
    label: str
    experiment: str
    state: State
    """``planned`` when it has no attempt."""
    attempt: int
    """Number of the newest; 0 when there is none."""
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
    hardware: Hardware
    epochs: int
    steps: int | None
    total_time_s: float


def run_records(store: Store) -> dict[str, RunRecord]:
    """Return every run by run id, in order of run id."""
    names = [name for name in RunRecord.__dataclass_fields__ if name != "gpus"]
    query = select(summary.c.hardware, *(summary.c[name] for name in names)).order_by(summary.c.run_id)

    def record(*, hardware: str, state: str, attempt: int | None, **values: Any) -> RunRecord:
        return RunRecord(**values, state=State(state), attempt=attempt or 0, gpus=Hardware.parse(hardware).gpus)

    with store.read() as connection:
        return {row["run_id"]: record(**row) for row in connection.execute(query).mappings()}


def durations(store: Store) -> list[Duration]:
    """Return the durations of successful runs, in order of run id."""
    query = select(*(summary.c[name] for name in Duration.__dataclass_fields__))
    query = query.where(summary.c.total_time_s.is_not(None)).order_by(summary.c.run_id)
    with store.read() as connection:
        rows = connection.execute(query).mappings()
        return [Duration(**{**row, "hardware": Hardware.parse(row["hardware"])}) for row in rows]


SUMMARY_COLUMNS: dict[str, type[Any]] = {c.name: c.type.python_type for c in summary.c}
"""Columns of the view ``summary`` in its order, with the type of their values."""

_OPERATORS: dict[str, Callable[[Any, Any], ColumnElement[bool]]] = {
    "!=": ColumnElement.is_distinct_from,  # unlike <>, true where the column is null
    **{"=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
}
_CONDITION = re.compile(r"\s*(\w+)\s*(!=|<=|>=|=|<|>|~)(.*)", re.DOTALL)
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def require_column(name: str, where: str, known: Iterable[str] = SUMMARY_COLUMNS) -> str:
    """Return the name of a column; raise InputError with the nearest one where there is no such column."""
    names = list(known)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"columns: {', '.join(names)}"
    raise InputError(f"no column {name!r}", where=where, hint=hint)


def condition(text: str) -> ColumnElement[bool]:
    """Parse a condition on the view ``summary``: ``lr=0.1``, ``state!=succeeded``, ``label~cnn``; empty means null."""
    where = f"--where {text}"
    _require_utf8(text, where)
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise InputError("not a condition", where=where, hint="KEY=VALUE, with one of = != < <= > >= ~ (contains)")
    name, sign, wanted = match.groups()
    column = summary.c[require_column(name, where)]
    kind = SUMMARY_COLUMNS[name]
    if sign == "~":
        return cast(column, Text).icontains(wanted, autoescape=True)
    if wanted == "" and sign in {"=", "!="}:
        empty = or_(column.is_(None), cast(column, Text) == "")
        return empty if sign == "=" else ~empty
    try:
        value = _BOOLEANS[wanted.strip().lower()] if kind is bool else kind(wanted)
    except (KeyError, ValueError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise InputError(f"{name} is {expected}, not {wanted!r}", where=where) from None
    if kind is int and value not in INT64:
        raise InputError(f"{name} is a whole number of 64 bits, and {value} is larger", where=where)
    return _OPERATORS[sign](column, value)


def _require_utf8(given: str, where: str) -> None:
    """Raise InputError for what no database takes: Python decodes other bytes of an argument as lone surrogates."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise InputError("not valid UTF-8", where=where, hint="write it in UTF-8") from None


def summaries(store: Store, conditions: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of the view ``summary`` that meet all conditions, similar runs next to each other."""
    order = ("experiment", "model", "dataset", "strategy", "hardware", "seed", "repeat", "label", "run_id")
    query = select(summary).where(*(condition(text) for text in conditions)).order_by(*(summary.c[n] for n in order))
    with store.read() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def run_sql(store: Store, sql: str, parameters: Mapping[str, str]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run the user's SQL on a store that is open for reading; return unique column names and the rows.

    A parameter that is written as a plain number is a number, any other is text. Raises :class:`QueryError`.
    """
    where = textwrap.shorten(sql, 80)
    _require_utf8(sql, where)
    for name, value in parameters.items():
        _require_utf8(f"{name}={value}", f"-p {name}={value}")
    with store.read() as connection:
        try:
            if store.is_sqlite:
                values = _ReadNames({name: _number(value) for name, value in parameters.items()})
                found = connection.exec_driver_sql(sql, values)
                _require_known_parameters(where, parameters, values.names)
            else:
                statement = text(sql)
                _require_known_parameters(where, parameters, statement.compile().params.keys())
                # PostgreSQL gives text the type of its context, but does not compare an int with text.
                numbers = {name: _number(value) for name, value in parameters.items()}
                floats = {name: number for name, number in numbers.items() if isinstance(number, float)}
                found = connection.execute(statement, {**parameters, **floats})
            if not found.returns_rows:
                hint = 'orchestrate query "SELECT * FROM summary"'
                raise QueryError("the statement returns no rows", where=where, hint=hint)
            names = list(found.keys())
            rows = [tuple(row) for row in found]
        except SQLAlchemyError as error:
            raise _query_error(where, error) from error
    return _unique_names(names), rows


_PLAIN_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?", re.ASCII)
"""Excludes what a run id may look like by chance, such as ``0012`` and ``12e4``."""
_DIGITS = len(str(-(2**63)))


def _number(value: str) -> int | float | str:
    """Return a plain number as a number: SQLite orders every text after every number (datatype3.html, "Sort Order")."""
    if _PLAIN_NUMBER.fullmatch(value) is None:
        return value
    if "." in value:
        return float(value)
    return int(value) if len(value) <= _DIGITS and int(value) in INT64 else value


class _ReadNames(dict[str, Any]):
    """Parameters that record which names SQLite reads: only SQLite knows the parameters of its statements."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


def _require_known_parameters(where: str, given: Iterable[str], used: Iterable[str]) -> None:
    """Raise QueryError for a parameter that the statement does not have: usually a misspelled one."""
    names = sorted(used)
    for name in given:
        if name not in names:
            has = f"it has {', '.join(f':{n}' for n in names)}" if names else "it has no parameter"
            raise QueryError(f"the statement has no :{name}", where=where, why=has, hint=f"leave out -p {name}=")


def _unique_names(names: Sequence[str]) -> list[str]:
    """Number repeated column names; a numbered name is never that of another column."""
    unique: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in unique or (number > 1 and candidate in names):
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


_STORE_FAILURES = tuple(f"SQLITE_{name}" for name in ("BUSY", "IOERR", "PROTOCOL", "CORRUPT", "NOTADB", "CANTOPEN"))


def _query_error(where: str, error: SQLAlchemyError) -> Exception:
    """Return our error for a mistake in the statement, the driver's own for a failure of the database."""
    cause = getattr(error, "orig", None) or error
    code = getattr(cause, "sqlite_errorname", None) or ""
    state = getattr(cause, "sqlstate", None) or ""
    if code.startswith(_STORE_FAILURES) or state.startswith(("08", "57")):
        return error
    why = str(cause).strip()
    if code in {"SQLITE_AUTH", "SQLITE_READONLY"} or state == "25006":
        return QueryError("query only reads", where=where, hint="only orchestrate collect writes results")
    if missing := re.search(r"binding parameter :(\w+)|bind parameter '(\w+)'", why):
        name = missing[1] or missing[2]
        return QueryError(f"no value for :{name}", where=where, hint=f"-p {name}=VALUE")
    return QueryError("the query failed", where=where, why=why, hint=_nearest(why))


def _nearest(why: str) -> str:
    """Return the table or column nearest to the unknown name in an error."""
    unknown = re.search(
        r"no such (table|column): (?:\w+\.)?(\w+)|(relation|column) \"?(?:\w+\.)?(\w+)\"? does not exist", why
    )
    if unknown is None:
        return ""
    kind, name = filter(None, unknown.groups())
    known = {row["column" if kind == "column" else "table"] for row in all_columns()}
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "orchestrate db info --columns lists tables and columns"


def all_columns() -> list[dict[str, str]]:
    """Return every column of every table and view."""
    tables = [*CONTENT, ingested, summary]
    rows = [{"table": t.name, "column": c.name, "type": c.type.python_type.__name__} for t in tables for c in t.c]
    return [*rows, *({**row, "table": "curves"} for row in rows if row["table"] == "epochs")]


def sizes(store: Store) -> list[dict[str, Any]]:
    """Return the number of rows of every table."""
    with store.read() as connection:
        return [{"table": t.name, "rows": count_rows(connection, t)} for t in (*CONTENT, ingested)]
