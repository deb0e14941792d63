"""Remove checkpoints, logs and leftovers by rule; never a result.

Files of live runs stay. Without options, only leftovers are removed: incomplete files, damaged checkpoints, and code
snapshots that no run needs any more. The command lists sizes and asks before it removes anything.

Example: orchestrate clean --keep best --older-than 7d --dry-run
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Annotated, Any

import typer

from orchestrator.cli import options, output
from orchestrator.cli.refresh import refresh_store, require_runs_folder
from orchestrator.errors import InputError, PartlyDoneError
from orchestrator.tracking.clean import CleanPolicy, CleanReport, ItemKind, KeepCheckpoints
from orchestrator.units import QuantityError, counted, parse_time_limit
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace
from workloads.contract import State
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import connect, queries
    from orchestrator.tracking import clean as cleaning

ORDER = 140

_MAX_LISTED = 10


def clean(
    checkpoints: Annotated[
        KeepCheckpoints,
        typer.Option(
            "--keep", "-k", help="Checkpoints to keep: each run's last, those of the best of several seeds, or none."
        ),
    ] = KeepCheckpoints.LAST,
    logs: Annotated[bool, typer.Option("--logs", help="Remove logs too.")] = False,
    state: Annotated[
        list[State] | None,
        typer.Option("--state", help="Clean runs in this state instead of succeeded ones; repeatable."),
    ] = None,
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Clean only runs that ended at least so long ago, such as 7d or 12h.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="List what would be removed, and exit.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    json: output.JsonOption = False,
    runs: options.RunsOption = DEFAULT_RUNS,
    database: options.DatabaseOption = DEFAULT_DATABASE,
) -> None:
    workspace = Workspace.at(runs=runs, database=database)
    policy = CleanPolicy(
        checkpoints=checkpoints,
        logs=logs,
        states=_require_ended(state or [State.SUCCEEDED]),
        older_than_s=_parse_age(older_than),
    )
    if json and not (yes or dry_run):
        raise InputError("--json cannot ask before it removes", hint="add --dry-run to list only, or --yes to remove")
    found = _find(workspace, policy)
    if not json:
        _print_report(found)
    removed = None
    if found.items and not dry_run and (yes or _confirm(found)):
        with connect.open_store(workspace.database) as store:
            removed = cleaning.remove(store, workspace.runs, found.items)
    if json:
        output.print_json(_json_report(found, removed))
    elif removed is not None:
        typer.echo(f"{_total(removed)} removed")
    elif not found.items:
        typer.echo("nothing to remove by these rules")
    elif not dry_run:
        typer.echo("nothing was removed")
    if removed is not None and removed.kept:
        raise PartlyDoneError(
            f"{counted(len(removed.kept), 'item')} could not be removed",
            why="; ".join(f"{path}: {why}" for path, why in removed.kept[:_MAX_LISTED]),
            hint="repeat orchestrate clean when the cause is fixed; what it removed cannot be recovered",
        )


def _require_ended(states: Collection[State]) -> frozenset[State]:
    """Return the states of ``--state``; raise InputError where runs have no files, or need all of them."""
    for state in states:
        if state is State.PLANNED:
            raise InputError(
                "planned runs have no files yet",
                where=f"--state {state.value}",
                hint="orchestrate submit submits them, orchestrate db rebuild --drop-missing drops their records",
            )
        if state.live:
            ended = [s.value for s in State if not s.live and s is not State.PLANNED]
            raise InputError(
                f"runs that are {state.value} need all their files",
                where=f"--state {state.value}",
                hint=f"orchestrate cancel ends runs; choose among {', '.join(ended)}",
            )
    return frozenset(states)


def _parse_age(text: str) -> float:
    """Return the seconds of ``--older-than``; 0 for the empty text."""
    if not text:
        return 0.0
    try:
        return parse_time_limit(text)
    except QuantityError as error:
        raise InputError(error.what.replace("time limit", "time"), where="--older-than", hint=error.hint) from error


def _find(workspace: Workspace, policy: CleanPolicy) -> CleanReport:
    require_runs_folder(workspace)
    if workspace.is_empty:
        return CleanReport()
    with connect.open_store(workspace.database) as store:
        refresh_store(store, workspace.runs)
        needed = cleaning.needed_snapshots(store, workspace.runs)
        return cleaning.find(workspace.runs, queries.run_records(store), needed, policy)


def _print_report(found: CleanReport) -> None:
    rows = []
    for kind in ItemKind:
        if items := [item for item in found.items if item.kind is kind]:
            num_runs = len({item.run_id for item in items} - {""})
            size_bytes = sum(item.size_bytes for item in items)
            rows.append({"what": kind.value, "runs": num_runs, "number": len(items), "size_bytes": size_bytes})
    if rows:
        size = output.Column("size_bytes", "size", lambda row: _format_size(row["size_bytes"]))
        output.print_rows(rows, ["what", "runs", "number", size])
    for path, why in found.kept[:_MAX_LISTED]:
        output.print_message(f"kept: {path}: {why}")
    if len(found.kept) > _MAX_LISTED:
        output.print_message(f"kept: {len(found.kept) - _MAX_LISTED} more")
    if found.num_live:
        output.print_message(f"kept: all files of {counted(found.num_live, 'live run')}")


def _total(report: CleanReport) -> str:
    return _format_size(sum(item.size_bytes for item in report.items))


def _format_size(size_bytes: int) -> str:
    if size_bytes == 1:
        return "1 byte"
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"


def _confirm(found: CleanReport) -> bool:
    if not sys.stdin.isatty():
        hint = "add --yes to remove, or --dry-run to list"
        raise InputError("standard input is no terminal, so nobody can confirm", hint=hint)
    return typer.confirm(f"Remove {_total(found)}? This cannot be undone.", err=True)


def _json_report(found: CleanReport, removed: CleanReport | None) -> dict[str, Any]:
    report = found if removed is None else removed
    return {
        "removed": removed is not None,
        "bytes": sum(item.size_bytes for item in report.items),
        "items": report.items,
        "left": [{"path": path, "why": why} for path, why in (*found.kept, *(removed.kept if removed else ()))],
        "live_runs": found.num_live,
    }
