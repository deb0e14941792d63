"""The only module that knows file names below the runs folder. Standard library only.

    RUNS/ab/abcdef0123456789/          one run, by run id; sharded so that no folder grows huge
        spec.json                      what was planned (RunSpec)
        checkpoint/last.pt             newest checkpoint
        attempts/1/                    one submission of the run
            events.jsonl               rank 0, append-only; other ranks events.<rank>.jsonl
            progress.<rank>.json       newest progress of a rank, replaced atomically
            rendezvous.json            where rank 0 listens for the others
            hang.<rank>.txt            stacks, when the rank's watchdog fired
            result.json                temp + rename; its presence is the end of the attempt in the job's own words
            submission.json            token, target, shape, job id; who sent it, and what for
            exit.json                  how a supervisor (local mode) or the tracker saw the attempt end
            held                       it is not to be sent again by itself, and why; empty: somebody cancelled the run
            job/                       submitit's folder in local mode: pickles and rank logs
                supervisor.json        local mode: who started the attempt, created at most once
                owner.json             Slurm: the job that carries it out, created at most once
    RUNS/jobs/<job id>/                submitit's folder of a Slurm array: pickles and rank logs
    RUNS/jobs/slurm-<job id>_<i>.out   what the job script itself said
    RUNS/jobs/orc-<token>/             an array from before its sbatch on (see orchestrator.backends.slurm.records):
        array.json, specs.json        which attempt each task is, and what to train (see workloads.files.array_record)
    RUNS/sites/<target>/               a cluster's limits, job scripts and newest answers
    RUNS/queue/                        local mode's queue (see orchestrator.backends.local.executor)
    RUNS/snapshots/                    the code that was submitted (see workloads.provenance.code_snapshot)
    RUNS/.trash/                       what an orchestrate clean is removing, or was when it was killed

Compute nodes only write here and never open the database.
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
from workloads.files.json_file import encode_json, read_json, write_bytes, write_json

_RUN_ID = re.compile(rf"[0-9a-f]{{{RUN_ID_DIGITS}}}")


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """The files of one attempt."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def job_folder(self) -> Path:
        """submitit's folder in local mode."""
        return self.path / "job"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def exit(self) -> Path:
        return self.path / "exit.json"

    @property
    def held(self) -> Path:
        """There when the run is not to be sent again by itself."""
        return self.path / "held"

    def hold_reason(self) -> str | None:
        """Why the run is not to be sent again by itself, empty where it was cancelled; None when it may be."""
        try:
            return self.held.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    @property
    def submission(self) -> Path:
        return self.path / "submission.json"

    @property
    def supervisor(self) -> Path:
        """Who started this attempt in local mode; created at most once, so an attempt runs at most once."""
        return self.job_folder / "supervisor.json"

    @property
    def owner(self) -> Path:
        """The Slurm job that carries out this attempt; created at most once."""
        return self.job_folder / "owner.json"

    def events(self, rank: int = 0) -> Path:
        return self.path / ("events.jsonl" if rank == 0 else f"events.{rank}.jsonl")

    def progress(self, rank: int) -> Path:
        return self.path / f"progress.{rank}.json"

    @property
    def rendezvous(self) -> Path:
        return self.path / "rendezvous.json"

    def hang(self, rank: int) -> Path:
        return self.path / f"hang.{rank}.txt"

    def logs(self, rank: int) -> list[Path]:
        """Standard output and error of a rank in local mode, oldest first; empty before it started."""
        return sorted([*self.job_folder.glob(f"*_{rank}_log.out"), *self.job_folder.glob(f"*_{rank}_log.err")])

    def create(self) -> AttemptDir:
        _make_folders(self.job_folder)
        return self

    def write_result(self, result: RunResult) -> None:
        write_json(self.result, result.to_json())

    def read_result(self) -> RunResult:
        """Raises FileNotFoundError, or ValueError for a file that is not a result of this run and attempt."""
        result = RunResult.from_json(_mapping(self.result))
        if result.attempt != self.number or result.run_id != self.path.parent.parent.name:
            raise ValueError(f"{self.result}: belongs to run {result.run_id} attempt {result.attempt}")
        return result


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run."""

    path: Path

    @classmethod
    def of(cls, runs: Path, run_id: str) -> RunDir:
        """The directory of a run below the runs folder.

        Raises:
            ValueError: ``run_id`` is not one (it might name a path outside the folder).
        """
        if not _RUN_ID.fullmatch(run_id):
            raise ValueError(f"{run_id!r} is not a run id")
        return cls(runs / f"{run_id[:2]}/{run_id}")

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint" / "last.pt"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.path / f"attempts/{number}")

    def attempts(self) -> list[AttemptDir]:
        """Existing attempts, oldest first."""
        return [self.attempt(number) for number in sorted(_numbers(f"{self.path}/attempts"))]

    def write_spec(self, spec: RunSpec) -> None:
        """Write ``spec.json`` where it is another one or none."""
        content = encode_json(spec.to_json())
        with contextlib.suppress(OSError):
            if self.spec.read_bytes() == content:
                return
        _make_folders(self.path)
        write_bytes(self.spec, content)

    def read_spec(self) -> RunSpec:
        """Raises FileNotFoundError, or ValueError for a file that is not this run's spec."""
        spec = RunSpec.from_json(_mapping(self.spec))
        if spec.run_id != self.run_id:
            raise ValueError(f"{self.spec}: belongs to run {spec.run_id}")
        if spec.train.run_id() != spec.run_id:
            raise ValueError(f"{self.spec}: edited: what it says to train is another run than {spec.run_id}")
        return spec


def newest_attempt(runs: Path, run_id: str) -> int:
    """Number of a run's newest attempt on disk, 0 without one; for thousands of runs, most of which have no folder."""
    return max(_numbers(f"{runs}/{run_id[:2]}/{run_id}/attempts"), default=0)


def _numbers(attempts: str) -> list[int]:
    try:
        with os.scandir(attempts) as entries:
            return [int(entry.name) for entry in entries if entry.name.isdigit()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _make_folders(path: Path) -> None:
    """As ``mkdir --parents``, with fewer questions to the disk where most of them are new."""
    try:
        path.mkdir()
    except FileNotFoundError:
        _make_folders(path.parent)
        path.mkdir(exist_ok=True)
    except FileExistsError:
        if not path.is_dir():
            raise


def jobs_folder(runs: Path) -> Path:
    """Where submitit keeps the pickles and rank logs of Slurm arrays."""
    return runs / "jobs"


def sites_folder(runs: Path) -> Path:
    """Where what is known of each cluster lies."""
    return runs / "sites"


def queue_folder(runs: Path) -> Path:
    """Where local mode keeps its queue."""
    return runs / "queue"


def snapshots_folder(runs: Path) -> Path:
    """Where the code of each submission is kept."""
    return runs / "snapshots"


def run_dirs(runs: Path, on_error: Callable[[OSError], None] | None = None) -> Iterator[RunDir]:
    """Every run below the runs folder, in order of run id; foreign files and folders are passed over.

    Args:
        runs: the runs folder; none is like an empty one.
        on_error: told of each folder that cannot be read, which is then passed over; None raises instead.
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


def _mapping(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: not a JSON object")
    return data
