"""Whether a submit is at work in a runs folder: a lease tells that at once on this machine, a file tells other hosts.

    RUNS/queue/at_work/<host>.json    there while a submit is at work on that host

What a killed submit has left is gone on with at once on its own host. Its file keeps other hosts from doing so for
:data:`TRUSTED_S`: nobody there can tell it from one that is waiting for ``sbatch``.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from orchestrator.backends import leases
from orchestrator.backends.local.records import submit_name
from orchestrator.backends.processes import Host
from workloads.files.json_file import read_json, write_json
from workloads.files.run_dir import queue_folder

TRUSTED_S = 600.0
"""Longer than ``sbatch`` may take to answer, and than looking for what it did not answer."""


@contextlib.contextmanager
def acquire(runs: Path) -> Iterator[bool]:
    """Show that a submit is at work; whether no other one was before it, on this host or another."""
    lease = leases.acquire(submit_name(runs))
    if lease is None:
        yield False
        return
    own = _file(runs, Host.here())
    try:
        # Where it cannot be written, other hosts do not learn of it; that is no reason to send nothing.
        with contextlib.suppress(OSError):
            own.parent.mkdir(parents=True, exist_ok=True)
            write_json(own, asdict(Host.here()), durable=False)
        yield not _earlier_than(own)
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
        lease.release()


def is_held_here(runs: Path) -> bool:
    """Whether a submit is at work on this host."""
    return leases.is_held(submit_name(runs))


def other_host(runs: Path) -> str:
    """The name of another host where a submit is at work, as far as can be told from here; empty without one."""
    names = [_name(path) for path in _others(_file(runs, Host.here()))]
    return names[0] if names else ""


def describe_holder(host: str) -> str:
    """In words where a submit is at work; nothing for this host."""
    return f"a submit on {host} is at work on it" if host else ""


def _earlier_than(own: Path) -> bool:
    """Whether another host was first; both may have shown themselves at once."""
    try:
        order = (own.stat().st_mtime_ns, own.name)
    except OSError:
        return bool(_others(own))
    return any((path.stat().st_mtime_ns, path.name) < order for path in _others(own))


def _others(own: Path) -> list[Path]:
    found = []
    with contextlib.suppress(OSError):
        for path in own.parent.glob("[!.]*.json"):
            # Times of one file server are compared, or of it and this host: clocks differ by less than is trusted.
            if path.name != own.name and time.time() - path.stat().st_mtime < TRUSTED_S:
                found.append(path)
    return found


def _file(runs: Path, host: Host) -> Path:
    reach = hashlib.sha256(f"{host.name}\0{host.network}".encode()).hexdigest()[:16]
    return queue_folder(runs) / "at_work" / f"{reach}.json"


def _name(path: Path) -> str:
    try:
        host = Host.from_json(read_json(path))
    except (OSError, ValueError):
        host = None
    return host.name if host and host.name else "another host"
