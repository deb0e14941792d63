"""``submit --canary``: one run of each resource shape goes first; the others follow when all of these succeeded."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from orchestrator.cli import monitor, output
from orchestrator.cli.refresh import refresh_runs
from orchestrator.cli.submit_report import combine
from orchestrator.errors import OperationError
from orchestrator.planning.plan import CellState
from orchestrator.submission import canary
from orchestrator.submission.submitter import SubmitResult
from orchestrator.units import counted

if TYPE_CHECKING:
    from orchestrator.planning.plan import Plan
    from orchestrator.workspace import Workspace

Submit = Callable[["Plan", Collection[str], str], SubmitResult]
"""Submits some runs of a plan, given by id, with the code snapshot of an earlier submit if one is named."""


def submit_canaries(
    workspace: Workspace, make_plan: Callable[[], Plan], submit: Submit, *, stale: bool, recover: bool
) -> tuple[SubmitResult, frozenset[str]]:
    """Submit canaries and wait until one run of every shape has succeeded.

    Args:
        workspace: the files of this command.
        make_plan: returns the plan of now.
        submit: submits runs of it.
        stale: whether stale results are rerun too.
        recover: whether to resubmit canaries that ended without a result, as far as the recovery rules allow it.

    Returns:
        What was submitted, and the ids of all canaries.

    Raises:
        OperationError: a canary failed, or could not be submitted.
        typer.Exit: the user left; the canaries go on.
    """
    result = SubmitResult()
    awaited: set[str] = set()
    while True:
        plan = make_plan()
        _require_success(workspace, plan, awaited, stale=stale)
        chosen = canary.choose_canaries(plan, stale=stale)
        if not chosen.run_ids:
            return result, frozenset(awaited)
        if chosen.to_submit:
            more = submit(plan, [run.cell.run_id for run in chosen.to_submit], result.snapshot)
            result = combine(result, more)
            if more.backlog:
                raise OperationError(
                    f"the site's limit leaves no room for {counted(len(more.backlog), 'canary', 'canaries')} now",
                    hint="repeat orchestrate submit --canary when queued jobs have ended",
                )
            if more.rejected or more.unanswered:
                return result, frozenset(awaited)
        awaited |= set(chosen.run_ids)
        rest = len(plan.to_submit(stale=stale)) - len(chosen.to_submit)
        canaries = counted(len(chosen.run_ids), "canary", "canaries")
        before = f"before {counted(rest, 'more run')}" if rest else "and no more runs"
        output.print_message(f"{canaries}, one of each resource shape, {before}")
        monitor.wait(workspace, chosen.run_ids, "submit --canary", recover=recover)


def _require_success(workspace: Workspace, plan: Plan, awaited: Collection[str], *, stale: bool) -> None:
    """Raise OperationError when a canary ended without a result."""
    failed = [run.cell.run_id for run in plan.runs if run.cell.run_id in awaited and run.state is CellState.FAILED]
    if not failed:
        return
    rest = len(plan.to_submit(stale=stale)) - len(failed)
    ended = [run for run in refresh_runs(workspace) if run.run_id in failed]
    raise OperationError(
        f"{', '.join(run.label for run in ended)} failed as canary; not submitted: {counted(rest, 'more run')}",
        where=", ".join(run.run_id for run in ended),
        why="; ".join(f"{run.state.value}: {run.message or run.reason}" for run in ended),
        hint="see orchestrate logs RUN; then orchestrate submit --canary tries again, submit alone submits all",
    )
