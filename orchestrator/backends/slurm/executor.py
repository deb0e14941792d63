"""A Slurm cluster as the login side sees it: send arrays, look at them, ask for their end.

Every command may be killed between any two lines here. What makes up for that is the order in ``_send_array``:

    1. the specs and the record of the array, with its token and what each index stands for, are on disk
    2. the call and the script are on disk under the token
    3. ``sbatch``, the token being the job's name
    4. the job's number goes into the record

A record without a number is an array that Slurm may or may not have: it is looked for by name, and adopted. Only when
Slurm has answered for a while that it knows no such job is the record discarded, and its tasks go out anew.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.backends import submit_lock
from orchestrator.backends.base import SUBMIT_LIMIT, UNREACHABLE, ForcedCancel, Receipt, Request, Status
from orchestrator.backends.exit_status import Exit
from orchestrator.backends.slurm import commands, query, queue_choice
from orchestrator.backends.slurm.observe import Evidence, Place
from orchestrator.backends.slurm.query import Newest, SeenArray
from orchestrator.backends.slurm.records import ArrayFolder, ArrayRecord, ClusterFolder, ClusterLimits
from orchestrator.backends.slurm.status import verdict
from orchestrator.errors import OperationError
from orchestrator.units import parse_time_limit
from workloads.contract import ResourceShape, State
from workloads.files.json_file import read_json
from workloads.files.run_dir import AttemptDir, jobs_folder
from workloads.provenance import code_snapshot

log = logging.getLogger(__name__)

ADOPTION_GRACE_S = 20.0
"""An array that Slurm does not list for so long was not accepted: twice the time that its messages may take."""
ADOPTION_POLL_S = 2.0
CANCELS_PER_CALL = 200
_SUBMIT_LIMIT = re.compile(r"Max\w*Submit\w*Limit|GrpSubmit\w*Limit")
_NO_SLURM = re.compile(r"establish a configuration source|DNS SRV lookup failed")
"""What clients say that neither have a configuration nor find one: no controller was asked."""
_NO_SBATCH = "submit did not finish, and there is no sbatch here; orchestrate submit on a login node goes on with it"

REJECTION_HINT = (
    "the site says no more than that; check, in the cluster file: max_submit (jobs you may have queued), time_limit "
    "against the queue's max_time, the pair of partition and qos, the type of GPU, the account"
)


class SlurmExecutor:
    """Carries out attempts on a cluster."""

    cancel_wait_s = 0.0
    """Ended jobs are seen at the next poll; nobody waits for that."""

    def __init__(self, runs: Path, site: ClusterLimits) -> None:
        self._runs = runs
        self._site = site
        self._folder = ClusterFolder(runs, site.name)
        self._arrays = ArrayFolder(runs)

    @classmethod
    def of(cls, runs: Path, target: str) -> SlurmExecutor | None:
        """None when nothing was ever sent to this target from here."""
        site = ClusterFolder(runs, target).site()
        return None if site is None else cls(runs, site)

    def capacity(self) -> int | None:
        """How many attempts the site takes now; None when it sets no limit, or does not tell."""
        if not self._site.max_submit:
            return None
        heard = query.num_queued(self._folder)
        if heard is None:
            return None
        queued, heard_at = heard
        arrays = self._arrays.open(self._site.name)
        on_the_way = sum(len(a.tasks) for a in arrays if a.job_id is None or a.asked_at > heard_at)
        return max(0, self._site.max_submit - queued - on_the_way)

    def ensure_running(self) -> None:
        """Slurm needs no waking."""

    def submit(self, requests: Sequence[Request], *, patient: bool = True) -> list[Receipt]:
        """Send attempts as arrays, one for each resource shape and chunk; those sent before are looked for first.

        Args:
            patient: wait for word of an array that Slurm may or may not have.
        """
        if shutil.which("sbatch") is None:
            return [Receipt(d.token, State.SUBMITTING, reason="interrupted", message=_NO_SBATCH) for d in requests]
        if leaking := commands.leaking():
            log.warning("not passed on to sbatch: %s", ", ".join(leaking))
        receipts: list[Receipt] = []
        places = self._places()
        earlier = {places[d.token].record.name: places[d.token].record for d in requests if d.token in places}
        for record in earlier.values():
            receipts += self._settle(record, patient=patient)
        places = self._places()
        fresh = [d for d in requests if d.token not in places]
        receipts += self._send_fresh(fresh, patient=patient)
        wanted = {d.token for d in requests}
        return [receipt for receipt in receipts if receipt.token in wanted]

    def _send_fresh(self, fresh: Sequence[Request], *, patient: bool) -> list[Receipt]:
        """Send chunk by chunk. Where the site did not tell how many jobs it takes, that is found out by halving."""
        receipts: list[Receipt] = []
        chunks = deque(self._chunks(fresh))
        stopped_by: Receipt | None = None
        while chunks:
            chunk = chunks.popleft()
            if stopped_by is not None:
                receipts += [replace(stopped_by, token=d.token) for d in chunk]
                continue
            interrupted = [Receipt(d.token, State.SUBMITTING, reason="interrupted") for d in chunk]
            said = self._send_array(chunk, patient=patient) or interrupted
            if said[0].reason == SUBMIT_LIMIT and len(chunk) > 1 and not self._site.max_submit:
                half = len(chunk) // 2
                chunks.extendleft((chunk[half:], chunk[:half]))
                continue
            receipts += said
            if said[0].state is State.PLANNED:
                stopped_by = said[0]
            elif said[-1].state is State.SUBMITTING:
                # Slurm does not answer, so the next command goes on from here.
                stopped_by = interrupted[-1]
        return receipts

    def status(self, attempts: Iterable[tuple[AttemptDir, str, State]], *, fresh: bool = False) -> list[Status]:
        """The state of each attempt. What ended without a result gets its ``exit.json`` here."""
        wanted = list(attempts)
        records = list(self._arrays.open(self._site.name))
        places = _index(records)
        tokens = {token for _, token, _ in wanted}
        concerned = [record for record in records if any(task.token in tokens for task in record.tasks)]
        newest = query.poll(self._folder, self._site, concerned, fresh=fresh)
        submit_host = submit_lock.other_host(self._runs)
        if not submit_host and not submit_lock.is_held_here(self._runs):
            unfinished = {token for _, token, recorded in wanted if recorded is State.SUBMITTING}
            self._adopt_seen(newest, concerned, unfinished)
        places = _index(self._arrays.open(self._site.name))
        submit_host = submit_lock.other_host(self._runs)
        submit_alive = bool(submit_host) or submit_lock.is_held_here(self._runs)
        evidence = Evidence(self._runs, self._site, self._arrays)
        verdicts, ends = [], []
        for attempt, token, recorded in wanted:
            place = places.get(token)
            witnesses = evidence.of(attempt, token, recorded, place, newest)
            found = verdict(replace(witnesses, submit_alive=submit_alive, submit_host=submit_host))
            if not found.state.live and found.state is not State.SUCCEEDED and witnesses.exit is None:
                end = Exit(found.state, found.reason, found.message, nodes=witnesses.node)
                ends.append((attempt, place, end))
            verdicts.append(replace(found, job_id=place.job_id if place else None))
        self._conclude(ends)
        newest.over_since = {t: at for t, at in newest.over_since.items() if t in tokens}
        newest.write(self._folder)
        live = {token for (_, token, _), found in zip(wanted, verdicts, strict=True) if found.state.live}
        self._close_ended(concerned, live)
        return verdicts

    def cancel(self, attempts: Sequence[tuple[AttemptDir, str]]) -> None:
        """Ask for the end of attempts, many with one ``scancel``; nobody else's job is touched.

        Raises:
            CommandError: ``scancel`` failed; what it was asked to end may go on.
        """
        places = self._places()
        ids, ends = [], []
        for attempt, token in attempts:
            place = places.get(token)
            if place is not None:
                self._arrays.ask_cancel(place.record, place.index)
            if place is not None and place.job_id is not None:
                ids.append(place.job_id)
            elif Exit.read(attempt) is None:
                # It may still come to Slurm; the job itself then finds this and does nothing.
                end = Exit(State.CANCELLED, "cancelled", "stopped by orchestrate cancel before it was sent")
                ends.append((attempt, place, end))
        self._conclude(ends)
        for batch in commands.batches(ids, CANCELS_PER_CALL):
            answer = commands.run("scancel", *batch)
            if not answer.ok and not _only_ended(answer.text):
                raise answer.error(hint="nothing was changed here; orchestrate cancel asks again")

    def force_cancel(self, attempts: Sequence[tuple[AttemptDir, str]]) -> list[ForcedCancel]:  # noqa: ARG002
        """Slurm ends its jobs itself, with SIGKILL at last."""
        return []

    def supersede(self, attempts: Sequence[tuple[AttemptDir, str]]) -> None:
        """Take back from Slurm what it might start again, before a later attempt takes over."""
        places = _index(self._arrays.all(self._site.name))
        for _, token in attempts:
            place = places.get(token)
            if place is not None and place.job_id is not None:
                # By name too: a number may be another job's by now.
                commands.run("scancel", f"--name={place.record.name}", place.job_id)

    # --- sending ---

    def _places(self) -> dict[str, Place]:
        return _index(self._arrays.open(self._site.name))

    def _chunks(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Runs of one shape and one code together, never more than an array may have; indices begin at 0 in each."""
        by_shape: dict[tuple[ResourceShape, str], list[Request]] = {}
        for request in requests:
            by_shape.setdefault((request.shape, request.spec.snapshot), []).append(request)
        most = self._site.array_index_max + 1
        if self._site.max_submit:
            most = min(most, self._site.max_submit)
        for group in by_shape.values():
            for start in range(0, len(group), most):
                yield group[start : start + most]

    def _send_array(self, chunk: Sequence[Request], *, patient: bool) -> list[Receipt]:
        from orchestrator.backends.slurm import array_job
        from orchestrator.backends.slurm.array_job import Fate, Parcel, SubmissionError
        from workloads.job.entry import run_task

        script = self._folder.script(chunk[0].shape)
        if script is None:
            what = f"no job script of this shape is kept for {self._site.name}; orchestrate submit plans and sends it"
            return [Receipt(d.token, State.FAILED, reason="no_script", message=what) for d in chunk]
        # Slurm opens a job's output before its script can make a folder, and fails the job where there is none.
        jobs_folder(self._runs).mkdir(parents=True, exist_ok=True)
        record = self._arrays.begin(ArrayRecord.new(self._site.name, chunk), [request.spec for request in chunk])
        spec = chunk[0].spec
        others = chunk[0].shape.arguments
        record, queue = self._choose_queue(record, chunk, others)
        self._arrays.keep_code(record, code_snapshot.pythonpath(self._runs, spec.snapshot, ""))
        parcel = Parcel(
            script=script,
            name=record.name,
            staging=self._arrays.of(record),
            num_tasks=len(chunk),
            num_ranks=spec.expect.ranks,
            parallel=self._site.array_parallel,
            minutes=-(-spec.execution.time_limit_s // 60),
            arguments=(*(f"--{name}={value}" for name, value in others.items()), *queue),
        )

        def accepted(job_id: str) -> None:
            nonlocal record
            record = self._arrays.write(replace(record, job_id=job_id))

        try:
            array_job.send(jobs_folder(self._runs), parcel, run_task, on_accepted=accepted)
        except SubmissionError as error:
            if error.fate is Fate.REFUSED:
                self._arrays.discard(record)
                said = error.answer.text or f"sbatch ended with exit code {error.answer.exit_code} and said nothing"
                stays = UNREACHABLE if _NO_SLURM.search(said) else SUBMIT_LIMIT if _SUBMIT_LIMIT.search(said) else ""
                state = State.PLANNED if stays else State.FAILED
                return [Receipt(d.token, state, reason=stays or "refused", message=said) for d in chunk]
            log.warning("sbatch did not say whether it took %s: %s", record.name, error.answer.text)
            return self._settle(record, patient=patient)
        return self._sent(record)

    def _choose_queue(
        self, record: ArrayRecord, chunk: Sequence[Request], others: Mapping[str, str]
    ) -> tuple[ArrayRecord, list[str]]:
        """The record with the queue that starts first, and how to say it; as it was where the script decides."""
        shape = chunk[0].shape
        pairs = self._folder.queues(shape) if self._site.queue_choice == "earliest" else []
        if len(pairs) < 2:
            return record, []
        limit_s = parse_time_limit(others["time"]) if "time" in others else chunk[0].spec.execution.time_limit_s
        script = self._folder.script_file(shape)
        found = queue_choice.earliest(script, pairs, others, count=len(chunk), time_limit_s=limit_s)
        if found is None:
            return record, []
        pair, said = found
        log.info("%s goes to %s, where Slurm expects it to start at %s", record.name, pair, said.start)
        record = replace(record, partition=pair.partition, qos=pair.qos, expected_start=said.start)
        return self._arrays.write(record), queue_choice.arguments(pair)

    def _sent(self, record: ArrayRecord) -> list[Receipt]:
        return [
            Receipt(task.token, State.PENDING, job_id=f"{record.job_id}_{index}", reason="queued")
            for index, task in enumerate(record.tasks)
        ]

    def _settle(self, record: ArrayRecord, *, patient: bool) -> list[Receipt]:
        """Find out what became of an array: it is adopted, or discarded, or in doubt until the next command."""
        while record.job_id is None:
            found = query.find(self._folder, self._site, record)
            if known := found or self._told_by_itself(record):
                return self._adopt(record, known)
            if found is not None:
                record = self._arrays.missed(record)
                if time.time() - (record.missed_at or time.time()) >= ADOPTION_GRACE_S:
                    self._arrays.discard(record)
                    return []
            if not patient or found is None:
                return [
                    Receipt(task.token, State.SUBMITTING, reason="in_doubt", message="Slurm may or may not have it")
                    for task in record.tasks
                ]
            time.sleep(min(ADOPTION_POLL_S, ADOPTION_GRACE_S / 4))
        return self._adopt(record, [record.job_id])

    def _told_by_itself(self, record: ArrayRecord) -> list[str]:
        """The number of the job, from a task that has started."""
        for task in record.tasks:
            owner = _object(task.directory(self._runs).owner)
            if owner.get("job_name") == record.name:
                return [str(owner.get("job_id", "")).partition("_")[0]]
        return []

    def _adopt(self, record: ArrayRecord, job_ids: Sequence[str]) -> list[Receipt]:
        from orchestrator.backends.slurm import array_job

        if record.job_id is None:
            record = self._arrays.write(replace(record, job_id=job_ids[0]))
        for other in job_ids[1:]:
            log.warning("job %s is a second one of %s: cancelled", other, record.name)
            commands.run("scancel", f"--name={record.name}", other)
        assert record.job_id is not None
        array_job.rename_script(jobs_folder(self._runs), self._arrays.of(record), record.job_id)
        return self._sent(record)

    # --- looking ---

    def _adopt_seen(self, newest: Newest, records: Sequence[ArrayRecord], unfinished: Collection[str]) -> None:
        """Go on where a submit was interrupted after ``sbatch``: the array is in the queue, or its number is known."""
        for record in records:
            if not any(task.token in unfinished for task in record.tasks):
                continue
            seen = newest.arrays.get(record.name, SeenArray())
            if job_ids := [record.job_id] if record.job_id else seen.job_ids:
                self._adopt(record, job_ids)

    def _conclude(self, ends: Iterable[tuple[AttemptDir, Place | None, Exit]]) -> None:
        """Write how attempts ended, also of those whose jobs did not come to making their folders."""
        ends = list(ends)
        missing: dict[str, tuple[ArrayRecord, list[int]]] = {}
        for attempt, place, _ in ends:
            if place is None:
                attempt.create()
            elif not attempt.submission.exists():
                missing.setdefault(place.record.token, (place.record, []))[1].append(place.index)
        for record, indexes in missing.values():
            self._arrays.create_run_folders(record, indexes)
        for attempt, _, end in ends:
            end.write(attempt)

    def _close_ended(self, records: Sequence[ArrayRecord], live: Collection[str]) -> None:
        for record in records:
            places = [task.directory(self._runs) for task in record.tasks if task.token not in live]
            if len(places) == len(record.tasks) and all(p.exit.exists() or p.result.exists() for p in places):
                self._arrays.close(record)


def _index(records: Iterable[ArrayRecord]) -> dict[str, Place]:
    return {task.token: Place(record, i) for record in records for i, task in enumerate(record.tasks)}


def _object(path: Path) -> Mapping[str, Any]:
    try:
        data = read_json(path)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _only_ended(text: str) -> bool:
    """Whether ``scancel`` complains only of jobs that have ended."""
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and all(re.search(r"Invalid job id|already completing|already finished", line) for line in lines)


def check_here(site_name: str) -> None:
    """Raises OperationError where no ``sbatch`` is: nothing may be recorded as sent from here."""
    if shutil.which("sbatch") is None:
        raise OperationError(
            f"this machine has no sbatch, so it cannot send runs to {site_name}",
            hint="run this on a login node of the cluster; --local runs on this machine",
        )
