"""Submit the planned runs; safe to interrupt and to repeat.

Submits every run that has no result and is not under way, after planning again if something changed. The runs go on
when this command ends. With --watch it stays, and submits the rest as queued jobs end, if the site limits their number.
With --wait and --watch, the exit code is 0 when all runs succeeded, 3 when some did, 1 when none did. It is always 1
when every cell is excluded.

Example: orchestrate submit --local --wait
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import options, output, submit_report
from orchestrator.cli.refresh import refresh_runs, require_runs_folder
from orchestrator.cluster.sbatch_options import QueueChoice
from orchestrator.errors import InputError, OperationError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_EXPERIMENT, DEFAULT_RUNS, Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import connect, queries
    from orchestrator.backends.slurm import query
    from orchestrator.cli import monitor
    from orchestrator.planning import plan as plans
    from orchestrator.planning import planner
    from orchestrator.submission import canary as canaries
    from orchestrator.submission import submitter

ORDER = 40

_MAX_REASONS = 10
"""Reasons of exclusion that an error lists."""

StaleOption = Annotated[bool, typer.Option("--stale", help="Rerun stale results too.")]
QueueOption = Annotated[
    QueueChoice | None,
    typer.Option(
        "--queue",
        help="Among the queues that can take a run, choose the first of the cluster file or where it starts earliest.",
    ),
]
MaxGpuHoursOption = Annotated[
    float | None,
    typer.Option(help="Submit nothing if time limits × GPUs, with runs of the plan under way, exceed this."),
]
CanaryOption = Annotated[
    bool,
    typer.Option("--canary", help="Submit one run of each resource shape first, the rest when all of them succeeded."),
]
WatchOption = Annotated[
    bool, typer.Option("--watch", help="As --wait, on the full screen; submits the backlog as queued jobs end.")
]


def submit(
    experiment: options.ExperimentOption = DEFAULT_EXPERIMENT,
    local: options.LocalOption = False,
    cluster: options.ClusterOption = None,
    sets: options.SetOption = None,
    stale: StaleOption = False,
    queue: QueueOption = None,
    max_gpu_hours: MaxGpuHoursOption = None,
    canary: CanaryOption = False,
    wait: options.WaitOption = False,
    watch: WatchOption = False,
    recover: options.RecoverOption = True,
    json: output.JsonOption = False,
    runs: options.RunsOption = DEFAULT_RUNS,
    database: options.DatabaseOption = DEFAULT_DATABASE,
    data: options.DataOption = None,
) -> None:
    workspace = Workspace.at(runs=runs, database=database, data_root=data, experiment=experiment)
    require_runs_folder(workspace)
    if recover:
        # Recovery resubmits from a checkpoint and with raised limits, which the plan would not.
        refresh_runs(workspace, recover=True)
    submission = _Submission(workspace, local, cluster, sets or [], stale, queue, max_gpu_hours)
    plan, result = submission.run(canary=canary, recover=recover)
    if json:
        output.print_json({**result.to_json(), "target": plan.target})
    else:
        _report(plan, result, submission.proven, stays=wait or watch)
    if not plan.runs:
        reasons = list(dict.fromkeys(f"{excluded.rule}: {excluded.why}" for excluded in plan.excluded))
        raise OperationError(
            "every cell is excluded", why="; ".join(reasons[:_MAX_REASONS]), hint="orchestrate plan shows all"
        )
    backlog = None
    if watch:
        backlog = monitor.Backlog(plan, result, lambda plan, snapshot: submission.submit(plan, snapshot=snapshot))
    try:
        if watch or wait:
            under_way = [run.cell.run_id for run in plan.runs if run.state is plans.CellState.RUNNING]
            # How the canaries ended is reported already.
            attempts = [a.run_id for a in (*result.submitted, *result.resumed) if a.run_id not in submission.proven]
            run_ids = [*attempts, *result.skipped, *under_way, *(result.backlog if watch else ())]
            command = "submit --watch" if watch else "submit --wait"
            ended = monitor.wait(workspace, run_ids, command, backlog, recover=recover)
            submit_report.exit_by_states(ended, len(submission.proven))
    finally:
        submit_report.raise_for_failures(backlog.result if backlog else result)


@dataclass(slots=True)
class _Submission:
    """One ``submit``: its options, and what it learns on the way."""

    workspace: Workspace
    local: bool
    cluster: Path | None
    sets: Sequence[str]
    stale: bool
    queue: QueueChoice | None
    max_gpu_hours: float | None
    newest: dict[str, int] = field(default_factory=dict)
    """Run id to newest attempt from before the newest plan was made."""
    proven: frozenset[str] = frozenset()
    """Run ids of canaries that succeeded."""

    def run(self, *, canary: bool, recover: bool) -> tuple[plans.Plan, submitter.SubmitResult]:
        """Submit the plan, canaries first if wanted; return the newest plan and what was submitted."""
        first = self._submit_canaries(recover=recover) if canary else submitter.SubmitResult()
        submit_report.raise_for_failures(first)
        plan = self.plan()
        if plan.cluster is not None:
            labels = {run.cell.run_id: run.cell.label for run in plan.to_submit(stale=self.stale)}
            _report_duplicates(self.workspace, labels)
        return plan, submit_report.combine(first, self.submit(plan, snapshot=first.snapshot))

    def _submit_canaries(self, *, recover: bool) -> submitter.SubmitResult:
        """Submit one run of each resource shape, and wait until one of every shape has succeeded.

        Raises:
            OperationError: a canary failed, or the site's limit leaves no room for it.
            typer.Exit: the user left; the canaries go on.
        """
        result = submitter.SubmitResult()
        awaited: set[str] = set()
        while True:
            plan = self.plan()
            self._require_success(plan, awaited)
            chosen = canaries.choose_canaries(plan, stale=self.stale)
            if chosen.to_submit:
                more = self.submit(plan, [run.cell.run_id for run in chosen.to_submit], result.snapshot)
                result = submit_report.combine(result, more)
                if more.backlog:
                    raise OperationError(
                        f"the site's limit leaves no room for {counted(len(more.backlog), 'canary', 'canaries')} now",
                        hint="repeat orchestrate submit --canary when queued jobs have ended",
                    )
            if not chosen.run_ids or (chosen.to_submit and (more.rejected or more.unanswered)):
                self.proven = frozenset(awaited)
                return result
            awaited |= set(chosen.run_ids)
            rest = len(plan.to_submit(stale=self.stale)) - len(chosen.to_submit)
            before = f"before {counted(rest, 'more run')}" if rest else "and no more runs"
            number = counted(len(chosen.run_ids), "canary", "canaries")
            output.print_message(f"{number}, one of each resource shape, {before}")
            monitor.wait(self.workspace, chosen.run_ids, "submit --canary", recover=recover)

    def _require_success(self, plan: plans.Plan, awaited: Collection[str]) -> None:
        """Raise OperationError when a canary ended without a result."""
        state = plans.CellState.FAILED
        failed = [run.cell.run_id for run in plan.runs if run.cell.run_id in awaited and run.state is state]
        if not failed:
            return
        rest = counted(len(plan.to_submit(stale=self.stale)) - len(failed), "more run")
        ended = [run for run in refresh_runs(self.workspace) if run.run_id in failed]
        raise OperationError(
            f"{', '.join(run.label for run in ended)} failed as canary; not submitted: {rest}",
            where=", ".join(run.run_id for run in ended),
            why="; ".join(f"{run.state.value}: {run.message or run.reason}" for run in ended),
            hint="see orchestrate logs RUN; then orchestrate submit --canary tries again, submit alone submits all",
        )

    def plan(self) -> plans.Plan:
        """Return the plan of now."""
        # Read before the plan is made: what another command submits in between has a newer attempt, and is skipped.
        self.newest = {}
        if self.workspace.has_database:
            with connect.open_store(self.workspace.database) as store:
                self.newest = {run_id: record.attempt for run_id, record in queries.run_records(store).items()}
        plan = planner.current_plan(self.workspace, local=self.local, cluster=self.cluster, sets=self.sets)
        if self.queue is None:
            return plan
        if plan.cluster is None:
            raise InputError("--queue chooses among the queues of a cluster, and these runs go to this machine")
        return replace(plan, cluster=replace(plan.cluster, queue_choice=self.queue.value))

    def submit(
        self, plan: plans.Plan, only: Collection[str] | None = None, snapshot: str = ""
    ) -> submitter.SubmitResult:
        """Submit a plan's runs, or some of them, with the code snapshot of an earlier submit if one is named."""
        return submitter.submit_plan(
            self.workspace,
            plan,
            stale=self.stale,
            newest_known=self.newest,
            sets=self.sets,
            snapshot=snapshot,
            only=only,
            max_gpu_hours=self.max_gpu_hours,
        )


def _report(plan: plans.Plan, result: submitter.SubmitResult, proven: frozenset[str], *, stays: bool) -> None:
    """Print what all submits of this command submitted, and the states of the other runs of the newest plan.

    Canaries in ``proven`` count as submitted where they are of this command, not as done before.
    """
    own_canaries = proven & {attempt.run_id for attempt in (*result.submitted, *result.resumed)}
    counts = Counter(run.state for run in plan.runs if run.cell.run_id not in own_canaries)
    counts.pop(plans.CellState.NEW, None)
    notes = [f"{counted(len(own_canaries), 'canary', 'canaries')} among them"] if own_canaries else []
    notes += [f"{n} {state.label}{' before' * (state is plans.CellState.FAILED)}" for state, n in counts.items()]
    notes += [f"{len(plan.excluded)} excluded"] if plan.excluded else []
    typer.echo(submit_report.describe(result, plan.target) + (f" ({', '.join(notes)})" if notes else ""))
    if result.submitted and not stays:
        output.print_message("they run in the background; orchestrate status shows them")


def _report_duplicates(workspace: Workspace, labels: Mapping[str, str]) -> None:
    """Warn of the same runs in the queue from other runs folders."""
    found = query.queued_elsewhere(workspace.runs, labels) if labels else {}
    for folder, run_ids in found.items():
        output.print_message(
            f"note: {len(run_ids)} of these runs, such as {labels[run_ids[0]]}, are queued from {folder} too, "
            "and would run twice: cancel one, or share a folder with --runs"
        )
