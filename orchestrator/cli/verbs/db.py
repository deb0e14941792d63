"""Look after the database.

Example: orchestrate db info
"""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli import options, output
from orchestrator.cli.refresh import print_collected, require_database, require_results
from orchestrator.errors import InputError
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import connect, errors, filesystem, ingest, queries, schema

ORDER = 130

app = typer.Typer()


@app.command()
def rebuild(
    drop_missing: Annotated[
        bool, typer.Option("--drop-missing", help="Drop runs, attempts and results whose files no longer exist.")
    ] = False,
    json: output.JsonOption = False,
    runs: options.RunsOption = DEFAULT_RUNS,
    database: options.DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Recreate the database from the run directories.

    Safe while runs are live: other commands see the old content or the new. A damaged file is kept under another name
    beside the new one. A file that is not an SQLite database, or belongs to another program, is rejected and unchanged.

    Example: orchestrate db rebuild
    """
    workspace = Workspace.at(runs=runs, database=database)
    if not workspace.runs.is_dir():
        raise InputError("there is no runs folder", where=str(workspace.runs), hint="name it with --runs")
    try:
        with connect.open_store(workspace.database) as store:
            report = ingest.rebuild(store, workspace.runs, drop_missing=drop_missing)
    except errors.StoreDamagedError:
        if filesystem.is_url(workspace.database):
            raise
        output.print_message(f"the damaged database is kept as {connect.set_aside(workspace.database)}")
        with connect.open_store(workspace.database) as store:
            report = ingest.collect(store, workspace.runs)
    print_collected("rebuilt", report, json=json)


@app.command()
def upgrade(database: options.DatabaseOption = DEFAULT_DATABASE) -> None:
    """Migrate the database to this version's schema; every command that writes does it too.

    Example: orchestrate db upgrade
    """
    workspace = Workspace.at(database=database)
    require_database(workspace)
    with connect.open_store(workspace.database) as store:
        typer.echo(f"{store.database}: schema {schema.revision(store)}")


@app.command()
def info(
    columns: Annotated[bool, typer.Option("--columns", help="List the columns of every table and view.")] = False,
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002 (the option's name)
    json: output.JsonFormatOption = False,
    database: options.DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Show where the database is, its schema revision, and how many rows its tables have.

    Example: orchestrate db info --columns
    """
    style = output.resolve_format(format, json)
    workspace = Workspace.at(database=database)
    require_results(workspace)
    with connect.open_store(workspace.database, read_only=True) as store:
        if columns:
            output.print_rows(queries.all_columns(), ["table", "column", "type"], style)
            return
        output.print_message(f"{store.database}: schema {schema.revision(store)}")
        output.print_rows(queries.sizes(store), ["table", "rows"], style)
