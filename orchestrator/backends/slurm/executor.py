"""Slurm's executor: submits arrays, returns the status of their tasks, cancels them.

Any command may be killed between any two lines here. The order in ``_submit_array`` lets the next one continue:

    1. write the specs and the record of the array, with its token and the attempt of each index
    2. write the call and the script under the token
    3. call ``sbatch`` with the token in the job's name
    4. write the job id into the record

A record without a job id is an array that Slurm may or may not have accepted. The next command looks for it by name and
adopts it. Once Slurm has answered for :data:`ADOPTION_GRACE_S` without listing it, the record is deleted and its tasks
are submitted again.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.backends import submit_lock
from orchestrator.backends.base import (
    CANCELLED,
    SUBMIT_LIMIT,
    UNREACHABLE,
    Attempt,
    ForcedCancel,
    Receipt,
    Request,
    Status,
)
from orchestrator.backends.processes import Answer
from orchestrator.backends.slurm import commands, query, queue_choice
from orchestrator.backends.slurm.observe import SlurmObserver
from orchestrator.backends.slurm.query import ArrayReport, SlurmReport
from orchestrator.backends.slurm.records import ArrayFolder, ArrayRecord, ClusterFolder, ClusterLimits
from orchestrator.backends.slurm.status import status_of
from orchestrator.errors import OperationError
from orchestrator.units import parse_time_limit
from workloads.contract import ResourceShape, State
from workloads.files.array_record import create_run_folders
from workloads.files.json_file import read_object_or_empty, write_bytes
from workloads.files.run_dir import jobs_folder
from workloads.lazy import lazy_imports
from workloads.provenance import code_snapshot

with lazy_imports(__name__):
    from orchestrator.backends.slurm import array_job
    from workloads.job import entry

log = logging.getLogger(__name__)

ADOPTION_GRACE_S = 20.0
"""Slurm did not accept an array that it does not list after this long: twice ``MessageTimeout`` (slurm.conf(5), 10 s by
default)."""
ADOPTION_POLL_S = 2.0
CANCELS_PER_CALL = 200
_HAS_ENDED = re.compile(r"Invalid job id|already completing|already finished")
"""Complaints of ``scancel`` about jobs that need no cancel."""
_SUBMIT_LIMIT = re.compile(r"Max\w*Submit\w*Limit|GrpSubmit\w*Limit")
_NO_CONTROLLER = re.compile(r"establish a configuration source|DNS SRV lookup failed")
"""Messages of clients without a configuration: they contacted no controller (slurm.conf(5), "configless")."""
_NO_SBATCH = "submit was interrupted, and this machine has no sbatch; run orchestrate submit on a login node"

REJECTION_HINT = (
    "the site says no more than that; check, in the cluster file: max_submit (jobs you may have queued), time_limit "
    "against the queue's max_time, the pair of partition and qos, the type of GPU, the account"
)

_Places = Mapping[str, tuple[ArrayRecord, int]]
"""Token of an attempt -> its array and its index there."""


class SlurmExecutor:
    """Executes attempts on a cluster."""

    cancel_wait_s = 0.0
    """The next poll shows which cancelled jobs have ended."""

    def __init__(self, runs: Path, limits: ClusterLimits) -> None:
        self._runs, self._limits = runs, limits
        self._folder = ClusterFolder(runs, limits.name)
        self._arrays = ArrayFolder(runs)

    @classmethod
    def of(cls, runs: Path, target: str) -> SlurmExecutor | None:
        """Return None if nothing was ever submitted to this target from here."""
        limits = ClusterFolder(runs, target).limits()
        return None if limits is None else cls(runs, limits)

    def capacity(self) -> int | None:
        """Return how many attempts the site accepts now; None if it has no known limit or Slurm does not answer."""
        if not self._limits.max_submit:
            return None
        if (answer := query.num_queued(self._folder)) is None:
            return None
        queued, answered_at = answer
        arrays = self._arrays.read(self._limits.name)
        uncounted = sum(len(a.tasks) for a in arrays if a.job_id is None or a.asked_at > answered_at)
        return max(0, self._limits.max_submit - queued - uncounted)

    def ensure_running(self) -> None:
        """Do nothing: Slurm's daemons run."""

    def submit(self, requests: Sequence[Request], *, wait: bool = True) -> list[Receipt]:
        """Submit attempts as arrays, one per resource shape and chunk. First settle what was submitted before."""
        if shutil.which("sbatch") is None:
            return [Receipt(r.token, State.SUBMITTING, reason="interrupted", message=_NO_SBATCH) for r in requests]
        if ignored := commands.option_variables():
            log.warning("not passed on to sbatch: %s", ", ".join(ignored))
        places = self._open_places()
        earlier = {places[r.token][0].name: places[r.token][0] for r in requests if r.token in places}
        receipts = [receipt for record in earlier.values() for receipt in self._settle(record, wait=wait)]
        places = self._open_places()
        receipts += self._submit_new([r for r in requests if r.token not in places], wait=wait)
        wanted = {r.token for r in requests}
        return [receipt for receipt in receipts if receipt.token in wanted]

    def _submit_new(self, requests: Sequence[Request], *, wait: bool) -> list[Receipt]:
        """Submit chunk by chunk. Where the site's submit limit is unknown, halve a chunk that exceeds it."""
        receipts: list[Receipt] = []
        chunks = deque(self._chunks(requests))
        stopped_by: Receipt | None = None
        while chunks:
            chunk = chunks.popleft()
            if stopped_by is not None:
                receipts += [replace(stopped_by, token=r.token) for r in chunk]
                continue
            interrupted = [Receipt(r.token, State.SUBMITTING, reason="interrupted") for r in chunk]
            answers = self._submit_array(chunk, wait=wait) or interrupted
            if answers[0].reason == SUBMIT_LIMIT and len(chunk) > 1 and not self._limits.max_submit:
                half = len(chunk) // 2
                chunks.extendleft((chunk[half:], chunk[:half]))
                continue
            receipts += answers
            if answers[0].state is State.PLANNED:
                stopped_by = answers[0]
            elif answers[-1].state is State.SUBMITTING:
                # Slurm does not answer; the next command continues from here.
                stopped_by = interrupted[-1]
        return receipts

    def status(self, attempts: Sequence[Attempt], *, fresh: bool = False) -> list[Status]:
        """Return the status of each attempt. Writes ``exit.json`` of those that ended without a result."""
        records = self._arrays.read(self._limits.name)
        tokens = {attempt.token for attempt in attempts}
        concerned = [record for record in records if any(task.token in tokens for task in record.tasks)]
        report = query.poll(self._folder, self._limits, concerned, fresh=fresh)
        if submit_lock.holder(self._runs) is None:
            unfinished = {attempt.token for attempt in attempts if attempt.recorded is State.SUBMITTING}
            self._adopt_listed(report, concerned, unfinished)
        places = self._open_places()
        observer = SlurmObserver(self._runs, self._limits, report, submit_lock.holder(self._runs))
        found, ended = [], []
        for attempt in attempts:
            place = places.get(attempt.token)
            observation = observer.observe(attempt, place)
            status = status_of(observation)
            if not status.state.live and status.state is not State.SUCCEEDED and observation.exit is None:
                ended.append((attempt, replace(status, exit_codes=(), nodes=observation.task.node)))
            found.append(replace(status, job_id=place[0].task_id(place[1]) if place else None))
        self._write_exits(ended, places)
        report.ended_since = {token: at for token, at in report.ended_since.items() if token in tokens}
        report.write(self._folder)
        live = {attempt.token for attempt, status in zip(attempts, found, strict=True) if status.state.live}
        self._close_ended(concerned, live)
        return found

    def cancel(self, attempts: Sequence[Attempt]) -> None:
        """Cancel attempts, many with one ``scancel``, by their ids only. Raise CommandError if jobs may run on."""
        places = self._open_places()
        ids, ended = [], []
        for attempt in attempts:
            record, index = places.get(attempt.token, (None, 0))
            if record is not None:
                self._arrays.request_cancel(record, index)
            if record is not None and (task_id := record.task_id(index)) is not None:
                ids.append(task_id)
            elif Status.read_exit(attempt.directory) is None:
                # Slurm may still have accepted it; then the job finds this file and does nothing.
                message = "stopped by orchestrate cancel before it was submitted"
                ended.append((attempt, replace(CANCELLED, message=message)))
        self._write_exits(ended, places)
        for batch in commands.batches(ids, CANCELS_PER_CALL):
            answer = commands.run("scancel", *batch)
            complaints = list(filter(str.strip, answer.text.splitlines()))
            if not answer.ok and not (complaints and all(map(_HAS_ENDED.search, complaints))):
                raise answer.error(hint="run orchestrate cancel again; nothing was changed here")

    def force_cancel(self, attempts: Sequence[Attempt]) -> list[ForcedCancel]:  # noqa: ARG002
        """Do nothing: Slurm sends SIGKILL itself, ``KillWait`` after SIGTERM (slurm.conf(5))."""
        return []

    def supersede(self, attempts: Sequence[Attempt]) -> None:
        """Cancel jobs that Slurm might requeue after a later attempt has replaced them."""
        places = _places(self._arrays.read(self._limits.name, ended=True))
        for attempt in attempts:
            record, index = places.get(attempt.token, (None, 0))
            if record is not None and (task_id := record.task_id(index)) is not None:
                # By name too: Slurm reuses job ids after MaxJobId (slurm.conf(5)).
                commands.run("scancel", f"--name={record.name}", task_id)

    # --- submit ---

    def _open_places(self) -> _Places:
        return _places(self._arrays.read(self._limits.name))

    def _chunks(self, requests: Sequence[Request]) -> Iterator[Sequence[Request]]:
        """Group requests by shape and code, at most as many as an array may have; indices start at 0 in each."""
        groups: dict[tuple[ResourceShape, str], list[Request]] = {}
        for request in requests:
            groups.setdefault((request.submission.shape, request.spec.snapshot), []).append(request)
        most = self._limits.array_index_max + 1
        most = min(most, self._limits.max_submit or most)
        for group in groups.values():
            yield from commands.batches(group, most)

    def _submit_array(self, chunk: Sequence[Request], *, wait: bool) -> list[Receipt]:
        spec, shape = chunk[0].spec, chunk[0].submission.shape
        script = self._folder.script(shape)
        if script is None:
            missing = f"no job script of this shape is stored for {self._limits.name}; run orchestrate submit"
            return [Receipt(r.token, State.FAILED, reason="no_script", message=missing) for r in chunk]
        # Slurm opens a job's output before its script can create the folder, and fails the job without one.
        jobs_folder(self._runs).mkdir(parents=True, exist_ok=True)
        record = self._arrays.create(ArrayRecord.new(self._limits.name, chunk), [request.spec for request in chunk])
        record, queue = self._choose_queue(record, chunk)
        code = os.fsencode(code_snapshot.pythonpath(self._runs, spec.snapshot, ""))
        write_bytes(self._arrays.of(record) / "code", code, durable=False)
        array = array_job.ArrayJob(
            script=script,
            name=record.name,
            folder=self._arrays.of(record),
            num_tasks=len(chunk),
            num_ranks=spec.expect.ranks,
            parallel=self._limits.array_parallel,
            minutes=-(-spec.execution.time_limit_s // 60),
            options=(*(f"--{name}={value}" for name, value in shape.arguments.items()), *queue),
        )

        def write_job_id(job_id: str) -> None:
            nonlocal record
            record = self._arrays.write(replace(record, job_id=job_id))

        try:
            executor = array_job.ArrayExecutor(jobs_folder(self._runs), array, on_accepted=write_job_id)
            executor.submit(entry.run_task, str(array.folder))
        except array_job.SubmissionError as error:
            if error.outcome is array_job.SbatchOutcome.REJECTED:
                self._arrays.discard(record)
                return _rejected(chunk, error.answer)
            log.warning("sbatch did not report whether Slurm accepted %s: %s", record.name, error.answer.text)
            return self._settle(record, wait=wait)
        return _accepted(record)

    def _choose_queue(self, record: ArrayRecord, chunk: Sequence[Request]) -> tuple[ArrayRecord, list[str]]:
        """Return the record with the queue that starts first, and its options; unchanged if the script decides."""
        shape = chunk[0].submission.shape
        pairs = self._folder.queues(shape) if self._limits.queue_choice == "earliest" else []
        if len(pairs) < 2:
            return record, []
        options = shape.arguments
        limit_s = parse_time_limit(options["time"]) if "time" in options else chunk[0].spec.execution.time_limit_s
        script = self._folder.script_file(shape)
        found = queue_choice.earliest(script, pairs, options, count=len(chunk), time_limit_s=limit_s)
        if found is None:
            return record, []
        pair, estimate = found
        log.info("%s goes to %s, where Slurm expects it to start at %s", record.name, pair, estimate.start)
        record = replace(record, partition=pair.partition, qos=pair.qos, expected_start=estimate.start)
        return self._arrays.write(record), queue_choice.queue_options(pair)

    def _settle(self, record: ArrayRecord, *, wait: bool) -> list[Receipt]:
        """Find out whether Slurm accepted an array: adopt it, discard it, or leave that to the next command."""
        while record.job_id is None:
            found = query.find(self._folder, self._limits, record)
            if known := found or self._job_ids_of_started(record):
                return self._adopt(record, known)
            if found is not None:
                if record.missed_at is None:
                    record = self._arrays.write(replace(record, missed_at=time.time()))
                if time.time() - (record.missed_at or time.time()) >= ADOPTION_GRACE_S:
                    self._arrays.discard(record)
                    return []
            if not wait or found is None:
                unknown = "sbatch did not report whether Slurm accepted it"
                return [Receipt(t.token, State.SUBMITTING, reason="no_answer", message=unknown) for t in record.tasks]
            time.sleep(min(ADOPTION_POLL_S, ADOPTION_GRACE_S / 4))
        return self._adopt(record, [record.job_id])

    def _job_ids_of_started(self, record: ArrayRecord) -> list[str]:
        """Return the job id that a started task of an array wrote."""
        for task in record.tasks:
            owner = read_object_or_empty(task.directory(self._runs).owner)
            if owner.get("job_name") == record.name:
                return [str(owner.get("job_id", "")).partition("_")[0]]
        return []

    def _adopt(self, record: ArrayRecord, job_ids: Sequence[str]) -> list[Receipt]:
        if record.job_id is None:
            record = self._arrays.write(replace(record, job_id=job_ids[0]))
        for other in job_ids[1:]:
            log.warning("job %s is a duplicate of %s: cancelled", other, record.name)
            commands.run("scancel", f"--name={record.name}", other)
        assert record.job_id is not None
        array_job.rename_script(jobs_folder(self._runs), self._arrays.of(record), record.job_id)
        return _accepted(record)

    # --- status ---

    def _adopt_listed(self, report: SlurmReport, records: Sequence[ArrayRecord], unfinished: Collection[str]) -> None:
        """Adopt the arrays of an interrupted submit that Slurm lists or whose job id is known."""
        for record in records:
            if not any(task.token in unfinished for task in record.tasks):
                continue
            listed = report.arrays.get(record.name, ArrayReport())
            if job_ids := [record.job_id] if record.job_id else listed.job_ids:
                self._adopt(record, job_ids)

    def _write_exits(self, ended: Sequence[tuple[Attempt, Status]], places: _Places) -> None:
        """Write ``exit.json`` of attempts, also of those whose jobs did not create their run folders."""
        missing: dict[Path, list[int]] = {}
        for attempt, _ in ended:
            record, index = places.get(attempt.token, (None, 0))
            if record is None:
                attempt.directory.create()
            elif not attempt.directory.submission.exists():
                missing.setdefault(self._arrays.of(record), []).append(index)
        for array, indexes in missing.items():
            create_run_folders(array, indexes)
        for attempt, status in ended:
            status.write_exit(attempt.directory)

    def _close_ended(self, records: Sequence[ArrayRecord], live: Collection[str]) -> None:
        for record in records:
            ended = [task.directory(self._runs) for task in record.tasks if task.token not in live]
            if len(ended) == len(record.tasks) and all(d.exit.exists() or d.result.exists() for d in ended):
                self._arrays.close(record)


def _places(records: Iterable[ArrayRecord]) -> _Places:
    return {task.token: (record, index) for record in records for index, task in enumerate(record.tasks)}


def _accepted(record: ArrayRecord) -> list[Receipt]:
    return [
        Receipt(task.token, State.PENDING, job_id=record.task_id(index), reason="queued")
        for index, task in enumerate(record.tasks)
    ]


def _rejected(chunk: Sequence[Request], answer: Answer) -> list[Receipt]:
    """Return the receipts of a rejected array: planned if it may be accepted later or elsewhere, else failed."""
    message = answer.text or f"sbatch ended with exit code {answer.exit_code} and no message"
    planned = UNREACHABLE if _NO_CONTROLLER.search(message) else SUBMIT_LIMIT if _SUBMIT_LIMIT.search(message) else ""
    state = State.PLANNED if planned else State.FAILED
    return [Receipt(request.token, state, reason=planned or "rejected", message=message) for request in chunk]


def require_sbatch(target: str) -> None:
    """Raise OperationError if this machine has no ``sbatch``: nothing may be recorded as submitted from here."""
    if shutil.which("sbatch") is None:
        raise OperationError(
            f"this machine has no sbatch, so it cannot submit runs to {target}",
            hint="run this on a login node of the cluster; --local runs on this machine",
        )
