"""Shared files of data sets: content digests, and a lock that saves work. Not a data set itself. Standard library only.

Correctness never rests on the lock: files appear by temp + rename and carry digests, so that where a file system has no
locks two processes merely do the same work twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from workloads.errors import DatasetError

LOCK_WAIT_S = 1800.0
"""Decoding a large image folder takes this long at most; a holder that died lets go at once."""
POLL_S = 0.2


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
