"""Monitor."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import typer

from orchestrator.cli import output
from orchestrator.cli.backlog import Shepherd
from orchestrator.cli.progress import Bars, Lines
from orchestrator.cli.refresh import refreshed
from orchestrator.errors import InputError, OrchestrateError
from orchestrator.tracking.status_summary import StatusSummary
from workloads.contract import State

if TYPE_CHECKING:
    from types import TracebackType

    from orchestrator.tracking.tracker import RunStatus
    from orchestrator.workspace import Workspace


LOOK_S = 0.5


LOOKING_SHARE = 0.2
"""At most this share of the time is spent on looking: thousands of runs shall not keep a login node busy."""


INTERRUPTED = 130


class View(Protocol):
    """Shows what was seen."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def show(self, seen: StatusSummary) -> None:
        """Something new was seen."""

    def pause(self, seconds: float) -> bool:
        """Wait until the next look; whether to go on."""


class _Notes(logging.Handler):
    """Takes what modules log, so that no view is written across."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.append(record.getMessage())


class Looker:
    """Looks at runs; a look that fails is shown as such, with what the last good one saw. Before there was a good one,
    what was asked for wrongly is raised: it would fail each time."""

    def __init__(
        self,
        workspace: Workspace,
        *,
        only: Collection[str] | None = None,
        shepherd: Shepherd | None = None,
        recover: bool = True,
    ) -> None:
        self._workspace = workspace
        self._recover = recover
        self._only = None if only is None else frozenset(only)
        self._shepherd = shepherd
        self._last = StatusSummary(updated_at=0.0)

    def look(self) -> StatusSummary:
        """What there is now."""
        notes: list[str] = []
        handler = _Notes(notes)
        logging.getLogger().addHandler(handler)
        try:
            runs = refreshed(self._workspace, notes.append, recover=self._recover)
            if self._shepherd is not None and (said := self._shepherd.tend(runs)):
                notes += said
                runs = refreshed(self._workspace, notes.append)
            unsent = frozenset(self._shepherd.done.held if self._shepherd else ())
            wanted = self._only if self._only is not None else {run.run_id for run in runs}
            runs = [run for run in runs if run.run_id in wanted - unsent]
            due = sum(self._comes_again(run) for run in runs)
            self._last = StatusSummary(
                runs, num_unsubmitted=len(unsent), num_to_resubmit=due, notes=tuple(dict.fromkeys(notes))
            )
        except (OrchestrateError, OSError) as error:
            if isinstance(error, InputError) and not self._last.updated_at:
                raise
            self._last = replace(self._last, notes=tuple(notes), problem=str(error) or type(error).__name__)
        finally:
            logging.getLogger().removeHandler(handler)
        return self._last

    def _comes_again(self, run: RunStatus) -> bool:
        """Whether a run that has ended will be sent again when there is room."""
        limited = self._shepherd is not None and self._shepherd.limited
        return limited and self._recover and run.will_resubmit


def attend(look: Callable[[], StatusSummary], view: View, *, until_over: bool = True) -> tuple[StatusSummary, bool]:
    """Look and show until the runs are over or the person leaves.

    Args:
        look: one look.
        view: shows it.
        until_over: whether to end when nothing goes on; else only when the person leaves.

    Returns:
        What was seen last, and whether the person left before the end.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    with view:
        while True:
            started = time.monotonic()
            seen = look()
            spent_s = time.monotonic() - started
            view.show(seen)
            if until_over and seen.over and not seen.problem:
                return seen, False
            if not view.pause(max(LOOK_S, spent_s / LOOKING_SHARE)):
                return seen, True


def wait(
    workspace: Workspace,
    run_ids: Sequence[str],
    command: str,
    shepherd: Shepherd | None = None,
    *,
    recover: bool = True,
) -> Counter[State]:
    """Wait until these runs have ended; how many ended how.

    Args:
        workspace: the files of this invocation.
        run_ids: the runs.
        command: what waits, for the message of an interruption.
        shepherd: sends those that were not sent yet; then the view is the full-screen one, where there is a terminal.
        recover: whether what ends without a result is sent again where its class and its bound allow it.

    Raises:
        typer.Exit: the person left, after saying that the runs go on.
    """
    looker = Looker(workspace, only=run_ids, shepherd=shepherd, recover=recover)
    try:
        seen, left = attend(looker.look, _view(workspace, full_screen=shepherd is not None))
        how = "left"
    except KeyboardInterrupt:
        left, how = True, "interrupted"
    if left:
        unsent = len(shepherd.done.held) if shepherd else 0
        stay = f"; {unsent} stay planned until the same command is there again" if unsent else ""
        again = "watch" if shepherd and not unsent else command
        output.talk(
            f"{how}: the runs go on{stay}; orchestrate status shows them, orchestrate cancel --all stops them, "
            f"orchestrate {again} shows this again"
        )
        raise typer.Exit(INTERRUPTED)
    return seen.counts


def _view(workspace: Workspace, *, full_screen: bool) -> View:
    if full_screen and sys.stdout.isatty():
        from orchestrator.cli.full_screen import Screen

        return Screen(workspace)
    return Bars() if sys.stderr.isatty() else Lines(output.talk)
