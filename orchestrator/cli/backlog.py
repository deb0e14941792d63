"""The backlog of a plan: runs that exceed the number of jobs that the site lets a user queue."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.planning.plan import Plan
from orchestrator.submission.submitter import SubmitResult
from orchestrator.tracking.tracker import RunStatus
from orchestrator.units import counted
from workloads.contract import State

SUBMIT_FRACTION = 0.25
"""Submit the backlog when this share of the site's limit is free, so that arrays are few and large."""


def combine(earlier: SubmitResult, later: SubmitResult) -> SubmitResult:
    """Return the result of two submits of one plan: what both submitted, and what the later one left."""
    return replace(
        later,
        submitted=[*earlier.submitted, *later.submitted],
        resumed=[*earlier.resumed, *later.resumed],
    )


@dataclass(slots=True)
class Backlog:
    """Submits the backlog of a plan as queued jobs end, at most once in ``poll_seconds`` of the cluster file."""

    plan: Plan
    result: SubmitResult
    """Of all submits together."""
    submit: Callable[[Plan, str], SubmitResult]
    """Submits the plan with a code snapshot."""
    _tried_at: float = field(default_factory=time.monotonic)

    @property
    def is_limited(self) -> bool:
        """Whether the site limits the number of queued jobs."""
        return self.plan.cluster is not None and self.plan.cluster.max_submit > 0

    def submit_more(self, runs: Sequence[RunStatus]) -> list[str]:
        """Submit what the limit now allows, and return notes for the user."""
        cluster = self.plan.cluster
        if not self.result.backlog or cluster is None or time.monotonic() - self._tried_at < cluster.poll_seconds:
            return []
        live = Counter(run.state for run in runs if run.target == cluster.name and run.state.live)
        if live[State.PENDING] and cluster.max_submit and live.total() > (1 - SUBMIT_FRACTION) * cluster.max_submit:
            return []
        self._tried_at = time.monotonic()
        more = self.submit(self.plan, self.result.snapshot)
        rejected = [*self.result.rejected, *more.rejected]
        self.result = replace(combine(self.result, more), skipped=self.result.skipped, rejected=rejected)
        count = len(more.submitted) + len(more.resumed)
        return [f"{counted(count, 'more run')} submitted, {len(more.backlog)} in the backlog"] if count else []
