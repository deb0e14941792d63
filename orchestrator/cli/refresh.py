"""What a verb does first: check that its workspace is usable, and bring the database up to date."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from orchestrator.cli.output import print_json, print_line, print_message
from orchestrator.errors import InputError, OrchestrateError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import attempt_files, connect, errors, ingest, queries
    from orchestrator.cluster import cluster_file, resources
    from orchestrator.submission import resubmit, submitter
    from orchestrator.tracking import assess, tracker


def refresh_runs(
    workspace: Workspace, report: Callable[[str], None] = print_message, *, recover: bool = False
) -> list[tracker.RunStatus]:
    """Return the state of every run now, or as last recorded where the database is read-only.

    With ``recover``, resubmit runs that ended without a result, as far as the recovery rules allow it.

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
        if recover and due:
            may_differ = True
            try:
                may_differ = resubmit.recover(workspace, due, report)
            except (OrchestrateError, OSError) as error:
                # The next command tries again.
                report(f"note: {counted(len(due), 'run')} could not be resubmitted: {error}")
            assessed = assess.assess_runs(store, workspace.runs) if may_differ else assessed
        return tracker.statuses(store, workspace.runs, assessed)


def refresh_store(
    store: connect.Store, runs: Path, *, fresh: bool = False, report: Callable[[str], None] = print_message
) -> None:
    """Read new files and query states, finish an interrupted submit, and restart the local queue where it is gone.

    With ``fresh``, query Slurm even if it was queried a moment ago.
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


def print_collected(done: str, report: ingest.CollectReport, *, json: bool) -> None:
    """Print how many records were read, after a word for what was done, and which files were skipped."""
    if json:
        print_json(report)
    else:
        counts = (counted(getattr(report, f"{name}s"), name) for name in ("run", "attempt", "result", "epoch"))
        print_line(f"{done}: {', '.join(counts)}")
    report_problems(report.problems)


def report_problems(
    problems: Iterable[attempt_files.IngestProblem], report: Callable[[str], None] = print_message
) -> None:
    """Report the files that were skipped."""
    for problem in problems:
        report(f"skipped: {problem.path}: {problem.what}")


def require_runs_folder(workspace: Workspace) -> None:
    """Raise InputError for a database with runs and no files of them: a typo or an unmounted disk would lose all."""
    folder = workspace.runs
    exists = folder.is_dir()
    if not workspace.has_database or (exists and any(folder.iterdir())):
        return
    try:
        with connect.open_store(workspace.database, read_only=True) as store:
            submitted = sum(record.attempt > 0 for record in queries.run_records(store).values())
    except errors.StoreError:
        return  # empty or damaged: the next one who opens it reports that
    if submitted:
        raise InputError(
            "the runs folder is empty" if exists else "there is no runs folder",
            where=str(folder),
            why=f"{workspace.database} has {counted(submitted, 'run')}, and none has files there",
            hint="name their folder with --runs or ORCHESTRATE_RUNS; for a new folder, name a new database with --db",
        )


def require_database(workspace: Workspace) -> None:
    """Raise InputError where there is no database; a misspelled name creates none."""
    if not workspace.has_database:
        hint = f"orchestrate collect{_db_option(workspace)} creates it from the runs folder, --db names another"
        raise InputError("there is no database", where=workspace.database, hint=hint)


def require_results(workspace: Workspace) -> None:
    """Raise InputError where nothing was submitted, or there is no database of what was."""
    require_workspace(workspace)
    require_database(workspace)


def require_workspace(workspace: Workspace) -> None:
    """Raise InputError where nothing was submitted yet."""
    if workspace.is_empty:
        raise InputError(
            "nothing was submitted here yet",
            where=str(workspace.runs.parent),
            why=f"neither {workspace.runs.name} nor {Path(workspace.database).name} exists",
            hint=f"orchestrate submit{_db_option(workspace)}, or name the places with --runs and --db",
        )


def default_cluster() -> cluster_file.ClusterProfile | None:
    """Return the cluster that ``plan`` takes without options here; None for this machine."""
    named = Path(name) if (name := os.environ.get("ORCHESTRATE_CLUSTER")) else None
    return cluster_file.choose(local=False, named=named, cwd=Path.cwd(), hostname=socket.gethostname())


def _db_option(workspace: Workspace) -> str:
    """Return the option with which other commands find this database; empty where they find it without."""
    default = Workspace.at(database=os.environ.get("ORCHESTRATE_DB") or DEFAULT_DATABASE).database
    return "" if workspace.database == default else f" --db {shlex.quote(workspace.database)}"
