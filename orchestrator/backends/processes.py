"""Linux process care for the queue and the supervisors: children that die with their parent, and finding stray ones."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

TOKEN_VARIABLE = "ORCHESTRATE_TOKEN"  # noqa: S105 (names an attempt, not a secret)
"""In the environment of every rank and of what it starts: finds an attempt's processes when their parents are gone."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Called in a child between fork and exec: the kernel kills it when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def of_attempt(token: str, *, session: int | None = None) -> list[int]:
    """Living processes of this user that carry an attempt's token in their environment.

    Args:
        session: also those of this session, except its leader: a program may overwrite its environment to show a title.
            Only for the leader itself, as a number of a session that is gone may be used again.
    """
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != session:
            # Other users' processes cannot be read, and some end while we look.
            with contextlib.suppress(OSError, IndexError):
                if mark in (path / "environ").read_bytes().split(b"\0") or _in_session(path, session):
                    found.append(int(path.name))
    return found


def find_supervisor(token: str) -> int | None:
    """The living supervisor of an attempt, which has its order, and so the token, on its command line."""
    mark = f'"token": "{token}"'.encode()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                if b"orchestrator.backends.local.supervisor" in words and any(mark in word for word in words):
                    return int(path.name)
    return None


def kill_supervised(token: str, supervisor: int) -> bool:
    """SIGKILL a supervisor and all of its attempt; False when something is still there (stuck in the kernel)."""
    # Its session first, and it stopped until then: as long as a leader is there, no other session has its number.
    with contextlib.suppress(OSError):
        os.kill(supervisor, signal.SIGSTOP)
    gone = kill_attempt(token, session=supervisor)
    deadline = time.monotonic() + 5.0
    while (pid := find_supervisor(token)) is not None:
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return gone


def _in_session(path: Path, session: int | None) -> bool:
    if session is None:
        return False
    # The name in parentheses may hold anything; state, parent, group and session follow it.
    state, _, _, sid = (path / "stat").read_bytes().rpartition(b")")[2].split()[:4]
    return int(sid) == session and state not in {b"Z", b"X"}


def kill_attempt(token: str, *, session: int | None = None, within_s: float = 5.0) -> bool:
    """SIGKILL everything of an attempt; False when something is still there (a process stuck in the kernel)."""
    deadline = time.monotonic() + within_s
    while pids := of_attempt(token, session=session):
        if time.monotonic() > deadline:
            return False
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return True


def num_oom_kills() -> int | None:
    """How often the kernel killed a process for want of memory since boot; None where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


@dataclass(frozen=True, slots=True)
class Host:
    """Which running system a process belongs to; leases can be seen only within one."""

    name: str
    boot: str
    """The kernel's id of this boot."""
    network: str
    """The network namespace, which is the reach of leases."""

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
        """None for anything that is not a host."""
        try:
            return cls(str(data["name"]), str(data["boot"]), str(data["network"]))
        except (KeyError, TypeError):
            return None
