"""``--wait``, ``--watch`` and ``watch``: look at runs again and again, and show them until they end or one leaves.

Whether this lives or dies changes nothing for the runs. Each look is that of ``status``: it takes in what ended, and
goes on with what was interrupted. A look that fails changes nothing, and is tried again.
"""

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
from orchestrator.cli.refreshing import refreshed
from orchestrator.errors import InputError, OrchestrateError
from orchestrator.tracking.status_summary import StatusSummary, describe_progress, describe_waiting, fraction_done
from orchestrator.units import counted
from workloads.contract import State

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress, TaskID

    from orchestrator.planning.plan import Plan
    from orchestrator.submission.submitter import Submitted
    from orchestrator.tracking.tracker import RunStatus
    from orchestrator.workspace import Workspace

LOOK_S = 0.5
LOOKING_SHARE = 0.2
"""At most this share of the time is spent on looking: thousands of runs shall not keep a login node busy."""
LINE_EVERY_S = 10.0
"""Without a terminal: at least this long between two lines of the whole, unless something changed."""
SAME_LINE_EVERY_S = 600.0
"""The same line again says only that somebody still looks."""
LABEL_LENGTH = 48
SEND_SHARE = 0.25
"""What did not fit is sent when this share of the site's limit is free, so that arrays are few and large."""
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


class Shepherd:
    """Sends what did not fit, as room appears: the same submit as before, as often as the site likes to be asked."""

    def __init__(
        self, workspace: Workspace, plan: Plan, done: Submitted, *, stale: bool, newest_known: dict[str, int]
    ) -> None:
        """``done``: what was sent before."""
        self._workspace = workspace
        self._plan = plan
        self._stale = stale
        self._newest_known = newest_known
        self._tried_at = time.monotonic()
        self.done = done
        """What was sent and what not, all in all."""

    @property
    def limited(self) -> bool:
        """Whether the site takes only so many at once."""
        return self._plan.site is not None and self._plan.site.max_submit > 0

    def tend(self, runs: Sequence[RunStatus]) -> list[str]:
        """Send what fits now; what there is to say of it."""
        site = self._plan.site
        if not self.done.held or site is None or time.monotonic() - self._tried_at < site.poll_seconds:
            return []
        here = Counter(run.state for run in runs if run.target == site.name and run.state.live)
        if here[State.PENDING] and site.max_submit and here.total() > (1 - SEND_SHARE) * site.max_submit:
            return []
        from orchestrator.submission import submitter

        self._tried_at = time.monotonic()
        more = submitter.submit(
            self._workspace,
            self._plan,
            stale=self._stale,
            newest_known=self._newest_known,
            snapshot=self.done.snapshot,
        )
        self.done = replace(
            more,
            sent=[*self.done.sent, *more.sent],
            resumed=[*self.done.resumed, *more.resumed],
            skipped=self.done.skipped,
            refused=[*self.done.refused, *more.refused],
        )
        count = len(more.sent) + len(more.resumed)
        return [f"{counted(count, 'more run')} sent, {len(more.held)} wait for room"] if count else []


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


def short(label: str) -> str:
    """One line, whatever people put into names."""
    text = " ".join(label.split())
    return text if len(text) <= LABEL_LENGTH else f"{text[: LABEL_LENGTH - 1]}…"


class Lines:
    """For logs and pipes: a line for each change, and now and then one for the whole."""

    def __init__(self, say: Callable[[str], None], *, from_start: bool = True) -> None:
        """``from_start``: what a run has come to before the first look is told too."""
        self._say = say
        self._said_at, self._said = float("-inf"), ""
        self._known: dict[str, tuple[int, State]] | None = {} if from_start else None
        self._told: Collection[str] = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, seen: StatusSummary) -> None:
        told = [*seen.notes, f"states are as last seen: {seen.problem}"][: len(seen.notes) + bool(seen.problem)]
        for text in told:
            if text not in self._told:
                self._say(text)
        self._told = told
        if self._known is not None:
            for run in seen.runs:
                before = self._known.get(run.run_id, (run.attempt, State.PENDING))
                if (run.attempt, run.state) != before and not (run.state in _QUIET and before[1] in _QUIET):
                    self._say(_change(run))
        self._known = {run.run_id: (run.attempt, run.state) for run in seen.runs}
        text = whole(seen)
        pause_s = SAME_LINE_EVERY_S if text == self._said else LINE_EVERY_S
        if time.monotonic() - self._said_at >= pause_s and not seen.over:
            self._said_at, self._said = time.monotonic(), text
            self._say(text)

    def pause(self, seconds: float) -> bool:
        time.sleep(seconds)
        return True


_QUIET = {State.PLANNED, State.SUBMITTING, State.PENDING}
"""Between these nothing happens that is worth a line."""


def _change(run: RunStatus) -> str:
    why = "; ".join(filter(None, (run.message or run.reason, run.recovery_message)))
    told = why and run.state is not State.SUCCEEDED
    return f"{short(run.label)}: {run.state.value}" + (f": {why}" if told else "")


def whole(seen: StatusSummary) -> str:
    """All runs in one line."""
    running = [run for run in seen.runs if run.state is State.RUNNING]
    text = f"{seen.num_ended}/{seen.total} done, {len(running)} running, {describe_waiting(seen)}"
    shown = "; ".join(f"{short(run.label)} {describe_progress(run)}" for run in running)
    return text + (f": {shown}" if shown else "")


class Bars:
    """For a terminal: one bar for everything, one line a running run."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True, highlight=False)
        self._bars: Progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            console=self._console,
        )
        self._all = self._bars.add_task("runs", total=None, detail="")
        self._tasks: dict[str, TaskID] = {}
        self._told: set[tuple[str, int]] = set()
        self._notes: Collection[str] = ()

    def __enter__(self) -> None:
        self._bars.start()

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def pause(self, seconds: float) -> bool:
        time.sleep(seconds)
        return True

    def show(self, seen: StatusSummary) -> None:
        for note in (*seen.notes, seen.problem):
            if note and note not in self._notes:
                self._print(note)
        self._notes = (*seen.notes, seen.problem)
        for run in seen.runs:
            if run.state.ended_badly and (run.run_id, run.attempt) not in self._told:
                self._told.add((run.run_id, run.attempt))
                self._print(_change(run))
        running = {run.run_id: run for run in seen.runs if run.state is State.RUNNING}
        self._bars.update(
            self._all,
            completed=seen.num_ended,
            total=seen.total,
            detail=f"{len(running)} running, {describe_waiting(seen)}",
        )
        for run_id in self._tasks.keys() - running.keys():
            self._bars.remove_task(self._tasks.pop(run_id))
        for run_id, run in running.items():
            if run_id not in self._tasks:
                self._tasks[run_id] = self._bars.add_task(short(run.label), total=None, detail="")
            share = fraction_done(run)
            self._bars.update(
                self._tasks[run_id],
                completed=round(100 * (share or 0)),
                total=None if share is None else 100,
                detail=describe_progress(run),
            )

    def _print(self, text: str) -> None:
        self._console.print(output.visible(text), markup=False, soft_wrap=True)
