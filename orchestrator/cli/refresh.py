"""Bring the database up to date: what every verb that shows runs does first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from orchestrator.cli.output import print_line, print_message
from orchestrator.cli.workspace_checks import require_runs_folder
from orchestrator.errors import OrchestrateError
from orchestrator.units import counted
from orchestrator.workspace import Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import attempt_files, connect, errors, ingest
    from orchestrator.cluster import resources
    from orchestrator.submission import resubmit, submitter
    from orchestrator.tracking import assess, tracker


def refresh_runs(
    workspace: Workspace, report: Callable[[str], None] = print_message, *, recover: bool = False
) -> list[tracker.RunStatus]:
    """Return the state of every run now, or as last recorded where the database is read-only.

    Args:
        workspace: the files of this command.
        report: takes notes for the user.
        recover: whether to resubmit runs that ended without a result, as far as the recovery rules allow it.

    Raises:
        InputError: the database has runs, and the runs folder does not exist or is empty.
    """
    require_runs_folder(workspace)
    if workspace.is_empty:
        return []
    try:
        with connect.open_store(workspace.database) as store:
            refresh_store(store, workspace.runs, report=report)
    except errors.StoreReadOnlyError as error:
        report(f"note: {error.where}: {error.what}, so states may be old")
        recover = False
    with connect.open_store(workspace.database, read_only=True) as store:
        assessed = assess.assess_runs(store, workspace.runs)
        due = [assessment for assessment in assessed.values() if assessment.decision.action.resubmits]
        if recover and due and _recover(workspace, due, report):
            assessed = assess.assess_runs(store, workspace.runs)
        return tracker.statuses(store, workspace.runs, assessed)


def _recover(workspace: Workspace, due: Sequence[assess.Assessment], report: Callable[[str], None]) -> bool:
    """Resubmit runs, and return whether the store may have changed."""
    try:
        return resubmit.recover(workspace, due, report)
    except (OrchestrateError, OSError) as error:
        # The next command tries again.
        report(f"note: {counted(len(due), 'run')} could not be resubmitted: {error}")
        return True


def refresh_store(
    store: connect.Store, runs: Path, *, fresh: bool = False, report: Callable[[str], None] = print_message
) -> None:
    """Read new files and query states, finish an interrupted submit, and restart the local queue where it is gone.

    Args:
        store: the database.
        runs: the runs folder.
        fresh: whether to query Slurm even if it was queried a moment ago.
        report: takes notes for the user.
    """
    report_problems(tracker.refresh(store, runs, fresh=fresh), report)
    try:
        if resumed := submitter.resume_submissions(store, runs):
            report(f"finished an interrupted submit: {counted(len(resumed), 'run')} submitted")
        local = tracker.find_executor(resources.LOCAL, runs)
        assert local is not None, "this machine is always there"
        local.ensure_running()
    except (OrchestrateError, OSError) as error:
        # The states are still worth showing where nothing can be submitted.
        report(f"note: {error}")


def print_collected(done: str, report: ingest.CollectReport) -> None:
    """Print how many records were read, after a word for what was done."""
    counts = (counted(getattr(report, f"{name}s"), name) for name in ("run", "attempt", "result", "epoch"))
    print_line(f"{done}: {', '.join(counts)}")


def report_problems(
    problems: Iterable[attempt_files.IngestProblem], report: Callable[[str], None] = print_message
) -> None:
    """Report the files that were skipped."""
    for problem in problems:
        report(f"skipped: {problem.path}: {problem.what}")
