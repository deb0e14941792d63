"""The pure function from what is observed of an attempt on a cluster to its status."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM, SIGUSR2

from orchestrator.backends.base import CANCELLED, SILENCE_S, Status
from orchestrator.backends.exit_status import INTERRUPTED_EXIT, conclude, final_status, unsubmitted_status
from orchestrator.backends.slurm.observe import SlurmObservation
from orchestrator.backends.slurm.states import Phase, base_state, cancelled_by, describe_reason
from workloads.contract import State

LIMIT_SLACK_S = 155
"""SIGUSR2 comes at most this long before the time limit: we request 90 s, and Slurm may send it up to 60 s early
(sbatch(1), ``--signal``)."""

FINISH_GRACE_S = 60.0
"""Files of an ended job may take this long to appear here. NFS clients cache attributes for up to 60 s (nfs(5),
``acdirmax``)."""
ABSENCE_GRACE_S = 120.0
"""A job that nobody lists counts as gone after this long: squeue may drop it before slurmdbd has its record."""
TASK_GRACE_S = 5.0
"""A task that is missing while its array is listed is queried once more after this long."""
REQUEUE_GRACE_S = 180.0
"""Slurm lists a job that it requeues as waiting within this time."""

_ENDING_SIGNALS = {code for s in (SIGTERM, SIGKILL, SIGUSR2) for code in (-s, 128 + s, +s)}
"""Exit codes after one of Slurm's signals; a shell adds 128, which ``sacct`` subtracts again."""

SCRIPT_FAILURES = {
    90: ("prologue", "a line of the cluster file's prologue failed"),
    91: ("interpreter", "the job found no Python interpreter"),
    92: ("launcher", "the job found no srun"),
    93: ("folder", "the job could not create its folder"),
}
"""Exit codes of a job script that could not start its run (``orchestrator.cluster.job_script.ScriptExit``)."""


def status_of(o: SlurmObservation) -> Status:
    """Return the status of an attempt: certain evidence decides first, missing evidence last."""
    if (final := final_status(o)) is not None:
        return final
    if not o.submitted:
        return unsubmitted_status(o)
    of_phase = {Phase.UNKNOWN: _unknown, Phase.WAITING: _waiting, Phase.ACTIVE: _active, Phase.ENDED: _ended}
    return of_phase.get(o.phase, _absent)(o)


def _unknown(o: SlurmObservation) -> Status:
    """Without news from Slurm the recorded state stays, except for what the run's own files show."""
    if o.result is not None:
        return o.result
    if o.started and o.recorded in {State.SUBMITTING, State.PENDING}:
        return _running(o)
    if o.recorded is State.SUBMITTING:
        return Status(State.PENDING, "queued", "submitted; Slurm has not been queried since")
    if o.cancelling:
        return Status(o.recorded, "cancelling")
    return Status(o.recorded, "queued" if o.recorded is State.PENDING else "")


def _running(o: SlurmObservation) -> Status:
    return Status(State.RUNNING, "cancelling" if o.cancelling else "")


def _waiting(o: SlurmObservation) -> Status:
    if o.started_since_query:
        return _running(o)
    if o.cancelling:
        return Status(State.PENDING, "cancelling")
    reason = o.task.reason
    return Status(State.PENDING, "requeued" if o.started else reason or "queued", describe_reason(reason))


def _active(o: SlurmObservation) -> Status:
    word, elapsed_s = base_state(o.task.state), o.task.elapsed_s
    if o.cancelling:
        return _running(o)
    if not o.started and word in {"CONFIGURING", "POWER_UP_NODE"}:
        return Status(State.PENDING, "starting", "its nodes are being prepared")
    if word in {"SUSPENDED", "STOPPED"}:
        return Status(State.RUNNING, "suspended", "Slurm has suspended it")
    if o.silent_s is not None and o.silent_s > SILENCE_S:
        silent = f"no sign of life{_on_node(o)} for {o.silent_s:.0f} s, but Slurm lists it as running"
        return Status(State.RUNNING, "silent", silent)
    if o.silent_s is None and elapsed_s is not None and elapsed_s > SILENCE_S:
        unstarted = f"no rank has started since Slurm started the job {elapsed_s:.0f} s ago; see orchestrate logs"
        return Status(State.RUNNING, "not_started", unstarted)
    return Status(State.RUNNING)


def _ended(o: SlurmObservation) -> Status:
    """Decide by Slurm's state if it names the cause; otherwise by the run's own files and exit codes."""
    word = base_state(o.task.state)
    if word in {"NODE_FAIL", "BOOT_FAIL", "RECONFIG_FAIL", "LAUNCH_FAILED", "PREEMPTED"}:
        return _lost_nodes(o, word)
    if word == "OUT_OF_MEMORY" or o.out_of_memory:
        return _out_of_memory(o)
    if word in {"TIMEOUT", "DEADLINE"}:
        return _timeout(o, "time_limit" if word == "TIMEOUT" else "deadline")
    if word == "CANCELLED":
        if o.cancelling:
            return CANCELLED
        by = cancelled_by(o.task.state)
        return Status(State.CANCELLED, "scancel", f"cancelled by {f'user {by}' if by else 'scancel or the site'}")
    if word == "FAILED" and _ended_at_time_limit(o):
        return _timeout(o, "time_limit")
    if not _failed_by_itself(o) and (o.task.exit_code == INTERRUPTED_EXIT or o.interrupted_by):
        return _interrupted(o)
    if word == "FAILED" and o.task.exit_code in SCRIPT_FAILURES:
        reason, what = SCRIPT_FAILURES[o.task.exit_code]
        return Status(State.FAILED, reason, f"{what}{_on_node(o)}{_last_line(o)}")
    if word == "COMPLETED" and o.failure is None and not o.hung and o.ended_s < FINISH_GRACE_S:
        return Status(State.RUNNING, "finishing", "the job has ended; result not yet visible on this node")
    if o.result is not None:
        return o.result
    code = 0 if word == "COMPLETED" else o.task.exit_code
    if code is None and o.failure is None and not o.hung:
        return Status(State.FAILED, "program_error", o.last_line or "Slurm reports FAILED, and the run logged nothing")
    if code and not _failed_by_itself(o):
        return Status(State.FAILED, "program_error", f"the job ended with exit code {code}{_on_node(o)}{_last_line(o)}")
    return _conclude(o, code)


def _lost_nodes(o: SlurmObservation, word: str) -> Status:
    if o.requeue and o.ended_s < REQUEUE_GRACE_S:
        return Status(State.PENDING, "requeued", f"{word}; Slurm is about to requeue it")
    if word == "PREEMPTED":
        preempted = "a job of higher priority took its node; orchestrate retry continues from the last checkpoint"
        return Status(State.PREEMPTED, "preempted", preempted)
    return Status(State.NODE_FAIL, word.lower(), f"its node failed{_on_node(o)}; orchestrate retry submits it again")


def _absent(o: SlurmObservation) -> Status:
    if o.cancelling and not o.started:
        return Status(State.CANCELLED, "cancelled", "stopped by orchestrate cancel before it started")
    if o.array_listed and not o.started and o.ended_s >= TASK_GRACE_S:
        return Status(State.CANCELLED, "scancel", "removed from the queue before it started, not by orchestrate")
    if o.ended_s < ABSENCE_GRACE_S:
        return Status(o.recorded if o.recorded is not State.SUBMITTING else State.PENDING, "unlisted")
    if o.out_of_memory:
        return _out_of_memory(o)
    if _failed_by_itself(o):
        return _conclude(o, 1)
    if o.interrupted_by:
        return _interrupted(o)
    if o.cancelling:
        return CANCELLED
    if not o.started:
        return Status(State.LOST, "unknown_to_slurm", "Slurm does not know the job, and it never started")
    if o.silent_s is None or o.silent_s < SILENCE_S:
        return Status(State.RUNNING, "unlisted", "Slurm does not list the job, but it shows signs of life")
    return Status(State.LOST, "no_sign_of_life", f"not listed by Slurm, no sign of life for {o.silent_s:.0f} s")


def _failed_by_itself(o: SlurmObservation) -> bool:
    return o.failure is not None or bool(o.hung) or any(o.rank_codes)


def _conclude(o: SlurmObservation, code: int | None) -> Status:
    codes = o.rank_codes if any(o.rank_codes) else [code]
    found = conclude(exit_codes=codes, failure=o.failure, hung=o.hung, last_line=o.last_line)
    return Status(found.state, found.reason, found.message)


def _out_of_memory(o: SlurmObservation) -> Status:
    size = f" of {o.memory}" if o.memory else ""
    full = f"the job's memory{size} was full; raise mem, then orchestrate submit"
    return Status(State.OUT_OF_MEMORY, "host_memory", full)


def _interrupted(o: SlurmObservation) -> Status:
    """The run obeyed a signal, which announced the time limit or a preemption."""
    elapsed_s = o.task.elapsed_s
    if elapsed_s is None:
        by_limit = o.interrupted_by == "SIGUSR2"
    else:
        by_limit = o.limit_s is not None and elapsed_s >= o.limit_s - LIMIT_SLACK_S
    if by_limit:
        return _timeout(o, "time_limit")
    early = f"ended by {o.interrupted_by or 'a signal'} before its time limit"
    return Status(State.PREEMPTED, "signal", f"{early}; orchestrate retry continues from the last checkpoint")


def _ended_at_time_limit(o: SlurmObservation) -> bool:
    """Whether a signal ended it at its time limit; some releases and sites report that as FAILED."""
    elapsed_s = o.task.elapsed_s
    if elapsed_s is None or o.limit_s is None or elapsed_s < o.limit_s or o.failure is not None or o.hung:
        return False
    codes = {code for code in (o.task.exit_code, *o.rank_codes) if code}
    return bool(codes) and codes <= _ENDING_SIGNALS


def _timeout(o: SlurmObservation, reason: str) -> Status:
    limit = f" of {o.limit_s} s" if o.limit_s else ""
    reached = f"it reached its time limit{limit}; orchestrate retry continues from the last checkpoint"
    return Status(State.TIMEOUT, reason, reached)


def _on_node(o: SlurmObservation) -> str:
    return f" on {o.task.node}" if o.task.node else ""


def _last_line(o: SlurmObservation) -> str:
    return f": {o.last_line}" if o.last_line else ""
