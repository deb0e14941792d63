"""Recovery at work: runs that ended without a result are sent again where their class and its bound allow it.

Acts only while a command of ours runs, and through the same ``send`` as ``submit`` and ``retry``: it may be killed
anywhere, and two that act at once send each run once. What has no room now is tried again by the next command.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backends.slurm import queue_choice
from orchestrator.backends.slurm.records import ClusterFolder, ClusterLimits
from orchestrator.cluster.resources import LOCAL
from orchestrator.cluster.sbatch_options import MemStyle
from orchestrator.submission import submitter
from orchestrator.tracking import tracker
from orchestrator.tracking.assess import Assessment
from orchestrator.tracking.recovery import Decision, RecoveryAction, no_node_left
from orchestrator.units import format_time_limit
from workloads.contract import RecoveryRecord, ResourceShape, RunSpec, State
from workloads.files.json_file import write_bytes
from workloads.files.run_dir import RunDir

if TYPE_CHECKING:
    from orchestrator.workspace import Workspace

_MAY_COME_BACK = frozenset({State.LOST, State.NODE_FAIL, State.PREEMPTED})
"""States in which a scheduler might still start the old attempt's job again."""

_NO_NODE = "node configuration is not available"
"""In Slurm's words of a job that fits no node, be it busy or not."""


def recover(workspace: Workspace, due: Sequence[Assessment], say: Callable[[str], None]) -> bool:
    """Send runs again as their assessments decide; whether any was tried.

    Args:
        workspace: the files of this invocation.
        due: all of them with a decision that sends.
        say: told what was done, and what could not be.
    """
    by_target: dict[str, list[Assessment]] = {}
    for assessment in due:
        by_target.setdefault(assessment.newest.target, []).append(assessment)
    tried = [_recover(workspace, target, assessments, say) for target, assessments in by_target.items()]
    return any(tried)


def _recover(workspace: Workspace, target: str, due: Sequence[Assessment], say: Callable[[str], None]) -> bool:
    executor = tracker.find_executor(target, workspace.runs)
    if executor is None or (target != LOCAL and shutil.which("sbatch") is None):
        return False
    room = executor.capacity()
    due = due if room is None else due[:room]
    folder = ClusterFolder(workspace.runs, target)
    site = folder.site()
    asked: dict[str, str] = {}
    wanted: list[tuple[RunSpec, ResourceShape]] = []
    records: dict[str, RecoveryRecord] = {}
    by_id = {assessment.newest.run_id: assessment for assessment in due}
    for run_id, assessment in by_id.items():
        spec = _spec(workspace.runs, run_id, say)
        if spec is None:
            continue
        decision, newest = assessment.decision, assessment.newest
        assert decision.failure is not None, "a run is resubmitted after a failure"
        limits = replace(spec.execution, time_limit_s=decision.time_limit_s, mem_bytes=decision.mem_bytes)
        shape = changed(newest.shape, decision, site)
        if decision.action is RecoveryAction.EXCLUDE_NODE and (refusal := _no_node(folder, shape, asked)):
            why = no_node_left(decision.failure, decision.excluded, refusal)
            write_bytes(tracker.attempt_dir(workspace.runs, newest).create().held, why.encode())
            say(f"{newest.label}: {newest.state.value}; not sent again: {why}")
            continue
        wanted.append((replace(spec, execution=limits), shape))
        records[run_id] = RecoveryRecord(
            failure=decision.failure,
            action=decision.action,
            attempt=newest.attempt,
            number=decision.number,
            bound=decision.bound,
            changes=decision.changes,
            cause=newest.message,
        )
    if not wanted:
        return any(asked.values())
    doubtful = [by_id[spec.run_id].newest for spec, _ in wanted if by_id[spec.run_id].newest.state in _MAY_COME_BACK]
    executor.supersede([(tracker.attempt_dir(workspace.runs, record), record.token or "") for record in doubtful])
    newest_known = {run_id: assessment.newest.attempt for run_id, assessment in by_id.items()}
    done = submitter.send(workspace, wanted, target, newest_known=newest_known, recoveries=records)
    for sent in done.sent:
        old = by_id[sent.run_id].newest
        say(f"{old.label}: {old.state.value}; {records[sent.run_id].message}, as attempt {sent.attempt}")
    for refused in done.refused:
        say(f"recovery was refused: {refused.message}")
    return True


def _no_node(folder: ClusterFolder, shape: ResourceShape, asked: dict[str, str]) -> str:
    """What Slurm says where no node is left for a shape, asked once for each; empty where it takes it, or says else."""
    key = shape.key()
    if key not in asked:
        given = [f"--{name}={value}" for name, value in shape.arguments.items()]
        said = queue_choice.estimate(folder.script_file(shape), *given).refusal
        asked[key] = said if _NO_NODE in said else ""
    return asked[key]


def _spec(runs: Path, run_id: str, say: Callable[[str], None]) -> RunSpec | None:
    place = RunDir.of(runs, run_id)
    try:
        return place.read_spec()
    except (OSError, ValueError) as error:
        say(f"run {run_id} cannot be sent again: {place.spec}: {error}")
        return None


def changed(shape: ResourceShape, decision: Decision, site: ClusterLimits | None) -> ResourceShape:
    """The shape of the next attempt. On a cluster it names the script it had, and what ``sbatch`` is told beside it."""
    new = replace(shape, time_limit_s=decision.time_limit_s, mem_bytes=decision.mem_bytes)
    if site is None:
        return new
    arguments = dict(shape.arguments)
    if new.time_limit_s != shape.time_limit_s:
        arguments["time"] = format_time_limit(new.time_limit_s)
    if new.mem_bytes != shape.mem_bytes:
        style = MemStyle(site.nodes.get(shape.node_kind, {}).get("mem_style", MemStyle.NODE))
        arguments |= style.option(new.mem_bytes, gpus=shape.ask_gpus_per_node, cpus=shape.cpus_per_node)
    if decision.excluded:
        arguments["exclude"] = ",".join(decision.excluded)
    return replace(new, arguments=arguments, script=shape.script_key) if arguments else new


def with_all_nodes(shape: ResourceShape) -> ResourceShape:
    """A shape without the nodes that recovery left out, for a run that people send again."""
    arguments = {name: value for name, value in shape.arguments.items() if name != "exclude"}
    return replace(shape, arguments=arguments, script=shape.script if arguments else "")
