"""The full-screen view of a terminal: the main thread polls, a second one reads keys and draws.

A poll takes as long as Slurm takes to answer, so keys cannot wait for it. Leaving the view ends nothing else: a slow
poll is interrupted as by Ctrl-C, which every command survives.

Textual is not used. It would replace the 150 lines of ``screen_layout`` that draw, but not those here: it runs its
event loop on the main thread, the only one that handles signals in Python, where an interrupt must reach the poll.
It also takes 0.35 s to import (Textual 8.2; Rich alone takes 0.06 s) and brings four more packages.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live

from orchestrator.cli import log_files, screen_layout
from orchestrator.cli.progress import View
from orchestrator.tracking.status_summary import StatusSummary
from orchestrator.workspace import Workspace
from workloads.files.run_dir import RunDir

DRAW_S = 0.5
"""Longest time between two drawings, seconds: the log grows, and the terminal is resized."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
"""Signals on which the terminal is restored."""
PATIENCE_S = 1.5
"""How long a poll may take to end by itself after ``q``, seconds."""
_LOG_LINES = 200


class FullScreen(View):
    """A view on the terminal's alternate screen; a context manager that restores the terminal."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._summary = StatusSummary(updated_at=0.0)
        self._choice = screen_layout.Choice()
        self._left = threading.Event()
        self._closed = threading.Event()
        self._wake_reader, self._wake_writer = os.pipe()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="screen", daemon=True)
        self._keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._modes: Any = None
        self._handlers: dict[int, Any] = {}
        self._signal = 0
        """The signal by which the main thread is to end."""
        self._is_up = False
        """Whether signal handlers may raise: not while the screen is set up or restored."""
        self._raised = False

    def __enter__(self) -> None:
        # A shell without job control starts background commands with SIGINT ignored (POSIX, 2.11), and q needs it.
        for number in _SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._handle_signal)
        try:
            if self._keyboard is not None:
                self._modes = termios.tcgetattr(self._keyboard)
                _read_single_keys(self._keyboard)
            self._live.start()
            self._thread.start()
            self._is_up = True
            if self._signal:
                raise _exception_for(self._signal)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._is_up = False
        self._closed.set()
        self._wake()
        try:
            if self._thread.ident is not None:
                self._thread.join(PATIENCE_S)
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._live.stop()
        finally:
            if self._keyboard is not None and self._modes is not None:
                # TCSAFLUSH drops unread keys, which the shell would take for commands.
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(self._keyboard, termios.TCSAFLUSH, self._modes)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def show(self, seen: StatusSummary) -> None:
        self._summary = seen
        self._wake()

    def pause(self, seconds: float) -> bool:
        self._left.wait(seconds)
        if self._error is not None:
            raise self._error
        return not self._left.is_set()

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        """Interrupt the main thread, unless it sets up or restores the screen."""
        self._signal = number
        self._wake()
        if self._is_up and not self._raised:
            self._raised = True
            raise _exception_for(number)

    def _wake(self) -> None:
        os.write(self._wake_writer, b"!")

    def _serve(self) -> None:
        """Draw and read keys, in the second thread."""
        # The kernel gives a signal to any thread that does not block it (signal(7)); only the main one's poll must end.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            while not self._closed.is_set():
                self._draw()
                self._listen()
        except BaseException as error:  # the main thread raises it
            self._error = error
            self._left.set()

    def _draw(self) -> None:
        seen, choice = self._summary, self._choice
        run = choice.run(seen) if choice.log else None
        log: list[str] = []
        if run is not None:
            attempt = RunDir.of(self._workspace.runs, run.run_id).attempt(run.attempt)
            log = log_files.last_lines(attempt, run.job_id, _LOG_LINES)
        width, height = self._console.size
        self._live.update(screen_layout.draw(seen, choice, log, (width, height)), refresh=True)

    def _listen(self) -> None:
        """Wait for a key, for a new summary, or for the time to draw again."""
        sources = [self._wake_reader] + ([] if self._keyboard is None else [self._keyboard])
        ready, _, _ = select.select(sources, [], [], DRAW_S)
        if self._wake_reader in ready:
            os.read(self._wake_reader, 4096)
        if self._signal:
            self._interrupt_until_closed(self._signal)
        if self._keyboard not in ready:
            return
        assert self._keyboard is not None
        typed = os.read(self._keyboard, 1024)
        if not typed:  # the terminal is gone
            self._keyboard = None
            self._leave()
        for key in screen_layout.split_keys(typed.decode(errors="replace")):
            if key == "q":
                self._leave()
                return
            lines = screen_layout.num_listed(self._summary, self._choice, self._console.size.height)
            self._choice = self._choice.press(key, self._summary, lines)

    def _leave(self) -> None:
        """End the view, and interrupt a poll that takes long."""
        self._left.set()
        self._interrupt_until_closed(signal.SIGINT)

    def _interrupt_until_closed(self, number: int) -> None:
        """Repeat the signal until the main thread closes the view.

        Once is not enough: Python prints and drops an exception that a handler raises within ``__del__`` and in the
        import system's weak reference callbacks (``sys.unraisablehook``).
        """
        while not self._closed.wait(PATIENCE_S):
            self._raised = False
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(threading.main_thread().ident or 0, number)


def _exception_for(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _read_single_keys(keyboard: int) -> None:
    """Switch the keyboard to single keys without echo (termios(3)), keeping keys that were typed before.

    Ctrl-Z is off: a stopped process would leave the terminal in this mode.
    """
    tty.setcbreak(keyboard, termios.TCSANOW)
    modes = termios.tcgetattr(keyboard)
    modes[6][termios.VSUSP] = b"\0"
    termios.tcsetattr(keyboard, termios.TCSANOW, modes)
