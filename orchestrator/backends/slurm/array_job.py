"""submitit's Slurm executor with our script, for one job and for many alike: always an array, named by its token."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from orchestrator.backends.slurm import commands
from orchestrator.backends.slurm.commands import Answer

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


def parse_job_id(stdout: str) -> str | None:
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
        job_id = parse_job_id(answer.stdout)
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
    """A folder by the array's name, where its call lies."""
    num_tasks: int
    num_ranks: int
    """Of each task."""
    parallel: int
    """Tasks at once; 0 for all."""
    minutes: int
    arguments: tuple[str, ...] = ()
    """Of ``sbatch``, which win over the lines of the script."""


class ArrayExecutor(SlurmExecutor):
    """Sends arrays whose script is given. Pickles, logs and ``Job`` objects are submitit's.

    One call serves all tasks, and is on disk before ``sbatch``, under the array's name, where the script finds it:
    submitit's own way, a pickle a task that is moved afterwards, leaves tasks without a call when the submitting
    process ends in between.
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
        (delayed,) = delayed_submissions
        delayed.set_timeout(parcel.minutes, self.max_num_timeout)
        delayed.dump(parcel.staging / "call.pkl")
        script = _script(parcel.staging)
        script.write_text(self._make_submission_file_text("", parcel.name), encoding="utf-8", newline="\n")
        answer = commands.run(*self._array_command(script), timeout_s=commands.SBATCH_TIMEOUT_S)
        outcome, job_id = fate(answer)
        if job_id is None:
            raise SubmissionError(outcome, answer)
        self._on_accepted(job_id)
        return [rename_script(self.folder.parent, parcel.staging, job_id, num_ranks=parcel.num_ranks)]

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002 (submitit's signature)
        return self._parcel.script

    def _array_command(self, script: Path) -> list[str]:
        throttle = f"%{self._parcel.parallel}" if self._parcel.parallel else ""
        array = f"--array=0-{self._parcel.num_tasks - 1}{throttle}"
        return ["sbatch", "--parsable", f"--job-name={self._parcel.name}", array, *self._parcel.arguments, str(script)]


def _script(staging: Path) -> Path:
    return staging / "script.sh"


def rename_script(folder: Path, staging: Path, job_id: str, *, num_ranks: int = 1) -> Job[Any]:
    """Give the script the name by the job's number that submitit expects; may be done again.

    Returns:
        submitit's view of the array's first task.
    """
    job: Job[Any] = SlurmJob(folder=folder / "%A", job_id=f"{job_id}_0", tasks=list(range(num_ranks)))
    if _script(staging).exists() and not job.paths.submission_file.exists():
        job.paths.move_temporary_file(_script(staging), "submission_file")
    return job


def send(folder: Path, parcel: Parcel, call: Callable[[str], Any], *, on_accepted: Callable[[str], None]) -> Job[Any]:
    """Send one array. ``call`` is made in each task, with the array's folder.

    Args:
        folder: of all arrays.
        parcel: the array.
        call: a function that compute nodes can import.
        on_accepted: told the job's number as soon as it is known.

    Returns:
        submitit's view of the first task.

    Raises:
        SubmissionError: ``sbatch`` refused, or did not say.
    """
    executor = ArrayExecutor(folder, parcel, on_accepted=on_accepted)
    return executor.submit(call, str(parcel.staging))
