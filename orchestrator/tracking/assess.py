"""Store and files -> what recovery will do, and did, about each run that ended without a result."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backends.base import Attempt, Status
from orchestrator.backends.slurm.records import ClusterFolder, ClusterLimits
from orchestrator.cluster.profile import Recovery
from orchestrator.cluster.resources import LOCAL
from orchestrator.cluster.sbatch_options import MemStyle, QueueChoice
from orchestrator.tracking.recovery import (
    Decision,
    FailureClass,
    PastAttempt,
    RecoveryAction,
    ResourceLimits,
    decide,
    failure_of,
    since_last_submit,
)
from workloads.contract import ResourceShape, State
from workloads.files.event_log import read_events
from workloads.files.run_dir import AttemptDir, RunDir
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import submissions

if TYPE_CHECKING:
    from db.connect import Store
    from db.submissions import AttemptRecord

_CANCELLED = "it was cancelled; orchestrate retry continues it from its last checkpoint"


@dataclass(frozen=True, slots=True)
class Assessment:
    """One run that ended without a result, or whose newest attempt recovery submitted."""

    newest: AttemptRecord
    decision: Decision
    recoveries: int
    """Attempts that recovery submitted since a person last submitted the run."""

    @property
    def action(self) -> str:
        """What recovery will do, else what it did; empty for nothing."""
        if self.decision.action is not RecoveryAction.NONE:
            return self.decision.action.value
        return self.newest.recovery.action if self.newest.recovery else ""

    @property
    def message(self) -> str:
        """The same in a sentence."""
        return self.decision.message or (self.newest.recovery.message if self.newest.recovery else "")


def assess_runs(store: Store, runs: Path) -> dict[str, Assessment]:
    """Assess, by run id, every run that ended without a result or that recovery submitted."""
    limits_of = cache(lambda target: None if target == LOCAL else ClusterFolder(runs, target).limits())
    found = {}
    for run_id, records in submissions.attempt_histories(store).items():
        newest, cluster = records[-1], limits_of(records[-1].target)
        history = [_past_attempt(record, runs, is_newest=record is newest) for record in records]
        recoveries = sum(past.resubmitted_for is not None for past in since_last_submit(history))
        known = newest.state.ended_badly and (cluster is not None or newest.target == LOCAL)
        decision = _decide(history, newest, cluster, runs) if known else Decision(action=RecoveryAction.NONE)
        found[run_id] = Assessment(newest, decision, recoveries)
    return found


def resource_limits(shape: ResourceShape, time_limit_s: int, cluster: ClusterLimits | None) -> ResourceLimits:
    """Return what an attempt had and what its target allows; ``cluster`` is None for this machine."""
    mem_bytes = shape.mem_bytes
    if cluster is None:
        return ResourceLimits(time_limit_s=time_limit_s, mem_bytes=mem_bytes, takes_mem=False, has_nodes=False)
    nodes = cluster.nodes.get(shape.node_kind, {})
    max_times = nodes.get("max_time_s", {})
    max_time_s = max_times.get(f"{shape.partition}/{shape.qos}", 0)
    if cluster.queue_choice == QueueChoice.EARLIEST and max_times:
        # Slurm may choose another queue, which allows more than the planned one.
        max_time_s = max(max_times.values()) if all(max_times.values()) else 0
    excluded = shape.arguments.get("exclude", cluster.excluded)
    return ResourceLimits(
        time_limit_s=time_limit_s,
        max_time_s=max_time_s,
        mem_bytes=mem_bytes,
        max_mem_bytes=nodes.get("mem_bytes", 0),
        takes_mem=nodes.get("mem_style") != MemStyle.NONE,
        excluded=tuple(node for node in excluded.split(",") if node),
    )


def _decide(
    history: Sequence[PastAttempt], newest: AttemptRecord, cluster: ClusterLimits | None, runs: Path
) -> Decision:
    # Keys of other versions are ignored.
    bounds = {} if cluster is None else {k: v for k, v in cluster.recovery.items() if k in Recovery.model_fields}
    limits = resource_limits(newest.shape, newest.time_limit_s or 0, cluster)
    retries = 0
    if failure_of(newest.state, newest.reason) is FailureClass.PROGRAM_ERROR:
        with contextlib.suppress(OSError, ValueError):
            retries = RunDir.of(runs, newest.run_id).read_spec().execution.retries
    decision = decide(history, Recovery(**bounds), limits, retries=retries)
    why = Attempt.of(runs, newest).directory.hold_reason() if decision.action.resubmits else None
    return decision if why is None else Decision(action=RecoveryAction.STOP, why=why or _CANCELLED)


def _past_attempt(record: AttemptRecord, runs: Path, *, is_newest: bool) -> PastAttempt:
    """Return what recovery needs of an attempt; reads its files only if the decision depends on them."""
    failure = record.recovery.failure if record.recovery else ""
    timed_out = is_newest and record.state is State.TIMEOUT
    lost_node = is_newest and record.state in {State.NODE_FAIL, State.WRONG_HARDWARE}
    directory = Attempt.of(runs, record).directory
    return PastAttempt(
        state=record.state,
        reason=record.reason,
        resubmitted_for=FailureClass(failure) if failure else None,
        has_checkpoint=timed_out and bool(read_events(directory.events(), 0, "checkpoint")[0]),
        node=_node_at_fault(directory, record.shape.ranks) if lost_node else "",
    )


def _node_at_fault(directory: AttemptDir, ranks: int) -> str:
    """Return the node of the rank that recorded the failure, else the only one; empty if there were several or none."""
    nodes = []
    for rank in range(ranks):
        events, _ = read_events(directory.events(rank), 0, "start", "error")
        node = next((str(e.get("node", "")) for e in reversed(events) if e["event"] == "start"), "")
        if any(e.get("failure_class") == State.WRONG_HARDWARE for e in events):
            return node
        nodes += [node] if node else []
    if not nodes and (ended := Status.read_exit(directory)) is not None and ended.nodes:
        nodes = [ended.nodes]
    # Slurm shortens several nodes to a list such as n[1-3].
    has_several = len(set(nodes)) != 1 or set(nodes[0]) & set("[,")
    return "" if has_several else nodes[0]
