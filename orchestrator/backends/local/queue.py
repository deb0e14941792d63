"""Local mode's queue: a small detached process per runs folder that leases devices and starts supervisors.

Any command that finds work without a queue starts one (``python -m orchestrator.backends.local.queue RUNS``); it ends
when nothing is left. It may be killed at any time: supervisors keep running, the run's own processes keep the leases,
and the next queue adopts them. Order is first come, first served. A run that does not fit yet lets later ones pass for
:data:`PATIENCE_S`; then the queue reserves devices for it as they become free, so that a large run is not starved.
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
from orchestrator.backends.exit_status import Ending, Exit, conclude, first_failure, hung_ranks, read_result_or_none
from orchestrator.backends.local.machine import Machine, local_machine
from orchestrator.backends.local.observe import Supervisor, host_fate, started_on, why_gone
from orchestrator.backends.local.records import (
    Entry,
    Order,
    QueueFolder,
    check_runs_folder,
    claim_start,
    environment,
    queue_name,
    supervisor_name,
)
from workloads.contract import State
from workloads.files.json_file import write_json

log = logging.getLogger(__name__)

POLL_S = 0.2
PATIENCE_S = 300.0
"""How long later runs may pass a blocked one."""
IDLE_S = 1.0
"""The queue ends after this long with nothing to do."""
CLAIM_AGE_S = 10.0
"""A claimed entry without a supervisor may still be another machine's queue at work, until it is this old."""

_RESERVATION = "reservation"
"""Held by the one queue of the machine that keeps devices for a run it cannot start yet: two such queues could each
keep half of what the other needs."""


@dataclass(slots=True)
class _Need:
    """Devices that one entry can have."""

    gpus: Sequence[str]
    cores: Sequence[int]
    num_gpus: int
    num_cores: int

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for entries that fit or do not fit together."""
        return (tuple(self.gpus), tuple(self.cores), self.num_gpus, self.num_cores)

    def impossible(self) -> str:
        """Why it can never be met here; empty when it can."""
        if len(self.gpus) < self.num_gpus:
            return f"needs {_count(self.num_gpus, 'GPU')}, and may use {len(self.gpus)} of this machine"
        if len(self.cores) < self.num_cores:
            return f"needs {_count(self.num_cores, 'core')}, and may use {len(self.cores)} of this machine"
        return ""

    def lacking(self) -> str:
        """What it waits for, in words."""
        free_gpus = sum(not leases.is_held(leases.gpu_name(uuid)) for uuid in self.gpus)
        free_cores = sum(not leases.is_held(leases.core_name(number)) for number in self.cores)
        parts = []
        if free_gpus < self.num_gpus:
            parts.append(f"{_count(self.num_gpus, 'GPU')} ({free_gpus} of {len(self.gpus)} free)")
        if free_cores < self.num_cores or not parts:
            parts.append(f"{_count(self.num_cores, 'core')} ({free_cores} of {len(self.cores)} free)")
        return "waits for " + " and ".join(parts)


@dataclass(slots=True)
class _Devices:
    """Leases of one run, complete or being gathered."""

    gpus: list[leases.Lease] = field(default_factory=list)
    cores: list[leases.Lease] = field(default_factory=list)

    def gather(self, need: _Need) -> bool:
        """Take what is free and still wanted; True when nothing is missing."""
        self.gpus += leases.acquire_up_to(map(leases.gpu_name, need.gpus), need.num_gpus - len(self.gpus))
        self.cores += leases.acquire_up_to(map(leases.core_name, need.cores), need.num_cores - len(self.cores))
        return len(self.gpus) == need.num_gpus and len(self.cores) == need.num_cores

    def all(self) -> list[leases.Lease]:
        return [*self.gpus, *self.cores]

    def release(self) -> None:
        leases.release(self.all())


@dataclass(slots=True)
class _Reservation:
    """Devices kept for one blocked run."""

    token: str
    permit: leases.Lease
    devices: _Devices

    def release(self) -> None:
        self.devices.release()
        self.permit.release()


class Queue:
    """The loop, and what it remembers between rounds."""

    def __init__(self, folder: QueueFolder, mine: Machine, present: frozenset[str]) -> None:
        self._folder = folder
        self._mine = mine
        self._present = present
        """UUIDs of all GPUs here, whatever CUDA_VISIBLE_DEVICES says."""
        # An affinity is inherited, not a limit: what the control group allows shows when all cores are asked for.
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        self._usable_cores = os.sched_getaffinity(0)
        self._entries: dict[str, Entry] = {}
        self._supervisors: dict[str, subprocess.Popen[bytes] | None] = {}
        """By token; None for one that an earlier queue started."""
        self._foreign: set[str] = set()
        """Running entries of another machine that shares the folder."""
        self._unwritten: set[str] = set()
        """Ended ones whose verdict the disk did not take yet."""
        self._blocked_since: dict[str, float] = {}
        self._reservation: _Reservation | None = None
        self._told: dict[str, str] = {}

    def serve(self) -> None:
        """Work until there has been nothing to do for a while."""
        idle_since: float | None = None
        while idle_since is None or time.monotonic() - idle_since < IDLE_S:
            busy = self.turn()
            idle_since = None if busy else (idle_since or time.monotonic())
            time.sleep(POLL_S)

    def turn(self) -> bool:
        """One round; False when nothing waits and nothing runs."""
        self._look_after_supervisors()
        pending = self._pending()
        self._start_what_fits(pending)
        return bool(self._entries or self._supervisors)

    def _look_after_supervisors(self) -> None:
        running = self._folder.tokens(self._folder.running)
        self._foreign &= running
        for token in running - self._supervisors.keys() - self._foreign:
            self._supervisors[token] = None
        for token, process in list(self._supervisors.items()):
            if process is not None:
                if process.poll() is None:
                    continue
                settled = self._settle(token, exit_code=process.returncode)
            else:
                settled = not leases.is_held(supervisor_name(token)) and self._settle(token, exit_code=None)
            if settled:
                del self._supervisors[token]

    def _settle(self, token: str, *, exit_code: int | None) -> bool:
        """See to the end of an attempt whose supervisor is gone; False when that cannot be decided yet."""
        try:
            entry = self._folder.read(self._folder.running, token)
        except FileNotFoundError:
            return True
        except ValueError:
            log.exception("entry %s is damaged", token)
            self._folder.finish(token)
            return True
        attempt = entry.attempt_dir(self._folder.runs)
        if Exit.read(attempt) is None:
            host = started_on(attempt)
            if host is None and not attempt.supervisor.exists():
                return self._settle_unstarted(entry, exit_code)
            fate = Supervisor.GONE if host is None else host_fate(host, processes.Host.here())
            if fate is Supervisor.ELSEWHERE:
                self._foreign.add(token)
                return True
            processes.kill_attempt(token)
            why = why_gone(fate, untold=self._folder.is_unreported(token))
            log.info("run %s attempt %s: %s", entry.run_id, entry.attempt, why)
            lost = Ending(State.LOST, "supervisor_lost", f"{why}; orchestrate retry goes on from its last checkpoint")
            cancelled = Ending(State.CANCELLED, "cancelled", "stopped by orchestrate cancel")
            ended = conclude(
                exit_codes=(),
                ending=cancelled if self._folder.is_cancelled(token) else lost,
                result=read_result_or_none(attempt),
                failure=first_failure(attempt, entry.num_ranks),
                hung=hung_ranks(attempt, entry.num_ranks),
            )
            try:
                ended.write(attempt)
            except OSError as error:
                # Tried again each turn, said once.
                if token not in self._unwritten:
                    log.warning("cannot write %s: %s", attempt.exit, error)
                self._unwritten.add(token)
                return False
        self._folder.finish(token)
        return True

    def _settle_unstarted(self, entry: Entry, exit_code: int | None) -> bool:
        if exit_code is not None:
            self._refuse(
                entry, f"its supervisor ended with exit code {exit_code} before it began: see {self._folder.log}"
            )
        elif self._folder.claim_age_s(entry.token) < CLAIM_AGE_S:
            return False
        else:
            self._folder.put_back(entry.token)
        return True

    def _refuse(self, entry: Entry, why: str) -> None:
        """End an attempt that could not be started."""
        attempt = entry.attempt_dir(self._folder.runs)
        if claim_start(attempt):
            Exit(State.FAILED, "start_failed", why).write(attempt)
        self._folder.finish(entry.token)

    def _pending(self) -> list[Entry]:
        """Entries that wait, in their order."""
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
            self._reservation.release()
            self._reservation = None

    def _start_what_fits(self, pending: Sequence[Entry]) -> None:
        waiting: dict[str, str] = {}
        blocked: dict[tuple[object, ...], str] = {}
        first_blocked: Entry | None = None
        # What is being gathered for a run that waited long goes before everybody else.
        kept = self._reservation.token if self._reservation is not None else ""
        for entry in sorted(pending, key=lambda entry: entry.token != kept):
            need = self._need(entry)
            if why := need.impossible():
                waiting[entry.token] = why
                continue
            if need.key in blocked:
                waiting[entry.token] = blocked[need.key]
                continue
            devices = self._devices(entry, need)
            if devices is not None:
                self._start(entry, devices)
                continue
            blocked[need.key] = need.lacking()
            waiting[entry.token] = blocked[need.key] + (", is next" if entry.token == kept else "")
            first_blocked = first_blocked or entry
        if first_blocked is not None:
            self._be_patient_with(first_blocked)
        self._tell(waiting)

    def _need(self, entry: Entry) -> _Need:
        """What an entry may have here: what its submit saw, or what we see when enough of that is gone by now."""
        gpus = [uuid for uuid in entry.gpus if uuid in self._present]
        if len(gpus) < entry.num_gpus <= len(entry.gpus):
            gpus = [gpu.uuid for gpu in self._mine.gpus]
        cores = [number for number in entry.cores if number in self._usable_cores]
        if len(cores) < entry.num_cores <= len(entry.cores):
            cores = list(self._mine.cores)
        return _Need(gpus, cores, entry.num_gpus, entry.num_cores)

    def _devices(self, entry: Entry, need: _Need) -> _Devices | None:
        """Leases for all that an entry needs, or None."""
        reservation = self._reservation
        if reservation is not None and reservation.token == entry.token:
            if not reservation.devices.gather(need):
                return None
            self._reservation = None
            reservation.permit.release()
            return reservation.devices
        devices = _Devices()
        if devices.gather(need):
            return devices
        devices.release()
        return None

    def _be_patient_with(self, entry: Entry) -> None:
        """Note since when the first blocked run waits; keep devices for it when that is too long."""
        since = self._blocked_since.setdefault(entry.token, time.monotonic())
        if self._reservation is None and time.monotonic() - since >= PATIENCE_S:
            permit = leases.acquire(_RESERVATION)
            if permit is not None:
                self._reservation = _Reservation(entry.token, permit, _Devices())

    def _start(self, entry: Entry, devices: _Devices) -> None:
        alive = leases.acquire(supervisor_name(entry.token))
        if alive is None or not self._folder.claim(entry.token):
            devices.release()
            if alive is not None:
                alive.release()
            return
        self._forget(entry.token)
        try:
            self._supervisors[entry.token] = self._spawn(entry, devices, alive)
        except OSError as error:
            log.exception("cannot start a supervisor")
            self._refuse(entry, f"its supervisor could not be started: {error}")
        # From here on the leases are the run's own.
        devices.release()
        alive.release()

    def _spawn(self, entry: Entry, devices: _Devices, alive: leases.Lease) -> subprocess.Popen[bytes]:
        order = Order(
            runs=str(self._folder.runs),
            token=entry.token,
            gpus=[lease.name.partition("/")[2] for lease in devices.gpus],
            cores=[int(lease.name.partition("/")[2]) for lease in devices.cores],
            leases=[lease.fileno() for lease in devices.all()],
        )
        log.info("run %s attempt %s: GPUs %s, cores %s", entry.run_id, entry.attempt, order.gpus, order.cores)
        directory = entry.working_directory
        return subprocess.Popen(
            [entry.python, "-P", "-m", "orchestrator.backends.local.supervisor", json.dumps(asdict(order))],
            env=environment(entry, os.environ),
            cwd=directory if Path(directory).is_dir() else self._folder.runs,
            stdin=subprocess.DEVNULL,
            pass_fds=[*order.leases, alive.fileno()],
            start_new_session=True,
        )

    def _tell(self, waiting: dict[str, str]) -> None:
        """Leave the reasons where ``status`` finds them."""
        if waiting == self._told:
            return
        self._told = waiting
        try:
            write_json(self._folder.waiting, waiting)
        except OSError:
            log.exception("cannot say why runs wait")


def main() -> None:
    """Become the queue of a runs folder, in the background; end at once when there is one."""
    folder = QueueFolder(Path(sys.argv[1]))
    os.umask(os.umask(0) | 0o002)
    check_runs_folder(folder.runs)
    folder.create()
    mine = local_machine()
    without = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    present = frozenset(gpu.uuid for gpu in local_machine(without).gpus)
    name = queue_name(folder.runs)
    lease = leases.acquire(name)
    if lease is None or not _into_background(folder):
        return
    log.info("queue %s on %s: %s GPUs, %s cores", os.getpid(), mine.hostname, len(mine.gpus), len(mine.cores))
    while lease is not None:
        Queue(folder, mine, present).serve()
        lease.release()
        # Who put an entry here before that saw a living queue, and counts on us.
        lease = leases.acquire(name) if folder.tokens(folder.pending) else None
    log.info("queue %s: nothing left to do", os.getpid())


def _into_background(folder: QueueFolder) -> bool:
    """Fork, so that the caller's command goes on; True in the queue itself."""
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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


if __name__ == "__main__":
    main()
