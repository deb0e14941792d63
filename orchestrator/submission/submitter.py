"""Plan -> attempts: specs set aside, intents committed, then everything handed over. Safe to kill and to repeat.

    1. outbox      the specs of all runs to send, in one file
    2. store       one intent with a token for each run that nobody else is sending, in one transaction
    3. executor    the attempt itself, with all that its job needs
    4. store       pending; the outbox file may go

After a kill between any two of these, :func:`resume` finds the intents that were not handed over and goes on from
there; handing over twice does no harm, as an attempt starts at most once. Two submits at once are kept apart by step 2.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backends import submit_lock
from orchestrator.backends.base import SUBMIT_LIMIT, UNREACHABLE, Receipt, Request
from orchestrator.backends.exit_status import Exit
from orchestrator.backends.local.records import QueueFolder, check_runs_folder
from orchestrator.backends.slurm.executor import check_here
from orchestrator.backends.slurm.records import ClusterFolder
from orchestrator.cluster.resources import LOCAL
from orchestrator.environment import snapshot as snapshots
from orchestrator.errors import InputError, OperationError
from orchestrator.planning import costs
from orchestrator.tracking import tracker
from workloads.contract import RecoveryRecord, ResourceShape, RunSpec, State, Submission
from workloads.files.json_file import write_bytes
from workloads.files.packed_specs import pack_specs, unpack_specs
from workloads.files.run_dir import RunDir

if TYPE_CHECKING:
    from db.connect import Store
    from db.submissions import AttemptRecord, Intent
    from orchestrator.planning.plan import Plan
    from orchestrator.workspace import Workspace

OUTBOX_AGE_S = 3600.0
"""An outbox file whose submit was killed is cleared away when it is older, so never under a living submit."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One attempt that was handed over."""

    run_id: str
    attempt: int
    token: str


@dataclass(frozen=True, slots=True)
class Submitted:
    """What one call did."""

    sent: list[Sent] = field(default_factory=list)
    resumed: list[Sent] = field(default_factory=list)
    """Intents of an earlier call that was interrupted."""
    skipped: list[str] = field(default_factory=list)
    """Run ids that somebody else sent meanwhile."""
    held: list[str] = field(default_factory=list)
    """Run ids for which the target has no room now: they stay planned."""
    refused: list[Receipt] = field(default_factory=list)
    """What the target did not take, each with its words."""
    snapshot: str = ""
    """The code that the plan's runs were sent with, see ``workloads.provenance.code_snapshot``."""
    in_doubt: int = 0
    """Attempts of which nobody knows yet whether the target took them; the next command finds out."""


def submit(
    workspace: Workspace,
    plan: Plan,
    *,
    stale: bool = False,
    newest_known: Mapping[str, int] | None = None,
    sets: Sequence[str] = (),
    snapshot: str = "",
    only: Collection[str] | None = None,
    max_gpu_hours: float | None = None,
) -> Submitted:
    """Carry out a plan: send every run that has no result and is not under way.

    Args:
        workspace: the files of this invocation.
        plan: made for this workspace.
        stale: also runs whose code, packages or data changed since.
        newest_known: run id to newest attempt from before the plan was made; a run that has a newer one is left out.
        sets: what replaced keys of the experiment, kept with the code.
        snapshot: an earlier submission's code; none freezes the code as it is now.
        only: run ids; None for all.
        max_gpu_hours: see :func:`orchestrator.costs.insist`; of the whole plan, whatever ``only`` says.

    Raises:
        InputError: the plan may cost too much, a check of the plan forbids it, or the runs folder is unsafe.
        OperationError: the target cannot be reached from here, or the runs folder cannot be written.
    """
    blocking = [check for check in plan.checks if check.blocking]
    if blocking:
        raise InputError(
            f"{len(blocking)} of the plan's checks must be mended first",
            why="; ".join(check.what for check in blocking),
            hint="; ".join(dict.fromkeys(check.fix for check in blocking if check.fix)),
        )
    if max_gpu_hours is not None:
        costs.insist(plan, max_gpu_hours, stale=stale)
    if plan.site is not None:
        check_here(plan.site.name)
        prepare_runs_folder(workspace.runs)
        scripts = {script.shape.key(): script.text for script in plan.scripts}
        queues = {script.shape.key(): script.queues for script in plan.scripts}
        ClusterFolder(workspace.runs, plan.target).keep(plan.site, scripts, queues)
    runs = [run for run in plan.to_send(stale=stale) if only is None or run.cell.run_id in only]
    if runs and not snapshots.kept(workspace.runs, snapshot):
        prepare_runs_folder(workspace.runs)
        experiment = snapshots.Experiment.read(workspace.experiment, sets)
        snapshot = snapshots.take(workspace.runs, plan.packages, experiment)
    expected = {shape: shape.expectation() for shape in {run.shape for run in runs}}
    wanted = [(plan.spec(run, snapshot, expected[run.shape]), run.shape) for run in runs]
    return replace(send(workspace, wanted, plan.target, newest_known=newest_known), snapshot=snapshot)


def send(
    workspace: Workspace,
    wanted: Sequence[tuple[RunSpec, ResourceShape]],
    target: str,
    *,
    newest_known: Mapping[str, int] | None = None,
    anew: bool = False,
    recoveries: Mapping[str, RecoveryRecord] | None = None,
) -> Submitted:
    """Send runs, each with its resource shape, and whatever an interrupted call left behind.

    Each runs the code that its spec names, so that a run which goes on in a later attempt goes on with the same; where
    that is gone, the code as it is now.

    Args:
        anew: the code as it is now for all of them.
        recoveries: run id to why it is sent again by itself; absent where people send it.
    """
    from db.connect import open_store
    from db.submissions import already_submitted, record_intents

    runs = workspace.runs
    executor = tracker.find_executor(target, runs)
    if executor is None:
        raise OperationError(
            f"nothing is known of the cluster {target} here, so nothing can be sent to it again",
            where=str(runs),
            hint=f"orchestrate submit --cluster {target} plans and sends it; --local runs on this machine",
        )
    prepare_runs_folder(runs)
    with open_store(workspace.database) as store, submit_lock.acquire(runs) as alone:
        tracker.refresh(store, runs)
        earlier = _resume(store, runs) if alone else []
        others = already_submitted(store, (spec.run_id for spec, _ in wanted), newest_known)
        free = [(spec, shape) for spec, shape in wanted if spec.run_id not in others]
        room = executor.capacity() if free else None
        fitting = free if room is None else free[:room]
        intents: list[Intent] = []
        receipts: list[Receipt] = []
        if fitting:
            fitting = _with_code(runs, fitting, target, anew=anew)
            outbox = _set_aside(runs, [spec for spec, _ in fitting])
            intents = record_intents(store, runs, fitting, target, newest_known=newest_known, recoveries=recoveries)
            by_id = {spec.run_id: (spec, shape) for spec, shape in fitting}
            requests = [
                _request(runs, target, intent, *by_id[intent.run_id], (recoveries or {}).get(intent.run_id))
                for intent in intents
            ]
            receipts = _hand_over(store, runs, target, requests)
            outbox.unlink()
        if alone:
            _clear_outbox(runs)
    executor.ensure_running()
    said = {receipt.token: receipt for receipt in receipts}
    done = [Sent(i.run_id, i.attempt, i.token) for i in intents if said[i.token].state is State.PENDING]
    every = [*receipts, *(receipt for _, receipt in earlier)]
    run_ids = {i.token: i.run_id for i in intents} | {sent.token: sent.run_id for sent, _ in earlier}
    held = [spec.run_id for spec, _ in free[len(fitting) :]]
    held += [run_ids[receipt.token] for receipt in every if receipt.reason == SUBMIT_LIMIT]
    touched = {*run_ids.values(), *held}
    return Submitted(
        sent=done,
        resumed=[sent for sent, receipt in earlier if receipt.state is State.PENDING],
        skipped=[spec.run_id for spec, _ in wanted if spec.run_id not in touched],
        held=held,
        refused=[receipt for receipt in every if receipt.state is State.FAILED or receipt.reason == UNREACHABLE],
        in_doubt=sum(receipt.state is State.SUBMITTING for receipt in every),
    )


def resume(store: Store, runs: Path) -> list[Sent]:
    """Hand over what an interrupted call recorded and did not hand over; call after :func:`tracker.refresh`.

    An intent whose spec is nowhere to be found becomes ``lost``, so that the run can be sent anew. Nothing is done
    while a submit is at work: its intents are not interrupted.
    """
    if not _unfinished(store):
        return []
    with submit_lock.acquire(runs) as alone:
        found = _resume(store, runs, patient=False) if alone else []
        return [sent for sent, receipt in found if receipt.state is State.PENDING]


def _unfinished(store: Store) -> list[AttemptRecord]:
    from db.submissions import live_attempts

    return [record for record in live_attempts(store) if record.state is State.SUBMITTING]


def _resume(store: Store, runs: Path, *, patient: bool = True) -> list[tuple[Sent, Receipt]]:
    from db.submissions import StatusUpdate, update_statuses

    left = _unfinished(store)
    if not left:
        return []
    set_aside = _outbox(runs)
    found: dict[str, list[Request]] = {}
    lost = []
    for record in left:
        if tracker.find_executor(record.target, runs) is None:
            continue
        spec = set_aside.get(record.run_id) or _spec_on_disk(runs, record)
        if spec is None or record.token is None:
            why = "submit was interrupted before its spec was written; orchestrate retry or submit sends it again"
            lost.append(StatusUpdate(record.run_id, record.attempt, State.LOST, reason="never_sent", message=why))
            continue
        request = _request(runs, record.target, record, spec, record.shape, record.recovery)
        found.setdefault(record.target, []).append(request)
    if lost:
        update_statuses(store, lost)
    done: list[tuple[Sent, Receipt]] = []
    for target, requests in found.items():
        receipts = {receipt.token: receipt for receipt in _hand_over(store, runs, target, requests, patient=patient)}
        done += [(Sent(d.spec.run_id, d.number, d.token), receipts[d.token]) for d in requests]
    _clear_outbox(runs)
    return done


def prepare_runs_folder(runs: Path) -> None:
    """Make the runs folder, or say why it cannot be used.

    Raises:
        InputError: others can write to it, it is somebody else's, or jobs could not use its name.
        OperationError: it cannot be written.
    """
    tags = re.search("%[jtAa]", str(runs))
    if tags:
        raise InputError(
            f"the runs folder's path contains {tags[0]}",
            where=str(runs),
            why="submitit and Slurm would put a job's number there",
            hint="name another folder with --runs",
        )
    if os.pathsep in str(runs):
        raise InputError(
            f"the runs folder's path contains {os.pathsep}",
            where=str(runs),
            why="jobs find their code there through PYTHONPATH, in which it parts two folders",
            hint="name another folder with --runs",
        )
    # Nothing below it may become writable for everybody, whatever the umask.
    os.umask(os.umask(0) | 0o002)
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperationError(
            f"cannot make the runs folder: {error.strerror}",
            where=str(runs),
            hint="name a folder you may write to with --runs",
        ) from error
    check_runs_folder(runs)


def _with_code(
    runs: Path, wanted: Sequence[tuple[RunSpec, ResourceShape]], target: str, *, anew: bool
) -> list[tuple[RunSpec, ResourceShape]]:
    """Give each run the name of the code that it runs."""
    names = {spec.snapshot for spec, _ in wanted}
    now = {name: name for name in names if not anew and snapshots.kept(runs, name)}
    now |= {name: snapshots.take_again(runs, name, local=target == LOCAL) for name in names - now.keys()}
    return [
        (spec if now[spec.snapshot] == spec.snapshot else replace(spec, snapshot=now[spec.snapshot]), shape)
        for spec, shape in wanted
    ]


def _request(
    runs: Path,
    target: str,
    intent: Intent | AttemptRecord,
    spec: RunSpec,
    shape: ResourceShape,
    recovery: RecoveryRecord | None,
) -> Request:
    token = intent.token
    assert token is not None, "an intent has a token"
    submission = Submission(
        token=token,
        target=target,
        attempt=intent.attempt,
        submitted_at=intent.submitted_at,
        time_limit_s=spec.execution.time_limit_s,
        snapshot=spec.snapshot,
        shape=shape,
        recovery=recovery,
    )
    return Request(runs, spec, submission)


def _hand_over(
    store: Store, runs: Path, target: str, requests: Sequence[Request], *, patient: bool = True
) -> list[Receipt]:
    """Give the attempts to the executor, then say so in the store."""
    from db.submissions import StatusUpdate, update_statuses, withdraw_intents

    if not requests:
        return []
    for request in requests:
        if request.number > 1:
            # Should a scheduler start the earlier attempt's job again, that must see that it was taken over.
            request.materialize()
    executor = tracker.find_executor(target, runs)
    assert executor is not None, "nothing is recorded for a target that cannot be reached"
    receipts = executor.submit(requests, patient=patient)
    by_token = {request.token: request for request in requests}
    marks = []
    for receipt in receipts:
        sent, state = by_token[receipt.token], receipt.state
        if state is State.PLANNED:
            continue
        if state is not State.PENDING:
            sent.materialize()
        message = receipt.message
        if state is State.FAILED:
            if (recovery := sent.submission.recovery) and recovery.cause:
                # What people must mend is what ended the run, not that there was nothing left to try.
                message = f"{recovery.cause}; sent again, it was refused: {message}"
            Exit(state, receipt.reason, message).write(sent.attempt)
        about = {"reason": receipt.reason, "message": message}
        marks.append(StatusUpdate(sent.spec.run_id, sent.number, state, receipt.job_id, **about))
    update_statuses(store, marks)
    no_room = [receipt.token for receipt in receipts if receipt.state is State.PLANNED]
    if no_room:
        # The store first: of files alone the next command would make the same attempt again, and send it.
        withdraw_intents(store, no_room)
        for token in no_room:
            shutil.rmtree(by_token[token].attempt.path, ignore_errors=True)
    return receipts


def _set_aside(runs: Path, specs: Sequence[RunSpec]) -> Path:
    folder = QueueFolder(runs)
    folder.create()
    path = folder.outbox / f"{uuid.uuid4().hex}.json"
    write_bytes(path, pack_specs(specs))
    return path


def _outbox(runs: Path) -> dict[str, RunSpec]:
    """Specs by run id, of every submit that did not get to its end; the newest one of a run."""
    specs: dict[str, RunSpec] = {}
    for path in sorted(QueueFolder(runs).outbox.glob("[!.]*"), key=lambda path: path.stat().st_mtime):
        with contextlib.suppress(OSError, ValueError):
            specs |= {spec.run_id: spec for spec in unpack_specs(path.read_bytes())}
    return specs


def _clear_outbox(runs: Path) -> None:
    """Take away what submits have left that were killed long ago."""
    for path in QueueFolder(runs).outbox.glob("[!.]*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > OUTBOX_AGE_S:
                path.unlink()


def _spec_on_disk(runs: Path, record: AttemptRecord) -> RunSpec | None:
    """The run's spec, when this attempt got as far as its own files: an older attempt's spec may be another one."""
    run = RunDir.of(runs, record.run_id)
    if run.attempt(record.attempt).submission.exists():
        with contextlib.suppress(OSError, ValueError):
            return run.read_spec()
    return None
