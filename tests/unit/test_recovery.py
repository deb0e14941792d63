"""What recovery does about each class of failure: the whole table, its bounds, and what it never does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from orchestrator.cluster.profile import Recovery
from orchestrator.cluster.value_types import WHOLE_NODE
from orchestrator.tracking.recovery import (
    NOT_ACCEPTED,
    Decision,
    FailureClass,
    PastAttempt,
    RecoveryAction,
    ResourceLimits,
    decide,
    failure_of,
)
from orchestrator.units import LONGEST_S, MOST_MEMORY_BYTES
from workloads.contract import State

POLICY = Recovery()
GB = 2**30
HOUR_S = 3600
LIMITS: dict[str, Any] = {"time_limit_s": HOUR_S, "mem_bytes": 4 * GB}
ENDS = {
    FailureClass.TIMEOUT: (State.TIMEOUT, "time_limit"),
    FailureClass.HOST_MEMORY: (State.OUT_OF_MEMORY, "host_memory"),
    FailureClass.DEVICE_MEMORY: (State.OUT_OF_MEMORY, "device_memory"),
    FailureClass.NODE_FAIL: (State.NODE_FAIL, "node_fail"),
    FailureClass.PREEMPTED: (State.PREEMPTED, "preempted"),
    FailureClass.WRONG_HARDWARE: (State.WRONG_HARDWARE, "wrong_hardware"),
    FailureClass.LOST: (State.LOST, "no_sign_of_life"),
    FailureClass.PROGRAM_ERROR: (State.FAILED, "program_error"),
}


def past(failure: FailureClass, resubmitted_for: FailureClass | None = None, **more: Any) -> PastAttempt:
    state, reason = ENDS[failure]
    return PastAttempt(
        state=state, reason=reason, resubmitted_for=resubmitted_for, **{"has_checkpoint": True, "node": "n1", **more}
    )


def decision(failure: FailureClass, *, policy: Recovery = POLICY, retries: int = 0, **limits: Any) -> Decision:
    return decide([past(failure)], policy, ResourceLimits(**LIMITS | limits), retries=retries)


@pytest.mark.parametrize(
    ("failure", "limits", "action", "changes"),
    [
        ("timeout", {}, "raise_time", "a time limit of 0-02:00:00 instead of 0-01:00:00"),
        ("timeout", {"max_time_s": 5400}, "raise_time", "a time limit of 0-01:30:00 instead of 0-01:00:00"),
        # It wrote a checkpoint, and its queue allows no more time: resubmit it unchanged.
        ("timeout", {"max_time_s": HOUR_S}, "resubmit", ""),
        ("timeout", {"max_time_s": 60}, "resubmit", ""),
        ("host_memory", {}, "raise_memory", "8G instead of 4G"),
        ("host_memory", {"max_mem_bytes": 6 * GB}, "raise_memory", "6G instead of 4G"),
        ("host_memory", {"max_mem_bytes": 4 * GB}, "stop", ""),
        ("host_memory", {"mem_bytes": WHOLE_NODE}, "stop", ""),
        ("host_memory", {"mem_bytes": None}, "stop", ""),
        ("host_memory", {"takes_mem": False}, "stop", ""),
        ("host_memory", {"has_nodes": False}, "stop", ""),
        ("device_memory", {}, "stop", ""),
        ("node_fail", {}, "exclude_node", "node n1 excluded"),
        ("wrong_hardware", {}, "exclude_node", "node n1 excluded"),
        ("wrong_hardware", {"has_nodes": False}, "stop", ""),
        ("preempted", {}, "resubmit", ""),
        ("lost", {}, "resubmit", ""),
        ("program_error", {}, "stop", ""),
    ],
)
def test_each_class(failure: str, limits: dict[str, Any], action: str, changes: str) -> None:
    found = decision(FailureClass(failure), **limits)
    assert (found.action, found.changes) == (action, changes)
    assert found.failure == failure
    if found.action.resubmits:
        assert found.number == 1 and f"(1 of {found.bound} for {failure})" in found.message
        assert found.time_limit_s >= HOUR_S and found.mem_bytes == (
            8 * GB if changes.startswith("8G") else 6 * GB if changes.startswith("6G") else 4 * GB
        )
    else:
        assert found.message.startswith("not resubmitted: ") and len(found.why) > 20, "it stops with a hint"


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (decision(FailureClass.DEVICE_MEMORY), "smaller batch_size"),
        (decision(FailureClass.HOST_MEMORY, mem_bytes=None), "set mem, then orchestrate submit"),
        (decision(FailureClass.HOST_MEMORY, takes_mem=False), "accepts no memory request"),
        (decision(FailureClass.HOST_MEMORY, max_mem_bytes=GB), "a node has no more memory"),
        (decision(FailureClass.HOST_MEMORY, has_nodes=False), "this machine's memory was full"),
        (decision(FailureClass.WRONG_HARDWARE, has_nodes=False), "plan again"),
        (decision(FailureClass.PROGRAM_ERROR), "correct the program, then orchestrate retry"),
        (decision(FailureClass.WRONG_HARDWARE, policy=Recovery(wrong_hardware=0)), "file, then orchestrate submit"),
        (decision(FailureClass.TIMEOUT, policy=Recovery(timeout=0)), "raise time_limit, then orchestrate submit"),
        *(
            (decide([PastAttempt(state=State.FAILED, reason=reason)], POLICY, ResourceLimits(**LIMITS)), hint)
            for reason, hint in [
                ("prologue", "correct prologue in the cluster file, then orchestrate submit"),
                ("interpreter", "correct python in the cluster file, then orchestrate submit"),
                ("launcher", "correct slurm_bin or launcher in the cluster file, then orchestrate submit"),
                ("input", "correct what its message names in the experiment file, then orchestrate submit"),
                ("dataset", "orchestrate data check and data prepare, then orchestrate retry"),
            ]
        ),
        (
            decide([past(FailureClass.TIMEOUT, has_checkpoint=False)], POLICY, ResourceLimits(**LIMITS)),
            "0-01:00:00; raise time_limit or lower checkpoint_every, then orchestrate submit",
        ),
    ],
)
def test_why_it_stops_and_what_to_do(failure: Decision, text: str) -> None:
    assert failure.action is RecoveryAction.STOP and text in failure.message


@pytest.mark.parametrize("failure", [f for f in FailureClass if f is not FailureClass.DEVICE_MEMORY])
def test_each_class_has_a_bound_of_its_own(failure: FailureClass) -> None:
    """Exactly as often as the bound, then never; failures of other classes in between have their own counters."""
    names = [name for name in Recovery.model_fields if not name.endswith("_factor")]
    policy = Recovery(**dict.fromkeys(names, 3))
    other = FailureClass.LOST if failure is not FailureClass.LOST else FailureClass.PREEMPTED
    history = [past(failure)]
    resubmitted = 0
    while (found := decide(history, policy, ResourceLimits(**LIMITS), retries=3)).action.resubmits:
        resubmitted += 1
        assert (found.number, found.bound) == (resubmitted, 3)
        history += [past(other, resubmitted_for=failure), past(failure, resubmitted_for=other)]
    assert resubmitted == 3 and found.action is RecoveryAction.STOP and "after 3 of 3" in found.message
    # A person submitted it again: the counter starts again.
    assert decide([*history, past(failure)], policy, ResourceLimits(**LIMITS), retries=3).number == 1


def test_zero_switches_a_class_off() -> None:
    assert decision(FailureClass.PREEMPTED, policy=Recovery(preempted=0)).action is RecoveryAction.STOP
    assert decision(FailureClass.PROGRAM_ERROR, retries=1).action is RecoveryAction.RESUBMIT
    hang = PastAttempt(state=State.FAILED, reason="hang")
    assert decide([hang], POLICY, ResourceLimits(**LIMITS), retries=1).failure is FailureClass.PROGRAM_ERROR


def test_an_unknown_node_is_not_excluded() -> None:
    for failure in (FailureClass.NODE_FAIL, FailureClass.WRONG_HARDWARE):
        found = decide([past(failure, node="")], POLICY, ResourceLimits(**LIMITS, excluded=("n7",)))
        assert (found.action, found.excluded) == (RecoveryAction.RESUBMIT, ("n7",))


def test_excluded_nodes_add_up() -> None:
    found = decision(FailureClass.NODE_FAIL, excluded=("n7", "n1"))
    assert found.excluded == ("n7", "n1")
    assert decision(FailureClass.NODE_FAIL, excluded=("n7",)).excluded == ("n7", "n1")


def test_nothing_is_raised_beyond_the_largest_valid_value() -> None:
    """Also where a site has no limits."""
    most = decision(FailureClass.TIMEOUT, policy=Recovery(time_factor=100.0), time_limit_s=LONGEST_S // 2)
    assert most.time_limit_s == LONGEST_S
    most = decision(FailureClass.HOST_MEMORY, policy=Recovery(mem_factor=100.0), mem_bytes=MOST_MEMORY_BYTES // 2)
    assert most.mem_bytes == MOST_MEMORY_BYTES


def test_a_factor_of_one_raises_nothing() -> None:
    policy = Recovery(time_factor=1.0, mem_factor=1.0)
    assert decision(FailureClass.TIMEOUT, policy=policy).action is RecoveryAction.RESUBMIT
    assert decision(FailureClass.HOST_MEMORY, policy=policy).action is RecoveryAction.RESUBMIT


@pytest.mark.parametrize("state", State)
def test_other_ends_need_no_recovery(state: State) -> None:
    """Live, succeeded and cancelled runs; and rejected ones, unless recovery submitted them."""
    known = failure_of(state, "")
    assert (known is None) == (state.live or state in {State.PLANNED, State.SUCCEEDED, State.CANCELLED})
    if known is None:
        for resubmitted_for in (None, FailureClass.LOST):
            ended = PastAttempt(state=state, resubmitted_for=resubmitted_for)
            assert decide([ended], POLICY, ResourceLimits(**LIMITS)) == Decision(action=RecoveryAction.NONE)
    for reason in NOT_ACCEPTED:
        rejected = PastAttempt(state=State.FAILED, reason=reason)
        assert decide([rejected], POLICY, ResourceLimits(**LIMITS), retries=9).message == ""
        again = PastAttempt(state=State.FAILED, reason=reason, resubmitted_for=FailureClass.HOST_MEMORY)
        assert (
            "rejected; orchestrate submit submits the run as it is planned now"
            in decide([again], POLICY, ResourceLimits(**LIMITS), retries=9).message
        )


def test_rules_of_all_combinations() -> None:
    """Limits never shrink nor exceed the site's, counters never exceed their bound, and recovery always stops."""
    checked = 0
    for failure, cap_s, mem, max_mem, checkpoint, node, takes_mem, has_nodes in itertools.product(
        FailureClass,
        [0, 1800, 5400, 10**6],
        [None, WHOLE_NODE, GB],
        [0, GB, 3 * GB],
        [False, True],
        ["", "n1"],
        [False, True],
        [False, True],
    ):
        limits = ResourceLimits(
            time_limit_s=HOUR_S,
            max_time_s=cap_s,
            mem_bytes=mem,
            max_mem_bytes=max_mem,
            takes_mem=takes_mem,
            has_nodes=has_nodes,
        )
        history = [past(failure, has_checkpoint=checkpoint, node=node)]
        resubmitted = 0
        while (found := decide(history, POLICY, limits, retries=1)).action.resubmits:
            checked += 1
            resubmitted += 1
            assert found.number == resubmitted <= found.bound
            assert HOUR_S <= limits.time_limit_s <= found.time_limit_s
            assert found.time_limit_s <= max(cap_s or found.time_limit_s, HOUR_S)
            assert mem is None or (found.mem_bytes or 0) >= mem
            assert not max_mem or mem in {None, WHOLE_NODE} or (found.mem_bytes or 0) <= max(max_mem, mem)
            assert set(found.excluded) <= {node}
            assert found.action is not RecoveryAction.RAISE_TIME or failure is FailureClass.TIMEOUT
            assert found.action is not RecoveryAction.RAISE_MEMORY or failure is FailureClass.HOST_MEMORY
            limits = ResourceLimits(
                time_limit_s=found.time_limit_s,
                max_time_s=cap_s,
                mem_bytes=found.mem_bytes,
                max_mem_bytes=max_mem,
                takes_mem=takes_mem,
                has_nodes=has_nodes,
                excluded=found.excluded,
            )
            history.append(past(failure, resubmitted_for=failure, has_checkpoint=checkpoint, node=node))
        assert found.action is RecoveryAction.STOP and found.message
    assert checked > 1000
