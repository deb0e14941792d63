"""Slurm's words, and the table from an observation to a status: row by row, and what holds in all combinations."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import pytest

from orchestrator.backends.base import SILENCE_S, Status
from orchestrator.backends.exit_status import RankFailure
from orchestrator.backends.slurm.observe import SlurmObservation
from orchestrator.backends.slurm.query import TaskRecord
from orchestrator.backends.slurm.states import (
    Phase,
    base_state,
    cancelled_by,
    describe_reason,
    parse_indices,
    parse_rank_codes,
    phase_of,
)
from orchestrator.backends.slurm.status import (
    ABSENCE_GRACE_S,
    FINISH_GRACE_S,
    REQUEUE_GRACE_S,
    TASK_GRACE_S,
    status_of,
)
from workloads.contract import State

TASK_FIELDS = {f.name for f in fields(TaskRecord)} - {"out_of_memory"}

SUCCESS = Status(State.SUCCEEDED)
FAILURE = Status(State.FAILED, "program_error", "rank 0: boom")
BOOM = RankFailure(1, 0.0, "program_error", "boom")
ENDED = {"phase": Phase.ENDED, "started": True}
ABSENT = {"phase": Phase.ABSENT}


def decide(**observed: Any) -> Status:
    """Return the status of an observation; fields of the task's record are given with the others."""
    task = {name: observed.pop(name) for name in TASK_FIELDS & observed.keys()}
    given = {"recorded": State.PENDING, "phase": Phase.UNKNOWN, "task": TaskRecord(**task)}
    return status_of(SlurmObservation(**{**given, **observed}))


@pytest.mark.parametrize(
    ("observed", "state", "reason"),
    [
        # A result or exit.json decides.
        ({"result": SUCCESS, **ENDED, "state": "FAILED"}, State.SUCCEEDED, ""),
        ({"result": SUCCESS, **ABSENT}, State.SUCCEEDED, ""),
        ({"exit": Status(State.TIMEOUT, "time_limit"), "phase": Phase.ACTIVE}, State.TIMEOUT, "time_limit"),
        # An interrupted submit, and one at work.
        ({"recorded": State.SUBMITTING, "submitted": False}, State.SUBMITTING, "interrupted"),
        ({"recorded": State.SUBMITTING, "submitted": False, "submit_host": ""}, State.SUBMITTING, "submitting"),
        # Slurm was not queried or did not answer: the recorded state stays.
        ({"recorded": State.RUNNING}, State.RUNNING, ""),
        ({"recorded": State.PENDING}, State.PENDING, "queued"),
        ({"recorded": State.SUBMITTING}, State.PENDING, "queued"),
        ({"recorded": State.PENDING, "started": True}, State.RUNNING, ""),
        ({"recorded": State.RUNNING, "result": FAILURE}, State.FAILED, "program_error"),
        # Waiting.
        ({"phase": Phase.WAITING, "state": "PENDING", "reason": "Priority"}, State.PENDING, "Priority"),
        ({"phase": Phase.WAITING, "started": True, "reason": "BeginTime"}, State.PENDING, "requeued"),
        ({"phase": Phase.WAITING, "started": True, "started_since_query": True}, State.RUNNING, ""),
        ({"phase": Phase.WAITING, "cancelling": True}, State.PENDING, "cancelling"),
        # Active.
        ({"phase": Phase.ACTIVE, "state": "RUNNING"}, State.RUNNING, ""),
        ({"phase": Phase.ACTIVE, "state": "COMPLETING", "result": FAILURE}, State.RUNNING, ""),
        ({"phase": Phase.ACTIVE, "state": "CONFIGURING"}, State.PENDING, "starting"),
        ({"phase": Phase.ACTIVE, "state": "SUSPENDED"}, State.RUNNING, "suspended"),
        ({"phase": Phase.ACTIVE, "silent_s": SILENCE_S + 1}, State.RUNNING, "silent"),
        ({"phase": Phase.ACTIVE, "elapsed_s": SILENCE_S + 1}, State.RUNNING, "not_started"),
        ({"phase": Phase.ACTIVE, "elapsed_s": SILENCE_S + 1, "silent_s": 1.0}, State.RUNNING, ""),
        # Ended.
        ({**ENDED, "state": "COMPLETED"}, State.RUNNING, "finishing"),
        ({**ENDED, "state": "COMPLETED", "ended_s": FINISH_GRACE_S}, State.FAILED, "no_result"),
        ({**ENDED, "state": "COMPLETED", "failure": BOOM}, State.FAILED, "program_error"),
        ({**ENDED, "state": "FAILED", "exit_code": 1, "failure": BOOM}, State.FAILED, "program_error"),
        ({**ENDED, "state": "FAILED", "exit_code": 1, "hung": [0]}, State.FAILED, "hang"),
        ({**ENDED, "state": "FAILED", "exit_code": 3}, State.FAILED, "program_error"),
        ({**ENDED, "state": "FAILED"}, State.FAILED, "program_error"),
        ({**ENDED, "state": "FAILED", "exit_code": 90}, State.FAILED, "prologue"),
        ({**ENDED, "state": "FAILED", "exit_code": 1, "out_of_memory": True}, State.OUT_OF_MEMORY, "host_memory"),
        ({**ENDED, "state": "OUT_OF_ME+"}, State.OUT_OF_MEMORY, "host_memory"),
        ({**ENDED, "state": "TIMEOUT"}, State.TIMEOUT, "time_limit"),
        ({**ENDED, "state": "DEADLINE"}, State.TIMEOUT, "deadline"),
        ({**ENDED, "state": "CANCELLED by 1000"}, State.CANCELLED, "scancel"),
        ({**ENDED, "state": "CANCELLED", "cancelling": True}, State.CANCELLED, "cancelled"),
        ({**ENDED, "state": "NODE_FAIL"}, State.NODE_FAIL, "node_fail"),
        ({**ENDED, "state": "BOOT_FAIL"}, State.NODE_FAIL, "boot_fail"),
        ({**ENDED, "state": "NODE_FAIL", "requeue": True}, State.PENDING, "requeued"),
        ({**ENDED, "state": "NODE_FAIL", "requeue": True, "ended_s": REQUEUE_GRACE_S}, State.NODE_FAIL, "node_fail"),
        ({**ENDED, "state": "PREEMPTED"}, State.PREEMPTED, "preempted"),
        ({**ENDED, "state": "PREEMPTED", "requeue": True}, State.PENDING, "requeued"),
        # Ended by a signal, which Slurm reports as FAILED: at the time limit, or before it.
        (
            {**ENDED, "state": "FAILED", "exit_code": 75, "elapsed_s": 3590, "limit_s": 3600},
            State.TIMEOUT,
            "time_limit",
        ),
        ({**ENDED, "state": "FAILED", "exit_code": 75, "elapsed_s": 60, "limit_s": 3600}, State.PREEMPTED, "signal"),
        ({**ENDED, "state": "FAILED", "exit_code": 75, "interrupted_by": "SIGUSR2"}, State.TIMEOUT, "time_limit"),
        ({**ENDED, "state": "FAILED", "exit_code": 75, "interrupted_by": "SIGTERM"}, State.PREEMPTED, "signal"),
        # Killed by a signal at the time limit, or before it.
        ({**ENDED, "state": "FAILED", "exit_code": -15, "elapsed_s": 60, "limit_s": 60}, State.TIMEOUT, "time_limit"),
        (
            {**ENDED, "state": "FAILED", "exit_code": 143, "rank_codes": [-9], "elapsed_s": 61, "limit_s": 60},
            State.TIMEOUT,
            "time_limit",
        ),
        ({**ENDED, "state": "FAILED", "exit_code": 15, "elapsed_s": 61, "limit_s": 60}, State.TIMEOUT, "time_limit"),
        ({**ENDED, "state": "FAILED", "exit_code": -15, "elapsed_s": 50, "limit_s": 60}, State.FAILED, "program_error"),
        ({**ENDED, "state": "FAILED", "exit_code": 1, "elapsed_s": 61, "limit_s": 60}, State.FAILED, "program_error"),
        (
            {**ENDED, "state": "FAILED", "exit_code": -9, "elapsed_s": 61, "limit_s": 60, "failure": BOOM},
            State.FAILED,
            "program_error",
        ),
        # One rank failed, and srun ended the others.
        (
            {**ENDED, "state": "FAILED", "exit_code": 75, "interrupted_by": "SIGTERM", "rank_codes": [None, 3]},
            State.FAILED,
            "program_error",
        ),
        # Not listed.
        ({**ABSENT}, State.PENDING, "unlisted"),
        ({**ABSENT, "recorded": State.RUNNING, "started": True}, State.RUNNING, "unlisted"),
        ({**ABSENT, "array_listed": True, "ended_s": TASK_GRACE_S}, State.CANCELLED, "scancel"),
        ({**ABSENT, "array_listed": True}, State.PENDING, "unlisted"),
        ({**ABSENT, "cancelling": True}, State.CANCELLED, "cancelled"),
        ({**ABSENT, "ended_s": ABSENCE_GRACE_S}, State.LOST, "unknown_to_slurm"),
        ({**ABSENT, "ended_s": ABSENCE_GRACE_S, "started": True, "silent_s": 1.0}, State.RUNNING, "unlisted"),
        ({**ABSENT, "ended_s": ABSENCE_GRACE_S, "started": True, "silent_s": SILENCE_S}, State.LOST, "no_sign_of_life"),
        ({**ABSENT, "ended_s": ABSENCE_GRACE_S, "started": True, "failure": BOOM}, State.FAILED, "program_error"),
        ({**ABSENT, "ended_s": ABSENCE_GRACE_S, "rank_codes": [None, -9]}, State.FAILED, "program_error"),
        ({**ABSENT, "ended_s": ABSENCE_GRACE_S, "out_of_memory": True}, State.OUT_OF_MEMORY, "host_memory"),
        (
            {**ABSENT, "ended_s": ABSENCE_GRACE_S, "started": True, "interrupted_by": "SIGUSR2"},
            State.TIMEOUT,
            "time_limit",
        ),
        ({**ABSENT, "ended_s": ABSENCE_GRACE_S, "started": True, "cancelling": True}, State.CANCELLED, "cancelled"),
    ],
)
def test_status_of(observed: dict[str, Any], state: State, reason: str) -> None:
    found = decide(**observed)
    assert (found.state, found.reason) == (state, reason), found


ALL_STATES = [
    *(
        "PENDING",
        "REQUEUED",
        "SPECIAL_EXIT",
        "RUNNING",
        "COMPLETING",
        "SUSPENDED",
        "SIGNALING",
        "RESIZING",
        "STAGE_OUT",
    ),
    *("COMPLETED", "FAILED", "CANCELLED by 0", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "SOMETHING_NEW"),
]


def test_rules_of_all_combinations() -> None:
    """State x result x start x silence x time x intent: each end has a reason, and a success stands."""
    checked = 0
    for state, result, started, silent, ended_s, cancelling, requeue, recorded in itertools.product(
        [*ALL_STATES, None, "unasked"],
        [None, SUCCESS, FAILURE],
        [False, True],
        [None, 1.0, SILENCE_S + 1],
        [0.0, REQUEUE_GRACE_S + 1],
        [False, True],
        [False, True],
        [State.SUBMITTING, State.PENDING, State.RUNNING],
    ):
        phase = {None: Phase.ABSENT, "unasked": Phase.UNKNOWN}.get(state) or phase_of(str(state))
        found = decide(
            recorded=recorded,
            phase=phase,
            state=state if phase not in {Phase.ABSENT, Phase.UNKNOWN} else "",
            result=result,
            started=started,
            silent_s=silent if started else None,
            ended_s=ended_s,
            cancelling=cancelling,
            requeue=requeue,
        )
        checked += 1
        assert found.state is not State.SUBMITTING, "it was submitted"
        assert (found.state is State.SUCCEEDED) == (result is SUCCESS)
        if result is not SUCCESS:
            if phase is Phase.UNKNOWN and result is None:
                assert found.state.live, "a query that failed ends nothing"
            if phase in {Phase.WAITING, Phase.ACTIVE}:
                assert found.state.live, "a job that Slurm lists as live has not ended"
            if not found.state.live:
                assert found.reason, "an end has a reason"
            if phase is Phase.ENDED and ended_s and result is None:
                assert not found.state.live, "a job that ended long ago has ended"
            if found.state is State.LOST:
                assert phase is Phase.ABSENT and ended_s, "only a job that nobody lists for long is lost"
    assert checked == 19 * 3 * 2 * 3 * 2 * 2 * 2 * 3


@pytest.mark.parametrize(
    ("text", "word", "phase"),
    [
        ("CANCELLED by 1000", "CANCELLED", Phase.ENDED),
        ("CANCELLED+", "CANCELLED", Phase.ENDED),
        ("OUT_OF_ME+", "OUT_OF_MEMORY", Phase.ENDED),
        ("NODE_FAIL", "NODE_FAIL", Phase.ENDED),
        ("COMPLETING", "COMPLETING", Phase.ACTIVE),
        ("CONFIGURING", "CONFIGURING", Phase.ACTIVE),
        ("REQUEUE_HOLD", "REQUEUE_HOLD", Phase.WAITING),
        ("INVENTED", "INVENTED", Phase.ACTIVE),
    ],
)
def test_base_state_and_phase(text: str, word: str, phase: Phase) -> None:
    assert (base_state(text), phase_of(text)) == (word, phase)


def test_cancelled_by() -> None:
    assert (cancelled_by("CANCELLED by 1000"), cancelled_by("CANCELLED")) == ("1000", "")
    assert decide(**ENDED, state="CANCELLED by 1000").message == "cancelled by user 1000"


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("3", [3]),
        ("0-3", [0, 1, 2, 3]),
        ("1-9:4%120", [1, 5, 9]),
        ("0,2,7-8%1", [0, 2, 7, 8]),
        ("", []),
        ("N/A", []),
    ],
)
def test_parse_indices(text: str, indices: list[int]) -> None:
    assert parse_indices(text) == indices


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("Priority", "others are ahead"),
        ("ReqNodeNotAvail, UnavailableNodes:sg001", "down or reserved"),
        ("QOSMaxJobsPerUserLimit", "your own limit"),
        ("QOSMaxSubmitJobPerUserLimit", "limit of queued jobs"),
        ("AssocGrpGRES", "your group's limit"),
        ("QOSMaxWallDurationPerJobLimit", "lower time_limit"),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "nodes it needs",
        ),
        ("SomethingNew", "SomethingNew"),
    ],
)
def test_describe_reason(reason: str, text: str) -> None:
    """The sentence keeps Slurm's word, for those who look it up."""
    assert text in describe_reason(reason)
    assert reason.split(",")[0].split(" for ")[0] in describe_reason(reason)


def test_exit_codes_of_the_ranks_that_ended_first() -> None:
    log = (
        "srun: error: n1: task 0: Exited with exit code 75\nsrun: error: n2: tasks 2-3: Killed\n"
        "srun: error: n1: task 1: Exited with exit code 1\n"
    )
    assert parse_rank_codes(log, 4) == [None, None, -9, -9]
