"""What an engine is handed: one attempt of one run on one rank, and how it hears that it must end."""

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


def print_error(text: str) -> None:
    """Tell people through standard error, whose file may lie on the very disk that is full."""
    _print(text, sys.stderr)


def print_progress(text: str) -> None:
    """A line on how it goes, on standard output; what counts goes to events and results."""
    _print(text, sys.stdout)


def _print(text: str, stream: TextIO) -> None:
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


class Interrupted(BaseException):
    """The job was told to end: its time is up, something more urgent wants the node, or somebody cancelled it."""


class StopSignals:
    """SIGTERM, SIGINT and SIGUSR2, obeyed at once during start-up and between two steps later on."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self.deferred = False
        """Whether the receiver asks at moments of its own choice, through :meth:`raise_if_stopped`."""
        self._leaving = False

    def install(self) -> None:
        """Take over from whatever handlers the launcher has set."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._receive)

    def record_only(self) -> None:
        """From now on nothing is interrupted: the rank is leaving anyway, and has to say why."""
        self._leaving = True

    def raise_if_stopped(self) -> None:
        """Raises Interrupted when an order has come."""
        if self.signal is not None:
            raise Interrupted(self.signal)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        insists = self.signal is not None
        self.signal = signal.Signals(number).name
        if not self._leaving and (insists or not self.deferred):
            raise Interrupted(self.signal)


class Events(EventLog):
    """An event log that a full disk cannot turn into the end of a run."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path
        self._complained = False

    def write(self, event: str, **data: Any) -> None:
        try:
            super().write(event, **data)
        except OSError as error:
            if not self._complained:
                self._complained = True
                print_error(f"{self._path}: events are being lost: {error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attempt, as one rank sees it."""

    spec: RunSpec
    run: RunDir
    attempt: AttemptDir
    world: World
    events: Events
    pulse: Pulse
    stop_signals: StopSignals
    result: RunResult
    """Filled in as things are measured, so that a failure keeps what was measured before it."""
