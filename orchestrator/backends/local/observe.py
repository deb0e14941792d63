"""What can be known of a local attempt, and the pure function from that to a state. A scheduler brings its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from orchestrator.backends import leases, submit_lock
from orchestrator.backends.base import Status
from orchestrator.backends.exit_status import Exit, result_status
from orchestrator.backends.local.records import QueueFolder, queue_name, supervisor_name
from orchestrator.backends.processes import Host
from workloads.contract import State
from workloads.files.json_file import read_json
from workloads.files.run_dir import AttemptDir

SILENCE_S = 900.0
"""A run on a machine that we cannot look into counts as lost after this long without progress."""


class Place(StrEnum):
    """Where the queue has an attempt's entry."""

    NOWHERE = "nowhere"
    PENDING = "pending"
    RUNNING = "running"


class Supervisor(StrEnum):
    """What is known of an attempt's supervisor."""

    NONE = "none"
    """None was ever started."""
    ALIVE = "alive"
    GONE = "gone"
    """It was started on this machine and is no more."""
    REBOOTED = "rebooted"
    """It was started on this machine before the last boot."""
    ELSEWHERE = "elsewhere"
    """It was started on another machine, or in another container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalObservation:
    """All that speaks for the state of one local attempt."""

    recorded: State
    """What the store has."""
    exit: Exit | None
    """The verdict of the one who saw the end."""
    result: Status | None
    """The job's own words."""
    place: Place
    supervisor: Supervisor
    queue_alive: bool
    submit_alive: bool
    waiting_reason: str = ""
    """The queue's reason."""
    cancelling: bool = False
    untold: bool = False
    """It has ended, and its supervisor found no room on the disk to write how."""
    silent_s: float | None = None
    """Seconds since the last sign of life in the run's directory."""
    host: str = ""
    """Where the supervisor was started."""
    submit_host: str = ""
    """Where a submit is at work; empty for this host."""


def verdict(w: LocalObservation) -> Status:
    """Weigh the witnesses. The order is the argument: what is final goes first, absence of news goes last."""
    if w.result is not None and w.result.state is State.SUCCEEDED:
        return w.result
    if w.exit is not None:
        return Status(w.exit.state, w.exit.reason, w.exit.message)
    if w.supervisor is Supervisor.ALIVE and w.untold:
        return Status(State.RUNNING, "disk_full", "it has ended, and the disk has no room to write how: make some")
    if w.supervisor is Supervisor.ALIVE:
        return Status(State.RUNNING, "cancelling" if w.cancelling else "")
    if w.supervisor in {Supervisor.GONE, Supervisor.REBOOTED}:
        if w.result is not None:
            return w.result
        if w.cancelling:
            return Status(State.CANCELLED, "cancelled", "stopped by orchestrate cancel")
        why = why_gone(w.supervisor, untold=w.untold)
        return Status(State.LOST, "supervisor_lost", f"{why}; orchestrate retry goes on from its last checkpoint")
    if w.supervisor is Supervisor.ELSEWHERE:
        if w.result is not None:
            return w.result
        if w.silent_s is None or w.silent_s < SILENCE_S:
            return Status(State.RUNNING, "", f"on {w.host}")
        return Status(State.LOST, "no_sign_of_life", f"no sign of life from {w.host} for {w.silent_s:.0f} s")
    if w.place is Place.RUNNING:
        return Status(State.PENDING, "starting")
    if w.place is Place.PENDING:
        if w.cancelling:
            return Status(State.PENDING, "cancelling")
        if not w.queue_alive:
            return Status(State.PENDING, "no_queue", "the queue process is gone; the next command of ours starts it")
        return Status(State.PENDING, "queued", w.waiting_reason)
    if w.recorded is State.SUBMITTING and w.submit_alive:
        return Status(State.SUBMITTING, "sending", submit_lock.describe_holder(w.submit_host))
    if w.recorded is State.SUBMITTING:
        return Status(State.SUBMITTING, "interrupted", "submit did not finish; orchestrate submit goes on with it")
    return Status(
        State.LOST, "entry_lost", "its queue entry is gone, and it never started; orchestrate retry sends it again"
    )


def why_gone(fate: Supervisor, *, untold: bool) -> str:
    """Why a supervisor left no verdict."""
    if untold:
        return "it ended while the disk had no room to write how"
    return "the machine was restarted" if fate is Supervisor.REBOOTED else "its supervisor was killed"


class LocalView:
    """One look at a queue: what is the same for all attempts is read once."""

    def __init__(self, folder: QueueFolder, now: float) -> None:
        self._folder = folder
        # The submit first: what it is sending is in the queue when it is gone.
        self._submit_host = submit_lock.other_host(folder.runs)
        self._submit_alive = bool(self._submit_host) or submit_lock.is_held_here(folder.runs)
        self._queue_alive = leases.is_held(queue_name(folder.runs))
        # In this order: an entry moves from pending to running, and must be seen in one of them.
        self._pending = folder.tokens(folder.pending)
        self._running = folder.tokens(folder.running)
        self._waiting: Mapping[str, str] = folder.why_waiting()
        self._here = Host.here()
        self._now = now

    def of(self, attempt: AttemptDir, token: str, recorded: State) -> LocalObservation:
        """All witnesses of one attempt."""
        # The supervisor first: it writes the verdict before it goes, so a verdict is there when it is found gone.
        supervisor, host = self._supervisor(attempt, token)
        place = Place.RUNNING if token in self._running else Place.NOWHERE
        return LocalObservation(
            recorded=recorded,
            exit=Exit.read(attempt),
            result=result_status(attempt),
            place=Place.PENDING if token in self._pending else place,
            supervisor=supervisor,
            queue_alive=self._queue_alive,
            submit_alive=self._submit_alive,
            submit_host=self._submit_host,
            waiting_reason=self._waiting.get(token, ""),
            cancelling=self._folder.is_cancelled(token),
            untold=self._folder.is_unreported(token),
            silent_s=_silence_s(attempt, self._now),
            host=host,
        )

    def _supervisor(self, attempt: AttemptDir, token: str) -> tuple[Supervisor, str]:
        alive = leases.is_held(supervisor_name(token))
        host = started_on(attempt)
        if host is None:
            # The queue holds the name from before the start.
            return (Supervisor.ALIVE if alive and attempt.supervisor.exists() else Supervisor.NONE), ""
        if alive:
            return Supervisor.ALIVE, host.name
        return host_fate(host, self._here), host.name


def host_fate(host: Host, here: Host) -> Supervisor:
    """What became of a supervisor that was started on ``host`` and does not answer ``here``."""
    if host == here:
        return Supervisor.GONE
    if host.name == here.name and host.boot != here.boot:
        return Supervisor.REBOOTED
    return Supervisor.ELSEWHERE


def started_on(attempt: AttemptDir) -> Host | None:
    """Where the attempt's supervisor was started; None when it was not, or is just about to say."""
    try:
        data: Any = read_json(attempt.supervisor)
    except (OSError, ValueError):
        return None
    return Host.from_json(data.get("host")) if isinstance(data, dict) else None


def _silence_s(attempt: AttemptDir, now: float) -> float | None:
    newest = 0.0
    for path in (attempt.path, *_signs_of_life(attempt)):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:
            continue
    return now - newest if newest else None


def _signs_of_life(attempt: AttemptDir) -> list[Path]:
    return [attempt.progress(0), attempt.events(0), attempt.supervisor]
