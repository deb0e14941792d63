"""A data set on the node's own disk, copied there once by the first rank of any job that needs it.

``ORCHESTRATE_STAGE`` names a folder on the node; variables in it, such as ``$TMPDIR``, are those of the node. Below it:

    orchestrate-<uid>/<key>/          a data root with one complete data set; the key identifies location and content
    orchestrate-<uid>/<key>.lock      exclusive while copying, shared while reading
    orchestrate-<uid>/<key>.failed    why copying failed recently, so that other ranks do not try again

On any problem the job reads the original data set, and a line in the log says why. Each use compares names, sizes and
times of copy and original; the digest of the data set covers contents, as without staging.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, Self

from workloads.job.context import Job, print_error
from workloads.registry import DatasetDeclaration

VARIABLE = "ORCHESTRATE_STAGE"
SPARE_SHARE = 0.05
"""Share of the disk that stays free for other files of jobs."""
RETRY_S = 600.0
POLL_S = 0.2
NUM_THREADS = 4
FILES_PER_BATCH = 64
BLOCK_BYTES = 16 << 20
_LOCK_FILES = frozenset({"lock", ".prepare.lock"})
"""Files beside the data that are not data and change all the time."""


class _NotStagedError(OSError):
    """Why the job reads the original data set."""


class _File(NamedTuple):
    name: str
    """Relative to the data set's folder."""
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path, name: str) -> Self:
        found = path.stat()
        return cls(name, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class _Source:
    """The original data set."""

    root: Path
    folder: Path
    files: tuple[_File, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def key(self) -> str:
        content = "".join(f"{name}\0{size}\0{mtime_ns}\n" for name, size, mtime_ns in self.files)
        return hashlib.sha256(os.fsencode(f"{self.folder}\n{content}")).hexdigest()[:16]

    def folder_in(self, root: Path) -> Path:
        """Return the data set's folder below another data root."""
        return root / self.folder.relative_to(self.root)

    def is_complete(self, copy: Path) -> bool:
        """Whether a copy has every file with its size and time: cleaners of temporary folders delete single files."""
        folder = self.folder_in(copy)
        with contextlib.suppress(OSError):
            return folder.is_dir() and all(_File.of(folder / file.name, file.name) == file for file in self.files)
        return False


_in_use: list[IO[str]] = []
"""Locks of the copies that this process reads; the kernel releases them when the process ends."""


def data_root(job: Job, declaration: DatasetDeclaration) -> Path | None:
    """Return the data root for this rank: on the node's disk where staging is requested and possible.

    Copying counts as start-up time; the event ``staging`` and the result's provenance record it.
    """
    root = Path(job.spec.data_root) if job.spec.data_root else None
    stage = os.environ.get(VARIABLE, "")
    if root is None or not stage or declaration.folder is None:
        return root
    started = time.monotonic()
    try:
        folder = _stage_folder(stage)
        source = _scan(root, declaration.folder(root, job.spec.train.dataset))
        copied = _ensure_copy(source, folder, job.pulse.beat)
        to, why, size = folder / source.key, "", source.size_bytes
    except OSError as error:
        to, why, copied, size = root, _message(error), False, 0
    took_s = time.monotonic() - started
    facts = {"to": str(to), "copied": copied, "size_bytes": size, "staging_s": took_s, "why_not": why}
    job.events.write("staging", **facts)
    job.result.provenance["staging"] = facts
    if why:
        print_error(f"the data set is not staged to {stage}: {why}; the job reads it from {root}")
    elif copied:
        print_error(f"staged {size / 2**20:,.1f} MiB from {root} to {to} in {took_s:.1f} s")
    return to


def _message(error: OSError) -> str:
    return f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")


def _stage_folder(stage: str) -> Path:
    """Return our folder on the node's disk, which nobody else may write to."""
    path = os.path.expandvars(stage)
    if "$" in path or not os.path.isabs(path):  # noqa: PTH117 (may be empty)
        raise _NotStagedError(f"{path or 'nothing'} is no absolute path on this node; is the variable set here?")
    folder = Path(path) / f"orchestrate-{os.getuid()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise _NotStagedError(f"{folder} belongs to another user, or others may write to it")
    return folder


def _scan(root: Path, folder: Path) -> _Source:
    visited: set[str] = set()

    def walk(parent: Path) -> Iterator[_File]:
        if (real := os.path.realpath(parent)) in visited:
            return  # a link back to a folder that was already scanned
        visited.add(real)
        with os.scandir(parent) as entries:
            for entry in sorted(entries, key=lambda entry: os.fsencode(entry.name)):
                if entry.is_dir():
                    yield from walk(Path(entry.path))
                elif entry.is_file() and entry.name not in _LOCK_FILES:
                    yield _File.of(Path(entry.path), str(Path(entry.path).relative_to(folder)))

    return _Source(root, folder, tuple(walk(folder)))


def _ensure_copy(source: _Source, folder: Path, beat: Callable[[], None]) -> bool:
    """Wait for a complete copy or make one, and lock it for this process; return whether this process copied.

    Raises OSError where there is no copy, and making one failed or is not possible.
    """
    copy, failed = folder / source.key, folder / f"{source.key}.failed"
    copied = False
    with contextlib.ExitStack() as on_error:
        lock = on_error.enter_context(open(folder / f"{source.key}.lock", "a", encoding="utf-8"))
        while True:
            if _try_lock(lock, fcntl.LOCK_EX):
                if not source.is_complete(copy):
                    _require_no_recent_failure(failed)
                    try:
                        _copy(source, folder, beat)
                    except OSError as error:
                        failed.write_text(_message(error), encoding="utf-8")
                        raise
                    copied = True
                fcntl.flock(lock, fcntl.LOCK_SH)
            elif not _try_lock(lock, fcntl.LOCK_SH):
                beat()
                time.sleep(POLL_S)
                continue
            # flock(2) converts a lock by releasing it first: another process may have deleted the copy in between.
            if source.is_complete(copy):
                _in_use.append(lock)
                on_error.pop_all()
                return copied
            fcntl.flock(lock, fcntl.LOCK_UN)
            _require_no_recent_failure(failed)


def _try_lock(lock: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _require_no_recent_failure(failed: Path) -> None:
    """Raise _NotStagedError when copying failed a moment ago."""
    with contextlib.suppress(FileNotFoundError):
        if time.time() - failed.stat().st_mtime < RETRY_S:
            raise _NotStagedError(failed.read_text(encoding="utf-8"))


def _copy(source: _Source, folder: Path, beat: Callable[[], None]) -> None:
    """Make the copy, complete or not at all."""
    for leftover in folder.glob(f".{source.key}.*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed
    shutil.rmtree(folder / source.key, ignore_errors=True)
    _free_space(source, folder)
    unfinished = Path(tempfile.mkdtemp(dir=folder, prefix=f".{source.key}."))
    try:
        target = source.folder_in(unfinished)
        for parent in {target, *((target / file.name).parent for file in source.files)}:
            parent.mkdir(parents=True, exist_ok=True)
        _copy_files(source, target, beat)
        if _scan(source.root, source.folder) != source or not source.is_complete(unfinished):
            raise _NotStagedError("the data set changed during the copy")
        unfinished.rename(folder / source.key)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy_files(source: _Source, target: Path, beat: Callable[[], None]) -> None:
    """Copy on several threads; beats as long as bytes arrive."""
    beating = threading.Lock()

    def copy(files: Sequence[_File]) -> None:
        for file in files:
            with open(source.folder / file.name, "rb") as original, open(target / file.name, "wb") as copied:
                while block := original.read(BLOCK_BYTES):
                    copied.write(block)
                    with beating:
                        beat()
            os.utime(target / file.name, ns=(file.mtime_ns, file.mtime_ns))

    starts = range(0, len(source.files), FILES_PER_BATCH)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        try:
            list(pool.map(copy, (source.files[start : start + FILES_PER_BATCH] for start in starts)))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _free_space(source: _Source, folder: Path) -> None:
    """Delete copies that nobody reads, one by one, until this data set fits."""
    for other in [None, *sorted(folder.glob("*.lock"))]:
        if other is not None and other.stem != source.key:
            with contextlib.suppress(OSError), open(other, "a", encoding="utf-8") as lock:
                if _try_lock(lock, fcntl.LOCK_EX):
                    shutil.rmtree(folder / other.stem, ignore_errors=True)
        disk = shutil.disk_usage(folder)
        if disk.free - source.size_bytes >= SPARE_SHARE * disk.total:
            return
    raise _NotStagedError(
        f"{source.size_bytes / 2**20:,.1f} MiB do not fit: {disk.free / 2**20:,.1f} MiB are free there, "
        f"and {SPARE_SHARE:.0%} of the disk must stay free"
    )
