"""Run a read-only SQL query on the results.

Tables: runs, attempts, results, epochs, classes, ranks. Views: summary (one row a run: its fields, its state, what
it measured) and curves (the epochs that count of each run). orchestrate db info --columns lists their columns.
Names and values are shown as the database has them: accuracy as a share, memory in bytes.

Example: orchestrate query "SELECT model, max(test_accuracy) FROM summary WHERE lr = :lr GROUP BY model" -p lr=0.1
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import output
from orchestrator.cli.options import DatabaseOption
from orchestrator.cli.workspace_checks import insist_on_results
from orchestrator.errors import InputError
from orchestrator.workspace import DEFAULT_DATABASE, Workspace

if TYPE_CHECKING:
    pass

ORDER = 120


def query(
    sql: Annotated[str, typer.Argument(help="One SELECT statement; - reads it from standard input.")],
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            "-p",
            metavar="NAME=VALUE",
            help="Value for :NAME in the statement, a number where it is written as one (80, -0.5); repeatable.",
        ),
    ] = None,
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002 (the option's name)
    json: output.JsonFormatOption = False,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    from db import queries
    from db.connect import open_store

    values = {}
    for given in parameters or []:
        name, equals, value = given.partition("=")
        if not equals:
            raise InputError("not a parameter", where=f"-p {given}", hint="-p NAME=VALUE")
        name = name.removeprefix(":")
        if name in values:
            raise InputError(f":{name} is given twice", where=f"-p {given}", hint="remove one of them")
        values[name] = value
    statement = _from_standard_input() if sql == "-" else sql
    workspace = Workspace.at(database=database)
    insist_on_results(workspace)
    with open_store(workspace.database, read_only=True) as store:
        names, rows = queries.run_sql(store, statement, values)
    columns = [output.Column(name, title=name, text=_as_asked(name)) for name in names]
    output.print_rows([dict(zip(names, row, strict=True)) for row in rows], columns, output.resolve_format(format, json))


def _from_standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError("not a text in UTF-8", where="standard input", hint="write it in UTF-8") from error


def _as_asked(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Neither scaled nor rounded: the unit of a column is that of the statement's author."""
    return lambda row: "" if row[name] is None else str(row[name])
