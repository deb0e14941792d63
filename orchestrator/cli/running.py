"""The verbs status, logs and cancel: looking after runs that are sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import naming, output
from orchestrator.cli.options import DatabaseOption, RecoverOption, RunsOption, insist_apart
from orchestrator.cli.refreshing import bring_up_to_date, refreshed
from orchestrator.cli.store import insist_on_something
from orchestrator.cluster.resources import LOCAL
from orchestrator.errors import InputError, OperationError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace
from workloads.contract import State

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.backends.base import ForcedCancel
    from orchestrator.tracking.tracker import RunStatus
    from workloads.files.run_dir import RunDir

app = typer.Typer()


@app.command()
def status(
    recover: RecoverOption = True,
    json: output.JsonFormatOption = False,
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002 (the option's name)
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Show the state of every run and why.

    Also brings the database up to date, finishes a submit that was interrupted, starts the queue again when it is gone
    and runs wait, and sends runs again that ended for no fault of theirs, as [cluster.NAME.recovery] says.

    Example: orchestrate status --json
    """
    workspace = Workspace.at(runs=runs, database=database)
    style = output.chosen(format, json)
    rows = [_row(run) for run in refreshed(workspace, recover=recover)]
    if not rows and style is output.Format.TABLE:
        output.talk("no runs yet; next: orchestrate submit")
        return
    columns = list(_row_keys()) if style.for_machines else _status_columns()
    output.rows(rows, columns, style)


@app.command()
def logs(
    context: typer.Context,
    run: naming.RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    rank: Annotated[int, typer.Option("--rank", "-r", min=0, help="Which rank.")] = 0,
    every: Annotated[bool, typer.Option("--all", help="Every rank.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Standard error only.")] = False,
    stdout: Annotated[bool, typer.Option("--stdout", help="Standard output only.")] = False,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Which attempt; the newest.")] = None,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Show what a run printed.

    Example: orchestrate logs cnn-eager-cpu1-s0 --follow
    """
    from orchestrator.cli import following
    from orchestrator.tracking import tracker
    from workloads.files.run_dir import RunDir

    insist_apart(context, "every", "rank", "--all shows every rank")
    insist_apart(context, "stdout", "stderr", "each shows one stream alone; without them both are shown")
    workspace = Workspace.at(runs=runs, database=database)
    chosen = naming.one(refreshed(workspace), run)
    if chosen.attempt == 0:
        raise InputError(f"run {chosen.run_id} has printed nothing: it was not sent yet", hint="orchestrate submit")
    number = attempt or chosen.attempt
    run_dir = RunDir.of(workspace.runs, chosen.run_id)
    place = run_dir.attempt(number)
    # The newest one gets its folder when its job starts.
    if number != chosen.attempt and not place.path.is_dir():
        raise InputError(f"run {chosen.run_id} has no attempt {number}", hint=f"its newest is {chosen.attempt}")
    job_id = chosen.job_id if number == chosen.attempt else tracker.job_id(place)
    _insist_on_rank(run_dir, rank)
    wanted = following.Wanted(rank=None if every else rank, stdout=stdout or not stderr, stderr=stderr or not stdout)
    shown = following.show(place, job_id, wanted, follow=follow)
    if not shown:
        # It may have ended while it was followed.
        chosen = naming.one(refreshed(workspace), chosen.run_id) if follow else chosen
        _say_nothing_shown(chosen, number, following.files(place, job_id, wanted), run)


def _insist_on_rank(run: RunDir, rank: int) -> None:
    """Raises InputError when the run has no such rank; a run whose spec cannot be read may have any."""
    try:
        num_ranks = run.read_spec().expect.ranks
    except (OSError, ValueError):
        return
    if rank >= num_ranks:
        raise InputError(
            f"run {run.run_id} has no rank {rank}",
            why=f"it has {counted(num_ranks, 'rank')}",
            hint="--all shows every rank" if num_ranks == 1 else f"--rank 0 to {num_ranks - 1}, or --all",
        )


def _say_nothing_shown(run: RunStatus, number: int, files: Sequence[Path], name: str) -> None:
    """Say why no line of an attempt's logs was shown.

    Raises:
        OperationError: there may be some yet, or there should be.
    """
    attempt = f"run {run.run_id} attempt {number}"
    newest = number == run.attempt
    if newest and run.state.live:
        what = f"{attempt} has printed nothing so far"
    elif files:
        what = f"{attempt} printed nothing there: empty {', '.join(map(str, files))}"
    else:
        what = f"{attempt} has no such logs: it wrote none, or orchestrate clean --logs removed them"
    if newest and run.state is State.SUCCEEDED:
        output.talk(what)
        return
    why = f"it is {run.state.value}" + (f": {run.message or run.reason}" if run.reason else "") if newest else ""
    hint = "" if (newest and run.state.live) or number == 1 else f"orchestrate logs {name} --attempt {number - 1}"
    raise OperationError(what, why=why, hint=hint)


@app.command()
def cancel(
    names: naming.RunsArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Every run that waits or runs.")] = False,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Stop runs.

    What waits is taken out of the queue, what runs is ended; on this machine, what does not end when it is asked to is
    killed. A run that has ended stays as it is, and is not sent again by itself. Checkpoints stay: orchestrate retry
    goes on from them.

    Example: orchestrate cancel --all
    """
    naming.insist(names, every, "cancel", "--all")
    workspace = Workspace.at(runs=runs, database=database)
    insist_on_something(workspace)
    found = refreshed(workspace)
    chosen = found if every else [naming.one(found, name) for name in names or []]
    live = [run for run in chosen if run.state.live]
    _hold(workspace, chosen)
    for run in chosen:
        if not run.state.live and not every:
            output.talk(f"{run.run_id} {run.label}: {run.state.value} already")
    left = _cancel(workspace, live)
    sent = {run.run_id for run in live if run.target != LOCAL}
    ending = [run for run in refreshed(workspace) if run.run_id in sent and run.state.live]
    typer.echo(f"{counted(len(live) - len(left), 'run')} cancelled")
    if ending and not left:
        still = "is" if len(ending) == 1 else "are"
        output.talk(f"{len(ending)} of them {still} being ended by Slurm; orchestrate status shows when that is over")
    if left:
        raise OperationError(
            f"not ended yet: {counted(len(left), 'run')}, {naming.listed([run for run in live if run.run_id in left])}",
            why="; ".join(dict.fromkeys(each.what for each in left.values())),
            hint="; ".join(dict.fromkeys(each.hint for each in left.values())),
        )


def _cancel(workspace: Workspace, live: Sequence[RunStatus]) -> dict[str, ForcedCancel]:
    """Ask for the end of runs and insist on it; by run id, those that have not ended for all that."""
    import time

    from db.connect import open_store
    from db.errors import StoreReadOnlyError
    from orchestrator.backends.exit_status import Exit
    from orchestrator.tracking import tracker
    from workloads.files.run_dir import RunDir

    places = {run.run_id: RunDir.of(workspace.runs, run.run_id).attempt(run.attempt) for run in live}
    # Read only, so that runs can be ended when their logs have filled the disk.
    with open_store(workspace.database, read_only=True) as store:
        from db.submissions import live_attempts

        tokens = {record.run_id: record.token or "" for record in live_attempts(store)}
        left: dict[str, ForcedCancel] = {}
        for target in sorted({run.target or "" for run in live}):
            executor = tracker.find_executor(target, workspace.runs)
            if executor is None:
                raise OperationError(f"this version cannot cancel jobs of {target}", hint="scancel the job id")
            meant = [run for run in live if run.target == target and run.run_id in tokens]
            executor.cancel([(places[run.run_id], tokens[run.run_id]) for run in meant])
            deadline = time.monotonic() + executor.cancel_wait_s
            while meant and time.monotonic() < deadline:
                meant = [run for run in meant if Exit.read(places[run.run_id]) is None]
                time.sleep(0.1 if meant else 0)
            by_token = {tokens[run.run_id]: run for run in meant}
            for each in executor.force_cancel([(places[run.run_id], token) for token, run in by_token.items()]):
                run = by_token[each.token]
                if not each.ended:
                    left[run.run_id] = each
                elif each.what:
                    output.talk(f"{run.run_id} {run.label}: {each.what}")
    with contextlib.suppress(StoreReadOnlyError), open_store(workspace.database) as store:
        bring_up_to_date(store, workspace.runs, fresh=True)
    return left


def _hold(workspace: Workspace, chosen: Sequence[RunStatus]) -> None:
    """See to it that what has ended is not sent again by itself."""
    from workloads.files.run_dir import RunDir

    due = [run for run in chosen if run.will_resubmit]
    for run in due:
        RunDir.of(workspace.runs, run.run_id).attempt(run.attempt).create().held.touch()
    if due:
        output.talk(f"{counted(len(due), 'run')} that had ended will not be sent again")


def _row(run: RunStatus) -> dict[str, Any]:
    row = {name: getattr(run, name) for name in run.__dataclass_fields__ if name != "progress"}
    return {**row, "state": run.state.value, **asdict(run.progress)}


def _row_keys() -> Iterator[str]:
    from orchestrator.tracking.tracker import Progress, RunStatus

    yield from (name for name in RunStatus.__dataclass_fields__ if name != "progress")
    yield from Progress.__dataclass_fields__


def _reason(row: Mapping[str, Any]) -> str:
    return "; ".join(filter(None, (row["message"] or row["reason"], row["recovery_message"])))


def _status_columns() -> list[str | output.Column]:
    return [
        "run_id",
        "label",
        output.Column("state"),
        output.Column("reason", text=_reason, below=1),
        output.Column("attempt", below=2),
        output.Column("epoch", text=lambda row: f"{row['epoch']}/{row['epochs']}" if row["epochs"] else "", below=2),
        output.Column("samples_per_s", below=2),
        output.Column("silent_s", "silent (s)", below=2),
    ]
