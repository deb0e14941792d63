"""Show what a run printed.

Example: orchestrate logs cnn-eager-cpu1-s0 --follow
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import output, run_names
from orchestrator.cli.options import DatabaseOption, RunsOption, insist_apart
from orchestrator.cli.refresh import refreshed
from orchestrator.errors import InputError, OperationError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace
from workloads.contract import State

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.tracking.tracker import RunStatus
    from workloads.files.run_dir import RunDir

ORDER = 70


def logs(
    context: typer.Context,
    run: run_names.RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    rank: Annotated[int, typer.Option("--rank", "-r", min=0, help="Which rank.")] = 0,
    every: Annotated[bool, typer.Option("--all", help="Every rank.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Standard error only.")] = False,
    stdout: Annotated[bool, typer.Option("--stdout", help="Standard output only.")] = False,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Which attempt; the newest.")] = None,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    from orchestrator.cli import log_files
    from orchestrator.tracking import tracker
    from workloads.files.run_dir import RunDir

    insist_apart(context, "every", "rank", "--all shows every rank")
    insist_apart(context, "stdout", "stderr", "each shows one stream alone; without them both are shown")
    workspace = Workspace.at(runs=runs, database=database)
    chosen = run_names.one(refreshed(workspace), run)
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
    wanted = log_files.Wanted(rank=None if every else rank, stdout=stdout or not stderr, stderr=stderr or not stdout)
    shown = log_files.show(place, job_id, wanted, follow=follow)
    if not shown:
        # It may have ended while it was followed.
        chosen = run_names.one(refreshed(workspace), chosen.run_id) if follow else chosen
        _say_nothing_shown(chosen, number, log_files.files(place, job_id, wanted), run)


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
