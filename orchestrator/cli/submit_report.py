"""Shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.errors import OperationError, PartlyDoneError
from orchestrator.units import counted
from orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from orchestrator.cli.backlog import Shepherd
    from orchestrator.submission.submitter import Submitted


WaitOption = Annotated[bool, typer.Option("--wait", "-w", help="Show progress until all runs have ended.")]


def _sent(done: Submitted, target: str) -> str:
    text = f"{counted(len(done.sent), 'run')} sent" + (f" to {target}" if target and done.sent else "")
    if done.resumed:
        text += f", {len(done.resumed)} of an interrupted submit"
    if done.skipped:
        text += f", {len(done.skipped)} already sent by another command"
    if done.held:
        text += f", {len(done.held)} stay planned until there is room: submit again, or submit --watch, sends them"
    return text


def _complain(done: Submitted) -> None:
    """Say what was not sent.

    Raises:
        PartlyDoneError: some was sent.
        OperationError: nothing was.
    """
    from orchestrator.backends.base import UNREACHABLE
    from orchestrator.backends.slurm.executor import REJECTION_HINT

    kind = PartlyDoneError if done.sent or done.resumed else OperationError
    if done.refused:
        said = dict.fromkeys(receipt.message for receipt in done.refused)
        if all(receipt.reason == UNREACHABLE for receipt in done.refused):
            raise kind(
                f"there is no Slurm to be reached from here: {counted(len(done.refused), 'run')} not sent",
                why="; ".join(said),
                hint="submit on a login node of the cluster; orchestrate submit --local takes this machine",
            )
        raise kind(f"refused by Slurm: {counted(len(done.refused), 'run')}", why="; ".join(said), hint=REJECTION_HINT)
    if done.in_doubt:
        raise kind(
            f"{counted(done.in_doubt, 'run')}: Slurm did not say whether it took them",
            why="it timed out, or cannot be reached",
            hint="nothing is sent twice: orchestrate submit or status looks for them in the queue by name",
        )


def _wait(
    workspace: Workspace,
    run_ids: Sequence[str],
    command: str,
    shepherd: Shepherd | None = None,
    *,
    recover: bool,
    num_succeeded: int = 0,
) -> None:
    """Wait for runs; ``num_succeeded``: how many had succeeded before, for the exit code."""
    from orchestrator.cli import monitor

    ended = monitor.wait(workspace, run_ids, command, shepherd, recover=recover)
    bad = sum(count for state, count in ended.items() if state.ended_badly)
    if bad:
        raise typer.Exit(1 if bad == ended.total() + num_succeeded else 3)
