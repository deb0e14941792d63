"""submitit's Slurm executor with our script, for one job and for many alike: always an array, named by its token."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from orchestrator.executors import slurm_commands
from orchestrator.executors.slurm_commands import Answer

_UNCLEAR = re.compile(
    r"timed out|time.?out|send/recv|Unable to contact|[Cc]onnect(ion)? (failure|refused|reset)|Communication|"
    r"Zero Bytes|Transport endpoint|not responding|Resource temporarily unavailable|Interrupted system call"
)
"""Words of a client that lost its controller: the job may have been accepted."""


class Fate(StrEnum):
    """What became of an ``sbatch``."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNCLEAR = "unclear"
    """Only the queue can tell."""


def job_id_in(stdout: str) -> str | None:
    """The job's number in what ``sbatch --parsable`` printed, whatever a site's filters print around it.

    ``4242``, ``4242;cluster`` and ``Submitted batch job 4242`` are understood, the last such line counts.
    """
    for line in reversed(stdout.splitlines()):
        match = re.fullmatch(r"\s*(?:Submitted batch job )?(\d+)(?:;\S*)?(?: on cluster \S+)?\s*", line)
        if match:
            return match[1]
    return None


def fate(answer: Answer) -> tuple[Fate, str | None]:
    """What became of an ``sbatch``, and the job's number when that is known."""
    if answer.ok:
        job_id = job_id_in(answer.stdout)
        return (Fate.ACCEPTED, job_id) if job_id else (Fate.UNCLEAR, None)
    if answer.exit_code is None or answer.exit_code < 0 or _UNCLEAR.search(answer.text):
        return Fate.UNCLEAR, None
    return Fate.REFUSED, None


class SubmissionError(Exception):
    """``sbatch`` did not accept, or did not say so."""

    def __init__(self, fate: Fate, answer: Answer) -> None:
        super().__init__(answer.text)
        self.fate = fate
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one array consists of."""

    script: str
    name: str
    staging: Path
    """A folder by the array's name, where its calls wait for the job's number."""
    num_ranks: int
    parallel: int
    """Tasks at once; 0 for all."""
    minutes: int
    arguments: tuple[str, ...] = ()
    """Of ``sbatch``, which win over the lines of the script."""


class ArrayExecutor(SlurmExecutor):
    """Sends arrays whose script is given. Pickles, logs and ``Job`` objects are submitit's.

    The calls are on disk before ``sbatch``, under the array's name, where the script finds them: submitit's own way,
    which moves them afterwards, leaves tasks without a call when the submitting process ends in between.
    """

    def __init__(self, folder: Path, parcel: Parcel, *, on_accepted: Callable[[str], None]) -> None:
        super().__init__(folder / "%A")
        self._parcel = parcel
        self._on_accepted = on_accepted
        self.update_parameters(time=parcel.minutes)

    @classmethod
    def affinity(cls) -> int:
        """Compute nodes have srun; a login node need not."""
        return 2

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        parcel = self._parcel
        parcel.staging.mkdir(parents=True, exist_ok=True)
        for index, delayed in enumerate(delayed_submissions):
            delayed.set_timeout(parcel.minutes, self.max_num_timeout)
            delayed.dump(call_path(parcel.staging, index))
        script = parcel.staging / "script.sh"
        script.write_text(self._make_submission_file_text("", parcel.name), encoding="utf-8", newline="\n")
        answer = slurm_commands.run(
            *self._array_command(script, len(delayed_submissions)), timeout_s=slurm_commands.SBATCH_TIMEOUT_S
        )
        outcome, job_id = fate(answer)
        if job_id is None:
            raise SubmissionError(outcome, answer)
        self._on_accepted(job_id)
        return name_calls(self.folder, parcel, job_id, len(delayed_submissions))

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002 (submitit's signature)
        return self._parcel.script

    def _array_command(self, script: Path, count: int) -> list[str]:
        throttle = f"%{self._parcel.parallel}" if self._parcel.parallel else ""
        array = f"--array=0-{count - 1}{throttle}"
        return ["sbatch", "--parsable", f"--job-name={self._parcel.name}", array, *self._parcel.arguments, str(script)]


def call_path(staging: Path, index: int) -> Path:
    """Where the call of a task waits until the job's number is known."""
    return staging / f"{index}.pkl"


def name_calls(folder: Path, parcel: Parcel, job_id: str, count: int) -> list[Job[Any]]:
    """Give calls and script the names by the job's number that submitit expects; may be done again."""
    tasks = list(range(parcel.num_ranks))
    jobs: list[Job[Any]] = [SlurmJob(folder=folder, job_id=f"{job_id}_{index}", tasks=tasks) for index in range(count)]
    for index, job in enumerate(jobs):
        if call_path(parcel.staging, index).exists() and not job.paths.submitted_pickle.exists():
            job.paths.move_temporary_file(call_path(parcel.staging, index), "submitted_pickle")
    script = parcel.staging / "script.sh"
    if jobs and script.exists() and not jobs[0].paths.submission_file.exists():
        jobs[0].paths.move_temporary_file(script, "submission_file")
    return jobs


def send(
    folder: Path,
    parcel: Parcel,
    call: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    *,
    on_accepted: Callable[[str], None],
) -> list[Job[Any]]:
    """Send one array: a task for each tuple of arguments, in order.

    Args:
        on_accepted: told the job's number as soon as it is known.

    Raises:
        SubmissionError: ``sbatch`` refused, or did not say.
    """
    executor = ArrayExecutor(folder, parcel, on_accepted=on_accepted)
    return executor.map_array(call, *zip(*arguments, strict=True))
