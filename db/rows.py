"""From values of files to typed rows, and from rows into tables, in bulk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Boolean, Connection, Double, Table

from db.models import JsonList, JsonObject, runs
from workloads.contract import INT64, RunSpec

Row = tuple[Any, ...]
"""One value for each column of a table, in the table's order."""


def canonical_json(value: Any) -> str:
    """Return the same text for equal values: sorted keys, no spaces, null for NaN and infinity."""
    return json.dumps(_finite(value), sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


class _Converter(NamedTuple):
    """How values get into one column."""

    name: str
    plain: type[Any]
    """Values of this type need no conversion, unless they are extreme."""
    convert: Callable[[Any], Any]
    nullable: bool

    def value(self, value: Any) -> Any:
        converted = value
        if value is not None:
            try:
                converted = self.convert(value)
            except ValueError as error:
                raise ValueError(f"{self.name} is {value!r}, {error}") from None
        if converted is None and not self.nullable:
            raise ValueError(f"{self.name} is missing" if value is None else f"{self.name} is {value!r}")
        return converted

    def values(self, column: list[Any]) -> list[Any]:
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
    """Return many rows of one table: as :func:`typed`, and several times as fast.

    Raises:
        ValueError: one of them has a value missing or of another type.
    """
    columns = [converter.values([row.get(converter.name) for row in rows]) for converter in _converters(table)]
    return list(zip(*columns, strict=True))


def run_rows(specs: Sequence[RunSpec]) -> list[Row]:
    """Return the rows of runs in the table ``runs``.

    Raises:
        ValueError: a value of one of them is missing or of another type.
    """
    columns = []
    for converter, values in zip(_converters(runs), zip(*map(_run_values(), specs), strict=True), strict=True):
        columns.append(converter.values(list(values)))
    return list(zip(*columns, strict=True))


@cache
def _run_values() -> attrgetter[Row]:
    """Return a function that reads a run's values in the table's order: fields of the spec, else of its ``train``."""
    own = {field.name for field in fields(RunSpec)}
    texts = {"hardware": "train.hardware.text"}
    return attrgetter(*(c.name if c.name in own else texts.get(c.name, f"train.{c.name}") for c in runs.columns))


def upsert(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Insert rows, or overwrite those that exist; by the driver, at ten times the speed of SQLAlchemy's own insert."""
    if rows:
        connection.exec_driver_sql(_upsert_sql(table, connection.dialect.name), list(rows))


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
    converters = []
    for column in table.columns:
        plain, convert = _CONVERSIONS.get(type(column.type), (str, _text))
        converters.append(_Converter(column.name, plain, convert, bool(column.nullable)))
    return converters


def _int(value: Any) -> int:
    if type(value) is int and value in INT64:
        return value
    raise ValueError("not a whole number of 64 bits")


def _float(value: Any) -> float | None:
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is int:
        return float(value)
    raise ValueError("not a number")


def _bool(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise ValueError("neither true nor false")


def _json(value: Any) -> str:
    if isinstance(value, dict):
        return canonical_json(value) if value else "{}"
    raise ValueError("not a JSON object")


def _json_list(value: Any) -> str:
    if isinstance(value, list):
        return canonical_json(value)
    raise ValueError("not a JSON list")


def _text(value: Any) -> str:
    """Return the text as a database can hold it: PostgreSQL takes no NUL, and UTF-8 has no lone surrogates."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    raise ValueError("not a text")


_CONVERSIONS: dict[type[Any], tuple[type[Any], Callable[[Any], Any]]] = {
    BigInteger: (int, _int),
    Double: (float, _float),
    Boolean: (bool, _bool),
    JsonObject: (dict, _json),
    JsonList: (list, _json_list),
}
"""Column type to the plain type and the conversion of its values; any other column holds text."""


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
