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
from typing import Annotated

import typer

from orchestrator.cli import options, output, run_names
from orchestrator.cli.refresh import refresh_runs, refresh_store, require_workspace
from orchestrator.cluster.resources import LOCAL
from orchestrator.errors import OperationError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace
from workloads.files.run_dir import RunDir
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import connect, errors, submissions
    from orchestrator.backends import base
    from orchestrator.tracking import tracker

ORDER = 80


def cancel(
    names: run_names.RunsArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Cancel every run that waits or runs.")] = False,
    runs: options.RunsOption = DEFAULT_RUNS,
    database: options.DatabaseOption = DEFAULT_DATABASE,
) -> None:
    run_names.require_selection(names, every, "cancel", "--all")
    workspace = Workspace.at(runs=runs, database=database)
    require_workspace(workspace)
    chosen = run_names.select(refresh_runs(workspace), names, lambda _run: True)
    live = [run for run in chosen if run.state.live]
    due = [run for run in chosen if run.will_resubmit]
    for run in due:
        RunDir.of(workspace.runs, run.run_id).attempt(run.attempt).create().held.touch()
    if due:
        output.print_message(f"{counted(len(due), 'run')} that had ended will not be resubmitted")
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
            why="; ".join(dict.fromkeys(each.message for each in left.values())),
            hint="; ".join(dict.fromkeys(each.hint for each in left.values())),
        )
    if ending:
        output.print_message(f"Slurm is still ending {len(ending)} of them; orchestrate status shows when they ended")


def _cancel(workspace: Workspace, live: Sequence[tracker.RunStatus]) -> dict[str, base.ForcedCancel]:
    """Cancel runs, and return by run id those that have not ended even when they were killed."""
    left: dict[str, base.ForcedCancel] = {}
    labels = {run.run_id: run.label for run in live}
    # Read-only, so that runs can be cancelled when their logs have filled the disk.
    with connect.open_store(workspace.database, read_only=True) as store:
        records = [record for record in submissions.live_attempts(store) if record.run_id in labels]
    for target in sorted({record.target for record in records}):
        executor = tracker.find_executor(target, workspace.runs)
        if executor is None:
            raise OperationError(f"this version cannot cancel jobs of {target}", hint="scancel the job id")
        waiting = [base.Attempt.of(workspace.runs, record) for record in records if record.target == target]
        executor.cancel(waiting)
        deadline = time.monotonic() + executor.cancel_wait_s
        while waiting and time.monotonic() < deadline:
            waiting = [attempt for attempt in waiting if base.Status.read_exit(attempt.directory) is None]
            time.sleep(0.1 if waiting else 0)
        run_ids = {attempt.token: attempt.run_id for attempt in waiting}
        for forced in executor.force_cancel(waiting):
            run_id = run_ids[forced.token]
            if not forced.ended:
                left[run_id] = forced
            elif forced.message:
                output.print_message(f"{run_id} {labels[run_id]}: {forced.message}")
    with contextlib.suppress(errors.StoreReadOnlyError), connect.open_store(workspace.database) as store:
        refresh_store(store, workspace.runs, fresh=True)
    return left
