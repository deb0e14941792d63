"""Runs at one moment: how many are in which state, why they wait, what failed.

Values only: the monitor makes a :class:`StatusSummary` from what the tracker reports, and every view shows it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from orchestrator.tracking.tracker import RunStatus
from workloads.contract import State

_LIVE_ORDER = (State.RUNNING, State.PENDING, State.SUBMITTING)
"""Live runs come first in this order, then those that ended without a result, then the others."""
_NO_REASON = "waits"


@dataclass(frozen=True, slots=True)
class ReasonGroup:
    """Runs with the same reason, and the label of one of them."""

    reason: str
    count: int
    label: str


@dataclass(frozen=True)
class StatusSummary:
    """Runs at one moment."""

    runs: Sequence[RunStatus] = ()
    num_unsubmitted: int = 0
    """Planned runs in the backlog: they are submitted when the site accepts more."""
    num_to_resubmit: int = 0
    """Ended runs that recovery resubmits when the site accepts more."""
    notes: Sequence[str] = ()
    """Further messages of the last update."""
    problem: str = ""
    """Why the last update failed; then all else is from the update before."""
    updated_at: float = field(default_factory=time.time)
    """When an update last succeeded, seconds since the epoch."""

    @cached_property
    def counts(self) -> Counter[State]:
        """Runs by state; the backlog counts as planned."""
        counts = Counter(run.state for run in self.runs)
        counts[State.PLANNED] += self.num_unsubmitted
        return +counts

    @cached_property
    def sorted_runs(self) -> Sequence[RunStatus]:
        """Running, waiting, ended without a result, done."""
        return sorted(self.runs, key=lambda run: (_rank(run.state), run.label, run.run_id))

    @property
    def num_live(self) -> int:
        return sum(run.state.live for run in self.runs)

    @property
    def num_ended(self) -> int:
        return self.total - self.num_live - self.counts[State.PLANNED]

    @property
    def is_finished(self) -> bool:
        """Whether no run is live and none is left to submit."""
        return not self.num_live and not self.num_unsubmitted and not self.num_to_resubmit

    @property
    def total(self) -> int:
        return self.counts.total()

    @property
    def samples_per_s(self) -> float:
        """Sum over the running runs."""
        return sum(run.progress.samples_per_s or 0.0 for run in self.runs if run.state is State.RUNNING)

    @cached_property
    def waiting_reasons(self) -> Sequence[ReasonGroup]:
        """Why runs wait, the most frequent reason first."""
        waiting = [run for run in self.runs if run.state in {State.PENDING, State.SUBMITTING}]
        return _group(waiting, lambda run: run.message or run.reason or _NO_REASON)

    @cached_property
    def failures(self) -> Sequence[ReasonGroup]:
        """Why runs ended without a result, the most frequent reason first."""
        failed = [run for run in self.runs if run.state.ended_badly]
        return _group(failed, lambda run: ": ".join(filter(None, (run.state, run.message or run.reason))))


def _rank(state: State) -> int:
    if state in _LIVE_ORDER:
        return _LIVE_ORDER.index(state)
    return len(_LIVE_ORDER) + (0 if state.ended_badly else 1)


def _group(runs: Sequence[RunStatus], reason_of: Callable[[RunStatus], str]) -> Sequence[ReasonGroup]:
    counts = Counter(map(reason_of, runs))
    labels = {reason_of(run): run.label for run in reversed(runs)}
    return [ReasonGroup(reason, count, labels[reason]) for reason, count in counts.most_common()]


def describe_waiting(summary: StatusSummary) -> str:
    """Describe how many runs wait, and the most frequent reason."""
    count = sum(run.state.live and run.state is not State.RUNNING for run in summary.runs)
    text = f"{count} waiting"
    if count and (group := summary.waiting_reasons[0]).reason != _NO_REASON:
        share = "" if group.count == count else f"{group.count} of them: "
        text += f" ({share}{group.reason})"
    return text + (f", {summary.num_unsubmitted} not submitted yet" if summary.num_unsubmitted else "")


def describe_progress(run: RunStatus) -> str:
    """Describe how far a running run is."""
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
    """Return the completed fraction, from 0 to 1; None if the run has not reported it."""
    progress = run.progress
    done, of = (progress.epoch, progress.epochs) if progress.epochs else (progress.step, progress.steps)
    return min(1.0, done / of) if of and done is not None else None
