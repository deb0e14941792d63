"""Plan -> attempts. Every step may be interrupted and repeated.

    1. outbox      the specs of all runs to submit, in one file
    2. store       one intent with a token for each run that no other command submits, in one transaction
    3. executor    the attempt itself, with all that its job needs
    4. store       pending; the outbox file is deleted

After a kill between any two steps, :func:`resume_submissions` continues from the intents that no executor has. An
executor may get the same attempt twice, which starts at most once. Step 2 keeps two submits at once apart.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.backends import submit_lock
from orchestrator.backends.base import SUBMIT_LIMIT, UNREACHABLE, Receipt, Request, Status
from orchestrator.backends.local.records import check_runs_folder
from orchestrator.backends.slurm.executor import require_sbatch
from orchestrator.backends.slurm.records import ClusterFolder
from orchestrator.cluster.resources import LOCAL
from orchestrator.environment import snapshot as snapshots
from orchestrator.errors import InputError, OperationError
from orchestrator.planning import costs
from orchestrator.submission import outbox
from orchestrator.tracking import tracker
from orchestrator.units import counted
from workloads.contract import RecoveryRecord, ResourceShape, RunSpec, State, Submission
from workloads.contract.flat import flat, from_flat
from workloads.files.run_dir import RunDir
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import connect, submissions

if TYPE_CHECKING:
    from orchestrator.planning.plan import Plan
    from orchestrator.workspace import Workspace

PlacedRun = tuple[RunSpec, ResourceShape]
"""A run to submit and the resources it gets."""


@dataclass(frozen=True, slots=True)
class SubmittedAttempt:
    """One attempt that an executor has."""

    run_id: str
    attempt: int
    token: str


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """What became of the runs of one call."""

    submitted: list[SubmittedAttempt] = field(default_factory=list)
    resumed: list[SubmittedAttempt] = field(default_factory=list)
    """Intents of an earlier call that was interrupted."""
    skipped: list[str] = field(default_factory=list)
    """Run ids that another command submitted meanwhile."""
    backlog: list[str] = field(default_factory=list)
    """Run ids that stay planned because the target's submit limit is reached."""
    rejected: list[Receipt] = field(default_factory=list)
    """With the target's messages."""
    snapshot: str = ""
    """Code of the plan's runs, see ``workloads.provenance.code_snapshot``."""
    unanswered: int = 0
    """Attempts for which Slurm has not answered yet; the next command finds out."""

    def to_json(self) -> dict[str, Any]:
        """What ``submit --json`` prints."""
        return {
            "sent": [asdict(attempt) for attempt in self.submitted],
            "resumed": [asdict(attempt) for attempt in self.resumed],
            "skipped": self.skipped,
            "held": self.backlog,
            "refused": [asdict(receipt) for receipt in self.rejected],
            "snapshot": self.snapshot,
            "in_doubt": self.unanswered,
        }


def submit_plan(
    workspace: Workspace,
    plan: Plan,
    *,
    stale: bool = False,
    newest_known: Mapping[str, int] | None = None,
    sets: Sequence[str] = (),
    snapshot: str = "",
    only: Collection[str] | None = None,
    max_gpu_hours: float | None = None,
) -> SubmitResult:
    """Submit every run of a plan that has no result and is not under way.

    Args:
        workspace: that of the plan.
        plan: what to submit.
        stale: submit stale runs too.
        newest_known: run id to newest attempt from before the plan was made; skip runs that have a newer one.
        sets: the ``--set`` texts, kept with the code.
        snapshot: code of an earlier submission; without one, freeze the code as it is now.
        only: run ids; None for all.
        max_gpu_hours: see :func:`orchestrator.planning.costs.check_limit`; counts the whole plan, whatever ``only`` is.

    Raises:
        InputError: the plan may cost too much, one of its checks failed, or the runs folder is unsafe.
        OperationError: the target cannot be reached from here, or the runs folder cannot be written.
    """
    if blocking := [check for check in plan.checks if check.blocking]:
        raise InputError(
            f"{counted(len(blocking), 'plan check')} failed; fix {'it' if len(blocking) == 1 else 'them'} first",
            why="; ".join(check.what for check in blocking),
            hint="; ".join(dict.fromkeys(check.fix for check in blocking if check.fix)),
        )
    if max_gpu_hours is not None:
        costs.check_limit(plan, max_gpu_hours, stale=stale)
    if plan.cluster is not None:
        require_sbatch(plan.cluster.name)
        prepare_runs_folder(workspace.runs)
        scripts = {script.shape.key(): script.text for script in plan.scripts}
        queues = {script.shape.key(): script.queues for script in plan.scripts}
        ClusterFolder(workspace.runs, plan.target).keep(plan.cluster, scripts, queues)
    runs = [run for run in plan.to_submit(stale=stale) if only is None or run.cell.run_id in only]
    if runs and not snapshots.renew(workspace.runs, snapshot):
        prepare_runs_folder(workspace.runs)
        experiment = snapshots.Experiment.read(workspace.experiment, sets)
        snapshot = snapshots.take(workspace.runs, plan.packages, experiment)
    expected = {shape: shape.expectation() for shape in {run.shape for run in runs}}
    wanted = [(plan.spec(run, snapshot, expected[run.shape]), run.shape) for run in runs]
    return replace(submit_runs(workspace, wanted, plan.target, newest_known=newest_known), snapshot=snapshot)


def submit_runs(
    workspace: Workspace,
    wanted: Sequence[PlacedRun],
    target: str,
    *,
    newest_known: Mapping[str, int] | None = None,
    current_code: bool = False,
    recoveries: Mapping[str, RecoveryRecord] | None = None,
) -> SubmitResult:
    """Submit runs, and what an interrupted call left behind.

    Args:
        workspace: has the runs folder and the store.
        wanted: the runs. Each uses the code that its spec names, so that all attempts of a run use the same; where that
            code is gone, the code as it is now.
        target: ``local`` or the cluster's name.
        newest_known: see :func:`submit_plan`.
        current_code: use the code as it is now for all of them.
        recoveries: run id to why recovery submits it; absent where a person does.

    Raises:
        OperationError: no run was ever submitted to this cluster from here, or the runs folder cannot be written.
    """
    runs = workspace.runs
    executor = tracker.find_executor(target, runs)
    if executor is None:
        raise OperationError(
            f"no run was submitted to cluster {target} from this runs folder, so its settings are unknown",
            where=str(runs),
            hint=f"plan and submit with orchestrate submit --cluster {target}, or --local for this machine",
        )
    prepare_runs_folder(runs)
    with connect.open_store(workspace.database) as store, submit_lock.acquire(runs) as alone:
        tracker.refresh(store, runs)
        earlier = _resume(store, runs) if alone else []
        taken = submissions.already_submitted(store, (spec.run_id for spec, _ in wanted), newest_known)
        free = [(spec, shape) for spec, shape in wanted if spec.run_id not in taken]
        fitting = free[: executor.capacity() if free else None]
        new = []
        if fitting:
            fitting = _with_code(runs, fitting, target, current_code=current_code)
            specs_file = outbox.write(runs, [spec for spec, _ in fitting])
            intents = submissions.record_intents(
                store, runs, fitting, target, newest_known=newest_known, recoveries=recoveries
            )
            specs = {spec.run_id: spec for spec, _ in fitting}
            new = _execute(store, target, [_request(runs, intent, specs[intent.run_id]) for intent in intents])
            specs_file.unlink()
        if alone:
            outbox.clear(runs)
    executor.ensure_running()
    both = [*new, *earlier]
    backlog = [spec.run_id for spec, _ in free[len(fitting) :]]
    backlog += [request.spec.run_id for request, receipt in both if receipt.reason == SUBMIT_LIMIT]
    touched = {request.spec.run_id for request, _ in both}.union(backlog)
    receipts = [receipt for _, receipt in both]
    return SubmitResult(
        submitted=_pending(new),
        resumed=_pending(earlier),
        skipped=[spec.run_id for spec, _ in wanted if spec.run_id not in touched],
        backlog=backlog,
        rejected=[r for r in receipts if r.state is State.FAILED or r.reason == UNREACHABLE],
        unanswered=sum(receipt.state is State.SUBMITTING for receipt in receipts),
    )


def resume_submissions(store: connect.Store, runs: Path) -> list[SubmittedAttempt]:
    """Submit what an interrupted call recorded and no executor has; call after :func:`tracker.refresh`.

    An intent without a spec becomes ``lost``, so that the run can be submitted anew. While another submit runs, nothing
    is done: its intents are not interrupted.
    """
    if not _unfinished(store):
        return []
    with submit_lock.acquire(runs) as alone:
        return _pending(_resume(store, runs, wait=False)) if alone else []


def _pending(answered: Sequence[tuple[Request, Receipt]]) -> list[SubmittedAttempt]:
    return [
        SubmittedAttempt(request.spec.run_id, request.number, request.token)
        for request, receipt in answered
        if receipt.state is State.PENDING
    ]


def _unfinished(store: connect.Store) -> list[submissions.AttemptRecord]:
    return [record for record in submissions.live_attempts(store) if record.state is State.SUBMITTING]


def _resume(store: connect.Store, runs: Path, *, wait: bool = True) -> list[tuple[Request, Receipt]]:
    specs = outbox.read(runs)
    by_target: dict[str, list[Request]] = {}
    lost = []
    why = "submit was interrupted before it wrote the run's spec; run orchestrate retry or submit"
    for record in _unfinished(store):
        if tracker.find_executor(record.target, runs) is None:
            continue
        spec = specs.get(record.run_id) or _spec_on_disk(runs, record)
        if spec and record.token:
            by_target.setdefault(record.target, []).append(_request(runs, record, spec))
        else:
            lost.append(submissions.StatusUpdate(record.run_id, record.attempt, State.LOST, None, "never_sent", why))
    submissions.update_statuses(store, lost)
    answered = [pair for target, requests in by_target.items() for pair in _execute(store, target, requests, wait=wait)]
    outbox.clear(runs)
    return answered


def _spec_on_disk(runs: Path, record: submissions.AttemptRecord) -> RunSpec | None:
    """The run's spec, where this attempt has files of its own: an older attempt's spec may differ."""
    run = RunDir.of(runs, record.run_id)
    if run.attempt(record.attempt).submission.exists():
        with contextlib.suppress(OSError, ValueError):
            return run.read_spec()
    return None


def prepare_runs_folder(runs: Path) -> None:
    """Create the runs folder.

    Raises:
        InputError: others can write to it, it belongs to somebody else, or jobs could not use its name.
        OperationError: it cannot be written.
    """
    for pattern, why in (
        ("%[jtAa]", "submitit and Slurm replace it by a job's number"),
        (os.pathsep, "jobs find their code through PYTHONPATH, in which it separates folders"),
    ):
        if found := re.search(pattern, str(runs)):
            what = f"the runs folder's path contains {found[0]}"
            raise InputError(what, where=str(runs), why=why, hint="name another folder with --runs")
    # Whatever the umask is: nobody else may write below it, since jobs unpickle what they find there.
    os.umask(os.umask(0) | 0o002)
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what, hint = f"cannot create the runs folder: {error.strerror}", "name a writable folder with --runs"
        raise OperationError(what, where=str(runs), hint=hint) from error
    check_runs_folder(runs)


def _with_code(runs: Path, wanted: Sequence[PlacedRun], target: str, *, current_code: bool) -> list[PlacedRun]:
    """Put the name of the code that each run uses into its spec."""
    names = {spec.snapshot for spec, _ in wanted}
    found = {name: name for name in names if not current_code and snapshots.renew(runs, name)}
    found |= {name: snapshots.retake(runs, name, local=target == LOCAL) for name in names - found.keys()}
    return [
        (spec if found[spec.snapshot] == spec.snapshot else replace(spec, snapshot=found[spec.snapshot]), shape)
        for spec, shape in wanted
    ]


def _request(runs: Path, intent: submissions.AttemptRecord, spec: RunSpec) -> Request:
    own = {"time_limit_s": spec.execution.time_limit_s, "snapshot": spec.snapshot}
    return Request(runs, spec, from_flat(Submission, flat(intent) | own))


def _execute(
    store: connect.Store, target: str, requests: Sequence[Request], *, wait: bool = True
) -> list[tuple[Request, Receipt]]:
    """Submit attempts to the executor, record its answers in the store, and return each attempt with its answer."""
    if not requests:
        return []
    for request in requests:
        if request.number > 1:
            # Slurm may start the job of the earlier attempt again (requeue): that job must see the newer attempt.
            request.materialize()
    executor = tracker.find_executor(target, requests[0].runs)
    assert executor is not None, "nothing is recorded for a target that cannot be reached"
    receipts = {receipt.token: receipt for receipt in executor.submit(requests, wait=wait)}
    answered = [(request, receipts[request.token]) for request in requests]
    updates = [_record_answer(*pair) for pair in answered if pair[1].state is not State.PLANNED]
    submissions.update_statuses(store, updates)
    withdrawn = [request for request, receipt in answered if receipt.state is State.PLANNED]
    if withdrawn:
        # First in the store: from the files alone, the next command would make the same attempt and submit it.
        submissions.withdraw_intents(store, [request.token for request in withdrawn])
        for request in withdrawn:
            shutil.rmtree(request.directory.path, ignore_errors=True)
    return answered


def _record_answer(request: Request, receipt: Receipt) -> submissions.StatusUpdate:
    """Write the files that an attempt needs after its answer, and return the update of the store."""
    message = receipt.message
    if receipt.state is not State.PENDING:
        request.materialize()
    if receipt.state is State.FAILED:
        recovery = request.submission.recovery
        if recovery is not None and recovery.cause:
            # The person must fix what ended the run before, not only the rejected resubmission.
            message = f"{recovery.cause}; its resubmission was rejected: {message}"
        Status(receipt.state, receipt.reason, message).write_exit(request.directory)
    return submissions.StatusUpdate(
        request.spec.run_id, request.number, receipt.state, receipt.job_id, receipt.reason, message
    )
