"""Send failed runs again.

Each gets a new attempt, which goes on from the last checkpoint where there is one. What is sent again by itself
within bounds (see status) counts from here anew.

Example: orchestrate retry --failed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import output, run_names
from orchestrator.cli.options import (
    DatabaseOption,
    RecoverOption,
    RunsOption,
)
from orchestrator.cli.refresh import refreshed
from orchestrator.cli.submit_report import WaitOption, _complain, _sent, _wait
from orchestrator.errors import InputError, OperationError
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace

if TYPE_CHECKING:
    from orchestrator.planning.plan import Plan
    from orchestrator.submission.submitter import SubmitResult
    from orchestrator.tracking.tracker import RunStatus


import os
import socket
from collections.abc import Iterable

from orchestrator.backends.slurm.records import ClusterFolder
from orchestrator.cluster import cluster_file
from orchestrator.config import experiment as experiments
from orchestrator.errors import OrchestrateError
from orchestrator.planning import plan_file
from orchestrator.planning.plan import Plan
from workloads.contract import ResourceShape, RunSpec, Submission

ORDER = 90


def retry(
    names: run_names.RunsArgument = None,
    failed: Annotated[bool, typer.Option("--failed", help="Every run that ended without a result.")] = False,
    wait: WaitOption = False,
    recover: RecoverOption = True,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    run_names.insist(names, failed, "retry", "--failed")
    workspace = Workspace.at(runs=runs, database=database)
    found = refreshed(workspace)
    chosen = (
        [run for run in found if run.state.ended_badly]
        if failed
        else [run_names.one(found, name) for name in names or []]
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
            _wait(workspace, [s.run_id for s in done.submitted], "retry --wait", recover=recover)
    finally:
        _complain(done)


def _send_again(workspace: Workspace, chosen: Sequence[RunStatus]) -> SubmitResult:
    from orchestrator.environment.snapshot import code_digest
    from orchestrator.submission import submitter
    from orchestrator.submission.resubmit import without_exclusions
    from workloads.files.json_file import read_json
    from workloads.files.run_dir import RunDir

    by_target: dict[str, list[tuple[RunSpec, ResourceShape]]] = {}
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
            shape = Submission.from_json(read_json(place.attempt(run.attempt).submission)).shape
        except (OSError, ValueError, AttributeError):
            shape = ResourceShape()
        by_target.setdefault(spec.target, []).append((spec, without_exclusions(shape)))
    say_so(workspace, [spec for wanted in by_target.values() for spec, _ in wanted])
    done = [
        submitter.submit_runs(
            workspace, wanted, target, newest_known={run.run_id: run.attempt for run in chosen}, current_code=True
        )
        for target, wanted in by_target.items()
    ]
    return submitter.SubmitResult(
        submitted=[s for d in done for s in d.submitted],
        resumed=[s for d in done for s in d.resumed],
        skipped=[s for d in done for s in d.skipped],
        backlog=[run_id for d in done for run_id in d.backlog],
        rejected=[r for d in done for r in d.rejected],
        unanswered=sum(d.unanswered for d in done),
    )


def say_so(workspace: Workspace, specs: Iterable[RunSpec]) -> None:
    """Tell that runs to be sent again were planned otherwise since, or that the files of the plan were edited."""
    try:
        plan = plan_file.read(workspace.plan_file)
    except (OSError, ValueError):
        return  # nothing is planned here, so there is nothing to differ from
    sent = {spec.run_id: spec.label for spec in specs if spec.target == plan.target}
    if otherwise := [sent[run_id] for run_id in _planned_otherwise(workspace, plan) if run_id in sent]:
        more = f" and {len(otherwise) - 1} more" if len(otherwise) > 1 else ""
        output.print_message(f"note: planned otherwise since they were sent: {otherwise[0]}{more}; {_ways_on(plan)}")
    elif edited := _edited(plan) if sent else []:
        say = "say" if len(edited) > 1 else "says"
        output.print_message(
            f"note: the {' and the '.join(edited)} {say} otherwise than the last plan; {_ways_on(plan)}"
        )


def _ways_on(plan: Plan) -> str:
    of_then = "time limit and memory" if plan.cluster is None else "time limit, memory and job script"
    return f"retry sends with the {of_then} of then, orchestrate submit with what is planned now"


def _planned_otherwise(workspace: Workspace, plan: Plan) -> list[str]:
    """Run ids whose job script in the plan is not the one that was sent last to its cluster for their shape."""
    folder = ClusterFolder(workspace.runs, plan.target)
    new = {script.shape for script in plan.scripts if folder.script(script.shape) != script.text}
    return [run.cell.run_id for run in plan.runs if run.shape in new]


def _edited(plan: Plan) -> list[str]:
    """Which sources of the plan were edited; a file that is gone or has mistakes is another verb's to tell of."""
    found = []
    try:
        file = plan.experiment_file
        if file is not None and experiments.load(file, plan.sets).digest != plan.digests["experiment"]:
            found.append("experiment file")
    except OrchestrateError:
        pass
    if plan.cluster is None:
        return found
    try:
        named = os.environ.get("ORCHESTRATE_CLUSTER")
        profile = cluster_file.choose(
            local=False, named=Path(named) if named else None, cwd=Path.cwd(), hostname=socket.gethostname()
        )
    except OrchestrateError:
        return found
    if profile is not None and profile.name == plan.target and profile.digest != plan.digests["cluster"]:
        found.append("cluster file")
    return found
