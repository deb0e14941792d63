"""Backlog."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.units import counted
from workloads.contract import State

if TYPE_CHECKING:
    from orchestrator.planning.plan import Plan
    from orchestrator.submission.submitter import Submitted
    from orchestrator.tracking.tracker import RunStatus
    from orchestrator.workspace import Workspace


SEND_SHARE = 0.25
"""What did not fit is sent when this share of the site's limit is free, so that arrays are few and large."""


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
