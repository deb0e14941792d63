"""What a folder's file system can do for a database. Standard library only."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from pathlib import Path

SQLITE_URL = "sqlite:///"
"""What may stand before the name of a file."""

_MOUNTS = Path("/proc/mounts")
_LOCAL_FILE_SYSTEMS = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs"}
)


def is_url(database: str) -> bool:
    """Whether a database is a server's and no file."""
    return "://" in database.removeprefix(SQLITE_URL)


def lock_problem(folder: Path) -> str:
    """Why files in this folder cannot be locked; empty when they can, or when none can be made there to try."""
    try:
        probe = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (opening may fail harmlessly, locking may not)
    except OSError:
        return ""
    with probe:
        try:
            fcntl.lockf(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"{errno.errorcode.get(error.errno or 0, '')} {error.strerror}".strip()
    return ""


def is_local(folder: Path) -> bool:
    """Whether a folder is on a file system of this machine alone; an unknown kind counts as not."""
    try:
        mounts = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return True
    place = os.fsencode(os.path.realpath(folder))
    best, kind = b"", b""
    for line in mounts:
        _, escaped, type_, *_ = line.split(b" ")
        point = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), escaped)
        if (place == point or place.startswith(point.rstrip(b"/") + b"/")) and len(point) >= len(best):
            best, kind = point, type_
    return kind.decode() in _LOCAL_FILE_SYSTEMS


def is_full(folder: Path) -> bool:
    """Whether there is no room for the shared memory of a write-ahead log, whose lack SQLite calls an I/O error."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize < 128 * 1024
