"""What is known of attempts on a cluster: from Slurm, from their own files and, of ended ones, from their logs."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.backends.exit_status import Exit, first_failure, hung_ranks, result_status, since_start
from orchestrator.backends.slurm.query import Newest, Seen, SeenArray
from orchestrator.backends.slurm.records import ArrayFolder, ArrayRecord, ClusterLimits
from orchestrator.backends.slurm.status import INTERRUPTED_EXIT, Phase, SlurmObservation, parse_rank_codes
from orchestrator.units import format_memory
from workloads.contract import State
from workloads.files.run_dir import AttemptDir, jobs_folder

_LOG_TAIL_BYTES = 4096
_MEMORY_LIMIT = re.compile(
    r"oom.kill|out.of.memory|exceeded (job |step )?memory limit|memory limit .*being killed", re.I
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an attempt is among the arrays."""

    record: ArrayRecord
    index: int

    @property
    def job_id(self) -> str | None:
        """None until Slurm is known to have the array."""
        return f"{self.record.job_id}_{self.index}" if self.record.job_id is not None else None


class Evidence:
    """Looks attempts up; Slurm itself was asked before."""

    def __init__(self, runs: Path, site: ClusterLimits, arrays: ArrayFolder) -> None:
        self._runs = runs
        self._site = site
        self._arrays = arrays

    def of(
        self, attempt: AttemptDir, token: str, recorded: State, place: Place | None, newest: Newest
    ) -> SlurmObservation:
        """All of it; logs and limits only when the task has ended."""
        said = result_status(attempt)
        ended = Exit.read(attempt)
        if place is None or ended is not None or (said is not None and said.state is State.SUCCEEDED):
            sent = recorded is not State.SUBMITTING or place is not None
            return SlurmObservation(recorded=recorded, phase=Phase.UNKNOWN, result=said, exit=ended, sent=sent)
        record, index = place.record, place.index
        array = newest.arrays.get(record.name, SeenArray())
        seen = array.tasks.get(index)
        phase = _phase(record, seen, newest)
        over_s = _over_s(newest, token, phase)
        life_at = _last_sign_of_life(attempt)
        started = life_at is not None or self._script_log(record, index).exists()
        witnesses = SlurmObservation(
            recorded=recorded,
            phase=phase,
            state=seen.state if seen else "",
            reason=seen.reason if seen else "",
            result=said,
            started=started,
            started_since=life_at is not None and life_at > newest.heard_at,
            silent_s=None if life_at is None else time.time() - life_at,
            over_s=over_s,
            array_known=bool(array.job_ids),
            elapsed_s=seen.elapsed_s if seen else None,
            sent=record.job_id is not None,
            requeue=self._site.requeue,
            cancelling=self._arrays.is_cancelled(record, index),
            node=seen.node if seen else "",
        )
        if phase in {Phase.ENDED, Phase.ABSENT}:
            return self._with_last_words(witnesses, attempt, record, index, seen)
        return witnesses

    def _with_last_words(
        self, witnesses: SlurmObservation, attempt: AttemptDir, record: ArrayRecord, index: int, seen: Seen | None
    ) -> SlurmObservation:
        """What is looked at only when a task has ended: how, in whose words, with what limits."""
        submission = record.submission(index)
        ranks, memory = submission.shape.ranks, submission.shape.mem_bytes
        logs = jobs_folder(self._runs) / str(record.job_id)
        script_log = _tail(self._script_log(record, index))
        errors = [_tail(logs / f"{record.job_id}_{index}_{rank}_log.err") for rank in range(ranks)]
        interrupts = since_start(attempt, "interrupt")
        codes = parse_rank_codes(script_log, ranks)
        # The rank that went first has more to say than those that were ended for it.
        blamed = [errors[rank] for rank, code in enumerate(codes) if code not in {None, 0, INTERRUPTED_EXIT}]
        said = [_last_line(text) for text in (*(blamed or errors), script_log)]
        return replace(
            witnesses,
            failure=first_failure(attempt, ranks),
            hung=hung_ranks(attempt, ranks),
            interrupted_by=str(interrupts[-1].get("signal", "")) if interrupts else "",
            exit_code=seen.exit_code if seen else None,
            rank_codes=codes,
            limit_s=submission.time_limit_s or None,
            memory=format_memory(memory) if memory else "",
            out_of_memory=bool(seen and seen.out_of_memory) or bool(_MEMORY_LIMIT.search(script_log + "".join(errors))),
            last_words=next((text for text in said if text), ""),
        )

    def _script_log(self, record: ArrayRecord, index: int) -> Path:
        return jobs_folder(self._runs) / f"slurm-{record.job_id}_{index}.out"


def _phase(record: ArrayRecord, seen: Seen | None, newest: Newest) -> Phase:
    if seen is not None:
        return seen.phase
    # An answer from before it was sent says nothing, nor does one that is not whole.
    heard_after = newest.heard_at > record.asked_at and not newest.problem and not newest.accounting_failed
    return Phase.ABSENT if heard_after else Phase.UNKNOWN


def _over_s(newest: Newest, token: str, phase: Phase) -> float:
    """Seconds since an attempt was first found neither waiting nor active."""
    if phase in {Phase.WAITING, Phase.ACTIVE}:
        newest.over_since.pop(token, None)
        return 0.0
    if phase is Phase.UNKNOWN:
        return 0.0
    now = time.time()
    return max(0.0, now - newest.over_since.setdefault(token, now))


def _last_sign_of_life(attempt: AttemptDir) -> float | None:
    newest = None
    for path in (attempt.progress(0), attempt.events(), attempt.owner):
        with contextlib.suppress(OSError):
            newest = max(newest or 0.0, path.stat().st_mtime)
    return newest


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _LOG_TAIL_BYTES))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def _last_line(text: str) -> str:
    """The last line that is not of Slurm's or submitit's own talk."""
    lines = [line.strip() for line in text.strip().splitlines()]
    own = [line for line in lines if not re.match(r"submitit (INFO|WARNING)|srun: |slurmstepd: ", line)]
    return (own or lines or [""])[-1]
