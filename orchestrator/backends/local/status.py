"""The pure function from what is observed of a local attempt to its status."""

from __future__ import annotations

from orchestrator.backends.base import CANCELLED, SILENCE_S, Status
from orchestrator.backends.exit_status import final_status, unsubmitted_status
from orchestrator.backends.local.observe import EntryState, LocalObservation, SupervisorState
from workloads.contract import State


def status_of(o: LocalObservation) -> Status:
    """Return the status of an attempt: certain evidence decides first, missing evidence last."""
    if (final := final_status(o)) is not None:
        return final
    if o.supervisor is SupervisorState.ALIVE:
        if o.unreported:
            full = "run ended, but the disk is full and its status could not be saved: free some space"
            return Status(State.RUNNING, "disk_full", full)
        return Status(State.RUNNING, "cancelling" if o.cancelling else "")
    if o.supervisor is not SupervisorState.NOT_STARTED and o.result is not None:
        return o.result
    if o.supervisor in {SupervisorState.KILLED, SupervisorState.REBOOTED}:
        return CANCELLED if o.cancelling else lost_status(o.supervisor, unreported=o.unreported)
    if o.supervisor is SupervisorState.ELSEWHERE:
        if o.silent_s is None or o.silent_s < SILENCE_S:
            return Status(State.RUNNING, "", f"on {o.host}")
        return Status(State.LOST, "no_sign_of_life", f"no sign of life from {o.host} for {o.silent_s:.0f} s")
    if o.entry is EntryState.RUNNING:
        return Status(State.PENDING, "starting")
    if o.entry is EntryState.PENDING:
        if o.cancelling:
            return Status(State.PENDING, "cancelling")
        if not o.queue_alive:
            gone = "the queue process has ended; the next orchestrate command restarts it"
            return Status(State.PENDING, "no_queue", gone)
        return Status(State.PENDING, "queued", o.waiting_reason)
    if o.recorded is State.SUBMITTING:
        return unsubmitted_status(o)
    gone = "its queue entry disappeared before it started; orchestrate retry submits it again"
    return Status(State.LOST, "entry_lost", gone)


def lost_status(supervisor: SupervisorState, *, unreported: bool) -> Status:
    """Return the status of an attempt whose supervisor ended without writing ``exit.json``."""
    if unreported:
        why = "the run ended while the disk was full, so its status was not saved"
    elif supervisor is SupervisorState.REBOOTED:
        why = "the machine was restarted"
    else:
        why = "its supervisor was killed"
    return Status(State.LOST, "supervisor_lost", f"{why}; orchestrate retry continues from its last checkpoint")
