"""Heartbeat of one rank: progress for people to see, and a watchdog that ends a stuck process.

The training loop sets attributes and beats. Once a second a daemon thread writes ``progress.<rank>.json`` if there was
a beat. A beat also rearms the watchdog, at most once a second. The watchdog is the C thread of
``faulthandler.dump_traceback_later``: it fires even when a thread holds the interpreter lock, dumps all stacks to
``hang.<rank>.txt`` and ends the process with exit code 1, so that a stuck rank does not keep its devices.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from typing import IO

from workloads.files.json_file import write_json
from workloads.files.run_dir import AttemptDir

INTERVAL_S = 1.0


class Pulse:
    """Progress and watchdog of one rank; ``hang_timeout_s`` without a beat end the process, 0 disables that."""

    def __init__(self, attempt: AttemptDir, rank: int, hang_timeout_s: int) -> None:
        self.phase = "startup"
        self.epoch = self.epochs = 0
        self.step = self.steps = 0
        self.samples = 0
        """Training samples since the start, over all ranks."""
        self.beats = 0
        self._attempt = attempt
        self._rank = rank
        self._hang_timeout_s = hang_timeout_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_regularly, name="pulse", daemon=True)
        self._stacks: IO[str] | None = None
        self._armed_at = 0.0

    def beat(self, phase: str | None = None) -> None:
        """Report progress; cheap enough for every step."""
        self.beats += 1
        if self._stacks is not None and time.monotonic() - self._armed_at > INTERVAL_S:
            self._arm(self._hang_timeout_s)
        if phase is not None:
            self.phase = phase

    def await_for(self, least_s: int) -> None:
        """Beat, and allow at least ``least_s`` until the next beat, for work that cannot report progress."""
        self.beats += 1
        if self._stacks is not None:
            self._arm(max(least_s, self._hang_timeout_s))
            self._armed_at = 0.0  # the next beat restores the usual timeout, however soon it comes

    def __enter__(self) -> Pulse:
        if self._hang_timeout_s:
            self._stacks = open(self._attempt.hang(self._rank), "w", encoding="utf-8")
            self._arm(self._hang_timeout_s)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._stacks is not None:
            faulthandler.cancel_dump_traceback_later()
            self._stacks.close()
            self._attempt.hang(self._rank).unlink(missing_ok=True)  # people take a file of this name for a hang
        self._write(samples_per_s=None)

    def _arm(self, timeout_s: int) -> None:
        assert self._stacks is not None
        self._armed_at = time.monotonic()
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=self._stacks)

    def _write_regularly(self) -> None:
        beats = samples = 0
        written_at = time.monotonic()
        self._write(samples_per_s=None)
        while not self._stop.wait(INTERVAL_S):
            if self.beats == beats:
                continue
            now = time.monotonic()
            self._write(samples_per_s=(self.samples - samples) / (now - written_at) if self.samples > samples else None)
            beats, samples, written_at = self.beats, self.samples, now

    def _write(self, *, samples_per_s: float | None) -> None:
        shown = ("phase", "epoch", "epochs", "step", "steps")
        progress = {"rank": self._rank, "time": time.time(), **{name: getattr(self, name) for name in shown}}
        # No run may fail because its progress cannot be shown.
        with contextlib.suppress(OSError):
            write_json(self._attempt.progress(self._rank), progress | {"samples_per_s": samples_per_s})
