"""Print the log files of an attempt, once or as they grow."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.backends.base import Status
from workloads.files.event_log import read_events
from workloads.files.run_dir import AttemptDir, jobs_folder

POLL_S = 0.3
_LINE_BYTES = 200
"""Assumed length of a line, to read only the end of a file."""


@dataclass(frozen=True, slots=True)
class LogSelection:
    """Which logs of an attempt."""

    rank: int | None = 0
    """None for all ranks."""
    stdout: bool = True
    stderr: bool = True


@dataclass(slots=True)
class _Tail:
    """How far each file was printed, and which one was printed last."""

    offsets: dict[Path, int] = field(default_factory=dict)
    last: Path | None = None

    def print_new(self, files: list[Path]) -> bool:
        """Print what is new, and return whether there was anything."""
        printed = False
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
                printed = True
        return printed


def print_logs(attempt: AttemptDir, job_id: str | None, selection: LogSelection, *, follow: bool) -> bool:
    """Print an attempt's logs, with ``follow`` until it ends; return whether there was anything in them."""
    tail = _Tail()
    while True:
        # Checked before the logs are read, so that the last lines are not missed.
        ended = not follow or Status.read_exit(attempt) is not None or attempt.result.exists()
        printed = tail.print_new(files(attempt, job_id, selection))
        if ended and not (follow and printed):
            return bool(tail.offsets)
        time.sleep(POLL_S)


def last_lines(attempt: AttemptDir, job_id: str | None, count: int) -> list[str]:
    """Return the last lines of rank 0, standard error after standard output."""
    lines: list[str] = []
    for path in files(attempt, job_id, LogSelection()):
        try:
            with open(path, "rb") as stream:
                stream.seek(max(0, stream.seek(0, 2) - count * _LINE_BYTES))
                lines += stream.read().decode("utf-8", "replace").splitlines()
        except OSError:
            continue
    return lines[-count:]


def files(attempt: AttemptDir, job_id: str | None, selection: LogSelection) -> list[Path]:
    """Return the log files of an attempt that exist."""
    ranks: Iterable[int] = itertools.count() if selection.rank is None else [selection.rank]
    found = itertools.takewhile(bool, (_rank_files(attempt, job_id, rank) for rank in ranks))
    wanted = {".err": selection.stderr}
    return [path for paths in found for path in paths if wanted.get(path.suffix, selection.stdout)]


def _rank_files(attempt: AttemptDir, job_id: str | None, rank: int) -> list[Path]:
    """Return a rank's files in local mode, else those of its Slurm task, else those that its start event names."""
    found = attempt.logs(rank) or _task_files(attempt, job_id, rank)
    if found:
        return sorted(found, key=lambda path: path.suffix != ".out")
    starts, _ = read_events(attempt.events(rank), 0, "start")
    return [Path(name) for event in starts[-1:] for name in event.get("logs", []) if Path(name).is_file()]


def _task_files(attempt: AttemptDir, job_id: str | None, rank: int) -> list[Path]:
    """Return the files of a rank of a Slurm array task, or the job script's output where the task wrote none."""
    if job_id is None:
        return []
    jobs = jobs_folder(attempt.path.parents[3])
    ranks = [jobs / job_id.partition("_")[0] / f"{job_id}_{rank}_log.{kind}" for kind in ("out", "err")]
    script = jobs / f"slurm-{job_id}.out"
    return [path for path in ranks if path.exists()] or ([script] if rank == 0 and script.exists() else [])
