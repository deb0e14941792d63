"""Run a read-only SQL query on the results.

Tables: runs, attempts, results, epochs, classes, ranks. Views: summary (one row for each run: its fields, its state and
what it measured) and curves (the valid epochs of each run). orchestrate db info --columns lists their columns.
Values are printed as the database has them: accuracy as a fraction, memory in bytes.

Example: orchestrate query "SELECT model, max(test_accuracy) FROM summary WHERE lr = :lr GROUP BY model" -p lr=0.1
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from orchestrator.cli import options, output
from orchestrator.cli.refresh import require_results
from orchestrator.errors import InputError
from orchestrator.workspace import DEFAULT_DATABASE, Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import connect, queries

ORDER = 120


def query(
    sql: Annotated[str, typer.Argument(help="One SELECT statement; - reads it from standard input.")],
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            "-p",
            metavar="NAME=VALUE",
            help="Value of :NAME in the statement, a number if it is written as one (80, -0.5); repeatable.",
        ),
    ] = None,
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002 (the option's name)
    json: output.JsonFormatOption = False,
    database: options.DatabaseOption = DEFAULT_DATABASE,
) -> None:
    values: dict[str, str] = {}
    for parameter in parameters or []:
        name, equals, value = parameter.partition("=")
        if not equals:
            raise InputError("not a parameter", where=f"-p {parameter}", hint="write -p NAME=VALUE")
        name = name.removeprefix(":")
        if name in values:
            raise InputError(f":{name} is given twice", where=f"-p {parameter}", hint="remove one of them")
        values[name] = value
    if sql == "-":
        try:
            sql = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise InputError("not valid UTF-8", where="standard input", hint="write it in UTF-8") from error
    workspace = Workspace.at(database=database)
    require_results(workspace)
    with connect.open_store(workspace.database, read_only=True) as store:
        names, rows = queries.run_sql(store, sql, values)
    columns = [output.Column(name, title=name, text=_unchanged(name)) for name in names]
    output.print_rows(
        [dict(zip(names, row, strict=True)) for row in rows], columns, output.resolve_format(format, json)
    )


def _unchanged(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a column's text without scaling and rounding: the statement decides the unit."""
    return lambda row: "" if row[name] is None else str(row[name])
