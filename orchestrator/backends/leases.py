"""Machine-wide leases: names with at most one holder, for GPUs, CPU cores, queues and supervisors.

A lease is a Unix datagram socket bound to a name in Linux's abstract namespace. The kernel lets one socket have a name
and frees it when the last process that has the socket is gone, however it ended. Child processes inherit the socket, so
a device stays leased as long as any process of its run lives, whatever happens to those that started it.

Why not lock files: they need a folder that all users of the machine can write to, where a cleaner of /tmp may remove a
locked file, a private /tmp hides it, and another user's symbolic link or umask gets in the way; and run folders lie on
file systems without locks. An abstract name has no file. It is shared by all processes of a network namespace: two
containers on one machine do not see each other's leases unless they share the host's network.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Iterable, Sequence

DOMAIN_VARIABLE = "ORCHESTRATE_LEASES"
"""Leases under different values of this variable do not see each other. Unset: one domain for the machine."""


class Lease:
    """A held name. Let go by :meth:`release`, or by the end of the last process that inherited it."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self._descriptor = descriptor

    def fileno(self) -> int:
        """For ``pass_fds``: a child that gets it holds the lease too."""
        return self._descriptor

    def release(self) -> None:
        """Let go in this process; children that inherited the lease keep it. Once only."""
        os.close(self._descriptor)


def acquire(name: str) -> Lease | None:
    """Hold a name; None when somebody else has it."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(_address(name))
    except OSError as error:
        holder.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return Lease(name, holder.detach())


def acquire_up_to(names: Iterable[str], count: int) -> list[Lease]:
    """Hold up to ``count`` of the names, in their order; names that others have are passed over."""
    taken: list[Lease] = []
    for name in names:
        if len(taken) == count:
            break
        lease = acquire(name)
        if lease is not None:
            taken.append(lease)
    return taken


def release(leases: Sequence[Lease]) -> None:
    for lease in leases:
        lease.release()


def is_held(name: str) -> bool:
    """Whether anybody holds a name. Looks without touching it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_address(name))
        except ConnectionRefusedError:
            return False
        # Any other answer (another user's socket refuses us, its buffer is full) comes from a living holder.
        except OSError:
            return True
    return True


def gpu_name(uuid: str) -> str:
    return f"gpu/{uuid}"


def core_name(number: int) -> str:
    return f"core/{number}"


def _address(name: str) -> bytes:
    domain = os.environ.get(DOMAIN_VARIABLE, "")
    # Hashed, as the kernel allows 107 bytes and MIG names and people's domains are long.
    digest = hashlib.sha256(f"{domain}\0{name}".encode(errors="surrogateescape")).hexdigest()[:32]
    return f"\0orchestrate/{digest}".encode()
