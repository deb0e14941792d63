"""``--wait``: shows runs until they end. Looks at files only; whether it lives or dies changes nothing for the runs."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from orchestrator import tracker
from orchestrator.cli import output
from workloads.contract import State
from workloads.rundir import AttemptDir

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from orchestrator.cli.workspace import Workspace

POLL_S = 0.5
LINE_EVERY_S = 10.0
"""Without a terminal: at least this long between two lines, unless a run ended."""
LABEL_LENGTH = 48
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class _Watched:
    """One attempt that is waited for."""

    attempt: AttemptDir
    token: str
    label: str
    target: str


def wait(workspace: Workspace, run_ids: Sequence[str]) -> Counter[State]:
    """Wait until these runs have ended; how many ended how.

    Raises:
        typer.Exit: Ctrl-C, after saying that the runs go on.
    """
    from db.engine import open_store
    from db.submissions import live

    with open_store(workspace.database) as store:
        watched = [
            _Watched(
                tracker.attempt_dir(workspace.runs, record), record.token or "", _short(record.label), record.target
            )
            for record in live(store)
            if record.run_id in set(run_ids)
        ]
        # What ended before we looked.
        ended = Counter(
            status.state
            for status in tracker.statuses(store, workspace.runs)
            if status.run_id in set(run_ids) and not status.state.live
        )
    view = _Bars(len(watched)) if sys.stderr.isatty() else _Lines(len(watched))
    try:
        with view:
            return ended + _watch(workspace, watched, view)
    except KeyboardInterrupt:
        output.talk(
            "interrupted: the runs go on; orchestrate status shows them, orchestrate cancel --all stops them, "
            "orchestrate submit --wait shows this again"
        )
        raise typer.Exit(INTERRUPTED) from None


def _watch(workspace: Workspace, watched: Sequence[_Watched], view: _Lines | _Bars) -> Counter[State]:
    states: dict[str, State] = {one.token: State.PENDING for one in watched}
    left = list(watched)
    while left:
        for target in {one.target for one in left}:
            carrier = tracker.executor(target, workspace.runs)
            assert carrier is not None, "it was sent through it"
            # The queue may have been killed; what waits shall not wait for the next command.
            carrier.wake()
            asked = [one for one in left if one.target == target]
            found = carrier.look([(one.attempt, one.token, states[one.token]) for one in asked])
            for one, verdict in zip(asked, found, strict=True):
                states[one.token] = verdict.state
                if not verdict.state.live:
                    view.ended(one.label, verdict.state, verdict.message or verdict.reason)
        left = [one for one in left if states[one.token].live]
        running = [
            (one.token, one.label, tracker.progress(one.attempt)) for one in left if states[one.token] is State.RUNNING
        ]
        view.show(running, waiting=len(left) - len(running), done=len(watched) - len(left))
        if left:
            time.sleep(POLL_S)
    return Counter(states.values())


def _short(label: str) -> str:
    """One line, whatever people put into names."""
    text = " ".join(label.split())
    return text if len(text) <= LABEL_LENGTH else f"{text[: LABEL_LENGTH - 1]}…"


def _describe(progress: tracker.Progress) -> str:
    parts = []
    if progress.epochs:
        parts.append(f"epoch {progress.epoch}/{progress.epochs}")
    elif progress.steps:
        parts.append(f"step {progress.step}/{progress.steps}")
    elif progress.phase:
        parts.append(progress.phase)
    if progress.samples_per_s:
        parts.append(f"{progress.samples_per_s:,.0f} samples/s")
    return ", ".join(parts) or "starting"


class _Lines:
    """For logs and pipes: a line when a run ends, and now and then what runs."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._said_at = 0.0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def ended(self, label: str, state: State, why: str) -> None:
        output.talk(f"{label}: {state.value}" + (f": {why}" if why else ""))

    def show(self, running: Sequence[tuple[str, str, tracker.Progress]], *, waiting: int, done: int) -> None:
        if time.monotonic() - self._said_at < LINE_EVERY_S or done == self._total:
            return
        self._said_at = time.monotonic()
        shown = "; ".join(f"{label} {_describe(progress)}" for _, label, progress in running)
        output.talk(
            f"{done}/{self._total} done, {len(running)} running, {waiting} waiting" + (f": {shown}" if shown else "")
        )


class _Bars:
    """For a terminal: one bar for everything, one line a running run."""

    def __init__(self, total: int) -> None:
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
        self._all = self._bars.add_task("runs", total=total, detail="")
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> None:
        self._bars.start()

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def ended(self, label: str, state: State, why: str) -> None:
        if state is not State.SUCCEEDED:
            self._console.print(f"{label}: {state.value}: {why}", markup=False, soft_wrap=True)

    def show(self, running: Sequence[tuple[str, str, tracker.Progress]], *, waiting: int, done: int) -> None:
        self._bars.update(self._all, completed=done, detail=f"{len(running)} running, {waiting} waiting")
        for token in self._tasks.keys() - {token for token, _, _ in running}:
            self._bars.remove_task(self._tasks.pop(token))
        for token, label, progress in running:
            if token not in self._tasks:
                self._tasks[token] = self._bars.add_task(label, total=None, detail="")
            steps, epochs = (progress.step, progress.steps), (progress.epoch, progress.epochs)
            completed, total = epochs if progress.epochs else steps
            self._bars.update(
                self._tasks[token], completed=completed or 0, total=total or None, detail=_describe(progress)
            )
