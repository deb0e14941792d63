"""``submit --canary``: one run of each resource shape goes first; when all have succeeded, the rest may."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.cli import monitor, output
from orchestrator.cli.refresh import refreshed
from orchestrator.errors import OperationError
from orchestrator.planning.plan import Action
from orchestrator.submission import canary
from orchestrator.submission.submitter import Submitted
from orchestrator.units import counted

if TYPE_CHECKING:
    from orchestrator.planning.plan import Plan
    from orchestrator.workspace import Workspace

Submit = Callable[["Plan", Collection[str], str], Submitted]
"""Sends some runs of a plan with the code of an earlier call, if any."""


def prove(
    workspace: Workspace, planned: Callable[[], Plan], submit: Submit, *, stale: bool, recover: bool
) -> tuple[Submitted, frozenset[str]]:
    """Send canaries and wait for them until every shape is proven; what was sent, and which runs were waited for.

    Args:
        workspace: the files of this invocation.
        planned: makes the plan as it is now.
        submit: sends runs of it, given as run ids.
        stale: whether runs that are out of date are sent too.
        recover: whether a canary that ended without a result is sent again where its class allows it.

    Raises:
        OperationError: a canary failed, or could not be sent.
        typer.Exit: the person left; canaries go on.
    """
    done = Submitted()
    awaited: set[str] = set()
    while True:
        plan = planned()
        _insist(workspace, plan, awaited, stale=stale)
        chosen = canary.choose(plan, stale=stale)
        if not chosen.run_ids:
            return done, frozenset(awaited)
        if chosen.to_send:
            more = submit(plan, [run.cell.run_id for run in chosen.to_send], done.snapshot)
            done = replace(more, sent=[*done.sent, *more.sent], resumed=[*done.resumed, *more.resumed])
            if more.held:
                raise OperationError(
                    f"the site has no room for {counted(len(more.held), 'canary', 'canaries')} now",
                    hint="orchestrate submit --canary again goes on when there is room",
                )
            if more.refused or more.in_doubt:
                return done, frozenset(awaited)
        awaited |= set(chosen.run_ids)
        rest = len(plan.to_send(stale=stale)) - len(chosen.to_send)
        canaries = counted(len(chosen.run_ids), "canary", "canaries")
        before = f"before {counted(rest, 'more run')}" if rest else "and no more runs"
        output.talk(f"{canaries}, one of each resource shape, {before}")
        monitor.wait(workspace, chosen.run_ids, "submit --canary", recover=recover)


def _insist(workspace: Workspace, plan: Plan, awaited: Collection[str], *, stale: bool) -> None:
    """Raises OperationError when a canary ended badly."""
    failed = [run.cell.run_id for run in plan.runs if run.cell.run_id in awaited and run.action is Action.FAILED]
    if not failed:
        return
    rest = len(plan.to_send(stale=stale)) - len(failed)
    ended = [run for run in refreshed(workspace) if run.run_id in failed]
    raise OperationError(
        f"{_names([run.label for run in ended])} failed as canary; not sent: {counted(rest, 'more run')}",
        where=", ".join(run.run_id for run in ended),
        why="; ".join(f"{run.state.value}: {run.message or run.reason}" for run in ended),
        hint="orchestrate logs RUN shows more; orchestrate submit --canary tries again, submit alone sends all",
    )


def _names(labels: Sequence[str]) -> str:
    return ", ".join(labels)
