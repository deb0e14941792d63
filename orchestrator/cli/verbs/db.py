"""Look after the database.

Example: orchestrate db info
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import output
from orchestrator.cli.collect_report import _say_collected, say_problems
from orchestrator.cli.options import DatabaseOption, RunsOption
from orchestrator.cli.workspace_checks import insist_on_database, insist_on_results
from orchestrator.errors import InputError
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace

if TYPE_CHECKING:
    pass

ORDER = 130


app = typer.Typer()


@app.command()
def rebuild(
    drop_missing: Annotated[
        bool, typer.Option("--drop-missing", help="Let go of runs, attempts and results that have no files any more.")
    ] = False,
    json: output.JsonOption = False,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Make the database anew from the run directories.

    Safe in the middle of a campaign: other commands see the old content or the new. A damaged file is kept beside it
    under another name; one that is no SQLite database at all, or another program's, is refused and stays as it is.

    Example: orchestrate db rebuild
    """
    from db import ingest
    from db.connect import open_store, set_aside
    from db.errors import StoreDamagedError
    from db.filesystem import is_url

    workspace = Workspace.at(runs=runs, database=database)
    if not workspace.runs.is_dir():
        raise InputError("there is no runs folder", where=str(workspace.runs), hint="name it with --runs")
    try:
        with open_store(workspace.database) as store:
            collected = ingest.rebuild(store, workspace.runs, drop_missing=drop_missing)
    except StoreDamagedError:
        if is_url(workspace.database):
            raise
        output.talk(f"the damaged database is kept as {set_aside(workspace.database)}")
        with open_store(workspace.database) as store:
            collected = ingest.collect(store, workspace.runs)
    if json:
        output.facts(collected)
    else:
        _say_collected("rebuilt", collected)
    say_problems(collected)


@app.command()
def upgrade(database: DatabaseOption = DEFAULT_DATABASE) -> None:
    """Bring the database to this version's schema; every command that writes does it too.

    Example: orchestrate db upgrade
    """
    from db.connect import open_store, revision

    workspace = Workspace.at(database=database)
    insist_on_database(workspace)
    with open_store(workspace.database) as store:
        typer.echo(f"{store.database}: schema {revision(store)}")


@app.command()
def info(
    columns: Annotated[bool, typer.Option("--columns", help="List the columns of every table and view.")] = False,
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002 (the option's name)
    json: output.JsonFormatOption = False,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Say where the database is, its schema, and what is in it.

    Example: orchestrate db info --columns
    """
    from db import queries
    from db.connect import open_store, revision

    style = output.chosen(format, json)
    workspace = Workspace.at(database=database)
    insist_on_results(workspace)
    with open_store(workspace.database, read_only=True) as store:
        if columns:
            output.rows(queries.schema(), ["table", "column", "type"], style)
            return
        output.talk(f"{store.database}: schema {revision(store)}")
        output.rows(queries.sizes(store), ["table", "rows"], style)
