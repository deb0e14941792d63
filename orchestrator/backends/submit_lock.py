"""Whether a submit is at work in a runs folder: a lease shows that on its own host, a file on other hosts.

    RUNS/queue/submits/<host>.json    exists while a submit is at work on that host

On its own host the next command continues a killed submit at once. Other hosts wait for :data:`TRUSTED_S`: from there
a killed submit looks like one that waits for ``sbatch``.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from orchestrator.backends import leases
from orchestrator.backends.processes import Host
from workloads.files.json_file import read_object_or_empty, write_json
from workloads.files.run_dir import queue_folder

TRUSTED_S = 600.0
"""Longer than ``sbatch`` may take, and the search for an array that it did not report."""


@contextlib.contextmanager
def acquire(runs: Path) -> Iterator[bool]:
    """Mark a submit as at work; yield whether it is the only one, on this host and others."""
    lease = leases.acquire(leases.submit_name(runs))
    if lease is None:
        yield False
        return
    own = _file(runs, Host.here())
    try:
        # Without the file other hosts do not see this submit, which is no reason to submit nothing.
        with contextlib.suppress(OSError):
            own.parent.mkdir(parents=True, exist_ok=True)
            write_json(own, asdict(Host.here()), durable=False)
        # Both hosts may have written their files at once: the first one works.
        yield _submits(runs)[:1] in ([], [own])
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
        lease.release()


def holder(runs: Path) -> str | None:
    """Return the host where a submit is at work: empty for this one, None for nowhere."""
    own = _file(runs, Host.here())
    if others := [path for path in _submits(runs) if path != own]:
        host = Host.from_json(read_object_or_empty(others[0]))
        return host.name if host and host.name else "another host"
    return "" if leases.is_held(leases.submit_name(runs)) else None


def _submits(runs: Path) -> list[Path]:
    """Return the files of submits that are young enough to be trusted, oldest first."""
    found = []
    with contextlib.suppress(OSError):
        for path in (queue_folder(runs) / "submits").glob("[!.]*.json"):
            written_ns = path.stat().st_mtime_ns
            # NFS: the server sets the file's time, this host reads the clock. They differ by far less than TRUSTED_S.
            if time.time() - written_ns / 1e9 < TRUSTED_S:
                found.append((written_ns, path))
    return [path for _, path in sorted(found)]


def _file(runs: Path, host: Host) -> Path:
    name = hashlib.sha256(f"{host.name}\0{host.network}".encode()).hexdigest()[:16]
    return queue_folder(runs) / "submits" / f"{name}.json"
