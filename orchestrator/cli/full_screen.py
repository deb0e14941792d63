"""The full-screen view of a terminal: one thread looks, another one reads keys and draws.

The main thread looks, which may take as long as Slurm takes to answer. Leaving ends nothing but the view: who looks at
something slow is interrupted as by Ctrl-C, which every command survives.
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
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from orchestrator.tracking.status_summary import StatusSummary

if TYPE_CHECKING:
    from orchestrator.cli.screen_layout import Looks
    from orchestrator.workspace import Workspace

DRAW_S = 0.5
"""The screen is drawn at least so often: a resized terminal and a growing log are followed."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
"""Signals upon which the screen is left."""
PATIENCE_S = 1.5
"""After q, so long for a look to end by itself."""
_LOG_LINES = 200


class Screen:
    """A full-screen view; a context manager that leaves the terminal as it was."""

    def __init__(self, workspace: Workspace) -> None:
        from rich.console import Console
        from rich.live import Live

        from orchestrator.cli.screen_layout import Looks

        self._workspace = workspace
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._seen = StatusSummary(updated_at=0.0)
        self._looks: Looks = Looks()
        self._left = threading.Event()
        self._closed = threading.Event()
        self._news, self._bell = os.pipe()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="screen", daemon=True)
        self._keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._terminal: Any = None
        self._handlers: dict[int, Any] = {}
        self._signal = 0
        """What the main thread was told to end by."""
        self._ready = False
        """Whether the screen is up: while it is set up or put away, no signal's handler raises."""
        self._raised = False

    def __enter__(self) -> None:
        # Whoever started us may have had SIGINT ignored, and leaving needs it.
        for number in _ENDING:
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._interrupted)
        try:
            if self._keyboard is not None:
                self._terminal = termios.tcgetattr(self._keyboard)
                _read_keys(self._keyboard)
            self._live.start()
            self._thread.start()
            self._ready = True
            if self._signal:
                raise _ending(self._signal)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ready = False
        self._closed.set()
        self._ring()
        try:
            if self._thread.ident is not None:
                self._thread.join(PATIENCE_S)
            with contextlib.suppress(OSError):  # of a terminal that is gone
                self._live.stop()
        finally:
            if self._keyboard is not None and self._terminal is not None:
                # What was typed and not read is not for the shell.
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(self._keyboard, termios.TCSAFLUSH, self._terminal)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def show(self, seen: StatusSummary) -> None:
        self._seen = seen
        self._ring()

    def pause(self, seconds: float) -> bool:
        self._left.wait(seconds)
        if self._error is not None:
            raise self._error
        return not self._left.is_set()

    def _interrupted(self, number: int, _frame: FrameType | None) -> None:
        """Leave what the main thread is at, unless it is setting up or leaving anyway."""
        self._signal = number
        self._ring()
        if self._ready and not self._raised:
            self._raised = True
            raise _ending(number)

    def _ring(self) -> None:
        os.write(self._bell, b"!")

    def _serve(self) -> None:
        """The other thread: keys and drawing."""
        # A signal that this thread took would not wake the main one from what it waits for.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            while not self._closed.is_set():
                self._draw()
                self._listen()
        except BaseException as error:  # told by the main thread
            self._error = error
            self._left.set()

    def _draw(self) -> None:
        from orchestrator.cli import log_files, screen_layout
        from workloads.files.run_dir import RunDir

        seen, looks = self._seen, self._looks
        chosen = looks.chosen(seen) if looks.log else None
        log: list[str] = []
        if chosen is not None:
            attempt = RunDir.of(self._workspace.runs, chosen.run_id).attempt(chosen.attempt)
            log = log_files.last_lines(attempt, chosen.job_id, _LOG_LINES)
        width, height = self._console.size
        self._live.update(screen_layout.draw(seen, looks, log, (width, height)), refresh=True)

    def _listen(self) -> None:
        """Wait for a key, for news, or for the time to draw again."""
        from orchestrator.cli import screen_layout

        sources = [self._news] + ([] if self._keyboard is None else [self._keyboard])
        ready, _, _ = select.select(sources, [], [], DRAW_S)
        if self._news in ready:
            os.read(self._news, 4096)
        if self._signal:
            self._insist(self._signal)
        if self._keyboard not in ready:
            return
        assert self._keyboard is not None
        typed = os.read(self._keyboard, 1024)
        if not typed:  # the terminal is gone
            self._keyboard = None
            self._leave()
        for key in screen_layout.keys_in(typed.decode(errors="replace")):
            if key == "q":
                self._leave()
                return
            lines = screen_layout.page(self._seen, self._looks, self._console.size.height)
            self._looks = self._looks.press(key, self._seen, lines)

    def _leave(self) -> None:
        """Let the main thread go; interrupt it when it looks at something that takes long."""
        self._left.set()
        self._insist(signal.SIGINT)

    def _insist(self, number: int) -> None:
        """Interrupt the main thread until it closes this: in an import, say, Python drops what a handler raises."""
        while not self._closed.wait(PATIENCE_S):
            self._raised = False
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(threading.main_thread().ident or 0, number)


def _ending(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _read_keys(keyboard: int) -> None:
    """Take keys one by one and unseen, also those typed before; Ctrl-Z would leave the terminal so."""
    tty.setcbreak(keyboard, termios.TCSANOW)
    modes = termios.tcgetattr(keyboard)
    modes[6][termios.VSUSP] = b"\0"
    termios.tcsetattr(keyboard, termios.TCSANOW, modes)
