"""Refresh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli import output
from orchestrator.cli.workspace_checks import insist_on_runs_folder
from orchestrator.errors import OrchestrateError
from orchestrator.units import counted

if TYPE_CHECKING:
    from db.connect import Store
    from orchestrator.tracking.assess import Assessment
    from orchestrator.tracking.tracker import RunStatus
    from orchestrator.workspace import Workspace


def refreshed(
    workspace: Workspace, say: Callable[[str], None] = output.talk, *, recover: bool = False
) -> list[RunStatus]:
    """Every run, as it is now; as the database last knew it where that cannot be written.

    Args:
        workspace: the files of this invocation.
        say: told what else there is to know.
        recover: whether what ended without a result is sent again where its class and its bound allow it.

    Raises:
        InputError: the runs folder is not there, and the database knows runs.
    """
    insist_on_runs_folder(workspace)
    if workspace.is_empty:
        return []
    from db.connect import open_store
    from db.errors import StoreReadOnlyError
    from orchestrator.tracking import tracker
    from orchestrator.tracking.assess import assess_runs

    try:
        with open_store(workspace.database) as store:
            bring_up_to_date(store, workspace.runs, say=say)
    except StoreReadOnlyError as error:
        say(f"note: {error.where}: {error.what}, so states may be old")
        recover = False
    with open_store(workspace.database, read_only=True) as store:
        known = assess_runs(store, workspace.runs)
        due = [assessment for assessment in known.values() if assessment.decision.action.resubmits]
        if recover and due and _recover(workspace, due, say):
            known = assess_runs(store, workspace.runs)
        return tracker.statuses(store, workspace.runs, known)


def _recover(workspace: Workspace, due: Sequence[Assessment], say: Callable[[str], None]) -> bool:
    """Whether something was done."""
    from orchestrator.submission import resubmit

    try:
        return resubmit.recover(workspace, due, say)
    except (OrchestrateError, OSError) as error:
        # The next command tries again.
        say(f"note: {counted(len(due), 'run')} could not be sent again: {error}")
        return True


def bring_up_to_date(
    store: Store, runs: Path, *, fresh: bool = False, say: Callable[[str], None] = output.talk
) -> None:
    """Take in what ended, ask the witnesses of what goes on, finish an interrupted submit, wake the queue."""
    from orchestrator.cluster.resources import LOCAL
    from orchestrator.submission import submitter
    from orchestrator.tracking import tracker

    for problem in tracker.refresh(store, runs, fresh=fresh):
        say(f"left out: {problem.path}: {problem.what}")
    try:
        if resumed := submitter.resume(store, runs):
            say(f"an interrupted submit was finished: {counted(len(resumed), 'run')} sent")
        executor = tracker.find_executor(LOCAL, runs)
        assert executor is not None, "this machine is always there"
        executor.ensure_running()
    except (OrchestrateError, OSError) as error:
        # Looking is still possible where acting is not.
        say(f"note: {error}")
