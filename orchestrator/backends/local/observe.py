"""Observe local attempts: their queue entries, their supervisors' leases, their files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.backends import leases, submit_lock
from orchestrator.backends.base import Attempt, Observation, Status
from orchestrator.backends.exit_status import last_change, result_status
from orchestrator.backends.local.records import QueueFolder, supervisor_host
from orchestrator.backends.processes import Host


class EntryState(StrEnum):
    """Which folder of the queue has an attempt's entry."""

    MISSING = "missing"
    PENDING = "pending"
    RUNNING = "running"


class SupervisorState(StrEnum):
    """What became of an attempt's supervisor."""

    NOT_STARTED = "not_started"
    ALIVE = "alive"
    KILLED = "killed"
    """It started on this machine and does not live."""
    REBOOTED = "rebooted"
    """It started on this machine before the last boot."""
    ELSEWHERE = "elsewhere"
    """It started on another machine or in another container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalObservation(Observation):
    """What is observed of one local attempt."""

    entry: EntryState
    supervisor: SupervisorState
    queue_alive: bool
    waiting_reason: str = ""
    """Why the queue does not start it yet."""
    unreported: bool = False
    """It has ended, and its supervisor could not write that on a full disk."""
    host: str = ""
    """Where the supervisor started."""


class LocalObserver:
    """Observes attempts of one queue; reads what all attempts share once."""

    def __init__(self, folder: QueueFolder) -> None:
        self._folder = folder
        # The submit goes first: once it has ended, what it submitted is in the queue.
        self._submit_host = submit_lock.holder(folder.runs)
        self._queue_alive = leases.is_held(leases.queue_name(folder.runs))
        # In this order: an entry moves from pending to running and must be found in one of them.
        self._pending = folder.tokens(folder.pending)
        self._running = folder.tokens(folder.running)
        self._waiting_reasons = folder.waiting_reasons()
        self._here = Host.here()

    def observe(self, attempt: Attempt) -> LocalObservation:
        token, directory = attempt.token, attempt.directory
        # The supervisor goes first: it writes exit.json before it ends, so a dead one has left its exit.json.
        supervisor, host = self._supervisor(attempt)
        entry = EntryState.RUNNING if token in self._running else EntryState.MISSING
        changed_at = last_change((directory.path, directory.progress(0), directory.events(0), directory.supervisor))
        return LocalObservation(
            recorded=attempt.recorded,
            exit=Status.read_exit(directory),
            result=result_status(directory),
            entry=EntryState.PENDING if token in self._pending else entry,
            supervisor=supervisor,
            queue_alive=self._queue_alive,
            submit_host=self._submit_host,
            waiting_reason=self._waiting_reasons.get(token, ""),
            cancelling=self._folder.is_cancelled(token),
            unreported=self._folder.is_unreported(token),
            silent_s=None if changed_at is None else time.time() - changed_at,
            host=host,
        )

    def _supervisor(self, attempt: Attempt) -> tuple[SupervisorState, str]:
        alive = leases.is_held(leases.supervisor_name(attempt.token))
        host = supervisor_host(attempt.directory)
        if host is None:
            # The queue holds the lease already before the start.
            is_starting = alive and attempt.directory.supervisor.exists()
            return (SupervisorState.ALIVE if is_starting else SupervisorState.NOT_STARTED), ""
        return (SupervisorState.ALIVE if alive else dead_supervisor(host, self._here)), host.name


def dead_supervisor(host: Host, here: Host) -> SupervisorState:
    """Return what became of a supervisor that started on ``host`` and whose lease is free ``here``."""
    if host == here:
        return SupervisorState.KILLED
    if host.name == here.name and host.boot != here.boot:
        return SupervisorState.REBOOTED
    return SupervisorState.ELSEWHERE
