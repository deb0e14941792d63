"""From values of files to typed rows, and from rows into tables, in bulk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Boolean, Connection, Double, Table, Text, func, select

from db.models import JsonList, JsonObject, runs
from workloads.contract import INT64, RunSpec

Row = tuple[Any, ...]
"""One value for each column of a table, in the table's order."""


_compact = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def canonical_json(value: Any) -> str:
    """Return the same text for equal values: sorted keys, no spaces, null for NaN and infinity."""
    try:
        return _compact(value)
    except ValueError:  # the encoder's error for NaN and infinity
        return _compact(json.loads(json.dumps(value), parse_constant=lambda _: None))


class _Converter(NamedTuple):
    """How values get into one column."""

    name: str
    plain: type[Any]
    """Values of this type need no conversion, unless they are extreme."""
    convert: Callable[[Any], Any]
    nullable: bool

    def value(self, value: Any) -> Any:
        try:
            converted = None if value is None else self.convert(value)
        except ValueError as error:
            raise ValueError(f"{self.name} is {value!r}, {error}") from None
        if converted is None and not self.nullable:
            raise ValueError(f"{self.name} is missing" if value is None else f"{self.name} is {value!r}")
        return converted

    def values(self, column: Sequence[Any]) -> Sequence[Any]:
        """Convert a whole column; where nothing needs conversion, checked by built-in functions instead of a loop."""
        if set(map(type, column)) == {self.plain}:
            if self.plain is str and (text := "".join(column)).isascii() and "\0" not in text:
                return column
            if self.plain is float and math.isfinite(sum(column)):
                return column
            if self.plain is int and min(column) in INT64 and max(column) in INT64:
                return column
        return [self.value(value) for value in column]


def typed(table: Table, values: Mapping[str, Any]) -> Row:
    """Return the row of a table; ignores values without a column, and turns NaN and infinity into null.

    Raises:
        ValueError: a value is missing or of another type. SQLite would store it, PostgreSQL would end the transaction.
    """
    return tuple(converter.value(values.get(converter.name)) for converter in _converters(table))


def typed_all(table: Table, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return many rows of one table: as :func:`typed`, and several times as fast."""
    return _rows(table, ([row.get(column.name) for row in rows] for column in table.columns))


def run_rows(specs: Sequence[RunSpec]) -> list[Row]:
    """Return the rows of runs in the table ``runs``; raises what :func:`typed` raises."""
    return _rows(runs, zip(*map(_run_values(), specs), strict=True))


def _rows(table: Table, columns: Iterable[Sequence[Any]]) -> list[Row]:
    converted = (converter.values(values) for converter, values in zip(_converters(table), columns, strict=True))
    return list(zip(*converted, strict=True))


@cache
def _run_values() -> attrgetter[Row]:
    """Return a function that reads a run's values in the table's order: fields of the spec, else of its ``train``."""
    own = {field.name: field.name for field in fields(RunSpec)} | {"hardware": "train.hardware.text"}
    return attrgetter(*(own.get(c.name, f"train.{c.name}") for c in runs.columns))


def upsert(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Insert rows, or overwrite those that exist; by the driver, at ten times the speed of SQLAlchemy's own insert."""
    if rows:
        connection.exec_driver_sql(_upsert_sql(table, connection.dialect.name), list(rows))


def count_rows(connection: Connection, table: Table) -> int:
    return connection.execute(select(func.count()).select_from(table)).scalar_one()


@cache
def _upsert_sql(table: Table, dialect: str) -> str:
    mark = "?" if dialect == "sqlite" else "%s"
    names = [f'"{c.name}"' for c in table.columns]
    keys = [f'"{c.name}"' for c in table.primary_key.columns]
    others = ", ".join(f"{n} = excluded.{n}" for n in names if n not in keys)
    return (
        f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join([mark] * len(names))})"  # noqa: S608
        f" ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {others}"
    )


@cache
def _converters(table: Table) -> list[_Converter]:
    return [
        _Converter(column.name, *_CONVERSIONS[type(column.type)], bool(column.nullable)) for column in table.columns
    ]


def _int(value: Any) -> int:
    if type(value) is int and value in INT64:
        return value
    raise ValueError("not a whole number of 64 bits")


def _float(value: Any) -> float | None:
    if type(value) in {float, int}:
        return float(value) if math.isfinite(value) else None
    raise ValueError("not a number")


def _text(value: str) -> str:
    """Return the text as a database can hold it: PostgreSQL takes no NUL, and UTF-8 has no lone surrogates."""
    return value.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _of(kind: type[Any], otherwise: str, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        if isinstance(value, kind):
            return convert(value)
        raise ValueError(otherwise)

    return checked


_CONVERSIONS: dict[type[Any], tuple[type[Any], Callable[[Any], Any]]] = {
    BigInteger: (int, _int),
    Double: (float, _float),
    Boolean: (bool, _of(bool, "neither true nor false", bool)),
    JsonObject: (dict, _of(dict, "not a JSON object", canonical_json)),
    JsonList: (list, _of(list, "not a JSON list", canonical_json)),
    Text: (str, _of(str, "not a text", _text)),
}
"""Column type to the plain type and the conversion of its values."""
