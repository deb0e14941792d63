"""Cancel runs.

A waiting run leaves the queue, a running one is ended. On this machine, a run that does not end by itself is killed.
Runs that have ended keep their state, and recovery does not resubmit them. Checkpoints stay: orchestrate retry
continues from them.

Example: orchestrate cancel --all
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import output, run_names
from orchestrator.cli.options import DatabaseOption, RunsOption
from orchestrator.cli.refresh import refresh_runs, refresh_store
from orchestrator.cli.workspace_checks import require_workspace
from orchestrator.cluster.resources import LOCAL
from orchestrator.errors import OperationError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace
from workloads.files.run_dir import RunDir
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import connect, errors, submissions
    from orchestrator.backends import exit_status
    from orchestrator.tracking import tracker

if TYPE_CHECKING:
    from orchestrator.backends.base import ForcedCancel

ORDER = 80


def cancel(
    names: run_names.RunsArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Cancel every run that waits or runs.")] = False,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    run_names.require_selection(names, every, "cancel", "--all")
    workspace = Workspace.at(runs=runs, database=database)
    require_workspace(workspace)
    chosen = run_names.select(refresh_runs(workspace), names, lambda _run: True)
    live = [run for run in chosen if run.state.live]
    _hold(workspace, chosen)
    for run in chosen:
        if not run.state.live and not every:
            output.print_message(f"{run.run_id} {run.label}: already {run.state.value}")
    left = _cancel(workspace, live)
    on_slurm = {run.run_id for run in live if run.target != LOCAL}
    ending = [run for run in refresh_runs(workspace) if run.run_id in on_slurm and run.state.live]
    typer.echo(f"{counted(len(live) - len(left), 'run')} cancelled")
    if left:
        names_left = run_names.describe([run for run in live if run.run_id in left])
        raise OperationError(
            f"not ended yet: {counted(len(left), 'run')}, {names_left}",
            why="; ".join(dict.fromkeys(each.what for each in left.values())),
            hint="; ".join(dict.fromkeys(each.hint for each in left.values())),
        )
    if ending:
        output.print_message(f"Slurm is still ending {len(ending)} of them; orchestrate status shows when they ended")


def _cancel(workspace: Workspace, live: Sequence[tracker.RunStatus]) -> dict[str, ForcedCancel]:
    """Cancel runs, and return by run id those that have not ended even when they were killed."""
    attempts = {run.run_id: RunDir.of(workspace.runs, run.run_id).attempt(run.attempt) for run in live}
    left: dict[str, ForcedCancel] = {}
    # Read-only, so that runs can be cancelled when their logs have filled the disk.
    with connect.open_store(workspace.database, read_only=True) as store:
        tokens = {record.run_id: record.token or "" for record in submissions.live_attempts(store)}
    for target in sorted({run.target or "" for run in live}):
        executor = tracker.find_executor(target, workspace.runs)
        if executor is None:
            raise OperationError(f"this version cannot cancel jobs of {target}", hint="scancel the job id")
        waiting = [run for run in live if run.target == target and run.run_id in tokens]
        executor.cancel([(attempts[run.run_id], tokens[run.run_id]) for run in waiting])
        deadline = time.monotonic() + executor.cancel_wait_s
        while waiting and time.monotonic() < deadline:
            waiting = [run for run in waiting if exit_status.Exit.read(attempts[run.run_id]) is None]
            time.sleep(0.1 if waiting else 0)
        by_token = {tokens[run.run_id]: run for run in waiting}
        for each in executor.force_cancel([(attempts[run.run_id], token) for token, run in by_token.items()]):
            run = by_token[each.token]
            if not each.ended:
                left[run.run_id] = each
            elif each.what:
                output.print_message(f"{run.run_id} {run.label}: {each.what}")
    with contextlib.suppress(errors.StoreReadOnlyError), connect.open_store(workspace.database) as store:
        refresh_store(store, workspace.runs, fresh=True)
    return left


def _hold(workspace: Workspace, chosen: Sequence[tracker.RunStatus]) -> None:
    """Keep recovery from resubmitting runs that have ended."""
    due = [run for run in chosen if run.will_resubmit]
    for run in due:
        RunDir.of(workspace.runs, run.run_id).attempt(run.attempt).create().held.touch()
    if due:
        output.print_message(f"{counted(len(due), 'run')} that had ended will not be resubmitted")
