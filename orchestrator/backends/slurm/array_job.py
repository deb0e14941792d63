"""submitit's Slurm executor with our script: always submits an array, whose job name is its token."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission
from submitit.slurm.slurm import SlurmExecutor as SubmititExecutor
from submitit.slurm.slurm import SlurmJob

from orchestrator.backends.processes import Answer
from orchestrator.backends.slurm import commands

SCRIPT = "script.sh"
_CONNECTION_LOST = re.compile(
    r"timed out|time.?out|send/recv|Unable to contact|[Cc]onnect(ion)? (failure|refused|reset)|Communication|"
    r"Zero Bytes|Transport endpoint|not responding|Resource temporarily unavailable|Interrupted system call"
)
"""Messages of a client that lost its controller, which may have accepted the job (strings of slurm_errno.c)."""


class SbatchOutcome(StrEnum):
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    NO_ANSWER = "no_answer"
    """Only the queue shows whether the job was accepted."""


def parse_job_id(stdout: str) -> str | None:
    """Return the job id that ``sbatch --parsable`` printed, whatever a site's wrapper prints around it.

    Accepts ``4242``, ``4242;cluster`` and ``Submitted batch job 4242``; the last such line counts.
    """
    answer = re.compile(r"\s*(?:Submitted batch job )?(\d+)(?:;\S*)?(?: on cluster \S+)?\s*")
    return next((match[1] for line in reversed(stdout.splitlines()) if (match := answer.fullmatch(line))), None)


def outcome_of(answer: Answer) -> tuple[SbatchOutcome, str | None]:
    """Return the outcome of an ``sbatch``, and the job id if it was accepted."""
    if answer.ok and (job_id := parse_job_id(answer.stdout)):
        return SbatchOutcome.ACCEPTED, job_id
    is_lost = answer.ok or answer.exit_code is None or answer.exit_code < 0 or _CONNECTION_LOST.search(answer.text)
    return SbatchOutcome.NO_ANSWER if is_lost else SbatchOutcome.REJECTED, None


@dataclass(eq=False)
class SubmissionError(Exception):
    """``sbatch`` rejected the array or did not answer."""

    outcome: SbatchOutcome
    answer: Answer


@dataclass(frozen=True, slots=True)
class ArrayJob:
    """One array to submit."""

    script: str
    name: str
    folder: Path
    """The array's own folder, where its call lies."""
    num_tasks: int
    num_ranks: int
    parallel: int
    """Tasks that run at once; 0 for all."""
    minutes: int
    options: tuple[str, ...] = ()
    """Options of ``sbatch``, which override the lines of the script."""


class ArrayExecutor(SubmititExecutor):
    """Submits arrays with a given script. Pickles, logs and ``Job`` objects are submitit's.

    All tasks share one pickled call, which is on disk before ``sbatch`` under the array's name, where the script finds
    it. submitit 1.5 writes one pickle per task and renames it after ``sbatch``: a submit that is killed in between
    leaves tasks without a call. ``submit`` raises :class:`SubmissionError`.
    """

    def __init__(self, jobs: Path, array: ArrayJob, *, on_accepted: Callable[[str], None]) -> None:
        """Prepare an array below ``jobs``, the folder of all arrays. ``on_accepted`` gets the job id once known."""
        super().__init__(jobs / "%A")
        self._array = array
        self._on_accepted = on_accepted
        self.update_parameters(time=array.minutes)

    @classmethod
    def affinity(cls) -> int:
        """Return 2, "available": submitit looks for srun, which a login node need not have."""
        return 2

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        array = self._array
        array.folder.mkdir(parents=True, exist_ok=True)
        (delayed,) = delayed_submissions
        delayed.set_timeout(array.minutes, self.max_num_timeout)
        delayed.dump(array.folder / "call.pkl")
        script = array.folder / SCRIPT
        script.write_text(array.script, encoding="utf-8", newline="\n")
        indices = f"--array=0-{array.num_tasks - 1}" + (f"%{array.parallel}" if array.parallel else "")
        argv = ("sbatch", "--parsable", f"--job-name={array.name}", indices, *array.options, str(script))
        answer = commands.run(*argv, timeout_s=commands.SBATCH_TIMEOUT_S)
        outcome, job_id = outcome_of(answer)
        if job_id is None:
            raise SubmissionError(outcome, answer)
        self._on_accepted(job_id)
        return [rename_script(self.folder.parent, array.folder, job_id, num_ranks=array.num_ranks)]


def rename_script(jobs: Path, folder: Path, job_id: str, *, num_ranks: int = 1) -> Job[Any]:
    """Rename the script as submitit expects, by job id; harmless if repeated. Return submitit's first task."""
    job: Job[Any] = SlurmJob(folder=jobs / "%A", job_id=f"{job_id}_0", tasks=list(range(num_ranks)))
    if (folder / SCRIPT).exists() and not job.paths.submission_file.exists():
        job.paths.move_temporary_file(folder / SCRIPT, "submission_file")
    return job
