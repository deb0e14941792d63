"""The verbs submit, status, logs, cancel and retry: sending runs, and looking after those that are sent."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import output
from orchestrator.cli.completion import run_names
from orchestrator.cli.refreshing import bring_up_to_date, refreshed
from orchestrator.cli.workspace import (
    DEFAULT_DATABASE,
    DEFAULT_EXPERIMENT,
    DEFAULT_RUNS,
    ClusterOption,
    DatabaseOption,
    DataOption,
    ExperimentOption,
    LocalOption,
    RecoverOption,
    RunsOption,
    SetOption,
    Workspace,
)
from orchestrator.errors import InputError, OperationError, PartlyDoneError
from orchestrator.quantities import counted
from orchestrator.sbatch import QueueChoice

if TYPE_CHECKING:
    from orchestrator.cli.waiting import Shepherd
    from orchestrator.plan import Plan
    from orchestrator.submitter import Submitted
    from orchestrator.tracker import RunStatus

app = typer.Typer()

_NAMED = 10
"""How many runs an error lists."""

RunArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...", help="Start of a run id, or a label.", show_default=False, autocompletion=run_names
    ),
]
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
    exit code is 0 when all runs succeeded, 3 when some did, 1 when none did.

    Example: orchestrate submit --local --wait
    """
    from orchestrator import planner, submitter
    from orchestrator.plan import Action

    workspace = Workspace.at(runs=runs, database=database, data_root=data, experiment=experiment)
    if recover:
        # What recovery sends goes on from where it was, with more; what it does not send is new to the plan.
        refreshed(workspace, recover=True)
    newest: dict[str, int] = {}

    def planned() -> Plan:
        # Read before the plan is made: who sends a run in between has it, and we leave it out.
        newest.clear()
        newest.update(_newest_attempts(workspace))
        plan = planner.current(workspace, local=local, cluster=cluster, sets=sets or [])
        return plan if queue is None else _with_queue(plan, queue)

    def send(plan: Plan, only: Collection[str] | None = None, snapshot: str = "") -> Submitted:
        return submitter.submit(
            workspace,
            plan,
            stale=stale,
            newest_known=newest,
            sets=sets or [],
            snapshot=snapshot,
            only=only,
            max_gpu_hours=max_gpu_hours,
        )

    first = submitter.Submitted()
    if canary:
        from orchestrator.cli import canaries

        first = canaries.prove(workspace, planned, send, stale=stale, recover=recover)
        _complain(first)
    plan = planned()
    if plan.site is not None:
        _tell_of_other_folders(workspace, {run.cell.run_id: run.cell.label for run in plan.to_send(stale=stale)})
    done = send(plan, snapshot=first.snapshot)
    done = replace(done, sent=[*first.sent, *done.sent], resumed=[*first.resumed, *done.resumed])
    under_way = [run.cell.run_id for run in plan.runs if run.action is Action.RUNNING]
    if json:
        output.facts({**asdict(done), "target": plan.target})
    else:
        counts = plan.counts()
        counts.pop(Action.NEW, None)
        again = Action.FAILED
        rest = [f"{count} {action.value}{' before' * (action is again)}" for action, count in counts.items()]
        rest += [f"{len(plan.excluded)} excluded"] if plan.excluded else []
        typer.echo(_sent(done, plan.target) + (f" ({', '.join(rest)})" if rest else ""))
        if done.sent and not (wait or watch):
            output.talk("they go on by themselves; orchestrate status shows them")
    if not plan.runs:
        reasons = list(dict.fromkeys(f"{excluded.rule}: {excluded.why}" for excluded in plan.excluded))
        output.talk(f"note: every cell is excluded: {'; '.join(reasons[:_NAMED])}; orchestrate plan shows all")
    run_ids = [*(s.run_id for s in (*done.sent, *done.resumed)), *done.skipped, *under_way]
    if watch:
        from orchestrator.cli.waiting import Shepherd

        shepherd = Shepherd(workspace, plan, done, stale=stale, newest_known=newest)
        run_ids += done.held
    try:
        if watch or wait:
            command = "submit --watch" if watch else "submit --wait"
            _wait(workspace, run_ids, command, shepherd if watch else None, recover=recover)
    finally:
        _complain(shepherd.done if watch else done)


@app.command()
def status(
    recover: RecoverOption = True,
    json: output.JsonOption = False,
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002 (the option's name)
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Show the state of every run and why.

    Also brings the database up to date, finishes a submit that was interrupted, starts the queue again when it is gone
    and runs wait, and sends runs again that ended for no fault of theirs, as [cluster.NAME.recovery] says.

    Example: orchestrate status --json
    """
    workspace = Workspace.at(runs=runs, database=database)
    style = output.chosen(format, json)
    rows = [_row(run) for run in refreshed(workspace, recover=recover)]
    if not rows and style is output.Format.TABLE:
        output.talk("no runs yet; next: orchestrate submit")
        return
    columns = list(_row_keys()) if style.for_machines else _status_columns()
    output.rows(rows, columns, style)


@app.command()
def logs(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="Start of a run id, or a label.", show_default=False, autocompletion=run_names
        ),
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    rank: Annotated[int, typer.Option("--rank", "-r", min=0, help="Which rank.")] = 0,
    every: Annotated[bool, typer.Option("--all", help="Every rank.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Standard error only.")] = False,
    stdout: Annotated[bool, typer.Option("--stdout", help="Standard output only.")] = False,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Which attempt; the newest.")] = None,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Show what a run printed.

    Example: orchestrate logs cnn-eager --follow
    """
    from orchestrator import tracker
    from orchestrator.cli import following
    from workloads.rundir import RunDir

    workspace = Workspace.at(runs=runs, database=database)
    chosen = _one(refreshed(workspace), run)
    number = attempt or chosen.attempt
    place = RunDir.of(workspace.runs, chosen.run_id).attempt(number)
    # The newest one gets its folder when its job starts.
    if number != chosen.attempt and not place.path.is_dir():
        raise InputError(f"run {chosen.run_id} has no attempt {number}", hint=f"its newest is {chosen.attempt}")
    job_id = chosen.job_id if number == chosen.attempt else tracker.job_id(place)
    wanted = following.Wanted(rank=None if every else rank, stdout=stdout or not stderr, stderr=stderr or not stdout)
    shown = following.show(place, job_id, wanted, follow=follow)
    if not shown:
        why = f"it is {chosen.state.value}" + (f": {chosen.message or chosen.reason}" if chosen.reason else "")
        hint = "" if chosen.state.live or number == 1 else f"orchestrate logs {run} --attempt {number - 1}"
        raise OperationError(f"run {chosen.run_id} attempt {number} has printed nothing so far", why=why, hint=hint)


@app.command()
def cancel(
    names: RunArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Every run that waits or runs.")] = False,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Stop runs.

    What waits is taken out of the queue, what runs is ended. A run that has ended stays as it is, and is not sent again
    by itself. Checkpoints stay: orchestrate retry goes on from them.

    Example: orchestrate cancel --all
    """
    _need_runs(names, every, "cancel", "--all")
    workspace = Workspace.at(runs=runs, database=database)
    found = refreshed(workspace)
    chosen = found if every else [_one(found, name) for name in names or []]
    live = [run for run in chosen if run.state.live]
    _hold(workspace, chosen)
    for run in chosen:
        if not run.state.live and not every:
            output.talk(f"{run.run_id} {run.label}: {run.state.value} already")
    left = _cancel(workspace, live)
    ending = [run for run in refreshed(workspace) if run.run_id in {r.run_id for r in live} and run.state.live]
    typer.echo(f"{counted(len(live) - len(left), 'run')} cancelled")
    if ending and not left:
        output.talk(f"{len(ending)} of them are being ended by Slurm; orchestrate status shows when they are gone")
    if left:
        raise OperationError(
            f"not ended yet: {counted(len(left), 'run')}, {_list(left)}",
            why="they got SIGKILL and are still there",
            hint="orchestrate status shows when they are gone",
        )


@app.command()
def retry(
    names: RunArgument = None,
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
    _need_runs(names, failed, "retry", "--failed")
    workspace = Workspace.at(runs=runs, database=database)
    found = refreshed(workspace)
    chosen = [run for run in found if run.state.ended_badly] if failed else [_one(found, name) for name in names or []]
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


def _tell_of_other_folders(workspace: Workspace, labels: Mapping[str, str]) -> None:
    from orchestrator.executors.slurm_elsewhere import queued_elsewhere

    found = queued_elsewhere(workspace.runs, labels) if labels else {}
    for folder, run_ids in found.items():
        output.talk(
            f"note: sent from {folder} too, and not ended: {len(run_ids)} of these runs, such as "
            f"{labels[run_ids[0]]}; each is carried out twice: cancel one, or share a folder with --runs"
        )


def _with_queue(plan: Plan, choice: QueueChoice) -> Plan:
    if plan.site is None:
        raise InputError("--queue chooses among the queues of a cluster, and these runs go to this machine")
    return replace(plan, site=replace(plan.site, queue_choice=choice.value))


def _newest_attempts(workspace: Workspace) -> dict[str, int]:
    if "://" not in workspace.database and not Path(workspace.database).exists():
        return {}
    from db.engine import open_store
    from db.queries import run_states

    with open_store(workspace.database) as store:
        return {run_id: record.attempt for run_id, record in run_states(store).items()}


def _one(found: Sequence[RunStatus], name: str) -> RunStatus:
    """The run that a name means: a run id or its start, else a label, else a part of one.

    Raises:
        InputError: none, or several; lists them.
    """
    ways = (
        [run for run in found if name and run.run_id.startswith(name)],
        [run for run in found if run.label == name],
        [run for run in found if name and name in run.label],
    )
    matches = next((way for way in ways if way), [])
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise InputError(f"no run is called {name!r}", hint="orchestrate status lists run ids and labels")
    raise InputError(
        f"{name!r} is the name of {len(matches)} runs", why=_list(matches), hint="give more of the run id or the label"
    )


def _list(found: Sequence[RunStatus]) -> str:
    more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(f"{run.run_id} ({run.label})" for run in found[:_NAMED]) + more


def _need_runs(names: Sequence[str] | None, every: bool, verb: str, option: str) -> None:
    if bool(names) == every:
        raise InputError(
            f"{verb} which runs?" if not names else f"runs are named, and {option} is given too",
            hint=f"orchestrate {verb} RUN, or orchestrate {verb} {option}",
        )


def _cancel(workspace: Workspace, live: Sequence[RunStatus]) -> list[RunStatus]:
    """Ask for the end of runs and wait for it; those that have not ended by then."""
    import time

    from db.engine import open_store
    from orchestrator import tracker
    from orchestrator.executors.endings import Exit
    from workloads.rundir import RunDir

    places = {run.run_id: RunDir.of(workspace.runs, run.run_id).attempt(run.attempt) for run in live}
    with open_store(workspace.database) as store:
        from db.submissions import live as live_attempts

        tokens = {record.run_id: record.token or "" for record in live_attempts(store)}
        left: list[RunStatus] = []
        for target in sorted({run.target or "" for run in live}):
            carrier = tracker.executor(target, workspace.runs)
            if carrier is None:
                raise OperationError(f"this version cannot cancel jobs of {target}", hint="scancel the job id")
            meant = [run for run in live if run.target == target and run.run_id in tokens]
            carrier.cancel([(places[run.run_id], tokens[run.run_id]) for run in meant])
            deadline = time.monotonic() + carrier.cancel_wait_s
            while meant and time.monotonic() < deadline:
                meant = [run for run in meant if Exit.read(places[run.run_id]) is None]
                time.sleep(0.1 if meant else 0)
            left += meant if carrier.cancel_wait_s else []
        bring_up_to_date(store, workspace.runs, fresh=True)
    return left


def _hold(workspace: Workspace, chosen: Sequence[RunStatus]) -> None:
    """See to it that what has ended is not sent again by itself."""
    from workloads.rundir import RunDir

    due = [run for run in chosen if run.comes_again]
    for run in due:
        RunDir.of(workspace.runs, run.run_id).attempt(run.attempt).held.touch()
    if due:
        output.talk(f"{counted(len(due), 'run')} that had ended will not be sent again")


def _send_again(workspace: Workspace, chosen: Sequence[RunStatus]) -> Submitted:
    from orchestrator import submitter
    from orchestrator.cli import outdated
    from orchestrator.shepherd import with_all_nodes
    from workloads.provenance import code_digest
    from workloads.rundir import RunDir, read_json

    now = code_digest()
    by_target: dict[str, list[tuple[Any, Mapping[str, Any]]]] = {}
    for run in chosen:
        place = RunDir.of(workspace.runs, run.run_id)
        try:
            spec = replace(place.read_spec(), code_digest=now)
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
    from orchestrator.executors.slurm import REFUSAL_HINT

    kind = PartlyDoneError if done.sent or done.resumed else OperationError
    if done.refused:
        said = dict.fromkeys(receipt.message for receipt in done.refused)
        raise kind(f"refused by Slurm: {counted(len(done.refused), 'run')}", why="; ".join(said), hint=REFUSAL_HINT)
    if done.in_doubt:
        raise kind(
            f"{counted(done.in_doubt, 'run')}: Slurm did not say whether it took them",
            why="it timed out, or cannot be reached",
            hint="nothing is sent twice: orchestrate submit or status looks for them in the queue by name",
        )


def _wait(
    workspace: Workspace, run_ids: Sequence[str], command: str, shepherd: Shepherd | None = None, *, recover: bool
) -> None:
    from orchestrator.cli import waiting

    ended = waiting.wait(workspace, run_ids, command, shepherd, recover=recover)
    bad = sum(count for state, count in ended.items() if state.ended_badly)
    if bad:
        raise typer.Exit(1 if bad == ended.total() else 3)


def _row(run: RunStatus) -> dict[str, Any]:
    row = {name: getattr(run, name) for name in run.__dataclass_fields__ if name != "progress"}
    return {**row, "state": run.state.value, **asdict(run.progress)}


def _row_keys() -> Iterator[str]:
    from orchestrator.tracker import Progress, RunStatus

    yield from (name for name in RunStatus.__dataclass_fields__ if name != "progress")
    yield from Progress.__dataclass_fields__


def _reason(row: Mapping[str, Any]) -> str:
    return "; ".join(filter(None, (row["message"] or row["reason"], row["recovery_message"])))


def _status_columns() -> list[str | output.Column]:
    return [
        "run_id",
        "label",
        output.Column("state"),
        output.Column("reason", text=_reason, below=1),
        output.Column("attempt", below=2),
        output.Column("epoch", text=lambda row: f"{row['epoch']}/{row['epochs']}" if row["epochs"] else "", below=2),
        output.Column("samples_per_s", below=2),
        output.Column("silent_s", "age [s]", below=2),
    ]
