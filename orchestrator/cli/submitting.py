"""The verbs submit and retry, which send runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import naming, output
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
from orchestrator.cli.refreshing import insist_on_runs_folder, refreshed
from orchestrator.cluster.sbatch_options import QueueChoice
from orchestrator.errors import InputError, OperationError, PartlyDoneError
from orchestrator.units import counted
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_EXPERIMENT, DEFAULT_RUNS, Workspace

if TYPE_CHECKING:
    from orchestrator.cli.waiting import Shepherd
    from orchestrator.planning.plan import Plan
    from orchestrator.submission.submitter import Submitted
    from orchestrator.tracking.tracker import RunStatus

app = typer.Typer()

_REASONS = 10
"""How many of the reasons why cells are excluded an error lists."""

WaitOption = Annotated[bool, typer.Option("--wait", "-w", help="Show progress until all runs have ended.")]
WatchOption = Annotated[
    bool, typer.Option("--watch", help="As --wait, full-screen; also sends what does not fit now, as room appears.")
]
QueueOption = Annotated[
    QueueChoice | None,
    typer.Option(
        "--queue", help="Of the queues that take a run: the first of the cluster file, or where it starts earliest."
    ),
]


@app.command()
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
    """Carry out the plan; safe to interrupt, safe to repeat.

    Sends what has no result and is not under way, planning first where something changed. Runs go on when this command
    ends. With --watch it stays, and sends the rest when the site takes no more at once. With --wait and --watch the
    exit code is 0 when all runs succeeded, 3 when some did, 1 when none did. It is 1 too, with or without them, where
    every cell is excluded.

    Example: orchestrate submit --local --wait
    """
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
        from orchestrator.cli.waiting import Shepherd

        shepherd = Shepherd(workspace, plan, done, stale=stale, newest_known=sending.newest)
        run_ids += done.held
    try:
        if watch or wait:
            command = "submit --watch" if watch else "submit --wait"
            _wait(workspace, run_ids, command, shepherd, recover=recover, num_succeeded=len(sending.proven))
    finally:
        _complain(shepherd.done if shepherd else done)


@app.command()
def retry(
    names: naming.RunsArgument = None,
    failed: Annotated[bool, typer.Option("--failed", help="Every run that ended without a result.")] = False,
    wait: WaitOption = False,
    recover: RecoverOption = True,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Send failed runs again.

    Each gets a new attempt, which goes on from the last checkpoint where there is one. What is sent again by itself
    within bounds (see status) counts from here anew.

    Example: orchestrate retry --failed
    """
    naming.insist(names, failed, "retry", "--failed")
    workspace = Workspace.at(runs=runs, database=database)
    found = refreshed(workspace)
    chosen = (
        [run for run in found if run.state.ended_badly] if failed else [naming.one(found, name) for name in names or []]
    )
    for run in chosen:
        if not run.state.ended_badly:
            hint = (
                "it is being cancelled; retry it when orchestrate status says that it has ended"
                if run.reason == "cancelling"
                else "it is under way"
                if run.state.live
                else "orchestrate submit --stale runs it again when it is out of date"
            )
            raise InputError(f"run {run.run_id} ({run.label}) is {run.state.value}: nothing to retry", hint=hint)
    if not chosen:
        typer.echo("0 runs sent: none ended without a result")
        return
    done = _send_again(workspace, chosen)
    typer.echo(_sent(done, ""))
    try:
        if wait:
            _wait(workspace, [s.run_id for s in done.sent], "retry --wait", recover=recover)
    finally:
        _complain(done)


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
            from orchestrator.cli import canaries

            first, self.proven = canaries.prove(self.workspace, self.plan, self.send, stale=self.stale, recover=recover)
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


def _send_again(workspace: Workspace, chosen: Sequence[RunStatus]) -> Submitted:
    from orchestrator.cli import outdated
    from orchestrator.environment.snapshot import code_digest
    from orchestrator.submission import submitter
    from orchestrator.submission.resubmit import with_all_nodes
    from workloads.files.json_file import read_json
    from workloads.files.run_dir import RunDir

    by_target: dict[str, list[tuple[Any, Mapping[str, Any]]]] = {}
    for run in chosen:
        place = RunDir.of(workspace.runs, run.run_id)
        try:
            spec = place.read_spec()
            spec = replace(spec, code_digest=code_digest(spec.train, workspace.runs))
        except (OSError, ValueError) as error:
            raise OperationError(
                f"the spec of run {run.run_id} cannot be read",
                where=str(place.spec),
                why=str(error),
                hint="orchestrate submit plans and sends it anew",
            ) from error
        try:
            shape = read_json(place.attempt(run.attempt).submission).get("shape", {})
        except (OSError, ValueError, AttributeError):
            shape = {}
        by_target.setdefault(spec.target, []).append((spec, with_all_nodes(shape)))
    outdated.say_so(workspace, [spec for wanted in by_target.values() for spec, _ in wanted])
    done = [
        submitter.send(workspace, wanted, target, newest_known={run.run_id: run.attempt for run in chosen}, anew=True)
        for target, wanted in by_target.items()
    ]
    return submitter.Submitted(
        sent=[s for d in done for s in d.sent],
        resumed=[s for d in done for s in d.resumed],
        skipped=[s for d in done for s in d.skipped],
        held=[run_id for d in done for run_id in d.held],
        refused=[r for d in done for r in d.refused],
        in_doubt=sum(d.in_doubt for d in done),
    )


def _sent(done: Submitted, target: str) -> str:
    text = f"{counted(len(done.sent), 'run')} sent" + (f" to {target}" if target and done.sent else "")
    if done.resumed:
        text += f", {len(done.resumed)} of an interrupted submit"
    if done.skipped:
        text += f", {len(done.skipped)} already sent by another command"
    if done.held:
        text += f", {len(done.held)} stay planned until there is room: submit again, or submit --watch, sends them"
    return text


def _complain(done: Submitted) -> None:
    """Say what was not sent.

    Raises:
        PartlyDoneError: some was sent.
        OperationError: nothing was.
    """
    from orchestrator.backends.base import UNREACHABLE
    from orchestrator.backends.slurm.executor import REJECTION_HINT

    kind = PartlyDoneError if done.sent or done.resumed else OperationError
    if done.refused:
        said = dict.fromkeys(receipt.message for receipt in done.refused)
        if all(receipt.reason == UNREACHABLE for receipt in done.refused):
            raise kind(
                f"there is no Slurm to be reached from here: {counted(len(done.refused), 'run')} not sent",
                why="; ".join(said),
                hint="submit on a login node of the cluster; orchestrate submit --local takes this machine",
            )
        raise kind(f"refused by Slurm: {counted(len(done.refused), 'run')}", why="; ".join(said), hint=REJECTION_HINT)
    if done.in_doubt:
        raise kind(
            f"{counted(done.in_doubt, 'run')}: Slurm did not say whether it took them",
            why="it timed out, or cannot be reached",
            hint="nothing is sent twice: orchestrate submit or status looks for them in the queue by name",
        )


def _wait(
    workspace: Workspace,
    run_ids: Sequence[str],
    command: str,
    shepherd: Shepherd | None = None,
    *,
    recover: bool,
    num_succeeded: int = 0,
) -> None:
    """Wait for runs; ``num_succeeded``: how many had succeeded before, for the exit code."""
    from orchestrator.cli import waiting

    ended = waiting.wait(workspace, run_ids, command, shepherd, recover=recover)
    bad = sum(count for state, count in ended.items() if state.ended_badly)
    if bad:
        raise typer.Exit(1 if bad == ended.total() + num_succeeded else 3)
