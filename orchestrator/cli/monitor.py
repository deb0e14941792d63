"""Poll runs and show them until they end or the user leaves: ``--wait``, ``--watch`` and ``watch``.

Runs do not depend on this process. Each poll does what ``status`` does: it records what ended, and finishes what was
interrupted. A poll that fails changes nothing, and the next one tries again.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import typer

from orchestrator.cli import output, submit_report
from orchestrator.cli.progress import Bars, Lines, View
from orchestrator.cli.refresh import refresh_runs
from orchestrator.errors import InputError, OrchestrateError
from orchestrator.tracking.status_summary import StatusSummary
from orchestrator.tracking.tracker import RunStatus
from orchestrator.units import counted
from orchestrator.workspace import Workspace
from workloads.contract import State
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from orchestrator.cli import full_screen
    from orchestrator.planning import plan as plans
    from orchestrator.submission import submitter

POLL_S = 0.5
MAX_BUSY_SHARE = 0.2
"""Share of the time spent on polling: with thousands of runs it would load a login node, which is shared."""
EXIT_INTERRUPTED = 130
"""Exit code of shells for SIGINT: 128 + 2."""
SUBMIT_FRACTION = 0.25
"""Submit the backlog when this share of the site's limit is free, so that arrays are few and large."""


@dataclass(slots=True)
class Backlog:
    """Submits the backlog of a plan as queued jobs end, at most once in ``poll_seconds`` of the cluster file."""

    plan: plans.Plan
    result: submitter.SubmitResult
    """Of all submits together."""
    submit: Callable[[plans.Plan, str], submitter.SubmitResult]
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
        self.result = replace(submit_report.combine(self.result, more), skipped=self.result.skipped, rejected=rejected)
        count = len(more.submitted) + len(more.resumed)
        return [f"{counted(count, 'more run')} submitted, {len(more.backlog)} in the backlog"] if count else []


class _NoteHandler(logging.Handler):
    """Collects what modules log, so that log lines do not break up a view."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.append(record.getMessage())


@dataclass(slots=True)
class Monitor:
    """Polls runs. A poll that fails returns the last good summary with the problem."""

    workspace: Workspace
    only: Collection[str] | None = None
    """Run ids; None for all."""
    backlog: Backlog | None = None
    """Submitted as the site's limit allows."""
    recover: bool = True
    """Whether to resubmit runs that ended without a result, as far as the recovery rules allow it."""
    _last: StatusSummary = field(default_factory=lambda: StatusSummary(updated_at=0.0))

    def poll(self) -> StatusSummary:
        """Return the states of now.

        Raises:
            InputError: the first poll failed by what the user gave, so that every other one would fail too.
        """
        notes: list[str] = []
        handler = _NoteHandler(notes)
        logging.getLogger().addHandler(handler)
        try:
            runs = refresh_runs(self.workspace, notes.append, recover=self.recover)
            if self.backlog is not None and (submitted := self.backlog.submit_more(runs)):
                notes += submitted
                runs = refresh_runs(self.workspace, notes.append)
            backlog = frozenset(self.backlog.result.backlog if self.backlog else ())
            runs = [run for run in runs if (self.only is None or run.run_id in self.only) and run.run_id not in backlog]
            due = sum(self._will_resubmit(run) for run in runs)
            self._last = StatusSummary(
                runs, num_unsubmitted=len(backlog), num_to_resubmit=due, notes=tuple(dict.fromkeys(notes))
            )
        except (OrchestrateError, OSError) as error:
            if isinstance(error, InputError) and not self._last.updated_at:
                raise
            self._last = replace(self._last, notes=tuple(notes), problem=str(error) or type(error).__name__)
        finally:
            logging.getLogger().removeHandler(handler)
        return self._last

    def _will_resubmit(self, run: RunStatus) -> bool:
        """Whether recovery resubmits a run that has ended once the site's limit allows it."""
        return self.backlog is not None and self.backlog.is_limited and self.recover and run.will_resubmit


def follow(poll: Callable[[], StatusSummary], view: View, *, until_over: bool = True) -> tuple[StatusSummary, bool]:
    """Poll and show until no run is live (only if ``until_over``), or the user leaves.

    Returns:
        The last summary, and whether the user left.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    with view:
        while True:
            started = time.monotonic()
            seen = poll()
            spent_s = time.monotonic() - started
            view.show(seen)
            if until_over and seen.is_finished and not seen.problem:
                return seen, False
            if not view.pause(max(POLL_S, spent_s / MAX_BUSY_SHARE)):
                return seen, True


def wait(
    workspace: Workspace,
    run_ids: Sequence[str],
    command: str,
    backlog: Backlog | None = None,
    *,
    recover: bool = True,
) -> Counter[State]:
    """Wait until runs have ended, and return how many are in which state.

    With a backlog, which is submitted meanwhile, a terminal shows the full screen. ``command`` is the command that
    waits; the message of an interrupt names it.

    Raises:
        typer.Exit: the user left; the runs go on.
    """
    monitor = Monitor(workspace, frozenset(run_ids), backlog, recover)
    view: View = Bars() if sys.stderr.isatty() else Lines(output.print_message)
    if backlog is not None and sys.stdout.isatty():
        view = full_screen.FullScreen(workspace)
    try:
        seen, left = follow(monitor.poll, view)
        how = "left"
    except KeyboardInterrupt:
        left, how = True, "interrupted"
    if left:
        unsubmitted = len(backlog.result.backlog) if backlog else 0
        rest = f"; {unsubmitted} stay planned until the same command runs again" if unsubmitted else ""
        again = "watch" if backlog and not unsubmitted else command
        output.print_message(
            f"{how}: the runs go on{rest}; orchestrate status shows them, orchestrate cancel --all stops them, "
            f"orchestrate {again} shows this again"
        )
        raise typer.Exit(EXIT_INTERRUPTED)
    return seen.counts
