"""Remove checkpoints, logs and leftovers by rule; never a result.

Runs that wait or run keep everything. Without options only leftovers go: half-written files, damaged checkpoints,
and code of old submissions that no run needs any more. Shows sizes and asks first.

Example: orchestrate clean --keep best --older-than 7d --dry-run
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import output
from orchestrator.cli.options import DatabaseOption, RunsOption
from orchestrator.errors import InputError, PartlyDoneError
from orchestrator.tracking.clean import ItemKind, KeepCheckpoints
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace
from workloads.contract import State

if TYPE_CHECKING:
    from orchestrator.tracking.clean import CleanPolicy, CleanReport

ORDER = 140


_NAMED = 10


def clean(
    checkpoints: Annotated[
        KeepCheckpoints,
        typer.Option("--keep", "-k", help="Which checkpoints stay: each run's last, the best over seeds, none."),
    ] = KeepCheckpoints.LAST,
    logs: Annotated[bool, typer.Option("--logs", help="Also what runs printed.")] = False,
    state: Annotated[
        list[State] | None, typer.Option("--state", help="Of runs in this state, succeeded unless given; repeatable.")
    ] = None,
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Only of runs that ended so long ago, such as 7d or 12h.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would go, and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: output.JsonOption = False,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    from orchestrator.tracking.clean import CleanPolicy

    workspace = Workspace.at(runs=runs, database=database)
    rules = CleanPolicy(
        checkpoints=checkpoints,
        logs=logs,
        states=_ended(state or [State.SUCCEEDED]),
        older_than_s=_seconds(older_than),
    )
    if json and not (yes or dry_run):
        raise InputError("--json asks nothing", hint="add --dry-run to look, or --yes to remove")
    found = _find(workspace, rules)
    if not json:
        _show(found)
    went = None
    if found.items and not dry_run and (yes or _agreed(found)):
        went = _remove(workspace, found)
    if json:
        output.facts(_told(found, went))
    elif went is not None:
        typer.echo(f"{_total(went)} removed")
    elif not found.items:
        typer.echo("nothing to remove by these rules")
    elif not dry_run:
        typer.echo("nothing was removed")
    if went is not None and went.left:
        raise PartlyDoneError(
            f"{counted(len(went.left), 'thing')} could not be removed",
            why="; ".join(f"{path}: {why}" for path, why in went.left[:_NAMED]),
            hint="what went is gone; orchestrate clean tries the rest again",
        )


def _ended(states: Collection[State]) -> frozenset[State]:
    for state in states:
        if state is State.PLANNED:
            raise InputError(
                "runs that are planned have no files yet",
                where=f"--state {state.value}",
                hint="orchestrate submit sends them, orchestrate db rebuild --drop-missing forgets them",
            )
        if state.live:
            ended = [s.value for s in State if not s.live and s is not State.PLANNED]
            raise InputError(
                f"runs that are {state.value} keep everything",
                where=f"--state {state.value}",
                hint=f"orchestrate cancel ends runs; states that have ended are {', '.join(ended)}",
            )
    return frozenset(states)


def _seconds(text: str) -> float:
    from orchestrator.units import QuantityError, parse_time_limit

    if not text:
        return 0.0
    try:
        return parse_time_limit(text)
    except QuantityError as error:
        raise InputError(error.what.replace("time limit", "time"), where="--older-than", hint=error.hint) from error


def _find(workspace: Workspace, rules: CleanPolicy) -> CleanReport:
    from orchestrator.cli.refresh import bring_up_to_date
    from orchestrator.cli.workspace_checks import insist_on_runs_folder
    from orchestrator.tracking import clean

    insist_on_runs_folder(workspace)
    if workspace.is_empty:
        return clean.CleanReport()
    from db.connect import open_store
    from db.queries import run_records

    with open_store(workspace.database) as store:
        bring_up_to_date(store, workspace.runs)
        needed = clean.needed_snapshots(store, workspace.runs)
        return clean.find(workspace.runs, run_records(store), needed, rules)


def _remove(workspace: Workspace, found: CleanReport) -> CleanReport:
    from db.connect import open_store
    from orchestrator.tracking import clean

    with open_store(workspace.database) as store:
        return clean.remove(store, workspace.runs, found.items)


def _show(found: CleanReport) -> None:
    rows = []
    for kind in ItemKind:
        items = [item for item in found.items if item.kind is kind]
        if items:
            total = sum(item.size_bytes for item in items)
            row = {"what": kind.value, "runs": len({i.run_id for i in items} - {""}), "number": len(items)}
            rows.append({**row, "size_bytes": total})
    if rows:
        size = output.Column("size_bytes", "size", lambda row: _size(row["size_bytes"]))
        output.rows(rows, ["what", "runs", "number", size])
    for path, why in found.left[:_NAMED]:
        output.talk(f"left alone: {path}: {why}")
    if len(found.left) > _NAMED:
        output.talk(f"left alone: {len(found.left) - _NAMED} more")
    if found.num_live:
        output.talk(f"{counted(found.num_live, 'run')} under way: nothing of that is removed")


def _total(found: CleanReport) -> str:
    return _size(sum(item.size_bytes for item in found.items))


def _size(size_bytes: int) -> str:
    if size_bytes == 1:
        return "1 byte"
    total = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if total < 1024 or unit == "GiB":
            break
        total /= 1024
    return f"{total:,.0f} {unit}" if unit == "bytes" else f"{total:,.1f} {unit}"


def _agreed(found: CleanReport) -> bool:
    if not sys.stdin.isatty():
        raise InputError("nobody is there to ask", hint="add --yes to remove, or --dry-run to look")
    return typer.confirm(f"Remove {_total(found)}? This cannot be undone.", err=True)


def _told(found: CleanReport, went: CleanReport | None) -> dict[str, Any]:
    gone = found if went is None else went
    return {
        "removed": went is not None,
        "bytes": sum(item.size_bytes for item in gone.items),
        "items": gone.items,
        "left": [{"path": path, "why": why} for path, why in (*found.left, *(went.left if went else ()))],
        "live_runs": found.num_live,
    }
