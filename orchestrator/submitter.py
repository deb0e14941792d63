"""Plan -> attempts: specs set aside, intents committed, then everything handed over. Safe to kill and to repeat.

    1. outbox      the specs of all runs to send, in one file
    2. store       one intent with a token for each run that nobody else is sending, in one transaction
    3. run folder  spec.json
    4. executor    the attempt itself, attempts/N/submission.json
    5. store       pending; the outbox file may go

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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import costs, tracker
from orchestrator import snapshot as snapshots
from orchestrator.errors import InputError, OperationError
from orchestrator.executors import at_work
from orchestrator.executors.endings import Exit
from orchestrator.executors.entries import QueueFolder, check_runs_folder
from orchestrator.executors.protocol import Delivery, Receipt
from orchestrator.executors.slurm import check_here
from orchestrator.executors.slurm_records import SiteFolder, shape_key
from orchestrator.resources import LOCAL
from orchestrator.together import for_each
from workloads.contract import RunSpec, State
from workloads.rundir import RunDir, encoded, read_json, write_bytes

if TYPE_CHECKING:
    from db.engine import Store
    from db.submissions import AttemptRecord, Intent
    from orchestrator.cli.workspace import Workspace
    from orchestrator.plan import Plan

OUTBOX_AGE_S = 3600.0
"""An outbox file whose submit was killed is cleared away when it is older, so never under a living submit."""
_SENT = ".sent"
"""Name of an outbox file of which everything was handed over."""
_ON_DISK_S = 120.0
"""By then a file that was written is on its disk: kernels wait a fraction of that."""


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
    """The code that the plan's runs were sent with, see ``workloads.frozen``."""
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
        scripts = {shape_key(asdict(script.shape)): script.text for script in plan.scripts}
        queues = {shape_key(asdict(script.shape)): script.queues for script in plan.scripts}
        SiteFolder(workspace.runs, plan.target).keep(plan.site, scripts, queues)
    runs = [run for run in plan.to_send(stale=stale) if only is None or run.cell.run_id in only]
    if runs and not snapshots.kept(workspace.runs, snapshot):
        prepare_runs_folder(workspace.runs)
        experiment = snapshots.Experiment.read(workspace.experiment, sets)
        snapshot = snapshots.take(workspace.runs, plan.packages, experiment)
    # Runs of one shape share its mapping, so that what is made of it is made once.
    shapes = {shape: asdict(shape) for shape in {run.shape for run in runs}}
    wanted = [(plan.spec(run, snapshot), shapes[run.shape]) for run in runs]
    return replace(send(workspace, wanted, plan.target, newest_known=newest_known), snapshot=snapshot)


def send(
    workspace: Workspace,
    wanted: Sequence[tuple[RunSpec, Mapping[str, Any]]],
    target: str,
    *,
    newest_known: Mapping[str, int] | None = None,
    anew: bool = False,
    recoveries: Mapping[str, Mapping[str, Any]] | None = None,
) -> Submitted:
    """Send runs, each with its resource shape, and whatever an interrupted call left behind.

    Each runs the code that its spec names, so that a run which goes on in a later attempt goes on with the same; where
    that is gone, the code as it is now.

    Args:
        anew: the code as it is now for all of them.
        recoveries: run id to why it is sent again by itself; absent where people send it.
    """
    from db.engine import open_store
    from db.submissions import record_intents, taken

    runs = workspace.runs
    carrier = tracker.executor(target, runs)
    if carrier is None:
        raise OperationError(
            f"nothing is known of the cluster {target} here, so nothing can be sent to it again",
            where=str(runs),
            hint=f"orchestrate submit --cluster {target} plans and sends it; --local runs on this machine",
        )
    prepare_runs_folder(runs)
    with open_store(workspace.database) as store, at_work.alone(runs) as alone:
        tracker.refresh(store, runs)
        earlier = _resume(store, runs) if alone else []
        others = taken(store, (spec.run_id for spec, _ in wanted), newest_known)
        free = [(spec, shape) for spec, shape in wanted if spec.run_id not in others]
        room = carrier.room() if free else None
        fitting = free if room is None else free[:room]
        intents: list[Intent] = []
        receipts: list[Receipt] = []
        if fitting:
            fitting = _with_code(runs, fitting, target, anew=anew)
            specs = {spec.run_id: spec for spec, _ in fitting}
            contents = {run_id: encoded(spec.to_json()) for run_id, spec in specs.items()}
            outbox = _set_aside(runs, contents.values())
            intents = record_intents(store, runs, fitting, target, newest_known=newest_known, recoveries=recoveries)
            shapes = {spec.run_id: shape for spec, shape in fitting}
            recorded = [
                _Recorded(
                    Sent(intent.run_id, intent.attempt, intent.token),
                    specs[intent.run_id],
                    contents[intent.run_id],
                    intent.submitted_at,
                    shapes[intent.run_id],
                    (recoveries or {}).get(intent.run_id),
                )
                for intent in intents
            ]
            receipts = _hand_over(store, runs, target, recorded)
            # Its specs are in the runs' folders, but a power cut could still lose them there.
            os.replace(outbox, outbox.with_suffix(_SENT))
        if alone:
            _clear_outbox(runs)
    carrier.wake()
    said = {receipt.token: receipt for receipt in receipts}
    done = [Sent(i.run_id, i.attempt, i.token) for i in intents if said[i.token].state is State.PENDING]
    every = [*receipts, *(receipt for _, receipt in earlier)]
    run_ids = {i.token: i.run_id for i in intents} | {sent.token: sent.run_id for sent, _ in earlier}
    held = [spec.run_id for spec, _ in free[len(fitting) :]]
    held += [run_ids[receipt.token] for receipt in every if receipt.state is State.PLANNED]
    touched = {*run_ids.values(), *held}
    return Submitted(
        sent=done,
        resumed=[sent for sent, receipt in earlier if receipt.state is State.PENDING],
        skipped=[spec.run_id for spec, _ in wanted if spec.run_id not in touched],
        held=held,
        refused=[receipt for receipt in every if receipt.state is State.FAILED],
        in_doubt=sum(receipt.state is State.SUBMITTING for receipt in every),
    )


def resume(store: Store, runs: Path) -> list[Sent]:
    """Hand over what an interrupted call recorded and did not hand over; call after :func:`tracker.refresh`.

    An intent whose spec is nowhere to be found becomes ``lost``, so that the run can be sent anew. Nothing is done
    while a submit is at work: its intents are not interrupted.
    """
    if not _unfinished(store):
        return []
    with at_work.alone(runs) as alone:
        found = _resume(store, runs, patient=False) if alone else []
        return [sent for sent, receipt in found if receipt.state is State.PENDING]


def _unfinished(store: Store) -> list[AttemptRecord]:
    from db.submissions import live

    return [record for record in live(store) if record.state is State.SUBMITTING]


def _resume(store: Store, runs: Path, *, patient: bool = True) -> list[tuple[Sent, Receipt]]:
    from db.submissions import Mark, mark_all

    left = _unfinished(store)
    if not left:
        return []
    set_aside = _outbox(runs)
    found: dict[str, list[_Recorded]] = {}
    lost = []
    for record in left:
        if tracker.executor(record.target, runs) is None:
            continue
        spec = set_aside.get(record.run_id) or _spec_on_disk(runs, record)
        if spec is None or record.token is None:
            why = "submit was interrupted before its spec was written; orchestrate retry or submit sends it again"
            lost.append(Mark(record.run_id, record.attempt, State.LOST, reason="never_sent", message=why))
            continue
        sent = Sent(record.run_id, record.attempt, record.token)
        found.setdefault(record.target, []).append(
            _Recorded(sent, spec, encoded(spec.to_json()), record.submitted_at, record.shape, record.recovery)
        )
    if lost:
        mark_all(store, lost)
    done: list[tuple[Sent, Receipt]] = []
    for target, attempts in found.items():
        receipts = {receipt.token: receipt for receipt in _hand_over(store, runs, target, attempts, patient=patient)}
        done += [(a.sent, receipts[a.sent.token]) for a in attempts]
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
    runs: Path, wanted: Sequence[tuple[RunSpec, Mapping[str, Any]]], target: str, *, anew: bool
) -> list[tuple[RunSpec, Mapping[str, Any]]]:
    """Give each run the name of the code that it runs."""
    names = {spec.snapshot for spec, _ in wanted}
    now = {name: name for name in names if not anew and snapshots.kept(runs, name)}
    now |= {name: snapshots.take_again(runs, name, local=target == LOCAL) for name in names - now.keys()}
    return [
        (spec if now[spec.snapshot] == spec.snapshot else replace(spec, snapshot=now[spec.snapshot]), shape)
        for spec, shape in wanted
    ]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """An attempt whose intent is in the store."""

    sent: Sent
    spec: RunSpec
    content: bytes
    """Of ``spec.json``."""
    submitted_at: str | None
    shape: Mapping[str, Any]
    recovery: Mapping[str, Any] | None


def _hand_over(
    store: Store, runs: Path, target: str, attempts: Sequence[_Recorded], *, patient: bool = True
) -> list[Receipt]:
    """Write each run's files, then give the attempts to the executor, then say so in the store."""
    from db.submissions import Mark, mark_all, withdraw

    if not attempts:
        return []
    deliveries, contents = [], []
    for recorded in attempts:
        sent, spec = recorded.sent, recorded.spec
        run = RunDir.of(runs, sent.run_id)
        contents.append((run, recorded.content))
        about = {
            "token": sent.token,
            "target": target,
            "attempt": sent.attempt,
            "submitted_at": recorded.submitted_at,
            "time_limit_s": spec.execution.time_limit_s,
            "snapshot": spec.snapshot,
            "shape": recorded.shape,
            "recovery": recorded.recovery,
        }
        deliveries.append(Delivery(sent.token, run.attempt(sent.attempt), spec, recorded.shape, about))
    for_each(lambda content: content[0].keep_spec(content[1]), contents)
    carrier = tracker.executor(target, runs)
    assert carrier is not None, "nothing is recorded for a target that cannot be reached"
    receipts = carrier.send(deliveries, patient=patient)
    places = {delivery.token: delivery for delivery in deliveries}
    marks = []
    for receipt in receipts:
        attempt = places[receipt.token].attempt
        if receipt.state is State.PLANNED:
            continue
        if receipt.state is not State.PENDING:
            places[receipt.token].introduce()
        if receipt.state is State.FAILED:
            Exit(receipt.state, receipt.reason, receipt.message).write(attempt)
        run_id = places[receipt.token].spec.run_id
        marks.append(
            Mark(run_id, attempt.number, receipt.state, receipt.job_id, reason=receipt.reason, message=receipt.message)
        )
    mark_all(store, marks)
    no_room = [receipt.token for receipt in receipts if receipt.state is State.PLANNED]
    if no_room:
        # The store first: of files alone the next command would make the same attempt again, and send it.
        withdraw(store, no_room)
        for token in no_room:
            shutil.rmtree(places[token].attempt.path, ignore_errors=True)
    return receipts


def _set_aside(runs: Path, specs: Iterable[bytes]) -> Path:
    folder = QueueFolder(runs)
    folder.create()
    path = folder.outbox / f"{uuid.uuid4().hex}.json"
    write_bytes(path, b"[" + b",".join(specs) + b"]")
    return path


def _outbox(runs: Path) -> dict[str, RunSpec]:
    """Specs by run id, of every submit that did not get to its end; the newest one of a run."""
    specs: dict[str, RunSpec] = {}
    for path in sorted(QueueFolder(runs).outbox.glob("[!.]*.json"), key=lambda path: path.stat().st_mtime):
        specs |= {spec.run_id: spec for spec in _specs_in(path)}
    return specs


def _clear_outbox(runs: Path) -> None:
    """Take away what nobody needs any more; specs that a power cut has lost are written again from there."""
    for path in QueueFolder(runs).outbox.glob("[!.]*"):
        with contextlib.suppress(FileNotFoundError):
            age_s = time.time() - path.stat().st_mtime
            if path.suffix == _SENT and age_s > _ON_DISK_S:
                for spec in _specs_in(path):
                    run = RunDir.of(runs, spec.run_id)
                    if _spec_of(run) is None:
                        run.write_spec(spec)
                path.unlink()
            elif path.suffix != _SENT and age_s > OUTBOX_AGE_S:
                path.unlink()


def _specs_in(outbox: Path) -> list[RunSpec]:
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return [RunSpec.from_json(data) for data in read_json(outbox)]
    return []


def _spec_on_disk(runs: Path, record: AttemptRecord) -> RunSpec | None:
    """The run's spec, when this attempt got as far as its own files: an older attempt's spec may be another one."""
    run = RunDir.of(runs, record.run_id)
    return _spec_of(run) if run.attempt(record.attempt).submission.exists() else None


def _spec_of(run: RunDir) -> RunSpec | None:
    try:
        return run.read_spec()
    except (OSError, ValueError):
        return None
