"""Files that processes share: content digests, a lock that saves work, work on many files. Not a data set itself.

Correctness never rests on the lock: files appear by temp + rename and carry digests, so that where a file system has no
locks two processes merely do the same work twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from workloads.errors import DatasetError

LOCK_WAIT_S = 1800.0
"""Decoding a large image folder takes this long at most; a holder that died lets go at once."""
POLL_S = 0.2
REPORT_EVERY_S = 5.0
CHUNK = 64
"""Images handed to a thread at once."""

BYTES_A_THREAD = 4096
"""Reading and decoding an image of a thousand bytes hardly leaves the interpreter, and threads that wait for it in turn
take longer than one: 10,000 of them took two cores 0.7 s in one thread, 1.0 s in four and 1.5 s in sixteen."""
LEAST_THREADS = 4
"""Network disks take a while to open any file, and then several threads wait at once."""

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes. Raises OSError."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def held(lock: Path, progress: Callable[[str], None], *, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold an advisory lock on a file, which is left behind (removing it would let two holders in).

    Raises:
        DatasetError: another process held it for ``wait_s``; it is named.
        OSError: the lock file cannot be made here.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _take(descriptor, lock, progress, wait_s)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, lock: Path, progress: Callable[[str], None], wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    said = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            if time.monotonic() > deadline:
                raise DatasetError(
                    f"another process has been preparing this data set for more than {wait_s:.0f} s",
                    where=str(lock),
                    why=f"held by {holder}",
                    hint="wait for it, or end it; the lock is free as soon as it is gone",
                ) from None
            if not said:
                progress(f"waiting for {holder}, which is preparing the same data set")
                said = True
            time.sleep(POLL_S)
        except OSError:
            return  # no locks on this file system
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
            return


def in_threads(
    work: Callable[[Item], Outcome],
    items: Sequence[Item],
    progress: Callable[[str], None],
    done_word: str,
    *,
    size_bytes: int,
) -> Iterator[Outcome]:
    """The outcomes of ``work`` in the order of ``items``, on a thread a core at most, with a report now and then.

    For work that leaves the interpreter, as reading, hashing and decoding do. The first error is raised and no further
    item started.

    Args:
        size_bytes: of all items' files together.
    """
    from concurrent.futures import ThreadPoolExecutor

    chunks = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    worth = max(LEAST_THREADS, size_bytes // max(len(items), 1) // BYTES_A_THREAD)
    pool = ThreadPoolExecutor(max_workers=min(worth, len(os.sched_getaffinity(0))))
    said = time.monotonic()
    try:
        done = 0
        for outcomes in pool.map(lambda chunk: [work(item) for item in chunk], chunks):
            yield from outcomes
            done += len(outcomes)
            if time.monotonic() - said > REPORT_EVERY_S:
                progress(f"{done_word} {done:,} of {len(items):,} images")
                said = time.monotonic()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
