"""What the job process knows about itself, what an engine receives, and the signals that stop both."""

from __future__ import annotations

import contextlib
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from workloads.contract import RunResult, RunSpec
from workloads.files.event_log import EventLog
from workloads.files.run_dir import AttemptDir, RunDir
from workloads.job.watchdog import Pulse
from workloads.job.world import World


def print_error(text: str, stream: TextIO | None = None) -> None:
    """Print to standard error, or another stream; ignores a full disk, since the log file may be on it."""
    with contextlib.suppress(OSError):
        print(text, file=stream or sys.stderr, flush=True)


def print_progress(text: str) -> None:
    """Print a line of progress to standard output; results go to events and ``result.json``."""
    print_error(text, sys.stdout)


class Interrupted(BaseException):
    """A signal told the job to end: the time limit, a preemption or a person who canceled it."""


class StopSignals:
    """SIGTERM, SIGINT and SIGUSR2: raise :class:`Interrupted` at once during start-up, later between two steps."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self.deferred = False
        """Whether the first signal waits for :meth:`raise_if_stopped`."""
        self.record_only = False
        """Whether no signal raises: the rank is ending and must be able to write why."""

    def install(self) -> None:
        """Replace the signal handlers of the launcher."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._receive)

    def raise_if_stopped(self) -> None:
        """Raise Interrupted when a signal has arrived."""
        if self.signal is not None:
            raise Interrupted(self.signal)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        is_repeated = self.signal is not None
        self.signal = signal.Signals(number).name
        if not self.record_only and (is_repeated or not self.deferred):
            raise Interrupted(self.signal)


class Events(EventLog):
    """An event log that drops events on a full disk, so that the run goes on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path, self._has_warned = path, False

    def write(self, event: str, **data: Any) -> None:
        try:
            super().write(event, **data)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                print_error(f"{self._path}: events are being lost: {error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of one attempt."""

    run: RunDir
    attempt: AttemptDir
    world: World
    events: Events
    stop_signals: StopSignals
    result: RunResult
    """Filled in as things are measured, so that a failure keeps what was measured before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Rank):
    """What an engine receives: a rank that passed the hardware check."""

    spec: RunSpec
    pulse: Pulse
