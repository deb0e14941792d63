"""Linux processes: commands with a time limit, children that die with their parent, the processes of an attempt.

The search for an attempt's processes reads /proc itself. psutil would be no shorter: it decodes environments and lacks
sessions, and login nodes would need one more compiled package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from orchestrator.errors import CommandError

TOKEN_VARIABLE = "ORCHESTRATE_TOKEN"  # noqa: S105 (names an attempt, not a secret)
"""In the environment of each rank and of its children: finds the processes of an attempt whose parents have ended."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this child when its parent ends; call between fork and exec (man 2 PR_SET_PDEATHSIG)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have ended before the call: then the kernel sends nothing.
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command printed, and how it ended."""

    argv: tuple[str, ...]
    exit_code: int | None
    """None if it did not end in time or was not found."""
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """Both outputs, standard error first."""
        return "\n".join(part.strip() for part in (self.stderr, self.stdout) if part.strip())

    def error(self, *, hint: str = "") -> CommandError:
        return CommandError(self.argv, self.exit_code, self.stdout, self.stderr, hint=hint)


def run_command(
    *argv: str, timeout_s: float, environ: Mapping[str, str] | None = None, outlives_us: bool = False
) -> Answer:
    """Run a command without input. The kernel kills it if this process ends first, unless it ``outlives_us``."""
    try:
        done = subprocess.run(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
            preexec_fn=None if outlives_us else partial(die_with_parent, os.getpid()),
        )
    except FileNotFoundError:
        return Answer(argv, None, "", f"there is no {argv[0]} on PATH")
    except OSError as error:
        return Answer(argv, None, "", f"{argv[0]}: {error.strerror}")
    except subprocess.TimeoutExpired:
        return Answer(argv, None, "", f"{argv[0]} did not end within {timeout_s:.0f} s")
    return Answer(argv, done.returncode, done.stdout, done.stderr)


def find_processes(token: str, *, session: int | None = None) -> list[int]:
    """Return this user's living processes with an attempt's token in their environment.

    And the other processes of ``session``, whose leader must live, as the kernel reuses session numbers: a program may
    overwrite its environment to show a title.
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
    with contextlib.suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE):
            return int(match[1])
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
