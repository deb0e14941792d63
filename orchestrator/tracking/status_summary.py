"""Runs at one moment as people look at them: how many are in which state, what is waited for, what went wrong.

Values only: whoever looks makes an :class:`StatusSummary` from what the tracker says, and any view shows it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from orchestrator.tracking.tracker import RunStatus
from workloads.contract import State

_ORDER = (State.RUNNING, State.PENDING, State.SUBMITTING)
"""What goes on comes first, then what ended without a result, then the rest."""


_WAITS = "waits"


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that have something in common, and one of them."""

    words: str
    count: int
    label: str


@dataclass(frozen=True)
class StatusSummary:
    """Runs at one moment."""

    runs: Sequence[RunStatus] = ()
    num_unsubmitted: int = 0
    """Planned runs that go out when there is room."""
    num_to_resubmit: int = 0
    """Runs that have ended, and are sent again when there is room."""
    notes: Sequence[str] = ()
    """What else the last look brought to light."""
    problem: str = ""
    """Why the last look failed; then all else is as the look before it found it."""
    updated_at: float = field(default_factory=time.time)
    """When a look last succeeded, seconds since the epoch."""

    @cached_property
    def counts(self) -> Counter[State]:
        """Runs by state, those that were not sent among the planned ones."""
        counts = Counter(run.state for run in self.runs)
        counts[State.PLANNED] += self.num_unsubmitted
        return +counts

    @cached_property
    def ordered(self) -> Sequence[RunStatus]:
        """As a person looks for them: running, waiting, ended without a result, done."""
        return sorted(self.runs, key=lambda run: (_place(run.state), run.label, run.run_id))

    @property
    def num_live(self) -> int:
        return sum(run.state.live for run in self.runs)

    @property
    def num_ended(self) -> int:
        return self.total - self.num_live - self.counts[State.PLANNED]

    @property
    def over(self) -> bool:
        """Whether nothing goes on and nothing is left to send."""
        return not self.num_live and not self.num_unsubmitted and not self.num_to_resubmit

    @property
    def total(self) -> int:
        return self.counts.total()

    @property
    def samples_per_s(self) -> float:
        """Of all running runs together."""
        return sum(run.progress.samples_per_s or 0.0 for run in self.runs if run.state is State.RUNNING)

    @cached_property
    def waiting_for(self) -> Sequence[Group]:
        """Why runs wait, in words, the most frequent reason first."""
        waiting = [run for run in self.runs if run.state in {State.PENDING, State.SUBMITTING}]
        return _groups(waiting, {run.run_id: run.message or run.reason or _WAITS for run in waiting})

    @cached_property
    def failures(self) -> Sequence[Group]:
        """What ended without a result and why, the most frequent reason first."""
        bad = [run for run in self.runs if run.state.ended_badly]
        why = {run.run_id: run.message or run.reason for run in bad}
        words = {run.run_id: f"{run.state}: {why[run.run_id]}" if why[run.run_id] else run.state.value for run in bad}
        return _groups(bad, words)


def _place(state: State) -> int:
    if state in _ORDER:
        return _ORDER.index(state)
    return len(_ORDER) + (0 if state.ended_badly else 1)


def _groups(runs: Sequence[RunStatus], words: Mapping[str, str]) -> Sequence[Group]:
    counts = Counter(words[run.run_id] for run in runs)
    first = {words[run.run_id]: run.label for run in reversed(runs)}
    return [Group(text, count, first[text]) for text, count in counts.most_common()]


def describe_waiting(seen: StatusSummary) -> str:
    """How many runs wait, and for what most of them do."""
    count = sum(run.state.live and run.state is not State.RUNNING for run in seen.runs)
    words = f"{count} waiting"
    if count and (why := seen.waiting_for[0]).words != _WAITS:
        words += f" ({why.words})" if why.count == count else f" ({why.count} of them: {why.words})"
    return words + (f", {seen.num_unsubmitted} not sent yet" if seen.num_unsubmitted else "")


def describe_progress(run: RunStatus) -> str:
    """How far a running run is."""
    progress = run.progress
    parts = []
    if progress.epochs:
        parts.append(f"epoch {progress.epoch or 0}/{progress.epochs}")
    elif progress.steps:
        parts.append(f"step {progress.step or 0}/{progress.steps}")
    elif progress.phase:
        parts.append(progress.phase)
    if progress.samples_per_s:
        parts.append(f"{progress.samples_per_s:,.0f} samples/s")
    return ", ".join(parts) or "starting"


def fraction_done(run: RunStatus) -> float | None:
    """From 0 to 1; None where the run does not say."""
    progress = run.progress
    if progress.steps and progress.step is not None and not progress.epochs:
        return min(1.0, progress.step / progress.steps)
    if progress.epochs and progress.epoch is not None:
        return min(1.0, progress.epoch / progress.epochs)
    return None
