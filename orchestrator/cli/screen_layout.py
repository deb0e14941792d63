"""What the full screen looks like and what its keys do: functions of values, without a terminal.

Only ASCII is drawn, apart from names that users chose, and as many lines as the terminal has.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rich.text import Text

from orchestrator.cli.output import printable
from orchestrator.tracking.status_summary import ReasonGroup, StatusSummary, describe_progress, fraction_done
from orchestrator.tracking.tracker import RunStatus
from workloads.contract import State

_MAX_GROUPS = 3
"""Reasons of one kind that are shown."""
_BAR_CELLS = 12
_SILENT_S = 60.0
"""A running run that reported nothing for so long is marked, seconds."""
_MIN_LOG_LINES = 2

KEYS = (
    ("q", "leave; nothing stops, orchestrate watch shows this again"),
    ("j k, arrows", "next and previous run; PgDn PgUp, g G for more"),
    ("l", "log of the selected run"),
    ("f", "list all runs, live runs, runs that ended without a result"),
    ("?", "this help"),
)


class Filter(StrEnum):
    """Which runs are listed."""

    ALL = "all"
    LIVE = "live"
    FAILED = "failed"

    def accepts(self, run: RunStatus) -> bool:
        return self is Filter.ALL or (run.state.live if self is Filter.LIVE else run.state.ended_badly)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user chose to see."""

    selected: str = ""
    """Run id; where it is not listed, the first run is selected."""
    filter: Filter = Filter.ALL
    log: bool = False
    help: bool = False

    def runs(self, seen: StatusSummary) -> Sequence[RunStatus]:
        """Return the listed runs."""
        return [run for run in seen.sorted_runs if self.filter.accepts(run)]

    def index(self, runs: Sequence[RunStatus]) -> int:
        """Return where the selected run is; it stays selected when it moves in the list."""
        return next((i for i, run in enumerate(runs) if run.run_id == self.selected), 0)

    def run(self, seen: StatusSummary) -> RunStatus | None:
        """Return the selected run."""
        runs = self.runs(seen)
        return runs[self.index(runs)] if runs else None

    def press(self, key: str, seen: StatusSummary, page: int = 10) -> Choice:
        """Return the choice after a key of :func:`split_keys`; a page key moves by ``page`` runs."""
        if key == "?" or (key == "escape" and self.help):
            return replace(self, help=not self.help)
        if key == "l" or (key == "escape" and self.log):
            return replace(self, log=not self.log)
        if key == "f":
            every = list(Filter)
            return replace(self, filter=every[(every.index(self.filter) + 1) % len(every)])
        runs = self.runs(seen)
        steps = {"down": 1, "up": -1, "page down": page, "page up": -page, "home": -len(runs), "end": len(runs)}
        if key not in steps or not runs:
            return self
        index = min(max(self.index(runs) + steps[key], 0), len(runs) - 1)
        return replace(self, selected=runs[index].run_id)


# xterm's sequences, in normal and in application cursor mode (DECCKM), and those of the Linux console.
_KEY_NAMES = {
    **dict.fromkeys(("\x1b[A", "\x1bOA", "k"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB", "j"), "down"),
    "\x1b[5~": "page up",
    **dict.fromkeys(("\x1b[6~", " "), "page down"),
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~", "g"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~", "G"), "end"),
    "\x1b": "escape",
    "Q": "q",
    "h": "?",
    **dict.fromkeys(("\r", "\n"), "l"),
}
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)


def split_keys(typed: str) -> list[str]:
    """Return the names of the keys in what a terminal sent; unknown sequences stay as they are."""
    return [_KEY_NAMES.get(key, key) for key in _KEY.findall(typed)]


def num_listed(seen: StatusSummary, choice: Choice, height: int) -> int:
    """Return how many runs a screen of ``height`` lines lists: half of what the head leaves when a log is shown."""
    left = height - len(_head(seen, 80)) - 1
    return max(1, left // 2 if choice.log else left)


def draw(seen: StatusSummary, choice: Choice, log: Sequence[str], size: tuple[int, int]) -> Text:
    """Return the whole screen of ``size`` (columns, lines), with the last lines of the selected run's ``log``."""
    width, height = size
    if choice.help:
        lines = [Text("keys", "bold"), *(Text(f"  {key:12} {what}") for key, what in KEYS)]
    else:
        lines = _head(seen, width)
        lines += _list(seen, choice, num_listed(seen, choice, height), width)
        if choice.log:
            lines += _log(seen, choice, log, height - len(lines) - 1)
    lines = lines[: max(0, height - 1)]
    lines += [Text()] * (height - 1 - len(lines))
    lines.append(Text(f"q leave   ? help   j k select   l log   f list: {choice.filter}", "reverse"))
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
        title.append(f"{ago}   update failed: {printable(seen.problem)}", "bold red")
    ended = f" {seen.num_ended:,}/{seen.total:,} ended"
    fraction = seen.num_ended / seen.total if seen.total else 0.0
    lines = [title, Text(_bar(fraction, max(1, min(60, width - len(ended) - 2))) + ended), _counts(seen)]
    lines += _groups("waits", seen.waiting_reasons, "yellow", with_label=False)
    lines += _groups("ended", seen.failures, "red", with_label=True)
    lines += [Text(printable(note), "magenta") for note in seen.notes[:_MAX_GROUPS]]
    return [*lines, Text()]


def _counts(seen: StatusSummary) -> Text:
    if not seen.total:
        return Text("no runs yet; next: orchestrate submit" if seen.updated_at else "updating ...")
    text = Text()
    for state in State:
        if seen.counts[state]:
            word = "not submitted yet" if state is State.PLANNED else state.value
            text.append("   " if text else "")
            text.append(f"{seen.counts[state]:,} {word}", _style(state))
    if seen.samples_per_s:
        text.append(f"   {seen.samples_per_s:,.0f} samples/s in total")
    return text


def _groups(title: str, groups: Sequence[ReasonGroup], style: str, *, with_label: bool) -> list[Text]:
    lines = []
    for group in groups[:_MAX_GROUPS]:
        label = f"   ({printable(group.label)})" if with_label else ""
        lines.append(Text(f"{title} {group.count:>6,} x {printable(group.reason)}{label}", style))
    if (more := len(groups) - _MAX_GROUPS) > 0:
        lines.append(Text(f"{title} ... and for {more} more reasons", style))
    return lines


def _list(seen: StatusSummary, choice: Choice, count: int, width: int) -> list[Text]:
    runs = choice.runs(seen)
    index = choice.index(runs)
    # The selected run stands in the middle, except at the ends of the list.
    start = max(0, min(index - count // 2, len(runs) - count))
    listed = runs[start : start + count]
    label_cells = min(max((Text(printable(run.label)).cell_len for run in listed), default=0), max(12, width * 2 // 5))
    return [_row(run, label_cells, is_selected=start + i == index) for i, run in enumerate(listed)]


def _row(run: RunStatus, label_cells: int, *, is_selected: bool) -> Text:
    label = Text(printable(run.label))
    label.truncate(label_cells, overflow="ellipsis", pad=True)
    row = Text(f"{'>' if is_selected else ' '} ", "bold")
    row.append(f"{run.state.value:14}", _style(run.state))
    row.append_text(label)
    row.append(f" {f'#{run.attempt}' if run.attempt > 1 else '':3} ")
    why = printable("; ".join(filter(None, (run.message or run.reason, run.recovery_message))))
    if run.state is State.RUNNING:
        fraction = fraction_done(run)
        row.append(f"{_bar(fraction, _BAR_CELLS)} " if fraction is not None else "")
        row.append(describe_progress(run))
        silent_s = run.progress.silent_s
        if silent_s is not None and silent_s > _SILENT_S:
            row.append(f", silent for {silent_s:.0f} s", "yellow")
        row.append(f", {why}" if why else "")
    elif run.state is not State.SUCCEEDED:
        row.append(why)
    if is_selected:
        row.stylize("bold")
    return row


def _log(seen: StatusSummary, choice: Choice, log: Sequence[str], count: int) -> list[Text]:
    run = choice.run(seen)
    if run is None or count < _MIN_LOG_LINES:
        return []
    title = Text(f"--- log of {printable(run.label)}, attempt {run.attempt}, run {run.run_id} ---", "bold")
    lines = [Text(printable(line)) for line in log[-(count - 1) :]]
    return [title, *(lines or [Text("no output yet", "dim")])]


def _bar(fraction: float, cells: int) -> str:
    full = int(fraction * cells)
    return f"[{'#' * full}{'.' * (cells - full)}]"


def _style(state: State) -> str:
    known = {State.SUCCEEDED: "green", State.RUNNING: "cyan"}
    return known.get(state, "red" if state.ended_badly else "yellow")
