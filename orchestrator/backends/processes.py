"""Linux processes of local mode: children that die with their parent, and the processes of an attempt.

Reads /proc itself instead of through psutil: the search runs between a SIGSTOP and a SIGKILL, and needs the environment
as bytes and the session, which psutil decodes or lacks. That keeps a compiled dependency out of login nodes, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

TOKEN_VARIABLE = "ORCHESTRATE_TOKEN"  # noqa: S105 (names an attempt, not a secret)
"""In the environment of each rank and of its children: finds the processes of an attempt whose parents are gone."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this child when its parent ends; call between fork and exec (man 2 PR_SET_PDEATHSIG)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have ended before the call: then the kernel sends nothing.
    if os.getppid() != parent:
        os._exit(1)


def find_processes(token: str, *, session: int | None = None) -> list[int]:
    """Return this user's living processes with an attempt's token in their environment.

    Args:
        token: of the attempt.
        session: also return the processes of this session except its leader: a program may overwrite its environment
            to show a title. Only while the leader lives, as the kernel reuses session numbers.
    """
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for pid, path in _processes():
        # Other users' processes cannot be read, and some end meanwhile.
        with contextlib.suppress(OSError, IndexError):
            if pid != session and (
                mark in (path / "environ").read_bytes().split(b"\0") or _is_in_session(path, session)
            ):
                found.append(pid)
    return found


def find_supervisor(token: str) -> int | None:
    """Return the living supervisor of an attempt, which has the token in its arguments."""
    mark = f'"token": "{token}"'.encode()
    for pid, path in _processes():
        with contextlib.suppress(OSError):
            arguments = (path / "cmdline").read_bytes().split(b"\0")
            if b"orchestrator.backends.local.supervisor" in arguments and any(mark in word for word in arguments):
                return pid
    return None


def kill_supervised(token: str, supervisor: int) -> bool:
    """SIGKILL a supervisor and its attempt; return False if a process remains (blocked in the kernel)."""
    # The supervisor is stopped until its session has ended: while it lives, no other session can get its number.
    with contextlib.suppress(OSError):
        os.kill(supervisor, signal.SIGSTOP)
    all_ended = kill_attempt(token, session=supervisor)
    return _kill(lambda: [pid for pid in [find_supervisor(token)] if pid is not None]) and all_ended


def kill_attempt(token: str, *, session: int | None = None) -> bool:
    """SIGKILL all processes of an attempt; return False if one remains (blocked in the kernel)."""
    return _kill(lambda: find_processes(token, session=session))


def _kill(find: Callable[[], list[int]], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while pids := find():
        if time.monotonic() > deadline:
            return False
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return True


def _processes() -> Iterator[tuple[int, Path]]:
    return ((int(path.name), path) for path in Path("/proc").iterdir() if path.name.isdigit())


def _is_in_session(path: Path, session: int | None) -> bool:
    if session is None:
        return False
    # man 5 proc_pid_stat: state, parent, group and session follow the name, which may hold any character but ends at
    # the last parenthesis.
    state, _, _, sid = (path / "stat").read_bytes().rpartition(b")")[2].split()[:4]
    return int(sid) == session and state not in {b"Z", b"X"}


def num_oom_kills() -> int | None:
    """Return how often the kernel's OOM killer acted since boot; None if the kernel does not count."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


@dataclass(frozen=True, slots=True)
class Host:
    """The running system that a process belongs to; leases are visible within one only."""

    name: str
    boot: str
    """The kernel's id of this boot."""
    network: str
    """The network namespace."""

    @classmethod
    def here(cls) -> Self:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            network = str(Path("/proc/self/ns/net").readlink())
        except OSError:
            boot = network = ""
        return cls(socket.gethostname(), boot, network)

    @classmethod
    def from_json(cls, data: Any) -> Self | None:
        """Return None if the data is not a host."""
        try:
            return cls(str(data["name"]), str(data["boot"]), str(data["network"]))
        except (KeyError, TypeError):
            return None
