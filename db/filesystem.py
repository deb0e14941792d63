"""What a folder's file system allows a database: locks, shared memory, space. Standard library only."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from pathlib import Path

SQLITE_URL = "sqlite:///"
"""Optional prefix of a file name."""

_MOUNTS = Path("/proc/mounts")
_LOCAL_FILE_SYSTEMS = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs"}
)


def is_url(database: str) -> bool:
    """Whether a database is on a server rather than a file."""
    return "://" in database.removeprefix(SQLITE_URL)


def lock_problem(folder: Path) -> str:
    """Return why files in this folder cannot be locked; empty when they can, or when no file can be created to try."""
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
    """Whether only this machine mounts the folder's file system; False for unknown types."""
    try:
        mounts = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return True
    real = os.fsencode(os.path.realpath(folder))
    best, kind = b"", b""
    for line in mounts:
        _, escaped, type_, *_ = line.split(b" ")
        point = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), escaped)
        if (real == point or real.startswith(point.rstrip(b"/") + b"/")) and len(point) >= len(best):
            best, kind = point, type_
    return kind.decode() in _LOCAL_FILE_SYSTEMS


def is_full(folder: Path) -> bool:
    """Whether the disk lacks space for a write-ahead log's shared memory; SQLite reports that as an I/O error."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize < 128 * 1024
