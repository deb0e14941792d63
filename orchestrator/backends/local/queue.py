"""Local mode's queue: a small detached process per runs folder that leases devices and starts supervisors.

Any command that finds work without a queue starts one (``python -m orchestrator.backends.local.queue RUNS``); it ends
when nothing is left. It may be killed at any time: supervisors keep running, the run's own processes keep the leases,
and the next queue adopts them. Entries start in the order of their submits. Later ones may overtake one that does not
fit yet for :data:`OVERTAKE_S`; then the queue reserves devices for it as they become free, so that it does not starve.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from orchestrator.backends import leases, processes
from orchestrator.backends.base import CANCELLED, Status
from orchestrator.backends.exit_status import conclude, first_failure, hung_ranks, result_status
from orchestrator.backends.local.machine import Machine, local_machine
from orchestrator.backends.local.observe import SupervisorState, dead_supervisor
from orchestrator.backends.local.records import (
    Entry,
    QueueFolder,
    SupervisorArgs,
    check_runs_folder,
    claim_start,
    run_environment,
    supervisor_host,
)
from orchestrator.backends.local.status import lost_status
from orchestrator.units import counted
from workloads.contract import State
from workloads.files.json_file import write_json

log = logging.getLogger(__name__)

POLL_S = 0.2
OVERTAKE_S = 300.0
"""How long later entries may overtake a blocked one."""
IDLE_S = 1.0
"""The queue ends after this long with nothing to do."""
CLAIM_AGE_S = 10.0
"""A claimed entry without a supervisor may belong to another machine's queue until it is this old."""

_RESERVATION = "reservation"
"""Lease of the one queue of the machine that reserves devices: two could each reserve half of what the other needs."""


@dataclass(frozen=True, slots=True)
class _Need:
    """Devices of one kind that an entry may use, by the names of their leases, and how many it needs."""

    noun: str
    names: tuple[str, ...]
    count: int

    def __str__(self) -> str:
        return counted(self.count, self.noun)


def _why_blocked(needs: Sequence[_Need]) -> str:
    free = [sum(not leases.is_held(name) for name in need.names) for need in needs]
    blocked = [(n, f) for n, f in zip(needs, free, strict=True) if f < n.count] or [(needs[-1], free[-1])]
    return "waits for " + " and ".join(f"{need} ({free} of {len(need.names)} free)" for need, free in blocked)


class _DeviceLeases:
    """Leases for one entry, complete or not yet."""

    def __init__(self) -> None:
        self._held: dict[str, list[leases.Lease]] = {}

    def acquire(self, needs: Sequence[_Need]) -> bool:
        """Acquire free devices as far as needed; True if none is missing."""
        for need in needs:
            held = self._held.setdefault(need.noun, [])
            held += leases.acquire_up_to(need.names, need.count - len(held))
        return all(len(self._held[need.noun]) == need.count for need in needs)

    def all(self) -> list[leases.Lease]:
        return [lease for held in self._held.values() for lease in held]

    def ids(self, noun: str) -> list[str]:
        """Return the UUIDs or numbers of the leased devices of a kind."""
        return [lease.name.partition("/")[2] for lease in self._held[noun]]


@dataclass(slots=True)
class _Reservation:
    token: str
    permit: leases.Lease
    devices: _DeviceLeases = field(default_factory=_DeviceLeases)


class LocalQueue:
    """The loop of the queue process, and its state between rounds."""

    def __init__(self, folder: QueueFolder, mine: Machine, present: frozenset[str]) -> None:
        self._folder = folder
        self._mine = mine
        self._present = present
        """UUIDs of all GPUs here, whatever CUDA_VISIBLE_DEVICES says."""
        # man 2 sched_setaffinity: the kernel intersects the mask with the cpuset. The inherited mask is only a habit of
        # the caller; the cpuset is the limit.
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        self._usable_cores = os.sched_getaffinity(0)
        self._entries: dict[str, Entry] = {}
        self._supervisors: dict[str, subprocess.Popen[bytes] | None] = {}
        """By token; None for one that an earlier queue started."""
        self._foreign: set[str] = set()
        """Running entries of another machine that shares the folder."""
        self._unwritten: set[str] = set()
        """Ended attempts whose exit.json the full disk did not take yet."""
        self._blocked_since: dict[str, float] = {}
        self._reservation: _Reservation | None = None
        self._written_reasons: dict[str, str] = {}

    def run(self) -> None:
        """Work until there has been nothing to do for :data:`IDLE_S`."""
        idle_since: float | None = None
        while idle_since is None or time.monotonic() - idle_since < IDLE_S:
            busy = self.run_once()
            idle_since = None if busy else (idle_since or time.monotonic())
            time.sleep(POLL_S)

    def run_once(self) -> bool:
        """Run one round; False if no entry waits or runs."""
        self._check_supervisors()
        self._start_what_fits(self._read_pending())
        return bool(self._entries or self._supervisors)

    def _check_supervisors(self) -> None:
        running = self._folder.tokens(self._folder.running)
        self._foreign &= running
        for token in running - self._supervisors.keys() - self._foreign:
            self._supervisors[token] = None
        for token, process in list(self._supervisors.items()):
            exit_code = process.poll() if process else None
            has_ended = exit_code is not None if process else not leases.is_held(leases.supervisor_name(token))
            if has_ended and self._finish(token, exit_code=exit_code):
                del self._supervisors[token]

    def _finish(self, token: str, *, exit_code: int | None) -> bool:
        """Finish an entry whose supervisor has ended; False if that has to wait."""
        try:
            entry = self._folder.read(self._folder.running, token)
        except FileNotFoundError:
            return True
        except ValueError:
            log.exception("entry %s is damaged", token)
            self._folder.finish(token)
            return True
        directory = entry.directory(self._folder.runs)
        if Status.read_exit(directory) is None:
            host = supervisor_host(directory)
            if host is None and not directory.supervisor.exists():
                if exit_code is not None:
                    ended = f"its supervisor ended with exit code {exit_code} at its start: see {self._folder.log}"
                    self._fail(entry, ended)
                elif self._folder.claim_age_s(token) < CLAIM_AGE_S:
                    return False
                else:
                    self._folder.unclaim(token)
                return True
            fate = SupervisorState.KILLED if host is None else dead_supervisor(host, processes.Host.here())
            if fate is SupervisorState.ELSEWHERE:
                self._foreign.add(token)
                return True
            if not self._write_exit_of_killed(entry, fate):
                return False
        self._folder.finish(token)
        return True

    def _write_exit_of_killed(self, entry: Entry, supervisor: SupervisorState) -> bool:
        """Write the exit.json that a killed supervisor did not write; False on a full disk."""
        directory, token = entry.directory(self._folder.runs), entry.token
        processes.kill_attempt(token)
        lost = lost_status(supervisor, unreported=self._folder.is_unreported(token))
        log.info("run %s attempt %s: %s", entry.run_id, entry.attempt, lost.message)
        status = conclude(
            exit_codes=(),
            stopped=CANCELLED if self._folder.is_cancelled(token) else lost,
            result=result_status(directory),
            failure=first_failure(directory, entry.num_ranks),
            hung=hung_ranks(directory, entry.num_ranks),
        )
        try:
            status.write_exit(directory)
        except OSError as error:
            # Tried again in each round, logged once.
            if token not in self._unwritten:
                log.warning("cannot write %s: %s", directory.exit, error)
            self._unwritten.add(token)
            return False
        return True

    def _fail(self, entry: Entry, why: str) -> None:
        directory = entry.directory(self._folder.runs)
        if claim_start(directory):
            Status(State.FAILED, "start_failed", why).write_exit(directory)
        self._folder.finish(entry.token)

    def _read_pending(self) -> list[Entry]:
        """Read new entries; return all pending ones in their order."""
        tokens = self._folder.tokens(self._folder.pending)
        for token in self._entries.keys() - tokens:
            self._forget(token)
        for token in tokens - self._entries.keys():
            try:
                self._entries[token] = self._folder.read(self._folder.pending, token)
            except FileNotFoundError:
                continue
            except (OSError, ValueError):
                log.exception("entry %s cannot be read: dropped", token)
                self._folder.withdraw(token)
        return sorted(self._entries.values(), key=lambda entry: entry.order)

    def _forget(self, token: str) -> None:
        self._entries.pop(token, None)
        self._blocked_since.pop(token, None)
        if self._reservation is not None and self._reservation.token == token:
            leases.release([*self._reservation.devices.all(), self._reservation.permit])
            self._reservation = None

    def _start_what_fits(self, pending: Sequence[Entry]) -> None:
        waiting: dict[str, str] = {}
        blocked: dict[Sequence[_Need], str] = {}
        first_blocked: Entry | None = None
        # The entry with a reservation goes before all others.
        reserved = self._reservation.token if self._reservation is not None else ""
        for entry in sorted(pending, key=lambda entry: entry.token != reserved):
            needs = self._needs(entry)
            if lacking := next((need for need in needs if len(need.names) < need.count), None):
                waiting[entry.token] = f"needs {lacking}, and may use {len(lacking.names)} of this machine"
                continue
            if needs in blocked:
                waiting[entry.token] = blocked[needs]
                continue
            if devices := self._acquire_devices(entry, needs):
                self._start(entry, devices)
                continue
            blocked[needs] = _why_blocked(needs)
            waiting[entry.token] = blocked[needs] + (", is next" if entry.token == reserved else "")
            first_blocked = first_blocked or entry
        if first_blocked is not None:
            self._reserve_if_overtaken(first_blocked)
        if waiting != self._written_reasons:
            self._written_reasons = waiting
            try:
                write_json(self._folder.waiting, waiting)
            except OSError:
                log.exception("cannot write why runs wait")

    def _needs(self, entry: Entry) -> tuple[_Need, ...]:
        """Return the devices that the submit of an entry saw, or those that the queue sees if too few of them exist."""
        gpus = [uuid for uuid in entry.gpus if uuid in self._present]
        if len(gpus) < entry.num_gpus <= len(entry.gpus):
            gpus = [gpu.uuid for gpu in self._mine.gpus]
        cores = [number for number in entry.cores if number in self._usable_cores]
        if len(cores) < entry.num_cores <= len(entry.cores):
            cores = list(self._mine.cores)
        return (
            _Need("GPU", tuple(map(leases.gpu_name, gpus)), entry.num_gpus),
            _Need("core", tuple(map(leases.core_name, cores)), entry.num_cores),
        )

    def _acquire_devices(self, entry: Entry, needs: Sequence[_Need]) -> _DeviceLeases | None:
        """Return leases for all that an entry needs, or None. A reservation keeps what it has."""
        own = self._reservation if self._reservation and self._reservation.token == entry.token else None
        devices = own.devices if own else _DeviceLeases()
        if not devices.acquire(needs):
            if own is None:
                leases.release(devices.all())
            return None
        if own is not None:
            own.permit.release()
            self._reservation = None
        return devices

    def _reserve_if_overtaken(self, entry: Entry) -> None:
        """Reserve devices for the first blocked entry once later ones have overtaken it for :data:`OVERTAKE_S`."""
        since = self._blocked_since.setdefault(entry.token, time.monotonic())
        is_due = self._reservation is None and time.monotonic() - since >= OVERTAKE_S
        if is_due and (permit := leases.acquire(_RESERVATION)):
            self._reservation = _Reservation(entry.token, permit)

    def _start(self, entry: Entry, devices: _DeviceLeases) -> None:
        alive = leases.acquire(leases.supervisor_name(entry.token))
        # The supervisor inherits all leases; this process releases its own copies in any case.
        held = [*devices.all(), *([alive] if alive is not None else [])]
        if alive is not None and self._folder.claim(entry.token):
            self._forget(entry.token)
            try:
                self._supervisors[entry.token] = self._spawn(entry, devices, alive)
            except OSError as error:
                log.exception("cannot start a supervisor")
                self._fail(entry, f"its supervisor could not be started: {error}")
        leases.release(held)

    def _spawn(self, entry: Entry, devices: _DeviceLeases, alive: leases.Lease) -> subprocess.Popen[bytes]:
        arguments = SupervisorArgs(
            runs=str(self._folder.runs),
            token=entry.token,
            gpus=devices.ids("GPU"),
            cores=[int(number) for number in devices.ids("core")],
            leases=[lease.descriptor for lease in devices.all()],
        )
        log.info("run %s attempt %s: GPUs %s, cores %s", entry.run_id, entry.attempt, arguments.gpus, arguments.cores)
        directory = entry.working_directory
        return subprocess.Popen(
            [entry.python, "-P", "-m", "orchestrator.backends.local.supervisor", json.dumps(asdict(arguments))],
            env=run_environment(entry, os.environ),
            cwd=directory if Path(directory).is_dir() else self._folder.runs,
            stdin=subprocess.DEVNULL,
            pass_fds=[*arguments.leases, alive.descriptor],
            start_new_session=True,
        )


def main() -> None:
    """Become the queue of a runs folder, in the background; end at once if it has one."""
    folder = QueueFolder(Path(sys.argv[1]))
    os.umask(os.umask(0) | 0o002)
    check_runs_folder(folder.runs)
    folder.create()
    mine = local_machine()
    without = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    present = frozenset(gpu.uuid for gpu in local_machine(without).gpus)
    name = leases.queue_name(folder.runs)
    lease = leases.acquire(name)
    if lease is None or not _fork_into_background(folder):
        return
    log.info("queue %s on %s: %s GPUs, %s cores", os.getpid(), mine.hostname, len(mine.gpus), len(mine.cores))
    while lease is not None:
        LocalQueue(folder, mine, present).run()
        lease.release()
        # A submit that added an entry just before that saw a living queue and relies on it.
        lease = leases.acquire(name) if folder.tokens(folder.pending) else None
    log.info("queue %s: nothing left to do", os.getpid())


def _fork_into_background(folder: QueueFolder) -> bool:
    """Fork, so that the caller's command continues; True in the queue itself."""
    descriptor = os.open(folder.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    if os.fork():
        return False
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(source, target)
    os.chdir("/")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    return True


if __name__ == "__main__":
    main()
