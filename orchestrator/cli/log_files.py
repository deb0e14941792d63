"""Showing the log files of an attempt, once or as they grow."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.backends.exit_status import Exit
from workloads.files.event_log import read_events
from workloads.files.run_dir import AttemptDir, jobs_folder

POLL_S = 0.3
_LINE_BYTES = 200
"""A line of a log, roughly: so much of a file is read for its last lines."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which logs."""

    rank: int | None
    """None for all ranks."""
    stdout: bool
    stderr: bool


@dataclass(slots=True)
class _Tail:
    """How far each file was shown, and which one was shown last."""

    offsets: dict[Path, int] = field(default_factory=dict)
    last: Path | None = None

    def show(self, files: list[Path]) -> bool:
        """Print what is new; whether there was something."""
        shown = False
        for path in files:
            try:
                with open(path, "rb") as stream:
                    stream.seek(self.offsets.get(path, 0))
                    content = stream.read()
            except OSError:
                continue
            if content:
                if len(files) > 1 and path != self.last:
                    print(f"==> {path} <==")
                self.last = path
                self.offsets[path] = self.offsets.get(path, 0) + len(content)
                sys.stdout.write(content.decode("utf-8", "replace"))
                sys.stdout.flush()
                shown = True
        return shown


def show(attempt: AttemptDir, job_id: str | None, wanted: Wanted, *, follow: bool) -> bool:
    """Print an attempt's logs; whether there was anything in them."""
    tail = _Tail()
    while True:
        # Asked before reading, so that what came last is still read.
        ended = not follow or Exit.read(attempt) is not None or attempt.result.exists()
        shown = tail.show(files(attempt, job_id, wanted))
        if ended and not (follow and shown):
            return bool(tail.offsets)
        time.sleep(POLL_S)


def last_lines(attempt: AttemptDir, job_id: str | None, count: int) -> list[str]:
    """The last lines that rank 0 of an attempt printed, standard error after standard output."""
    lines: list[str] = []
    for path in files(attempt, job_id, Wanted(rank=0, stdout=True, stderr=True)):
        try:
            with open(path, "rb") as stream:
                stream.seek(max(0, stream.seek(0, 2) - count * _LINE_BYTES))
                lines += stream.read().decode("utf-8", "replace").splitlines()
        except OSError:
            continue
    return lines[-count:]


def files(attempt: AttemptDir, job_id: str | None, wanted: Wanted) -> list[Path]:
    """The logs of an attempt that are there."""
    ranks = range(_num_ranks(attempt, job_id)) if wanted.rank is None else [wanted.rank]
    return [path for rank in ranks for path in _of_rank(attempt, job_id, rank) if _is_wanted(path, wanted)]


def _of_rank(attempt: AttemptDir, job_id: str | None, rank: int) -> list[Path]:
    """Local mode's files, else the Slurm task's, else those that the rank itself said it writes to."""
    files = attempt.logs(rank) or _of_task(attempt, job_id, rank)
    if files:
        return sorted(files, key=lambda path: path.suffix != ".out")
    starts, _ = read_events(attempt.events(rank), 0, "start")
    return [Path(name) for event in starts[-1:] for name in event.get("logs", []) if Path(name).is_file()]


def _of_task(attempt: AttemptDir, job_id: str | None, rank: int) -> list[Path]:
    """Rank logs of a task of a Slurm array; where there is none, what the job script said."""
    if job_id is None:
        return []
    jobs = jobs_folder(attempt.path.parents[3])
    ranks = [jobs / job_id.partition("_")[0] / f"{job_id}_{rank}_log.{kind}" for kind in ("out", "err")]
    found = [path for path in ranks if path.exists()]
    script = jobs / f"slurm-{job_id}.out"
    return found or ([script] if rank == 0 and script.exists() else [])


def _is_wanted(path: Path, wanted: Wanted) -> bool:
    return wanted.stderr if path.suffix == ".err" else wanted.stdout


def _num_ranks(attempt: AttemptDir, job_id: str | None) -> int:
    number = 0
    while _of_rank(attempt, job_id, number):
        number += 1
    return number
