"""The state of a run or of one attempt."""

from __future__ import annotations

from enum import StrEnum

RANK_LOST = "rank_lost"
"""Failure class of a rank that only saw its peer go: whoever saw the whole job end knows more."""


class State(StrEnum):
    """The state of a run or of one attempt; the words that files, tables and JSON use."""

    PLANNED = "planned"
    """Nothing was sent yet."""
    SUBMITTING = "submitting"
    """The intent is recorded, the scheduler's answer is not."""
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
        """Whether work may still be going on, so that nothing new may be sent for this run."""
        return self in {State.SUBMITTING, State.PENDING, State.RUNNING}

    @property
    def ended_badly(self) -> bool:
        """Whether the attempt ended without a result."""
        return not self.live and self not in {State.PLANNED, State.SUCCEEDED}
