"""The data root, and work on files that processes share: digests, a lock, threads.

Correctness does not depend on the lock: files appear by rename and carry digests. On a file system without locks, such
as Lustre mounted without ``flock``, two processes do the same work twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import TypeVar

from workloads.errors import DatasetError

LOCK_WAIT_S = 1800.0
"""Decoding a large image folder takes at most this long; the kernel releases the lock of a process that died."""
POLL_S = 0.2
REPORT_EVERY_S = 5.0
ITEMS_PER_CHUNK = 64
BYTES_PER_THREAD = 4096
"""Decoding a tiny image holds the interpreter lock nearly all the time, so more threads are slower: 10,000 images of
1,000 bytes took two cores 0.7 s with one thread, 1.0 s with four and 1.5 s with sixteen."""
MIN_THREADS = 4
"""Network disks take a while to open any file; several threads wait at once."""

Progress = Callable[[str], None]
"""Reports progress in sentences."""
Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def require_root(root: Path | None, name: str) -> Path:
    """Return the data root. Raises DatasetError where none is set."""
    if root is None:
        raise DatasetError(
            f"{name} needs a data folder, and none is set",
            where="ORCHESTRATE_DATA",
            hint="export ORCHESTRATE_DATA=/path/to/data, give --data, or set data in cluster.toml",
        )
    return root


def sha256(path: Path) -> str:
    """Return the hex digest of a file's content. Raises OSError."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def locked(lock: Path, progress: Progress, *, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold an advisory lock on a file. The file stays: after a removal two processes could lock two files of one name.

    Raises:
        DatasetError: another process held the lock for ``wait_s``; the message names it.
        OSError: the lock file cannot be created.
    """
    with open(lock, "a+b", buffering=0) as stream:
        deadline = time.monotonic() + wait_s
        reported = False
        while not _try_lock(stream.fileno()):
            holder = os.pread(stream.fileno(), 200, 0).decode(errors="replace").strip() or "another process"
            if time.monotonic() > deadline:
                raise DatasetError(
                    f"another process has been preparing this data set for more than {wait_s:.0f} s",
                    where=str(lock),
                    why=f"held by {holder}",
                    hint="wait for it, or end it: that frees the lock",
                )
            if not reported:
                progress(f"waiting for {holder}, which is preparing the same data set")
                reported = True
            time.sleep(POLL_S)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {os.uname().nodename}\n".encode())
        yield


def _try_lock(descriptor: int) -> bool:
    """Whether this process now has the lock, or the file system has no locks."""
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def in_threads(
    work: Callable[[Item], Outcome], items: Sequence[Item], progress: Progress, done_word: str, *, size_bytes: int
) -> Iterator[Outcome]:
    """Yield the outcomes of ``work`` in the order of ``items``, on at most one thread per core.

    For work that releases the interpreter lock, such as reading, hashing and decoding. The first error is raised, and
    no further chunk starts. ``size_bytes`` is the size of all items' files together.
    """
    chunks = [items[start : start + ITEMS_PER_CHUNK] for start in range(0, len(items), ITEMS_PER_CHUNK)]
    threads = max(MIN_THREADS, size_bytes // max(len(items), 1) // BYTES_PER_THREAD)
    pool = futures.ThreadPoolExecutor(max_workers=min(threads, len(os.sched_getaffinity(0))))
    reported_at = time.monotonic()
    try:
        done = 0
        for outcomes in pool.map(lambda chunk: [work(item) for item in chunk], chunks):
            yield from outcomes
            done += len(outcomes)
            if time.monotonic() - reported_at > REPORT_EVERY_S:
                progress(f"{done_word} {done:,} of {len(items):,} images")
                reported_at = time.monotonic()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
