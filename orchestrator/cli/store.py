"""The verbs collect and db: filling the store and looking after it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import output
from orchestrator.cli.options import DatabaseOption, RunsOption
from orchestrator.errors import InputError, PartlyDoneError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace

if TYPE_CHECKING:
    from db.ingest import CollectReport

app = typer.Typer()
db_app = typer.Typer(help="Look after the database.\n\nExample: orchestrate db info", no_args_is_help=True)
app.add_typer(db_app, name="db")


@app.command()
def collect(
    json: output.JsonOption = False, runs: RunsOption = DEFAULT_RUNS, database: DatabaseOption = DEFAULT_DATABASE
) -> None:
    """Read new results from the runs folder into the database.

    Only what changed since the last time is read; status and results do it too, results where there is a database.
    Files that are damaged or may not be read are named, left out and tried again each time.

    Example: orchestrate collect
    """
    workspace = Workspace.at(runs=runs, database=database)
    from db.connect import open_store
    from db.ingest import collect as take_in

    if not workspace.runs.is_dir():
        raise InputError(
            "there is no runs folder", where=str(workspace.runs), hint="orchestrate submit, or name it with --runs"
        )
    with open_store(workspace.database) as store:
        collected = take_in(store, workspace.runs)
    if json:
        output.facts(collected)
    else:
        _say_collected("new or changed", collected)
    say_problems(collected)
    if collected.problems:
        raise PartlyDoneError(
            f"left out: {counted(len(collected.problems), 'file or folder', 'files or folders')}",
            hint="they are tried again each time",
        )


@db_app.command()
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


@db_app.command()
def upgrade(database: DatabaseOption = DEFAULT_DATABASE) -> None:
    """Bring the database to this version's schema; every command that writes does it too.

    Example: orchestrate db upgrade
    """
    from db.connect import open_store, revision

    workspace = Workspace.at(database=database)
    insist_on_database(workspace)
    with open_store(workspace.database) as store:
        typer.echo(f"{store.database}: schema {revision(store)}")


@db_app.command()
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


def insist_on_database(workspace: Workspace) -> None:
    """Raises InputError where there is none: a misspelt name makes no file."""
    if not workspace.has_database:
        raise InputError(
            "there is no database",
            where=workspace.database,
            hint=f"orchestrate collect{_named(workspace)} makes it from the runs folder, --db names another",
        )


def insist_on_results(workspace: Workspace) -> None:
    """Raises InputError where no run was ever sent from here, or there is no database of those that were."""
    insist_on_something(workspace)
    insist_on_database(workspace)


def insist_on_something(workspace: Workspace) -> None:
    """Raises InputError where no run was ever sent from here."""
    if workspace.is_empty:
        raise InputError(
            "there is nothing here yet",
            where=str(workspace.runs.parent),
            why=f"neither {workspace.runs.name} nor {Path(workspace.database).name} exists",
            hint=f"orchestrate submit{_named(workspace)}, or name the places with --runs and --db",
        )


def _named(workspace: Workspace) -> str:
    """The option that other commands need to find this database; none where they find it by themselves."""
    usual = Workspace.at(database=os.environ.get("ORCHESTRATE_DB") or DEFAULT_DATABASE).database
    return "" if workspace.database == usual else f" --db {shlex.quote(workspace.database)}"


def _say_collected(done: str, collected: CollectReport) -> None:
    counts = ", ".join(counted(getattr(collected, f"{name}s"), name) for name in ("run", "attempt", "result", "epoch"))
    typer.echo(f"{done}: {counts}")


def say_problems(collected: CollectReport) -> None:
    for problem in collected.problems:
        output.talk(f"left out: {problem.path}: {problem.what}")
