"""The state of a run or of one attempt."""

from __future__ import annotations

from enum import StrEnum

RANK_LOST = "rank_lost"
"""Failure class of a rank whose peer vanished: the executor, which sees the whole job, knows more."""


class State(StrEnum):
    """The state of a run or of one attempt, as files, tables and JSON name it."""

    PLANNED = "planned"
    """Not submitted yet."""
    SUBMITTING = "submitting"
    """The intent is recorded, the executor has not answered."""
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    WRONG_HARDWARE = "wrong_hardware"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def live(self) -> bool:
        """Whether the attempt may still run, so that no other may be submitted."""
        return self in {State.SUBMITTING, State.PENDING, State.RUNNING}

    @property
    def ended_badly(self) -> bool:
        """Whether the attempt ended without a result."""
        return not self.live and self not in {State.PLANNED, State.SUCCEEDED}
