"""Machine-wide leases: names with at most one holder, for GPUs, CPU cores, queues, submits and supervisors.

A lease is a Unix datagram socket bound to a name in Linux's abstract namespace (man 7 unix). The kernel lets one socket
have a name, and frees it when the last process with the socket has ended, however it ended. Child processes inherit the
socket, so a device stays leased while any process of its run lives.

Lock files (and filelock) do not do that: they need a folder that all users of the machine can write to, where a cleaner
of /tmp may remove a locked file, a private /tmp hides it, and another user's symbolic link or umask gets in the way;
and run folders may lie on file systems without locks. All processes of a network namespace share the abstract names:
two containers on one machine do not see each other's leases unless they share the host's network.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

DOMAIN_VARIABLE = "ORCHESTRATE_LEASES"
"""Leases under different values of this variable do not see each other. Unset: one domain for the machine."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A held name, until :meth:`release` or the end of the last process that inherited it."""

    name: str
    descriptor: int
    """For ``pass_fds``: a child that inherits it holds the lease too."""

    def release(self) -> None:
        """Release the lease in this process, once; children that inherited it keep it."""
        os.close(self.descriptor)


def acquire(name: str) -> Lease | None:
    """Acquire a name; None if it is held."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as holder:
        try:
            holder.bind(_address(name))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise
        return Lease(name, holder.detach())


def acquire_up_to(names: Iterable[str], count: int) -> list[Lease]:
    """Acquire the first ``count`` free ones of the names, or as many as are free."""
    return list(islice(filter(None, map(acquire, names)), count))


def release(leases: Sequence[Lease]) -> None:
    for lease in leases:
        lease.release()


def is_held(name: str) -> bool:
    """Whether any process holds a name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        # Any other error (EACCES of another user's socket, EAGAIN of a full buffer) comes from a living holder.
        return probe.connect_ex(_address(name)) != errno.ECONNREFUSED


def gpu_name(uuid: str) -> str:
    return f"gpu/{uuid}"


def core_name(number: int) -> str:
    return f"core/{number}"


def queue_name(runs: Path) -> str:
    return f"queue/{os.path.realpath(runs)}"


def submit_name(runs: Path) -> str:
    return f"submit/{os.path.realpath(runs)}"


def supervisor_name(token: str) -> str:
    """Name the supervisor of an attempt, which holds this while it lives."""
    return f"supervisor/{token}"


def _address(name: str) -> bytes:
    domain = os.environ.get(DOMAIN_VARIABLE, "")
    # A hash, as sun_path holds 108 bytes (man 7 unix), and MIG names and domains are long.
    digest = hashlib.sha256(f"{domain}\0{name}".encode(errors="surrogateescape")).hexdigest()[:32]
    return f"\0orchestrate/{digest}".encode()
