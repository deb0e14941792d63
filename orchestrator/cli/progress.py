"""Progress of runs on standard error: bars in a terminal, lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from orchestrator.cli import output
from orchestrator.tracking.status_summary import StatusSummary, describe_progress, describe_waiting, fraction_done
from orchestrator.tracking.tracker import RunStatus
from workloads.contract import State
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from rich import console, progress

LINE_EVERY_S = 10.0
"""Shortest time between two lines about all runs, seconds."""
SAME_LINE_EVERY_S = 600.0
"""Shortest time until the same line is repeated as a sign of life, seconds."""
MAX_LABEL = 48
"""Characters of a label."""
_QUIET = {State.PLANNED, State.SUBMITTING, State.PENDING}
"""A change between these states is not worth a line."""


class View:
    """Shows summaries of runs."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, seen: StatusSummary) -> None:
        """Show a new summary."""
        raise NotImplementedError

    def pause(self, seconds: float) -> bool:
        """Wait for the next poll, and return whether to go on."""
        time.sleep(seconds)
        return True


class Lines(View):
    """A line for each change, and from time to time one about all runs."""

    def __init__(self, report: Callable[[str], None], *, from_start: bool = True) -> None:
        """Report lines to a function, with ``from_start`` also the states before the first summary."""
        self._report = report
        self._summary_at, self._summary = float("-inf"), ""
        self._known: dict[str, tuple[int, State]] | None = {} if from_start else None
        self._notes: Collection[str] = ()

    def show(self, seen: StatusSummary) -> None:
        notes = [*seen.notes, *([f"states are as last seen: {seen.problem}"] if seen.problem else [])]
        for note in notes:
            if note not in self._notes:
                self._report(note)
        self._notes = notes
        if self._known is not None:
            for run in seen.runs:
                before = self._known.get(run.run_id, (run.attempt, State.PENDING))
                if (run.attempt, run.state) != before and not (run.state in _QUIET and before[1] in _QUIET):
                    self._report(_describe_change(run))
        self._known = {run.run_id: (run.attempt, run.state) for run in seen.runs}
        summary = summarize(seen)
        pause_s = SAME_LINE_EVERY_S if summary == self._summary else LINE_EVERY_S
        if time.monotonic() - self._summary_at >= pause_s and not seen.is_finished:
            self._summary_at, self._summary = time.monotonic(), summary
            self._report(summary)


def _shorten(label: str) -> str:
    text = " ".join(label.split())
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"


def _describe_change(run: RunStatus) -> str:
    why = "; ".join(filter(None, (run.message or run.reason, run.recovery_message)))
    has_why = why and run.state is not State.SUCCEEDED
    return f"{_shorten(run.label)}: {run.state.value}" + (f": {why}" if has_why else "")


def summarize(seen: StatusSummary) -> str:
    """Return one line about all runs."""
    running = [run for run in seen.runs if run.state is State.RUNNING]
    text = f"{seen.num_ended}/{seen.total} done, {len(running)} running, {describe_waiting(seen)}"
    details = "; ".join(f"{_shorten(run.label)} {describe_progress(run)}" for run in running)
    return text + (f": {details}" if details else "")


class Bars(View):
    """A bar for all runs, and one for each running run."""

    def __init__(self) -> None:
        self._console = console.Console(stderr=True, highlight=False)
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[detail]}", markup=False),
            console=self._console,
        )
        self._all = self._bars.add_task("runs", total=None, detail="")
        self._tasks: dict[str, progress.TaskID] = {}
        self._reported: set[tuple[str, int]] = set()
        self._notes: Collection[str] = ()

    def __enter__(self) -> None:
        self._bars.start()

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def show(self, seen: StatusSummary) -> None:
        notes = (*seen.notes, seen.problem)
        for note in notes:
            if note and note not in self._notes:
                self._print(note)
        self._notes = notes
        for run in seen.runs:
            if run.state.ended_badly and (run.run_id, run.attempt) not in self._reported:
                self._reported.add((run.run_id, run.attempt))
                self._print(_describe_change(run))
        running = {run.run_id: run for run in seen.runs if run.state is State.RUNNING}
        detail = f"{len(running)} running, {describe_waiting(seen)}"
        self._bars.update(self._all, completed=seen.num_ended, total=seen.total, detail=detail)
        for run_id in self._tasks.keys() - running.keys():
            self._bars.remove_task(self._tasks.pop(run_id))
        for run_id, run in running.items():
            if run_id not in self._tasks:
                self._tasks[run_id] = self._bars.add_task(_shorten(run.label), total=None, detail="")
            fraction = fraction_done(run)
            self._bars.update(
                self._tasks[run_id],
                completed=round(100 * (fraction or 0)),
                total=None if fraction is None else 100,
                detail=describe_progress(run),
            )

    def _print(self, text: str) -> None:
        self._console.print(output.printable(text), markup=False, soft_wrap=True)
