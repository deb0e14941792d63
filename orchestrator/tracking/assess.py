"""What is done, and was done, about runs that ended without a result: store and files -> ``tracking.recovery``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.backends.exit_status import Exit
from orchestrator.backends.slurm.records import ClusterFolder, ClusterLimits
from orchestrator.cluster.profile import Recovery
from orchestrator.cluster.resources import LOCAL
from orchestrator.cluster.sbatch_options import MemStyle, QueueChoice
from orchestrator.tracking.recovery import (
    Decision,
    FailureClass,
    Limits,
    PastAttempt,
    RecoveryAction,
    decide,
    failure_of,
    since_last_submit,
)
from workloads.contract import ResourceShape, State
from workloads.files.event_log import read_events
from workloads.files.run_dir import AttemptDir, RunDir

if TYPE_CHECKING:
    from db.connect import Store
    from db.submissions import AttemptRecord

_CANCELLED = "orchestrate cancel asked for that; orchestrate retry sends it from its last checkpoint"


@dataclass(frozen=True, slots=True)
class Assessment:
    """One run that ended without a result, or whose newest attempt was sent by recovery."""

    newest: AttemptRecord
    decision: Decision
    recoveries: int
    """Attempts that were sent by recovery since people last sent the run."""

    @property
    def action(self) -> str:
        """What is to be done, else what was done; empty for nothing."""
        if self.decision.action is not RecoveryAction.NONE:
            return self.decision.action.value
        return self.newest.recovery.action if self.newest.recovery else ""

    @property
    def message(self) -> str:
        """The same in a sentence."""
        return self.decision.text or (self.newest.recovery.message if self.newest.recovery else "")


def assess_runs(store: Store, runs: Path) -> dict[str, Assessment]:
    """By run id, for every run that ended without a result or was sent by recovery."""
    from db.submissions import attempt_histories

    sites: dict[str, ClusterLimits | None] = {LOCAL: None}
    found = {}
    for run_id, records in attempt_histories(store).items():
        newest = records[-1]
        if newest.target not in sites:
            sites[newest.target] = ClusterFolder(runs, newest.target).site()
        site = sites[newest.target]
        history = list(_history(records, runs))
        recoveries = sum(past.resubmitted_for is not None for past in since_last_submit(history))
        known = newest.state.ended_badly and (site is not None or newest.target == LOCAL)
        decision = _decide(history, newest, site, runs) if known else Decision(action=RecoveryAction.NONE)
        found[run_id] = Assessment(newest, decision, recoveries)
    return found


def limits(shape: ResourceShape, time_limit_s: int, site: ClusterLimits | None) -> Limits:
    """What an attempt had, and what its target would give; ``site`` is None for this machine."""
    mem_bytes = shape.mem_bytes
    if site is None:
        return Limits(time_limit_s=time_limit_s, mem_bytes=mem_bytes, takes_mem=False, has_nodes=False)
    nodes = site.nodes.get(shape.node_kind, {})
    caps = nodes.get("max_time_s", {})
    own = caps.get(f"{shape.partition}/{shape.qos}", 0)
    if site.queue_choice == QueueChoice.EARLIEST and caps:
        # Another queue may take it where its own is too short.
        own = max(caps.values()) if all(caps.values()) else 0
    excluded = shape.arguments.get("exclude", site.excluded)
    return Limits(
        time_limit_s=time_limit_s,
        max_time_s=own,
        mem_bytes=mem_bytes,
        max_mem_bytes=nodes.get("mem_bytes", 0),
        takes_mem=nodes.get("mem_style") != MemStyle.NONE,
        excluded=tuple(node for node in excluded.split(",") if node),
    )


def _decide(history: Sequence[PastAttempt], newest: AttemptRecord, site: ClusterLimits | None, runs: Path) -> Decision:
    run = RunDir.of(runs, newest.run_id)
    policy = Recovery() if site is None else Recovery(**_known(site.recovery))
    time_limit_s = newest.time_limit_s or 0
    is_ours = failure_of(newest.state, newest.reason) is FailureClass.PROGRAM_ERROR
    found = decide(history, policy, limits(newest.shape, time_limit_s, site), retries=_retries(run) if is_ours else 0)
    why = run.attempt(newest.attempt).hold_reason() if found.action.resubmits else None
    return found if why is None else Decision(action=RecoveryAction.STOP, why=why or _CANCELLED)


def _known(recovery: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of other versions are passed over."""
    return {k: v for k, v in recovery.items() if k in Recovery.model_fields}


def _retries(run: RunDir) -> int:
    try:
        return run.read_spec().execution.retries
    except (OSError, ValueError):
        return 0


def _history(records: Sequence[AttemptRecord], runs: Path) -> Iterator[PastAttempt]:
    for record in records:
        resubmitted_for = FailureClass(record.recovery.failure) if record.recovery and record.recovery.failure else None
        seen: dict[str, Any] = {}
        if record is records[-1] and record.state.ended_badly:
            seen = _seen(record, RunDir.of(runs, record.run_id).attempt(record.attempt))
        yield PastAttempt(state=record.state, reason=record.reason, resubmitted_for=resubmitted_for, **seen)


def _seen(record: AttemptRecord, attempt: AttemptDir) -> dict[str, Any]:
    """What only the files of an attempt tell, as far as its end makes it matter."""
    if record.state is State.TIMEOUT:
        return {"has_checkpoint": bool(read_events(attempt.events(), 0, "checkpoint")[0])}
    if record.state in {State.NODE_FAIL, State.WRONG_HARDWARE}:
        return {"node": _node_at_fault(attempt, record.shape.ranks)}
    return {}


def _node_at_fault(attempt: AttemptDir, ranks: int) -> str:
    """The node of the rank that complained, else the only one; empty when there were several, or nobody knows."""
    nodes = []
    for rank in range(ranks):
        events, _ = read_events(attempt.events(rank), 0, "start", "error")
        node = next((str(e.get("node", "")) for e in reversed(events) if e["event"] == "start"), "")
        if any(e.get("failure_class") == State.WRONG_HARDWARE for e in events):
            return node
        nodes += [node] if node else []
    if not nodes and (ended := Exit.read(attempt)) is not None and ended.nodes:
        nodes = [ended.nodes]
    several = len(set(nodes)) != 1 or set(nodes[0]) & set("[,")
    return "" if several else nodes[0]
