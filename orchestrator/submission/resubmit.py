"""Resubmit runs that ended without a result, as recovery decides.

Happens only while one of our commands runs, and through the same :func:`submitter.submit_runs` as ``submit`` and
``retry``: it may be killed anywhere, and two commands at once resubmit each run once. What the submit limit leaves out
is due again for the next command.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backends.base import Attempt
from orchestrator.backends.slurm import queue_choice
from orchestrator.backends.slurm.records import ClusterFolder, ClusterLimits
from orchestrator.cluster.resources import LOCAL
from orchestrator.cluster.sbatch_options import MemStyle
from orchestrator.submission import submitter
from orchestrator.tracking import tracker
from orchestrator.tracking.assess import Assessment
from orchestrator.tracking.recovery import Decision, RecoveryAction, no_node_left
from orchestrator.units import format_time_limit
from workloads.contract import RecoveryRecord, ResourceShape, State
from workloads.contract.flat import flat, from_flat
from workloads.files.json_file import write_bytes
from workloads.files.run_dir import RunDir

if TYPE_CHECKING:
    from orchestrator.workspace import Workspace

_MAY_RESTART = frozenset({State.LOST, State.NODE_FAIL, State.PREEMPTED})
"""States after which Slurm may start the same job again (``sbatch --requeue``, JobRequeue in ``slurm.conf``)."""

_NO_NODE = "node configuration is not available"
"""Slurm's ESLURM_REQUESTED_NODE_CONFIG_UNAVAILABLE: no node fits the job, whether busy or not."""


def recover(workspace: Workspace, due: Sequence[Assessment], report: Callable[[str], None]) -> bool:
    """Resubmit what is due; return whether any was tried. ``report`` gets a sentence for each, also for what failed."""
    by_target: dict[str, list[Assessment]] = {}
    for assessment in due:
        by_target.setdefault(assessment.newest.target, []).append(assessment)
    tried = [_recover(workspace, target, assessments, report) for target, assessments in by_target.items()]
    return any(tried)


def _recover(workspace: Workspace, target: str, due: Sequence[Assessment], report: Callable[[str], None]) -> bool:
    runs = workspace.runs
    executor = tracker.find_executor(target, runs)
    if executor is None or (target != LOCAL and shutil.which("sbatch") is None):
        return False
    by_id = {assessment.newest.run_id: assessment for assessment in due[: executor.capacity()]}
    wanted, rejected = _prepare(runs, target, by_id, report)
    if not wanted:
        return rejected
    newest = [by_id[spec.run_id].newest for spec, _ in wanted]
    executor.supersede([Attempt.of(runs, record) for record in newest if record.state in _MAY_RESTART])
    records = {
        run_id: from_flat(RecoveryRecord, {**flat(a.decision), "attempt": a.newest.attempt, "cause": a.newest.message})
        for run_id, a in by_id.items()
    }
    known = {run_id: assessment.newest.attempt for run_id, assessment in by_id.items()}
    result = submitter.submit_runs(workspace, wanted, target, newest_known=known, recoveries=records)
    for attempt in result.submitted:
        old = by_id[attempt.run_id].newest
        report(f"{old.label}: {old.state.value}; {records[attempt.run_id].message}, as attempt {attempt.attempt}")
    for receipt in result.rejected:
        report(f"resubmission was rejected: {receipt.message}")
    return True


def _prepare(
    runs: Path, target: str, by_id: dict[str, Assessment], report: Callable[[str], None]
) -> tuple[list[submitter.PlacedRun], bool]:
    """Return the runs to resubmit with their new limits and shapes, and whether Slurm has no node left for any."""
    folder = ClusterFolder(runs, target)
    limits = folder.limits()

    @cache
    def no_node(shape: ResourceShape) -> str:
        """Slurm's message where no node is left for a shape; empty where there are nodes."""
        arguments = [f"--{name}={value}" for name, value in shape.arguments.items()]
        rejection = queue_choice.estimate(folder.script_file(shape), *arguments).rejection
        return rejection if _NO_NODE in rejection else ""

    wanted, rejected = [], False
    for run_id, assessment in by_id.items():
        decision, newest, run = assessment.decision, assessment.newest, RunDir.of(runs, run_id)
        try:
            spec = run.read_spec()
        except (OSError, ValueError) as error:
            report(f"run {run_id} cannot be resubmitted: {run.spec}: {error}")
            continue
        shape = next_shape(newest.shape, decision, limits)
        if decision.action is RecoveryAction.EXCLUDE_NODE and (rejection := no_node(shape)):
            rejected = True
            assert decision.failure is not None, "a node is excluded because of a failure"
            why = no_node_left(decision.failure, decision.excluded, rejection)
            write_bytes(run.attempt(newest.attempt).create().held, why.encode())
            report(f"{newest.label}: {newest.state.value}; not resubmitted: {why}")
            continue
        execution = replace(spec.execution, time_limit_s=decision.time_limit_s, mem_bytes=decision.mem_bytes)
        wanted.append((replace(spec, execution=execution), shape))
    return wanted, rejected


def next_shape(shape: ResourceShape, decision: Decision, limits: ClusterLimits | None) -> ResourceShape:
    """The shape of the next attempt.

    On a cluster it keeps the planned script and changes it by arguments of ``sbatch``, which win over its lines.
    ``limits`` is None for this machine.
    """
    new = replace(shape, time_limit_s=decision.time_limit_s, mem_bytes=decision.mem_bytes)
    if limits is None:
        return new
    arguments = dict(shape.arguments)
    if new.time_limit_s != shape.time_limit_s:
        arguments["time"] = format_time_limit(new.time_limit_s)
    if new.mem_bytes != shape.mem_bytes:
        style = MemStyle(limits.nodes.get(shape.node_kind, {}).get("mem_style", MemStyle.NODE))
        arguments |= style.option(new.mem_bytes, gpus=shape.ask_gpus_per_node, cpus=shape.cpus_per_node)
    if decision.excluded:
        arguments["exclude"] = ",".join(decision.excluded)
    return replace(new, arguments=arguments, script=shape.script_key) if arguments else new


def without_exclusions(shape: ResourceShape) -> ResourceShape:
    """A shape without the nodes that recovery excluded, for a run that a person retries."""
    arguments = {name: value for name, value in shape.arguments.items() if name != "exclude"}
    return replace(shape, arguments=arguments, script=shape.script if arguments else "")
