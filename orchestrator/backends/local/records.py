"""The queue on disk: one small file per attempt, moved by atomic renames.

RUNS/queue/
    outbox/<id>.json         specs of one submit until all its attempts are submitted
    submits/<host>.json      a submit is at work on that host (submit_lock)
    pending/<token>.json     an attempt that waits (Entry)
    running/<token>.json     an attempt whose supervisor was started
    cancelled/<token>        the attempt shall end
    unreported/<token>       the attempt has ended, but the disk was full and its exit.json could not be written
    waiting.json             why each pending attempt waits; written by the queue process
    log.txt                  log of the queue process and the supervisors
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shlex
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from orchestrator.backends.processes import Host
from workloads.errors import InputError, OperationError
from workloads.files.json_file import read_json, read_object_or_empty, write_bytes
from workloads.files.run_dir import AttemptDir, RunDir, jobs_folder, queue_folder, snapshots_folder

DEFAULT_JOB = "workloads.job.entry:run"
"""``module:function``, called in each rank with the run's directory and the attempt's number."""

_INHERITED = re.compile(
    r"CUDA_|GLOO_|HF_(DATASETS_CACHE|HOME|HUB_CACHE)|LD_|MKL_|NCCL_|OMP_|ORCHESTRATE_|PATH|PYTHONPATH|PYTORCH_|TMPDIR|"
    r"TORCH|VIRTUAL_ENV|XLA_"
)
"""Prefixes of the variables that may affect a result: a run inherits them from its submit. All others, secrets among
them, stay out of the files; a run inherits them from the process that started the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One attempt in the queue."""

    token: str
    run_id: str
    attempt: int
    order: tuple[float, int]
    """Sorts entries: time of the submit (seconds since the epoch), then the order within it."""
    python: str
    """The interpreter of the submit, and so of the run."""
    working_directory: str
    environ: dict[str, str]
    gpus: tuple[str, ...]
    """UUIDs of the GPUs that the submit could see; the run gets some of them."""
    cores: tuple[int, ...]
    """Cores that the submit could use."""
    num_gpus: int
    num_ranks: int
    cpus_per_rank: int
    job: str = DEFAULT_JOB

    @property
    def num_cores(self) -> int:
        return self.num_ranks * self.cpus_per_rank

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Raise ValueError if the data is not an entry of this version."""
        try:
            return cls(**data | {name: tuple(data[name]) for name in ("order", "gpus", "cores")})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a queue entry: {error}") from error

    def directory(self, runs: Path) -> AttemptDir:
        return RunDir.of(runs, self.run_id).attempt(self.attempt)


@dataclass(frozen=True, slots=True)
class SupervisorArgs:
    """What the queue passes to a supervisor, as one JSON argument."""

    runs: str
    token: str
    gpus: list[str]
    """UUIDs of the leased GPUs."""
    cores: list[int]
    leases: list[int]
    """Descriptors of the device leases; every rank inherits them."""


def inherited_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a run inherits from its submit."""
    return {name: value for name, value in environ.items() if _INHERITED.match(name)}


def run_environment(entry: Entry, queue: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run: the queue's, except for the variables inherited from the submit."""
    return {k: v for k, v in queue.items() if not _INHERITED.match(k)} | entry.environ


class QueueFolder:
    """The files of one queue."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.path = queue_folder(runs)
        self.pending = self.path / "pending"
        self.running = self.path / "running"
        self.cancelled = self.path / "cancelled"
        self.unreported = self.path / "unreported"
        self.outbox = self.path / "outbox"
        self.waiting = self.path / "waiting.json"
        self.log = self.path / "log.txt"

    def create(self) -> None:
        for folder in (self.pending, self.running, self.cancelled, self.unreported, self.outbox):
            folder.mkdir(parents=True, exist_ok=True)

    def put(self, entry: Entry) -> None:
        """Add a pending entry, whole or not at all."""
        # json.dumps escapes: paths and variables may hold bytes that are not UTF-8.
        write_bytes(self.pending / f"{entry.token}.json", json.dumps(asdict(entry)).encode())

    def tokens(self, folder: Path) -> set[str]:
        """Return the tokens of the entries in ``pending`` or ``running``."""
        try:
            # Temporary files of write_bytes start with a dot.
            return {path.stem for path in folder.iterdir() if path.suffix == ".json" and path.name[0] != "."}
        except FileNotFoundError:
            return set()

    def read(self, folder: Path, token: str) -> Entry:
        """Raise FileNotFoundError if the entry is missing, ValueError if it is damaged."""
        return Entry.from_json(read_json(folder / f"{token}.json"))

    def claim(self, token: str) -> bool:
        """Move a pending entry to ``running``; False if it was cancelled or another machine's queue claimed it."""
        try:
            (self.pending / f"{token}.json").rename(self.running / f"{token}.json")
        except FileNotFoundError:
            return False
        return True

    def unclaim(self, token: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.running / f"{token}.json").rename(self.pending / f"{token}.json")

    def withdraw(self, token: str) -> None:
        """Remove a pending entry for good."""
        (self.pending / f"{token}.json").unlink(missing_ok=True)

    def claim_age_s(self, token: str) -> float:
        """Return the seconds since an entry was claimed."""
        try:
            # A rename sets st_ctime and keeps st_mtime.
            return time.time() - (self.running / f"{token}.json").stat().st_ctime
        except FileNotFoundError:
            return 0.0

    def finish(self, token: str) -> None:
        """Remove the entry of an attempt that has its ``exit.json``."""
        for path in (self.running / f"{token}.json", self.cancelled / token, self.unreported / token):
            path.unlink(missing_ok=True)

    def request_cancel(self, token: str) -> None:
        write_bytes(self.cancelled / token, b"")

    def is_cancelled(self, token: str) -> bool:
        return (self.cancelled / token).exists()

    def mark_unreported(self, token: str) -> None:
        """Mark an attempt as ended. An empty file needs no data block, so a full disk mostly takes it."""
        with contextlib.suppress(OSError):
            (self.unreported / token).touch()

    def is_unreported(self, token: str) -> bool:
        return (self.unreported / token).exists()

    def waiting_reasons(self) -> dict[str, str]:
        """Return token -> reason, as the queue process last wrote them."""
        return {token: str(reason) for token, reason in read_object_or_empty(self.waiting).items()}


def check_runs_folder(runs: Path, directory: AttemptDir | None = None) -> None:
    """Check that nobody else can plant code in a runs folder: jobs load pickles from it.

    Checks the folders that all runs share, and those of ``directory``, the attempt whose pickle is about to be loaded.
    Raise InputError if others can write to one or own it, OperationError if we cannot write to the runs folder.
    """
    _check_owner_and_mode(runs, runs)
    if runs.exists() and not os.access(runs, os.W_OK | os.X_OK):
        raise OperationError(
            "cannot write to the runs folder",
            where=str(runs),
            why="it is read-only",
            hint=f"chmod u+w {shlex.quote(str(runs))}, or name another folder with --runs",
        )
    queue = QueueFolder(runs)
    folders = [jobs_folder(runs), snapshots_folder(runs), queue.path, queue.pending, queue.running, queue.outbox]
    if directory is not None:
        folders += [path for path in (directory.job_folder, *directory.job_folder.parents) if runs in path.parents]
    for folder in folders:
        _check_owner_and_mode(folder, runs)


def _check_owner_and_mode(folder: Path, runs: Path) -> None:
    name = "the runs folder" if folder == runs else "a folder of the runs folder"
    why = "jobs load pickles from it, and a pickle is code that would run as you"
    try:
        status = folder.stat()
    except FileNotFoundError:
        return
    if status.st_mode & stat.S_IWOTH:
        # Folders are mostly opened together with all below them: hence -R.
        hint = f"chmod -R o-w {shlex.quote(str(runs))}"
        raise InputError(f"everybody may write to {name}", where=str(folder), why=why, hint=hint)
    if status.st_uid != os.geteuid():
        raise InputError(
            f"{name} belongs to {_user(status.st_uid)}, not to {_user(os.geteuid())}",
            where=str(folder),
            why=why,
            hint="name a folder of your own with --runs, or run as its owner",
        )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def claim_start(directory: AttemptDir) -> bool:
    """Claim the one start of an attempt; False if a supervisor or a cancellation has claimed it."""
    directory.create()
    try:
        # man 2 open: O_EXCL is atomic on local file systems, and on NFS from version 3 on.
        descriptor = os.open(directory.supervisor, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        json.dump({"pid": os.getpid(), "host": asdict(Host.here()), "started_at": started_at}, stream)
    return True


def supervisor_host(directory: AttemptDir) -> Host | None:
    """Return the host where the supervisor started; None before it started or wrote so."""
    return Host.from_json(read_object_or_empty(directory.supervisor).get("host"))
