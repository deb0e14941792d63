"""The queue on disk: what waits, what runs, what is to stop. One small file per attempt, moved by atomic renames.

RUNS/queue/
    outbox/<id>.json         specs of one submit until all of them are handed over
    pending/<token>.json     an attempt that waits (Entry)
    running/<token>.json     an attempt whose supervisor was started
    cancelled/<token>        ask for the end of an attempt
    untold/<token>           an attempt has ended, and the disk had no room for how
    waiting.json             why each pending attempt waits, in words; written by the queue process
    log.txt                  what the queue process says
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
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
from workloads.files.json_file import read_json, write_bytes
from workloads.files.run_dir import AttemptDir, RunDir, jobs_folder, queue_folder, snapshots_folder

DEFAULT_JOB = "workloads.job.entry:run"
"""``module:function``, called in each rank with the run's directory and the attempt's number."""

_CARRIED = (
    "CUDA_",
    "GLOO_",
    "HF_DATASETS_CACHE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "LD_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "ORCHESTRATE_",
    "PATH",
    "PYTHONPATH",
    "PYTORCH_",
    "TMPDIR",
    "TORCH",
    "VIRTUAL_ENV",
    "XLA_",
)
"""Prefixes of the variables that bear on a result. They go from the submit to its runs; others, and secrets with them,
stay out of the files and come from the process that started the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One attempt in the queue."""

    token: str
    run_id: str
    attempt: int
    order: tuple[float, int]
    """Sorts entries: when the submit sent them (seconds since the epoch), then its own order."""
    python: str
    """The interpreter of the submit, and so of the run."""
    working_directory: str
    environ: dict[str, str]
    gpus: tuple[str, ...]
    """UUIDs that the submit could see: the run gets its GPUs among them."""
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
        """Raises ValueError for anything that is not an entry of this version."""
        try:
            values = {**data, "order": tuple(data["order"]), "gpus": tuple(data["gpus"]), "cores": tuple(data["cores"])}
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a queue entry: {error}") from error

    def attempt_dir(self, runs: Path) -> AttemptDir:
        return RunDir.of(runs, self.run_id).attempt(self.attempt)


@dataclass(frozen=True, slots=True)
class Order:
    """What the queue tells a supervisor, as one argument."""

    runs: str
    token: str
    gpus: list[str]
    """UUIDs of the leased GPUs."""
    cores: list[int]
    leases: list[int]
    """Descriptors of the device leases; every rank inherits them."""


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a run takes from its submit."""
    return {name: value for name, value in environ.items() if name.startswith(_CARRIED)}


def environment(entry: Entry, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run: the queue's, with everything that bears on a result as its submit had it."""
    return {k: v for k, v in base.items() if not k.startswith(_CARRIED)} | entry.environ


class QueueFolder:
    """The files of one queue."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.path = queue_folder(runs)
        self.pending = self.path / "pending"
        self.running = self.path / "running"
        self.cancelled = self.path / "cancelled"
        self.untold = self.path / "untold"
        self.outbox = self.path / "outbox"
        self.waiting = self.path / "waiting.json"
        self.log = self.path / "log.txt"

    def create(self) -> None:
        for folder in (self.pending, self.running, self.cancelled, self.untold, self.outbox):
            folder.mkdir(parents=True, exist_ok=True)

    def put(self, entry: Entry) -> None:
        """Make an entry pending, whole or not at all."""
        # Escaped: paths and variables may hold bytes that are no UTF-8.
        write_bytes(self.pending / f"{entry.token}.json", json.dumps(asdict(entry)).encode())

    def tokens(self, folder: Path) -> set[str]:
        """Tokens of the entries in ``pending`` or ``running``."""
        try:
            return {path.stem for path in folder.iterdir() if _is_entry(path.name)}
        except FileNotFoundError:
            return set()

    def read(self, folder: Path, token: str) -> Entry:
        """Raises FileNotFoundError, or ValueError for a damaged entry."""
        return Entry.from_json(read_json(folder / f"{token}.json"))

    def claim(self, token: str) -> bool:
        """Move a pending entry to ``running``; False when it is gone (cancelled, or another machine's queue has it)."""
        return _rename(self.pending / f"{token}.json", self.running / f"{token}.json")

    def put_back(self, token: str) -> None:
        _rename(self.running / f"{token}.json", self.pending / f"{token}.json")

    def withdraw(self, token: str) -> bool:
        """Take a pending entry out for good; False when it was not pending."""
        try:
            os.unlink(self.pending / f"{token}.json")
        except FileNotFoundError:
            return False
        return True

    def claim_age_s(self, token: str) -> float:
        """Seconds since an entry was claimed."""
        try:
            return time.time() - (self.running / f"{token}.json").stat().st_ctime
        except FileNotFoundError:
            return 0.0

    def finish(self, token: str) -> None:
        """Forget an entry whose end is on record in the run's directory."""
        for path in (self.running / f"{token}.json", self.cancelled / token, self.untold / token):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def ask_cancel(self, token: str) -> None:
        write_bytes(self.cancelled / token, b"")

    def is_cancelled(self, token: str) -> bool:
        return (self.cancelled / token).exists()

    def mark_unreported(self, token: str) -> None:
        """Leave word that an attempt has ended; an empty file mostly has room where its verdict has none."""
        with contextlib.suppress(OSError):
            (self.untold / token).touch()

    def is_unreported(self, token: str) -> bool:
        return (self.untold / token).exists()

    def why_waiting(self) -> dict[str, str]:
        """Token -> reason, as the queue process last saw it."""
        try:
            data = read_json(self.waiting)
        except (OSError, ValueError):
            return {}
        return {str(k): str(v) for k, v in data.items()} if isinstance(data, dict) else {}


def queue_name(runs: Path) -> str:
    """The lease of the one queue of a runs folder (on this machine)."""
    return f"queue/{os.path.realpath(runs)}"


def submit_name(runs: Path) -> str:
    """The lease of a submit that is at work in a runs folder."""
    return f"submit/{os.path.realpath(runs)}"


def supervisor_name(token: str) -> str:
    """The lease that an attempt's supervisor holds while it lives."""
    return f"supervisor/{token}"


def check_runs_folder(runs: Path, attempt: AttemptDir | None = None) -> None:
    """Refuse a runs folder in which somebody else could plant code: jobs load pickles from it.

    Args:
        runs: it, and what is below it for all runs.
        attempt: the one whose pickle is about to be loaded.

    Raises:
        InputError: others can write to it, or it is somebody else's.
        OperationError: we cannot write to it.
    """
    _insist_on_ours(runs, runs)
    if runs.exists() and not os.access(runs, os.W_OK | os.X_OK):
        raise OperationError(
            "cannot write to the runs folder",
            where=str(runs),
            why="it is read-only",
            hint=f"chmod u+w {shlex.quote(str(runs))}, or name another folder with --runs",
        )
    queue = QueueFolder(runs)
    folders = [jobs_folder(runs), snapshots_folder(runs), queue.path, queue.pending, queue.running, queue.outbox]
    if attempt is not None:
        folders += [path for path in (attempt.job_folder, *attempt.job_folder.parents) if runs in path.parents]
    for folder in folders:
        _insist_on_ours(folder, runs)


def _insist_on_ours(folder: Path, runs: Path) -> None:
    name = "the runs folder" if folder == runs else "a folder of the runs folder"
    why = "jobs load pickles from it, and a pickle is code that would run as you"
    try:
        status = folder.stat()
    except FileNotFoundError:
        return
    if status.st_mode & stat.S_IWOTH:
        # Whoever opened one folder mostly opened all below it.
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


def claim_start(attempt: AttemptDir) -> bool:
    """Claim the one start of an attempt; False when it is taken, by a supervisor or by a cancellation."""
    attempt.create()
    try:
        descriptor = os.open(attempt.supervisor, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        json.dump({"pid": os.getpid(), "host": asdict(Host.here()), "started_at": started_at}, stream)
    return True


def _is_entry(name: str) -> bool:
    # write_bytes' temporary files start with a dot.
    return name.endswith(".json") and not name.startswith(".")


def _rename(source: Path, target: Path) -> bool:
    try:
        source.rename(target)
    except FileNotFoundError:
        return False
    return True
