"""Carry out the plan; safe to interrupt, safe to repeat.

Sends what has no result and is not under way, planning first where something changed. Runs go on when this command
ends. With --watch it stays, and sends the rest when the site takes no more at once. With --wait and --watch the
exit code is 0 when all runs succeeded, 3 when some did, 1 when none did. It is 1 too, with or without them, where
every cell is excluded.

Example: orchestrate submit --local --wait
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import output
from orchestrator.cli.options import (
    ClusterOption,
    DatabaseOption,
    DataOption,
    ExperimentOption,
    LocalOption,
    RecoverOption,
    RunsOption,
    SetOption,
)
from orchestrator.cli.refresh import refreshed
from orchestrator.cli.submit_report import WaitOption, _complain, _sent, _wait
from orchestrator.cli.workspace_checks import insist_on_runs_folder
from orchestrator.cluster.sbatch_options import QueueChoice
from orchestrator.errors import InputError, OperationError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_EXPERIMENT, DEFAULT_RUNS, Workspace

if TYPE_CHECKING:
    from orchestrator.planning.plan import Plan
    from orchestrator.submission.submitter import Submitted

ORDER = 40


_REASONS = 10
"""How many of the reasons why cells are excluded an error lists."""


WatchOption = Annotated[
    bool, typer.Option("--watch", help="As --wait, full-screen; also sends what does not fit now, as room appears.")
]


QueueOption = Annotated[
    QueueChoice | None,
    typer.Option(
        "--queue", help="Of the queues that take a run: the first of the cluster file, or where it starts earliest."
    ),
]


def submit(
    experiment: ExperimentOption = DEFAULT_EXPERIMENT,
    local: LocalOption = False,
    cluster: ClusterOption = None,
    sets: SetOption = None,
    stale: Annotated[bool, typer.Option("--stale", help="Also run again what is done but out of date.")] = False,
    queue: QueueOption = None,
    max_gpu_hours: Annotated[
        float | None,
        typer.Option(help="Send nothing when time limits × GPUs, with what is under way of it, come to more."),
    ] = None,
    canary: Annotated[
        bool, typer.Option("--canary", help="First one run of each resource shape; the rest when all succeeded.")
    ] = False,
    wait: WaitOption = False,
    watch: WatchOption = False,
    recover: RecoverOption = True,
    json: output.JsonOption = False,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
    data: DataOption = None,
) -> None:
    from orchestrator.planning.plan import Action

    workspace = Workspace.at(runs=runs, database=database, data_root=data, experiment=experiment)
    insist_on_runs_folder(workspace)
    if recover:
        # What recovery sends goes on from where it was, with more; what it does not send is new to the plan.
        refreshed(workspace, recover=True)
    sending = _Sending(workspace, local, cluster, sets or [], stale, queue, max_gpu_hours)
    plan, done = sending.send_all(canary=canary, recover=recover)
    if json:
        output.facts({**asdict(done), "target": plan.target})
    else:
        _tell(plan, done, sending.proven, staying=wait or watch)
    if not plan.runs:
        reasons = list(dict.fromkeys(f"{excluded.rule}: {excluded.why}" for excluded in plan.excluded))
        raise OperationError(
            "every cell is excluded",
            why="; ".join(reasons[:_REASONS]),
            hint="orchestrate plan shows all",
        )
    under_way = [run.cell.run_id for run in plan.runs if run.action is Action.RUNNING]
    # Of the canaries it is known, and was told, how they ended.
    sent = [s.run_id for s in (*done.sent, *done.resumed) if s.run_id not in sending.proven]
    run_ids = [*sent, *done.skipped, *under_way]
    shepherd = None
    if watch:
        from orchestrator.cli.backlog import Shepherd

        shepherd = Shepherd(workspace, plan, done, stale=stale, newest_known=sending.newest)
        run_ids += done.held
    try:
        if watch or wait:
            command = "submit --watch" if watch else "submit --wait"
            _wait(workspace, run_ids, command, shepherd, recover=recover, num_succeeded=len(sending.proven))
    finally:
        _complain(shepherd.done if shepherd else done)


@dataclass(slots=True)
class _Sending:
    """What one ``submit`` is to send, and how."""

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
    """Run ids of canaries that were waited for, and succeeded."""

    def send_all(self, *, canary: bool, recover: bool) -> tuple[Plan, Submitted]:
        """Send what is to be sent, canaries first where they are wanted; the plan, and what was done."""
        from orchestrator.submission.submitter import Submitted

        first = Submitted()
        if canary:
            from orchestrator.cli import canary_submit

            first, self.proven = canary_submit.prove(
                self.workspace, self.plan, self.send, stale=self.stale, recover=recover
            )
            _complain(first)
        plan = self.plan()
        if plan.site is not None:
            wanted = {run.cell.run_id: run.cell.label for run in plan.to_send(stale=self.stale)}
            _tell_of_other_folders(self.workspace, wanted)
        done = self.send(plan, snapshot=first.snapshot)
        return plan, replace(done, sent=[*first.sent, *done.sent], resumed=[*first.resumed, *done.resumed])

    def plan(self) -> Plan:
        """The plan as it is now."""
        from orchestrator.planning import planner

        # Read before the plan is made: who sends a run in between has it, and we leave it out.
        self.newest.clear()
        self.newest.update(_newest_attempts(self.workspace))
        plan = planner.current(self.workspace, local=self.local, cluster=self.cluster, sets=self.sets)
        if self.queue is None:
            return plan
        if plan.site is None:
            raise InputError("--queue chooses among the queues of a cluster, and these runs go to this machine")
        return replace(plan, site=replace(plan.site, queue_choice=self.queue.value))

    def send(self, plan: Plan, only: Collection[str] | None = None, snapshot: str = "") -> Submitted:
        """Send a plan's runs, or some of them, with the code of an earlier call if it is named."""
        from orchestrator.submission import submitter

        return submitter.submit(
            self.workspace,
            plan,
            stale=self.stale,
            newest_known=self.newest,
            sets=self.sets,
            snapshot=snapshot,
            only=only,
            max_gpu_hours=self.max_gpu_hours,
        )


def _tell(plan: Plan, done: Submitted, proven: frozenset[str], *, staying: bool) -> None:
    """``proven``: runs that were waited for; those that were sent here are not told as done before."""
    from orchestrator.planning.plan import Action

    first = proven & {s.run_id for s in (*done.sent, *done.resumed)}
    counts = Counter(run.action for run in plan.runs if run.cell.run_id not in first)
    counts.pop(Action.NEW, None)
    rest = [f"{count} {action.words}{' before' * (action is Action.FAILED)}" for action, count in counts.items()]
    rest += [f"{len(plan.excluded)} excluded"] if plan.excluded else []
    rest = [f"{counted(len(first), 'canary', 'canaries')} among them", *rest] if first else rest
    typer.echo(_sent(done, plan.target) + (f" ({', '.join(rest)})" if rest else ""))
    if done.sent and not staying:
        output.talk("they go on by themselves; orchestrate status shows them")


def _tell_of_other_folders(workspace: Workspace, labels: Mapping[str, str]) -> None:
    from orchestrator.backends.slurm.other_workspaces import queued_elsewhere

    found = queued_elsewhere(workspace.runs, labels) if labels else {}
    for folder, run_ids in found.items():
        output.talk(
            f"note: sent from {folder} too, and not ended: {len(run_ids)} of these runs, such as "
            f"{labels[run_ids[0]]}; each is carried out twice: cancel one, or share a folder with --runs"
        )


def _newest_attempts(workspace: Workspace) -> dict[str, int]:
    if not workspace.has_database:
        return {}
    from db.connect import open_store
    from db.queries import run_records

    with open_store(workspace.database) as store:
        return {run_id: record.attempt for run_id, record in run_records(store).items()}
