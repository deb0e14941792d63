"""A data set on the node's own disk: copied there once, by whichever rank of whichever job comes first.

``ORCHESTRATE_STAGE`` names a folder of the node; the variables in it are the node's, such as ``$TMPDIR``. Below it:

    orchestrate-<uid>/<key>/          a data root with the one data set, whole; the key tells place and content
    orchestrate-<uid>/<key>.lock      held by who copies, shared by who reads
    orchestrate-<uid>/<key>.failed    why it could not be copied a moment ago: the other ranks need not try

Whatever goes wrong, the data set is read from where it is, and a line in the log says why. What was copied is compared
with the original by names, sizes and times, at each use; contents are compared by the data set's digest, as always.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from workloads.job.context import Job, print_error
from workloads.registry import DatasetDeclaration

VARIABLE = "ORCHESTRATE_STAGE"
SPARE_SHARE = 0.05
"""Of the disk: left free for what jobs write there."""
RETRY_S = 600.0
POLL_S = 0.2
NUM_THREADS = 4
FILES_AT_ONCE = 64
BLOCK_BYTES = 16 << 20
_NOT_DATA = frozenset({"lock", ".prepare.lock"})
"""Lock files beside the data: they change all the time."""


class _NotStagedError(Exception):
    """Why a data set is read from where it is."""


class _File(NamedTuple):
    name: str
    """Below the data set's folder."""
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class _Original:
    """The data set where it is."""

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

    @property
    def below(self) -> Path:
        return self.folder.relative_to(self.root)


_in_use: list[IO[str]] = []
"""Locks of what this process reads; they go with the process."""


def data_root(job: Job, declaration: DatasetDeclaration) -> Path | None:
    """The folder from which this rank reads its data set: on the node's disk where that is wanted and possible.

    The time it takes is part of start-up; the event ``staging`` and the result's provenance tell it.
    """
    root = Path(job.spec.data_root) if job.spec.data_root else None
    wanted = os.environ.get(VARIABLE, "")
    if root is None or not wanted or declaration.folder is None:
        return root
    started = time.monotonic()
    try:
        folder = _stage_folder(wanted)
        original = _original(root, declaration.folder(root, job.spec.train.dataset))
        copied = _bring(original, folder, job.pulse.beat)
        to, why = folder / original.key, ""
        size = original.size_bytes
    except (_NotStagedError, OSError) as error:
        to, why, copied, size = root, _words(error), False, 0
    took_s = time.monotonic() - started
    facts = {"to": str(to), "copied": copied, "size_bytes": size, "staging_s": took_s, "why_not": why}
    job.events.write("staging", **facts)
    job.result.provenance["staging"] = facts
    if why:
        print_error(f"the data set is not staged to {wanted}: {why}; it is read from {root}")
    elif copied:
        print_error(f"staged {size / 2**20:,.1f} MiB from {root} to {to} in {took_s:.1f} s")
    return to


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")
    return str(error)


def _stage_folder(wanted: str) -> Path:
    """Our folder on the node's disk; nobody else may write to it."""
    place = os.path.expandvars(wanted)
    if "$" in place or not os.path.isabs(place):  # noqa: PTH117 (may be empty)
        raise _NotStagedError(f"{place or 'nothing'} is no absolute path on this node; is the variable set here?")
    folder = Path(place) / f"orchestrate-{os.getuid()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise _NotStagedError(f"{folder} is somebody else's, or others may write to it")
    return folder


def _original(root: Path, folder: Path) -> _Original:
    seen: set[str] = set()

    def walk(place: Path) -> Iterator[_File]:
        if (real := os.path.realpath(place)) in seen:
            return  # a link that leads to where we were
        seen.add(real)
        with os.scandir(place) as entries:
            for entry in sorted(entries, key=lambda entry: os.fsencode(entry.name)):
                if entry.is_dir():
                    yield from walk(Path(entry.path))
                elif entry.is_file() and entry.name not in _NOT_DATA:
                    about = entry.stat()
                    yield _File(str(Path(entry.path).relative_to(folder)), about.st_size, about.st_mtime_ns)

    return _Original(root, folder, tuple(walk(folder)))


def _bring(original: _Original, folder: Path, beat: Callable[[], None]) -> bool:
    """See to it that the copy is there and stays; whether this process made it.

    Raises:
        _NotStagedError: it cannot be had.
        OSError: likewise.
    """
    lock = open(folder / f"{original.key}.lock", "a", encoding="utf-8")  # noqa: SIM115 (held until the process ends)
    try:
        copied = _brought(original, folder, lock, beat)
    except BaseException:
        lock.close()
        raise
    _in_use.append(lock)
    return copied


def _brought(original: _Original, folder: Path, lock: IO[str], beat: Callable[[], None]) -> bool:
    failed = folder / f"{original.key}.failed"
    copied = False
    while True:
        if _take(lock, fcntl.LOCK_EX):
            if not _is_whole(original, folder / original.key):
                _insist_on_trying(failed)
                try:
                    _copy(original, folder, beat)
                except (_NotStagedError, OSError) as error:
                    failed.write_text(_words(error), encoding="utf-8")
                    raise
                copied = True
            fcntl.flock(lock, fcntl.LOCK_SH)
        elif not _take(lock, fcntl.LOCK_SH):
            beat()
            time.sleep(POLL_S)
            continue
        # Whoever makes room may have come in between.
        if _is_whole(original, folder / original.key):
            return copied
        fcntl.flock(lock, fcntl.LOCK_UN)
        _insist_on_trying(failed)


def _take(lock: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _insist_on_trying(failed: Path) -> None:
    """Raises _NotStagedError when it was tried a moment ago."""
    with contextlib.suppress(FileNotFoundError):
        if time.time() - failed.stat().st_mtime < RETRY_S:
            raise _NotStagedError(failed.read_text(encoding="utf-8"))


def _is_whole(original: _Original, copy: Path) -> bool:
    """Whether a copy has every file, of the right size and time: cleaners of temporary folders take single ones."""
    for file in original.files:
        try:
            about = (copy / original.below / file.name).stat()
        except OSError:
            return False
        if (about.st_size, about.st_mtime_ns) != (file.size, file.mtime_ns):
            return False
    return copy.is_dir()


def _copy(original: _Original, folder: Path, beat: Callable[[], None]) -> None:
    """Make the copy, whole or not at all."""
    for left in folder.glob(f".{original.key}.*"):
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
    shutil.rmtree(folder / original.key, ignore_errors=True)
    _make_room(original, folder)
    unfinished = Path(tempfile.mkdtemp(dir=folder, prefix=f".{original.key}."))
    try:
        target = unfinished / original.below
        for parent in {target, *((target / file.name).parent for file in original.files)}:
            parent.mkdir(parents=True, exist_ok=True)

        _copy_files(original, target, beat)
        if _original(original.root, original.folder) != original or not _is_whole(original, unfinished):
            raise _NotStagedError("it changed while it was copied")
        unfinished.rename(folder / original.key)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy_files(original: _Original, target: Path, beat: Callable[[], None]) -> None:
    """Copy on several threads; there is a beat as long as bytes arrive."""
    blocks = itertools.count()

    def copy(files: Sequence[_File]) -> None:
        for file in files:
            with open(original.folder / file.name, "rb") as source, open(target / file.name, "wb") as copied:
                while block := source.read(BLOCK_BYTES):
                    copied.write(block)
                    next(blocks)
            os.utime(target / file.name, ns=(file.mtime_ns, file.mtime_ns))

    files = original.files
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        left = {pool.submit(copy, files[i : i + FILES_AT_ONCE]) for i in range(0, len(files), FILES_AT_ONCE)}
        seen = next(blocks)
        try:
            while left:
                done, left = wait(left, timeout=1.0, return_when=FIRST_COMPLETED)
                for one in done:
                    one.result()
                if (now := next(blocks)) > seen + 1 or done:
                    beat()
                seen = now
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _make_room(original: _Original, folder: Path) -> None:
    """Remove copies that nobody reads, one by one, until this one fits."""
    for other in [None, *sorted(folder.glob("*.lock"))]:
        if other is not None and other.stem != original.key:
            with contextlib.suppress(OSError), open(other, "a", encoding="utf-8") as lock:
                if _take(lock, fcntl.LOCK_EX):
                    shutil.rmtree(folder / other.stem, ignore_errors=True)
        disk = shutil.disk_usage(folder)
        if disk.free - original.size_bytes >= SPARE_SHARE * disk.total:
            return
    raise _NotStagedError(
        f"{original.size_bytes / 2**20:,.1f} MiB do not fit: {disk.free / 2**20:,.1f} MiB are free there, "
        f"and {SPARE_SHARE:.0%} of the disk stay so"
    )
