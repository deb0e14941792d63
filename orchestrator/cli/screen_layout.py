"""What the full-screen view looks like, and what its keys do: functions of values, without a terminal.

Only ASCII is drawn besides what people put into names, and exactly as many lines as there are: it fits any terminal.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from rich.text import Text

from orchestrator.cli.output import visible
from orchestrator.tracking.status_summary import Group, StatusSummary, describe_progress, fraction_done
from workloads.contract import State

if TYPE_CHECKING:
    from orchestrator.tracking.tracker import RunStatus

_GROUPS = 3
"""Reasons of one kind that are shown."""
_BAR_CELLS = 12
_SILENT_S = 60.0
"""A running run that said nothing for so long is marked."""
_HALF_OF_SCREEN = 2
_LEAST_TABLE = 3

KEYS = (
    ("q", "leave; nothing stops, orchestrate watch shows this again"),
    ("j k, arrows", "next and previous run; PgDn PgUp, g G for more"),
    ("l", "log of the selected run"),
    ("f", "show all runs, those that go on, those that ended without a result"),
    ("?", "this help"),
)


class Only(StrEnum):
    """Which runs are listed."""

    ALL = "all"
    LIVE = "live"
    BAD = "failed"

    def takes(self, run: RunStatus) -> bool:
        return self is Only.ALL or (run.state.live if self is Only.LIVE else run.state.ended_badly)

    @property
    def next(self) -> Only:
        every = list(Only)
        return every[(every.index(self) + 1) % len(every)]


@dataclass(frozen=True, slots=True)
class Looks:
    """What a person has chosen to see."""

    selected: str = ""
    """Run id; the first one in the list where it is not there."""
    only: Only = Only.ALL
    log: bool = False
    help: bool = False

    def runs(self, seen: StatusSummary) -> Sequence[RunStatus]:
        return [run for run in seen.ordered if self.only.takes(run)]

    def index(self, runs: Sequence[RunStatus]) -> int:
        """Where the selected run is; it stays selected when it moves."""
        return next((i for i, run in enumerate(runs) if run.run_id == self.selected), 0)

    def chosen(self, seen: StatusSummary) -> RunStatus | None:
        runs = self.runs(seen)
        return runs[self.index(runs)] if runs else None

    def press(self, key: str, seen: StatusSummary, page: int = 10) -> Looks:
        """What is seen after a key; unknown keys do nothing."""
        if key == "?" or (key == "escape" and self.help):
            return replace(self, help=not self.help)
        if key == "l" or (key == "escape" and self.log):
            return replace(self, log=not self.log)
        if key == "f":
            return replace(self, only=self.only.next)
        runs = self.runs(seen)
        steps = {"down": 1, "up": -1, "page down": page, "page up": -page, "home": -len(runs), "end": len(runs)}
        if key not in steps or not runs:
            return self
        index = min(max(self.index(runs) + steps[key], 0), len(runs) - 1)
        return replace(self, selected=runs[index].run_id)


_NAMES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "k": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "j": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    " ": "page down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "g": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
    "G": "end",
    "\x1b": "escape",
    "Q": "q",
    "h": "?",
    "\r": "l",
    "\n": "l",
}
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)


def keys_in(typed: str) -> list[str]:
    """The keys in what a terminal sent; sequences of unknown keys come as they are."""
    return [_NAMES.get(key, key) for key in _KEY.findall(typed)]


def page(seen: StatusSummary, looks: Looks, height: int) -> int:
    """How many runs are listed on a screen of so many lines."""
    left = height - len(_head(seen, 80)) - 1
    return max(1, left // _HALF_OF_SCREEN if looks.log else left)


def draw(seen: StatusSummary, looks: Looks, log: Sequence[str], size: tuple[int, int]) -> Text:
    """The whole screen.

    Args:
        seen: the runs.
        looks: what was chosen.
        log: the last lines that the selected run printed.
        size: columns and lines.
    """
    width, height = size
    if looks.help:
        lines = [Text("keys", "bold"), *(Text(f"  {key:12} {what}") for key, what in KEYS)]
    else:
        lines = _head(seen, width)
        num_listed = page(seen, looks, height)
        lines += _listed(seen, looks, num_listed, width)
        if looks.log:
            lines += _log(seen, looks, log, height - len(lines) - 1)
    lines = lines[: max(0, height - 1)]
    lines += [Text()] * (height - 1 - len(lines))
    lines.append(Text(f"q leave   ? help   j k select   l log   f list: {looks.only}", "reverse"))
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines[-height:])


def _head(seen: StatusSummary, width: int) -> list[Text]:
    age_s = time.time() - seen.updated_at
    when = time.strftime("%H:%M:%S", time.localtime(seen.updated_at)) if seen.updated_at else "never"
    title = Text(f"orchestrate watch   as of {when}", "bold")
    if seen.problem:
        ago = f", {age_s:.0f} s ago" if seen.updated_at else ""
        title.append(f"{ago}   cannot look: {visible(seen.problem)}", "bold red")
    ended = f" {seen.num_ended:,}/{seen.total:,} ended"
    share = seen.num_ended / seen.total if seen.total else 0.0
    lines = [title, Text(_bar(share, max(1, min(60, width - len(ended) - 2))) + ended), _counts(seen)]
    lines += _grouped("waits", seen.waiting_for, "yellow", with_label=False)
    lines += _grouped("ended", seen.failures, "red", with_label=True)
    lines += [Text(visible(note), "magenta") for note in seen.notes[:_GROUPS]]
    return [*lines, Text()]


def _counts(seen: StatusSummary) -> Text:
    if not seen.total:
        return Text("no runs yet; next: orchestrate submit" if seen.updated_at else "looking ...")
    text = Text()
    for state in State:
        if seen.counts[state]:
            word = "not sent yet" if state is State.PLANNED else state.value
            text.append("   " if text else "")
            text.append(f"{seen.counts[state]:,} {word}", _style(state))
    if seen.samples_per_s:
        text.append(f"   {seen.samples_per_s:,.0f} samples/s in all")
    return text


def _grouped(title: str, groups: Sequence[Group], style: str, *, with_label: bool) -> list[Text]:
    lines = []
    for group in groups[:_GROUPS]:
        label = f"   ({visible(group.label)})" if with_label else ""
        lines.append(Text(f"{title} {group.count:>6,} x {visible(group.words)}{label}", style))
    if more := len(groups) - _GROUPS:
        lines += [Text(f"{title} ... and for {more} more reasons", style)] if more > 0 else []
    return lines


def _listed(seen: StatusSummary, looks: Looks, count: int, width: int) -> list[Text]:
    runs = looks.runs(seen)
    index = looks.index(runs)
    # The selected run in the middle, but for the ends of the list.
    start = max(0, min(index - count // 2, len(runs) - count))
    shown = runs[start : start + count]
    label_cells = min(max((Text(visible(run.label)).cell_len for run in shown), default=0), max(12, width * 2 // 5))
    return [_row(run, label_cells, selected=start + i == index) for i, run in enumerate(shown)]


def _row(run: RunStatus, label_cells: int, *, selected: bool) -> Text:
    label = Text(visible(run.label))
    label.truncate(label_cells, overflow="ellipsis", pad=True)
    row = Text(f"{'>' if selected else ' '} ", "bold")
    row.append(f"{run.state.value:14}", _style(run.state))
    row.append_text(label)
    row.append(f" {f'#{run.attempt}' if run.attempt > 1 else '':3} ")
    why = visible("; ".join(filter(None, (run.message or run.reason, run.recovery_message))))
    if run.state is State.RUNNING:
        share = fraction_done(run)
        row.append(f"{_bar(share, _BAR_CELLS)} " if share is not None else "")
        row.append(describe_progress(run))
        silent_s = run.progress.silent_s
        if silent_s is not None and silent_s > _SILENT_S:
            row.append(f", silent for {silent_s:.0f} s", "yellow")
        row.append(f", {why}" if why else "")
    elif run.state is not State.SUCCEEDED:
        row.append(why)
    if selected:
        row.stylize("bold")
    return row


def _log(seen: StatusSummary, looks: Looks, log: Sequence[str], count: int) -> list[Text]:
    run = looks.chosen(seen)
    if run is None or count < _LEAST_TABLE - 1:
        return []
    title = Text(f"--- log of {visible(run.label)}, attempt {run.attempt}, run {run.run_id} ---", "bold")
    lines = [Text(visible(line)) for line in log[-(count - 1) :]]
    return [title, *(lines or [Text("it has printed nothing so far", "dim")])]


def _bar(share: float, cells: int) -> str:
    full = int(share * cells)
    return f"[{'#' * full}{'.' * (cells - full)}]"


def _style(state: State) -> str:
    if state is State.SUCCEEDED:
        return "green"
    if state is State.RUNNING:
        return "cyan"
    return "red" if state.ended_badly else "yellow"
