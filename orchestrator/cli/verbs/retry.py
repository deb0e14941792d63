"""Retry runs that ended without a result.

Each gets a new attempt, which continues from the last checkpoint if there is one. Recovery counts its own attempts from
here anew (see orchestrate status).

Example: orchestrate retry --failed
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from orchestrator.cli import options, output, run_names, submit_report
from orchestrator.cli.refresh import default_cluster, refresh_runs
from orchestrator.errors import InputError, OperationError, OrchestrateError
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_RUNS, Workspace
from workloads.contract import ResourceShape, RunSpec, Submission
from workloads.files.json_file import read_json
from workloads.files.run_dir import RunDir
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from orchestrator.backends.slurm import records
    from orchestrator.cli import monitor
    from orchestrator.config import experiment as experiments
    from orchestrator.environment import snapshot
    from orchestrator.planning import plan as plans
    from orchestrator.planning import plan_file
    from orchestrator.submission import resubmit, submitter
    from orchestrator.tracking import tracker

ORDER = 90


def retry(
    names: run_names.RunsArgument = None,
    failed: Annotated[bool, typer.Option("--failed", help="Retry every run that ended without a result.")] = False,
    wait: options.WaitOption = False,
    recover: options.RecoverOption = True,
    runs: options.RunsOption = DEFAULT_RUNS,
    database: options.DatabaseOption = DEFAULT_DATABASE,
) -> None:
    run_names.require_selection(names, failed, "retry", "--failed")
    workspace = Workspace.at(runs=runs, database=database)
    chosen = run_names.select(refresh_runs(workspace), names, lambda run: run.state.ended_badly)
    for run in chosen:
        _require_ended_badly(run)
    if not chosen:
        typer.echo("0 runs submitted: none ended without a result")
        return
    result = _submit_again(workspace, chosen)
    typer.echo(submit_report.describe(result))
    try:
        if wait:
            run_ids = [attempt.run_id for attempt in result.submitted]
            submit_report.exit_by_states(monitor.wait(workspace, run_ids, "retry --wait", recover=recover))
    finally:
        submit_report.raise_for_failures(result)


def _require_ended_badly(run: tracker.RunStatus) -> None:
    if run.state.ended_badly:
        return
    if run.reason == "cancelling":
        hint = "it is being cancelled; retry it when orchestrate status shows that it has ended"
    elif run.state.live:
        hint = "it is under way"
    else:
        hint = "orchestrate submit --stale reruns it if it is stale"
    raise InputError(f"run {run.run_id} ({run.label}) is {run.state.value}: nothing to retry", hint=hint)


def _submit_again(workspace: Workspace, chosen: Sequence[tracker.RunStatus]) -> submitter.SubmitResult:
    """Submit new attempts of runs with the current code and with the resources of their newest attempt."""
    by_target: dict[str, list[tuple[RunSpec, ResourceShape]]] = {}
    for run in chosen:
        run_dir = RunDir.of(workspace.runs, run.run_id)
        try:
            spec = run_dir.read_spec()
            spec = replace(spec, code_digest=snapshot.code_digest(spec.train, workspace.runs))
        except (OSError, ValueError) as error:
            what, hint = f"the spec of run {run.run_id} cannot be read", "orchestrate submit writes it again"
            raise OperationError(what, where=str(run_dir.spec), why=str(error), hint=hint) from error
        try:
            shape = Submission.from_json(read_json(run_dir.attempt(run.attempt).submission)).shape
        except (OSError, ValueError, AttributeError):
            shape = ResourceShape()
        by_target.setdefault(spec.target, []).append((spec, resubmit.without_exclusions(shape)))
    _report_changed_plan(workspace, [spec for wanted in by_target.values() for spec, _ in wanted])
    newest_known = {run.run_id: run.attempt for run in chosen}
    done = [
        submitter.submit_runs(workspace, wanted, target, newest_known=newest_known, current_code=True)
        for target, wanted in by_target.items()
    ]
    return submitter.SubmitResult(
        submitted=[attempt for result in done for attempt in result.submitted],
        resumed=[attempt for result in done for attempt in result.resumed],
        skipped=[run_id for result in done for run_id in result.skipped],
        backlog=[run_id for result in done for run_id in result.backlog],
        rejected=[receipt for result in done for receipt in result.rejected],
        unanswered=sum(result.unanswered for result in done),
    )


def _report_changed_plan(workspace: Workspace, specs: Iterable[RunSpec]) -> None:
    """Say that the plan, or a file that it is made from, has changed since these runs were submitted."""
    try:
        plan = plan_file.read(workspace.plan_file)
    except (OSError, ValueError):
        return  # without a plan here, nothing can differ from it
    labels = {spec.run_id: spec.label for spec in specs if spec.target == plan.target}
    old = "time limit and memory" if plan.cluster is None else "time limit, memory and job script"
    ways = f"retry keeps their {old}, orchestrate submit uses what is planned now"
    if changed := [labels[run_id] for run_id in _changed_runs(workspace, plan) if run_id in labels]:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        output.print_message(f"note: the plan of {changed[0]}{more} has changed since the last submit; {ways}")
    elif labels and (files := _changed_files(plan)):
        have = "have" if len(files) > 1 else "has"
        output.print_message(f"note: the {' and the '.join(files)} {have} changed since the last plan; {ways}")


def _changed_runs(workspace: Workspace, plan: plans.Plan) -> list[str]:
    """Return the ids of runs whose planned job script differs from the last one submitted for their shape."""
    folder = records.ClusterFolder(workspace.runs, plan.target)
    changed = {script.shape for script in plan.scripts if folder.script(script.shape) != script.text}
    return [run.cell.run_id for run in plan.runs if run.shape in changed]


def _changed_files(plan: plans.Plan) -> list[str]:
    """Return which files of the plan have changed; one that is gone or has errors is left for ``plan`` to report."""
    found = []
    with contextlib.suppress(OrchestrateError):
        file = plan.experiment_file
        if file is not None and experiments.load(file, plan.sets).digest != plan.digests["experiment"]:
            found.append("experiment file")
    with contextlib.suppress(OrchestrateError):
        profile = default_cluster() if plan.cluster is not None else None
        if profile is not None and profile.name == plan.target and profile.digest != plan.digests["cluster"]:
            found.append("cluster file")
    return found
