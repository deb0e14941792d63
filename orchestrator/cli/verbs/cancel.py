"""Stop runs.

What waits is taken out of the queue, what runs is ended; on this machine, what does not end when it is asked to is
killed. A run that has ended stays as it is, and is not sent again by itself. Checkpoints stay: orchestrate retry
goes on from them.

Example: orchestrate cancel --all
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import output, run_names
from orchestrator.cli.options import DatabaseOption, RunsOption
from orchestrator.cli.refresh import bring_up_to_date, refreshed
from orchestrator.cli.workspace_checks import insist_on_something
from orchestrator.cluster.resources import LOCAL
from orchestrator.errors import OperationError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace

if TYPE_CHECKING:
    from orchestrator.backends.base import ForcedCancel
    from orchestrator.tracking.tracker import RunStatus

ORDER = 80


def cancel(
    names: run_names.RunsArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Every run that waits or runs.")] = False,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    run_names.insist(names, every, "cancel", "--all")
    workspace = Workspace.at(runs=runs, database=database)
    insist_on_something(workspace)
    found = refreshed(workspace)
    chosen = found if every else [run_names.one(found, name) for name in names or []]
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
            f"not ended yet: {counted(len(left), 'run')}, {run_names.listed([run for run in live if run.run_id in left])}",
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
