"""Observe attempts on a cluster: Slurm's records, the attempts' own files and, of ended ones, their logs."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.backends.base import Attempt, Observation, Status
from orchestrator.backends.exit_status import (
    INTERRUPTED_EXIT,
    RankFailure,
    events_since_start,
    final_status,
    first_failure,
    hung_ranks,
    last_change,
    read_tail,
    result_status,
)
from orchestrator.backends.slurm.query import ArrayReport, SlurmReport, TaskRecord
from orchestrator.backends.slurm.records import ArrayFolder, ArrayRecord, ClusterLimits
from orchestrator.backends.slurm.states import Phase, parse_rank_codes
from orchestrator.units import format_memory
from workloads.contract import State
from workloads.files.run_dir import jobs_folder

_MEMORY_LIMIT = re.compile(
    r"oom.kill|out.of.memory|exceeded (job |step )?memory limit|memory limit .*being killed", re.I
)
"""Messages of slurmstepd about the memory limit, of different releases and cgroup versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmObservation(Observation):
    """What is observed of one attempt on a cluster."""

    phase: Phase
    task: TaskRecord = field(default_factory=TaskRecord)
    submitted: bool = True
    """Whether Slurm is known to have accepted it."""
    array_listed: bool = False
    """Whether Slurm lists the array or other tasks of it."""
    started: bool = False
    """Whether a start left any file."""
    started_since_query: bool = False
    """Whether its files changed after Slurm last answered."""
    ended_s: float = 0.0
    """Seconds since it was first found neither waiting nor active."""
    requeue: bool = False
    """Whether the site requeues jobs."""
    failure: RankFailure | None = None
    hung: Sequence[int] = ()
    interrupted_by: str = ""
    """The signal that the run recorded as the cause of its end."""
    rank_codes: Sequence[int | None] = ()
    """Exit codes by rank, as far as ``srun`` logged them; negative for a signal."""
    limit_s: int | None = None
    memory: str = ""
    """The requested memory, formatted."""
    out_of_memory: bool = False
    """Whether a step's state or a log reports the memory limit."""
    last_line: str = ""
    """Of the log of the rank that failed first."""


class SlurmObserver:
    """Observes attempts after Slurm was queried."""

    def __init__(self, runs: Path, limits: ClusterLimits, report: SlurmReport, submit_host: str | None) -> None:
        self._runs, self._limits, self._report, self._submit_host = runs, limits, report, submit_host
        self._arrays = ArrayFolder(runs)

    def observe(self, attempt: Attempt, place: tuple[ArrayRecord, int] | None) -> SlurmObservation:
        """Observe an attempt at its ``place``, array and index. Reads logs and limits only if its task has ended."""
        observation = SlurmObservation(
            recorded=attempt.recorded,
            phase=Phase.UNKNOWN,
            result=result_status(attempt.directory),
            exit=Status.read_exit(attempt.directory),
            submitted=place is not None or attempt.recorded is not State.SUBMITTING,
            submit_host=self._submit_host,
        )
        if place is None or final_status(observation) is not None:
            return observation
        record, index = place
        array = self._report.arrays.get(record.name, ArrayReport())
        task = array.tasks.get(index)
        phase = self._phase(record, task)
        directory = attempt.directory
        changed_at = last_change((directory.progress(0), directory.events(), directory.owner))
        observation = replace(
            observation,
            phase=phase,
            task=task or TaskRecord(),
            started=changed_at is not None or self._script_log(record, index).exists(),
            started_since_query=changed_at is not None and changed_at > self._report.answered_at,
            silent_s=None if changed_at is None else time.time() - changed_at,
            ended_s=self._ended_s(attempt.token, phase),
            array_listed=bool(array.job_ids),
            submitted=record.job_id is not None,
            requeue=self._limits.requeue,
            cancelling=self._arrays.is_cancelled(record, index),
        )
        if phase in {Phase.ENDED, Phase.ABSENT}:
            return self._with_logs(observation, attempt, record, index)
        return observation

    def _with_logs(
        self, observation: SlurmObservation, attempt: Attempt, record: ArrayRecord, index: int
    ) -> SlurmObservation:
        submission = record.submission(index)
        ranks, memory = submission.shape.ranks, submission.shape.mem_bytes
        logs = jobs_folder(self._runs) / str(record.job_id)
        script_log = read_tail(self._script_log(record, index))
        errors = [read_tail(logs / f"{record.job_id}_{index}_{rank}_log.err") for rank in range(ranks)]
        interrupts = events_since_start(attempt.directory, "interrupt")
        codes = parse_rank_codes(script_log, ranks)
        # The rank that failed first logs the cause; srun then ended the others.
        failed = [errors[rank] for rank, code in enumerate(codes) if code not in {None, 0, INTERRUPTED_EXIT}]
        lines = [_last_line(text) for text in (*(failed or errors), script_log)]
        return replace(
            observation,
            failure=first_failure(attempt.directory, ranks),
            hung=hung_ranks(attempt.directory, ranks),
            interrupted_by=str(interrupts[-1].get("signal", "")) if interrupts else "",
            rank_codes=codes,
            limit_s=submission.time_limit_s or None,
            memory=format_memory(memory) if memory else "",
            out_of_memory=observation.task.out_of_memory or bool(_MEMORY_LIMIT.search(script_log + "".join(errors))),
            last_line=next((line for line in lines if line), ""),
        )

    def _script_log(self, record: ArrayRecord, index: int) -> Path:
        return jobs_folder(self._runs) / f"slurm-{record.job_id}_{index}.out"

    def _phase(self, record: ArrayRecord, task: TaskRecord | None) -> Phase:
        if task is not None:
            return task.phase
        # An incomplete answer, or one from before the submission, proves nothing.
        report = self._report
        has_answer = report.answered_at > record.asked_at and not report.problem and not report.accounting_failed
        return Phase.ABSENT if has_answer else Phase.UNKNOWN

    def _ended_s(self, token: str, phase: Phase) -> float:
        if phase in {Phase.WAITING, Phase.ACTIVE}:
            self._report.ended_since.pop(token, None)
        if phase not in {Phase.ENDED, Phase.ABSENT}:
            return 0.0
        now = time.time()
        return max(0.0, now - self._report.ended_since.setdefault(token, now))


def _last_line(text: str) -> str:
    """Return the last line that is not a message of Slurm or submitit, else the last line."""
    lines = [line.strip() for line in text.strip().splitlines()]
    own = [line for line in lines if not re.match(r"submitit (INFO|WARNING)|srun: |slurmstepd: ", line)]
    return (own or lines or [""])[-1]
