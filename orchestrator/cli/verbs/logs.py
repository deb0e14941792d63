"""Print the logs of a run: standard output and standard error of rank 0 of its newest attempt.

Example: orchestrate logs cnn-eager-cpu1-s0 --follow
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import options, output, run_names
from orchestrator.cli.refresh import refresh_runs
from orchestrator.errors import InputError, OperationError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace
from workloads.contract import State
from workloads.files.run_dir import RunDir
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from orchestrator.cli import log_files
    from orchestrator.tracking import tracker

ORDER = 70


def logs(
    context: typer.Context,
    run: run_names.RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")] = False,
    rank: Annotated[int, typer.Option("--rank", "-r", min=0, help="Print the logs of this rank.")] = 0,
    every: Annotated[bool, typer.Option("--all", help="Print the logs of all ranks.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Print standard error only.")] = False,
    stdout: Annotated[bool, typer.Option("--stdout", help="Print standard output only.")] = False,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="Print the logs of this attempt instead of the newest.")
    ] = None,
    runs: options.RunsOption = DEFAULT_RUNS,
    database: options.DatabaseOption = DEFAULT_DATABASE,
) -> None:
    options.require_exclusive(context, "every", "rank", "--all prints the logs of all ranks")
    options.require_exclusive(context, "stdout", "stderr", "each prints one stream only; without them both are printed")
    workspace = Workspace.at(runs=runs, database=database)
    status = run_names.find(refresh_runs(workspace), run)
    if status.attempt == 0:
        raise InputError(f"run {status.run_id} has no logs: it was not submitted yet", hint="orchestrate submit")
    number = attempt or status.attempt
    run_dir = RunDir.of(workspace.runs, status.run_id)
    attempt_dir = run_dir.attempt(number)
    # The folder of the newest attempt appears when its job starts.
    if number != status.attempt and not attempt_dir.path.is_dir():
        raise InputError(f"run {status.run_id} has no attempt {number}", hint=f"its newest is {status.attempt}")
    job_id = status.job_id if number == status.attempt else tracker.read_job_id(attempt_dir)
    _require_rank(run_dir, rank)
    selection = log_files.LogSelection(
        rank=None if every else rank, stdout=stdout or not stderr, stderr=stderr or not stdout
    )
    if not log_files.print_logs(attempt_dir, job_id, selection, follow=follow):
        if follow:  # the run may have ended meanwhile
            status = run_names.find(refresh_runs(workspace), status.run_id)
        _report_no_logs(status, number, log_files.files(attempt_dir, job_id, selection), run)


def _require_rank(run: RunDir, rank: int) -> None:
    """Raise InputError when the run has no such rank; where its spec cannot be read, any rank may exist."""
    try:
        num_ranks = run.read_spec().expect.ranks
    except (OSError, ValueError):
        return
    if rank >= num_ranks:
        raise InputError(
            f"run {run.run_id} has no rank {rank}",
            why=f"it has {counted(num_ranks, 'rank')}",
            hint="--all prints the only one" if num_ranks == 1 else f"--rank 0 to {num_ranks - 1}, or --all",
        )


def _report_no_logs(run: tracker.RunStatus, number: int, files: Sequence[Path], name: str) -> None:
    """Say why nothing was printed; raise OperationError unless the run succeeded without printing anything."""
    attempt = f"run {run.run_id} attempt {number}"
    is_newest = number == run.attempt
    if is_newest and run.state.live:
        what = f"{attempt} has no output yet"
    elif files:
        what = f"{attempt} has empty logs: {', '.join(map(str, files))}"
    else:
        what = f"{attempt} has no such logs: it wrote none, or orchestrate clean --logs removed them"
    if is_newest and run.state is State.SUCCEEDED:
        output.print_message(what)
        return
    why = f"it is {run.state.value}" + (f": {run.message or run.reason}" if run.reason else "") if is_newest else ""
    hint = "" if (is_newest and run.state.live) or number == 1 else f"orchestrate logs {name} --attempt {number - 1}"
    raise OperationError(what, why=why, hint=hint)
