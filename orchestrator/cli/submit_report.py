"""What ``submit`` and ``retry`` report of a submit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import typer

from orchestrator.errors import OperationError, PartlyDoneError
from orchestrator.units import counted
from workloads.contract import State
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from orchestrator.backends import base
    from orchestrator.backends.slurm import executor
    from orchestrator.submission import submitter


def combine(earlier: submitter.SubmitResult, later: submitter.SubmitResult) -> submitter.SubmitResult:
    """Return the result of two submits of one plan: what both submitted, and what the later one left."""
    return replace(later, submitted=[*earlier.submitted, *later.submitted], resumed=[*earlier.resumed, *later.resumed])


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
    """Raise an error for runs that were not submitted: PartlyDoneError where others were, else OperationError."""
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


def exit_by_states(ended: Counter[State], num_succeeded: int = 0) -> None:
    """Exit with 1 where all runs ended without a result, with 3 where some did; ``num_succeeded`` others have one."""
    bad = sum(count for state, count in ended.items() if state.ended_badly)
    if bad:
        raise typer.Exit(1 if bad == ended.total() + num_succeeded else 3)
