"""The only module that knows file names below the runs folder. Standard library only.

    RUNS/ab/abcdef0123456789/          one run, by run id; two levels keep folders small
        spec.json                      the plan for the run (RunSpec)
        checkpoint/last.pt             newest checkpoint
        attempts/1/                    one execution of the run
            events.jsonl               rank 0, append-only; other ranks events.<rank>.jsonl
            progress.<rank>.json       newest progress of a rank, replaced atomically
            rendezvous.json            addresses at which rank 0 listens for the other ranks
            hang.<rank>.txt            stacks, when the rank's watchdog fired
            result.json                final state as the job reports it, written when the attempt ends
            submission.json            token, target, shape, job id; who submitted the attempt, and why
            exit.json                  state that a supervisor (local mode) or the tracker concluded
            held                       recovery must not resubmit the run: the reason; empty if a person canceled it
            job/                       submitit's folder in local mode: pickles and rank logs
                supervisor.json        local mode: the process that started the attempt, created at most once
                owner.json             Slurm: the job that executes the attempt, created at most once
    RUNS/jobs/<job id>/                submitit's folder of a Slurm array: pickles and rank logs
    RUNS/jobs/slurm-<job id>_<i>.out   output of the job script itself
    RUNS/jobs/orc-<token>/             an array, from before its sbatch (see orchestrator.backends.slurm.records):
        array.json, specs.json        attempt and spec of each task (see workloads.files.array_record)
    RUNS/sites/<target>/               a cluster's limits, job scripts and newest answers
    RUNS/queue/                        local mode's queue (see orchestrator.backends.local.executor)
    RUNS/snapshots/                    the submitted code (see workloads.provenance.code_snapshot)
    RUNS/.trash/                       files that orchestrate clean is deleting

Compute nodes only write files here and never open the database.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.contract import RUN_ID_DIGITS, RunResult, RunSpec
from workloads.files.json_file import encode_json, read_object, write_bytes, write_json

_RUN_ID = re.compile(rf"[0-9a-f]{{{RUN_ID_DIGITS}}}")


class _Below:
    """Attribute that is a fixed path below its owner's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, _kind: type) -> Path:
        return Path(owner.path, self._name)


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """The files of one attempt."""

    path: Path

    job_folder = _Below("job")
    result = _Below("result.json")
    exit = _Below("exit.json")
    held = _Below("held")
    submission = _Below("submission.json")
    rendezvous = _Below("rendezvous.json")
    supervisor = _Below("job/supervisor.json")
    owner = _Below("job/owner.json")

    @property
    def number(self) -> int:
        return int(self.path.name)

    def events(self, rank: int = 0) -> Path:
        return self.path / ("events.jsonl" if rank == 0 else f"events.{rank}.jsonl")

    def progress(self, rank: int) -> Path:
        return self.path / f"progress.{rank}.json"

    def hang(self, rank: int) -> Path:
        return self.path / f"hang.{rank}.txt"

    def logs(self, rank: int) -> list[Path]:
        """Return a rank's standard output and error in local mode, oldest first; empty before it started."""
        return sorted([*self.job_folder.glob(f"*_{rank}_log.out"), *self.job_folder.glob(f"*_{rank}_log.err")])

    def hold_reason(self) -> str | None:
        """Return why recovery must not resubmit the run, empty for a canceled run; None when it may."""
        try:
            return self.held.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def create(self) -> AttemptDir:
        """Create the attempt's folders."""
        _make_folders(self.job_folder)
        return self

    def write_result(self, result: RunResult) -> None:
        write_json(self.result, result.to_json())

    def read_result(self) -> RunResult:
        """Raises FileNotFoundError, or ValueError for a file that is not a result of this run and attempt."""
        result = RunResult.from_json(read_object(self.result))
        if result.attempt != self.number or result.run_id != self.path.parent.parent.name:
            raise ValueError(f"{self.result}: belongs to run {result.run_id} attempt {result.attempt}")
        return result


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run."""

    path: Path

    spec = _Below("spec.json")
    checkpoint = _Below("checkpoint/last.pt")

    @classmethod
    def of(cls, runs: Path, run_id: str) -> RunDir:
        """Return the directory of a run. Raises ValueError for another text, which could lead out of ``runs``."""
        if not _RUN_ID.fullmatch(run_id):
            raise ValueError(f"{run_id!r} is not a run id")
        return cls(runs / f"{run_id[:2]}/{run_id}")

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def runs(self) -> Path:
        """The runs folder."""
        return self.path.parent.parent

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.path / f"attempts/{number}")

    def attempts(self) -> list[AttemptDir]:
        """Return existing attempts, oldest first."""
        return [self.attempt(number) for number in sorted(_numbers(f"{self.path}/attempts"))]

    def write_spec(self, spec: RunSpec) -> None:
        """Write ``spec.json`` unless it has the same content."""
        content = encode_json(spec.to_json())
        with contextlib.suppress(OSError):
            if self.spec.read_bytes() == content:
                return
        _make_folders(self.path)
        write_bytes(self.spec, content)

    def read_spec(self) -> RunSpec:
        """Raises FileNotFoundError, or ValueError for a file that is not this run's spec."""
        spec = RunSpec.from_json(read_object(self.spec))
        if spec.run_id != self.run_id:
            raise ValueError(f"{self.spec}: belongs to run {spec.run_id}")
        if spec.train.run_id() != spec.run_id:
            raise ValueError(f"{self.spec}: edited: its training configuration no longer matches run {spec.run_id}")
        return spec


def newest_attempt(runs: Path, run_id: str) -> int:
    """Return the number of a run's newest attempt on disk, 0 without one; fast for thousands of runs without folder."""
    return max(_numbers(f"{runs}/{run_id[:2]}/{run_id}/attempts"), default=0)


def _numbers(attempts: str) -> list[int]:
    try:
        with os.scandir(attempts) as entries:
            return [int(entry.name) for entry in entries if entry.name.isdigit()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _make_folders(path: Path) -> None:
    """Create a folder and its parents; needs fewer system calls than ``mkdir(parents=True)`` for new ones."""
    try:
        path.mkdir()
    except FileNotFoundError:
        _make_folders(path.parent)
        path.mkdir(exist_ok=True)
    except FileExistsError:
        if not path.is_dir():
            raise


def jobs_folder(runs: Path) -> Path:
    """Return the folder of submitit's pickles and rank logs of Slurm arrays."""
    return runs / "jobs"


def sites_folder(runs: Path) -> Path:
    """Return the folder of what is known about each cluster."""
    return runs / "sites"


def queue_folder(runs: Path) -> Path:
    """Return the folder of local mode's queue."""
    return runs / "queue"


def snapshots_folder(runs: Path) -> Path:
    """Return the folder of submitted code."""
    return runs / "snapshots"


def run_dirs(runs: Path, on_error: Callable[[OSError], None] | None = None) -> Iterator[RunDir]:
    """Yield every run below the runs folder in order of run id; skips other files and folders.

    Args:
        runs: the runs folder; a missing one counts as empty.
        on_error: called for each folder that cannot be read, which is then skipped; None raises instead.
    """
    for shard in _folders(runs, on_error):
        if len(shard.name) == 2:
            for path in _folders(shard, on_error):
                if _RUN_ID.fullmatch(path.name) and path.name.startswith(shard.name):
                    yield RunDir(path)


def _folders(folder: Path, on_error: Callable[[OSError], None] | None) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        if on_error is None:
            raise
        on_error(error)
        return []
