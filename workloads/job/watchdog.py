"""The pulse of one rank: what it is doing, for people to see, and the watch that ends it when it stops doing it.

The loop sets attributes and beats; a daemon thread looks once a second and writes ``progress.<rank>.json`` when there
was a beat since. A beat also winds up the watchdog, once a second at most. That is a C thread of ``faulthandler``: it
fires also when the interpreter's lock is held, dumps all stacks to ``hang.<rank>.txt`` and ends the process at once,
with exit code 1, so that a stuck rank cannot hold its devices.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from types import TracebackType
from typing import IO

from workloads.files.json_file import write_json
from workloads.files.run_dir import AttemptDir

LOOK_EVERY_S = 1.0


class Pulse:
    """Progress of one rank; a context manager that watches while it is open.

    Args:
        hang_timeout_s: seconds without a beat after which the process is ended; 0 never ends it.
    """

    def __init__(self, attempt: AttemptDir, rank: int, hang_timeout_s: int) -> None:
        self.phase = "startup"
        self.epoch = 0
        self.epochs = 0
        self.step = 0
        self.steps = 0
        self.samples = 0
        """Training samples since the start, over all ranks."""
        self.beats = 0
        self._attempt = attempt
        self._rank = rank
        self._hang_timeout_s = hang_timeout_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="pulse", daemon=True)
        self._stacks: IO[str] | None = None
        self._wound_at = 0.0

    def beat(self, phase: str | None = None) -> None:
        """Say that there was progress; cheap enough for every step."""
        self.beats += 1
        if self._stacks is not None and time.monotonic() - self._wound_at > LOOK_EVERY_S:
            self._wind_up(self._hang_timeout_s)
        if phase is not None:
            self.phase = phase

    def await_for(self, least_s: int) -> None:
        """Beat, and allow the next one to take that long at least: what comes now shows no progress on its way."""
        self.beats += 1
        if self._stacks is not None:
            self._wind_up(max(least_s, self._hang_timeout_s))
            self._wound_at = 0.0  # the next beat winds it up as usual, however soon it comes

    def __enter__(self) -> Pulse:
        if self._hang_timeout_s:
            self._stacks = open(self._attempt.hang(self._rank), "w", encoding="utf-8")
            self._wind_up(self._hang_timeout_s)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if self._stacks is not None:
            faulthandler.cancel_dump_traceback_later()
            self._stacks.close()
            # An empty file would look like a hang to whoever goes by its name.
            self._attempt.hang(self._rank).unlink(missing_ok=True)
        self._write(samples_per_s=None)

    def _wind_up(self, timeout_s: int) -> None:
        assert self._stacks is not None
        self._wound_at = time.monotonic()
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=self._stacks)

    def _look(self) -> None:
        beats = samples = 0
        looked = time.monotonic()
        self._write(samples_per_s=None)
        while not self._stop.wait(LOOK_EVERY_S):
            if self.beats == beats:
                continue
            now = time.monotonic()
            self._write(samples_per_s=(self.samples - samples) / (now - looked) if self.samples > samples else None)
            beats, samples, looked = self.beats, self.samples, now

    def _write(self, *, samples_per_s: float | None) -> None:
        progress = {
            "rank": self._rank,
            "time": time.time(),
            "phase": self.phase,
            "epoch": self.epoch,
            "epochs": self.epochs,
            "step": self.step,
            "steps": self.steps,
            "samples_per_s": samples_per_s,
        }
        # Nobody's run may end because a progress bar could not be fed.
        with contextlib.suppress(OSError):
            write_json(self._attempt.progress(self._rank), progress)
