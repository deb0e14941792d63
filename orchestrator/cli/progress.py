"""Progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from orchestrator.cli import output
from orchestrator.tracking.status_summary import StatusSummary, describe_progress, describe_waiting, fraction_done
from workloads.contract import State

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from orchestrator.tracking.tracker import RunStatus


LINE_EVERY_S = 10.0
"""Without a terminal: at least this long between two lines of the whole, unless something changed."""


SAME_LINE_EVERY_S = 600.0
"""The same line again says only that somebody still looks."""


LABEL_LENGTH = 48


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
