"""What ``submit`` and ``retry`` report of a submit, and how they wait for its runs."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from orchestrator.errors import OperationError, PartlyDoneError
from orchestrator.units import counted
from orchestrator.workspace import Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from orchestrator.backends import base
    from orchestrator.backends.slurm import executor
    from orchestrator.cli import backlog as backlogs
    from orchestrator.cli import monitor
    from orchestrator.submission import submitter


def describe(result: submitter.SubmitResult, target: str = "") -> str:
    """Return a submit's result in one line."""
    text = f"{counted(len(result.submitted), 'run')} submitted"
    if target and result.submitted:
        text += f" to {target}"
    if result.resumed:
        text += f", {len(result.resumed)} of an interrupted submit"
    if result.skipped:
        text += f", {len(result.skipped)} already submitted by another command"
    if result.backlog:
        text += (
            f", {len(result.backlog)} stay planned, as the site's limit is reached: "
            "orchestrate submit later, or submit --watch, submits them"
        )
    return text


def raise_for_failures(result: submitter.SubmitResult) -> None:
    """Raise an error for runs that were not submitted.

    Raises:
        PartlyDoneError: others were.
        OperationError: none was.
    """
    kind = PartlyDoneError if result.submitted or result.resumed else OperationError
    if result.rejected:
        count = counted(len(result.rejected), "run")
        why = "; ".join(dict.fromkeys(receipt.message for receipt in result.rejected))
        if all(receipt.reason == base.UNREACHABLE for receipt in result.rejected):
            raise kind(
                f"Slurm cannot be reached from here: {count} not submitted",
                why=why,
                hint="submit on a login node of the cluster; orchestrate submit --local uses this machine",
            )
        raise kind(f"Slurm rejected {count}", why=why, hint=executor.REJECTION_HINT)
    if result.unanswered:
        raise kind(
            f"Slurm gave no answer for {counted(result.unanswered, 'run')}",
            why="sbatch timed out, or the controller cannot be reached",
            hint="orchestrate status looks for the jobs by name; nothing is submitted twice",
        )


def wait(
    workspace: Workspace,
    run_ids: Sequence[str],
    command: str,
    backlog: backlogs.Backlog | None = None,
    *,
    recover: bool,
    num_succeeded: int = 0,
) -> None:
    """Wait for runs, and exit with 1 where all ended without a result, with 3 where some did.

    Args:
        workspace: the files of this command.
        run_ids: the runs.
        command: the command that waits, to name it when it is interrupted.
        backlog: to be submitted meanwhile.
        recover: whether to resubmit runs that ended without a result, as far as the recovery rules allow it.
        num_succeeded: runs of this command that had succeeded before.
    """
    ended = monitor.wait(workspace, run_ids, command, backlog, recover=recover)
    bad = sum(count for state, count in ended.items() if state.ended_badly)
    if bad:
        raise typer.Exit(1 if bad == ended.total() + num_succeeded else 3)
