"""Slurm's words, and the pure function from what scheduler, files and clocks say of an attempt to its state."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from signal import SIGKILL, SIGTERM, SIGUSR2

from orchestrator.backends import submit_lock
from orchestrator.backends.base import Status
from orchestrator.backends.exit_status import Exit, Failure, conclude
from workloads.contract import State

INTERRUPTED_EXIT = os.EX_TEMPFAIL
"""Exit code of a rank that obeyed a signal (``workloads.job.entry.ExitCode.INTERRUPTED``)."""

LIMIT_SLACK_S = 155
"""The time limit is announced this long before it at most: our 90 s, and Slurm may be up to 60 s early."""

FINISH_GRACE_S = 60.0
"""The files of a job that ended may take so long to be seen from here."""
ABSENCE_GRACE_S = 120.0
"""Accounting may lag; a job that nobody lists counts as gone after this long only."""
TASK_GRACE_S = 5.0
"""A task that is missing while its array is listed is looked for once more after this time."""
REQUEUE_GRACE_S = 180.0
"""A job that Slurm starts again by itself is listed as waiting within this time."""
SILENCE_S = 900.0
"""A run that shows no sign of life for so long is gone when nobody lists it, and worth a word when Slurm does."""

_ENDING_SIGNALS = {code for s in (SIGTERM, SIGKILL, SIGUSR2) for code in (-s, 128 + s, +s)}
"""Exit codes of what Slurm's signals ended; a shell adds 128, which ``sacct`` takes off again."""

SCRIPT_FAILURES = {
    90: ("prologue", "a line of the cluster file's prologue failed"),
    91: ("interpreter", "the job found no Python interpreter"),
    92: ("launcher", "the job found no srun"),
    93: ("folder", "the job could not make its folder"),
}
"""Exit codes of a job script that could not start its run (``orchestrator.render.ScriptExit``)."""


class Phase(StrEnum):
    """How far a task is, by the scheduler."""

    WAITING = "waiting"
    ACTIVE = "active"
    ENDED = "ended"
    ABSENT = "absent"
    """Everybody answered, and nobody lists it."""
    UNKNOWN = "unknown"
    """Nobody could be asked, or not since it was sent."""


_WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "LAUNCH_FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "RECONFIG_FAIL",
    "TIMEOUT",
}
_ACTIVE = {
    "COMPLETING",
    "CONFIGURING",
    "EXPEDITING",
    "POWER_UP_NODE",
    "RESIZING",
    "REVOKED",
    "RUNNING",
    "SIGNALING",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
    "UPDATE_DB",
}
_ALL = _WAITING | _ENDED | _ACTIVE


def base_state(text: str) -> str:
    """A state without its suffixes: of ``CANCELLED by 1000``, ``CANCELLED+`` and ``OUT_OF_ME+``."""
    word = (text.split() or [""])[0].upper()
    if word.endswith("+"):
        fitting = [state for state in _ALL if state.startswith(word[:-1])]
        return fitting[0] if len(fitting) == 1 else word[:-1]
    return word


def phase_of(text: str) -> Phase:
    """What a state of Slurm's means; a word that a newer Slurm has invented counts as active."""
    word = base_state(text)
    if word in _WAITING:
        return Phase.WAITING
    return Phase.ENDED if word in _ENDED else Phase.ACTIVE


def cancelled_by(text: str) -> str:
    """The user id in ``CANCELLED by 1000``; empty without one."""
    match = re.fullmatch(r"CANCELLED by (\d+)", text.strip())
    return match[1] if match else ""


_REASONS = {
    "None": "just arrived; the scheduler has not looked at it yet",
    "Priority": "others are ahead in the queue; it starts when its turn comes",
    "Resources": "next in line, waits for free nodes of this kind",
    "BeginTime": "may not start before a set time; after a requeue Slurm waits two minutes",
    "Dependency": "waits for another job to end",
    "DependencyNeverSatisfied": "the job it waits for did not end as asked; cancel it and submit again",
    "JobArrayTaskLimit": "array_parallel of the cluster file is reached; raise it to run more at once",
    "JobHeldUser": "held by you; scontrol release it",
    "JobHeldAdmin": "held by an administrator; ask the site",
    "JobHoldMaxRequeue": "was requeued too often and is held; scontrol release it, or cancel and retry",
    "launch failed requeued held": "a node could not start it and Slurm holds it; scontrol release it",
    "ReqNodeNotAvail": "the nodes it asks for are down or reserved, often before maintenance",
    "Reservation": "waits for its reservation to begin",
    "Licenses": "waits for a licence",
    "PartitionDown": "the partition is down; ask the site, or use another queue",
    "PartitionInactive": "the partition starts nothing now; ask the site, or use another queue",
    "PartitionTimeLimit": "asks for more time than the partition gives; lower time_limit, or use another queue",
    "PartitionNodeLimit": "asks for more nodes than the partition gives, or its nodes are down; use another queue",
    "PartitionConfig": "the partition does not take such a job; use another queue",
    "BadConstraints": "no node is like what it asks for; mend constraint or type in the cluster file",
    "NodeDown": "a node it needs is down",
    "InvalidAccount": "the account may not run here; mend account in the cluster file",
    "InvalidQOS": "the QOS may not be used here; mend qos in the cluster file",
    "AccountNotAllowed": "the account may not use this partition; mend account or partition in the cluster file",
    "Cleaning": "the node is still being cleaned after its last start",
    "Prolog": "the node is being prepared",
}
_KINDS_OF_REASON = (
    (r"(QOS|Assoc).*(Max|Grp).*(Submit)", "your limit of queued jobs is reached; the rest can go out when some end"),
    (r"(QOS|Assoc).*Max.*(Wall|Minutes)", "asks for more time than your QOS or account gives; lower time_limit"),
    (r"(QOS|Assoc)Max.*PerJob", "asks for more than your QOS or account gives a job; ask for less"),
    (
        r"(QOS|Assoc)Max.*(PerUser|Limit)?",
        "your own limit of running jobs or devices is reached; waits for your others",
    ),
    (r"(QOS|Assoc)Grp", "your group's limit is reached; waits for jobs of your group"),
    (r"ReqNodeNotAvail|UnavailableNodes|Nodes required", "nodes it needs are down, reserved, or others are ahead"),
    (r".*[Hh]eld", "held; scontrol release it"),
)


def describe_reason(reason: str) -> str:
    """A reason for waiting, as a sentence that says what to do; the word itself where it is not known."""
    word = reason.strip("()")
    for known in (word, word.split(",")[0].strip()):
        if known in _REASONS:
            return f"{_REASONS[known]} ({known})"
    for pattern, text in _KINDS_OF_REASON:
        if re.match(pattern, word):
            return f"{text} ({word})"
    return word


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmObservation:
    """All that speaks for the state of one attempt on a cluster."""

    recorded: State
    """What the store has."""
    phase: Phase
    state: str = ""
    """The scheduler's own words."""
    reason: str = ""
    """Why it waits, or what else the scheduler says of it."""
    exit: Exit | None = None
    """A verdict reached earlier."""
    result: Status | None = None
    """The job's own words."""
    failure: Failure | None = None
    """The first error that a rank recorded."""
    hung: Sequence[int] = ()
    interrupted_by: str = ""
    """The signal that ended the run, by its own word."""
    started: bool = False
    """Whether there is any file of a start."""
    started_since: bool = False
    """Whether it started, or showed life, after the scheduler was last asked."""
    silent_s: float | None = None
    """Seconds since the last sign of life in the run's directory."""
    over_s: float = 0.0
    """Seconds since it was first found neither waiting nor active."""
    array_known: bool = False
    """Whether the scheduler lists other tasks of its array, or the array itself."""
    sent: bool = True
    """Whether Slurm is known to have got it."""
    submit_alive: bool = False
    submit_host: str = ""
    """Where a submit is at work; empty for this host."""
    requeue: bool = False
    """Whether the site starts jobs again by itself."""
    cancelling: bool = False
    exit_code: int | None = None
    """The job's."""
    rank_codes: Sequence[int | None] = ()
    """By rank, as far as the launcher told; negative for a signal."""
    elapsed_s: float | None = None
    limit_s: int | None = None
    memory: str = ""
    """The memory that was asked for, in words."""
    out_of_memory: bool = False
    """Whether a step or a log tells of the memory limit."""
    last_words: str = ""
    node: str = ""


def verdict(w: SlurmObservation) -> Status:
    """Weigh the witnesses. The order is the argument: what is final goes first, absence of news goes last."""
    if w.result is not None and w.result.state is State.SUCCEEDED:
        return w.result
    if w.exit is not None:
        return Status(w.exit.state, w.exit.reason, w.exit.message)
    if not w.sent:
        return _unsent(w)
    if w.phase is Phase.UNKNOWN:
        return _unasked(w)
    if w.phase is Phase.WAITING:
        return _waiting(w)
    if w.phase is Phase.ACTIVE:
        return _active(w)
    if w.phase is Phase.ENDED:
        return _ended(w)
    return _absent(w)


def _unsent(w: SlurmObservation) -> Status:
    if w.submit_alive:
        return Status(State.SUBMITTING, "sending", submit_lock.describe_holder(w.submit_host))
    return Status(State.SUBMITTING, "interrupted", "submit did not finish; orchestrate submit goes on with it")


def _unasked(w: SlurmObservation) -> Status:
    """Nothing new from the scheduler: what is known stays, but for what the run itself tells."""
    if w.result is not None:
        return w.result
    if w.started and w.recorded in {State.SUBMITTING, State.PENDING}:
        return Status(State.RUNNING, "cancelling" if w.cancelling else "")
    if w.recorded is State.SUBMITTING:
        return Status(State.PENDING, "queued", "sent; Slurm was not asked since")
    if w.cancelling:
        return Status(w.recorded, "cancelling")
    return Status(w.recorded, "queued" if w.recorded is State.PENDING else "")


def _waiting(w: SlurmObservation) -> Status:
    if w.started_since:
        return Status(State.RUNNING, "cancelling" if w.cancelling else "")
    if w.cancelling:
        return Status(State.PENDING, "cancelling")
    words = describe_reason(w.reason)
    return Status(State.PENDING, "requeued" if w.started else w.reason or "queued", words)


def _active(w: SlurmObservation) -> Status:
    if w.cancelling:
        return Status(State.RUNNING, "cancelling")
    if not w.started and base_state(w.state) in {"CONFIGURING", "POWER_UP_NODE"}:
        return Status(State.PENDING, "starting", "its nodes are being prepared")
    if base_state(w.state) in {"SUSPENDED", "STOPPED"}:
        return Status(State.RUNNING, "suspended", "the scheduler has suspended it")
    if w.silent_s is not None and w.silent_s > SILENCE_S:
        where = f" on {w.node}" if w.node else ""
        return Status(State.RUNNING, "silent", f"no sign of life{where} for {w.silent_s:.0f} s, yet Slurm runs it")
    if w.silent_s is None and w.elapsed_s is not None and w.elapsed_s > SILENCE_S:
        what = f"Slurm has run it for {w.elapsed_s:.0f} s, and no rank has started; orchestrate logs shows why"
        return Status(State.RUNNING, "not_started", what)
    return Status(State.RUNNING)


def _ended(w: SlurmObservation) -> Status:
    word = base_state(w.state)
    where = f" on {w.node}" if w.node else ""
    if word in {"NODE_FAIL", "BOOT_FAIL", "RECONFIG_FAIL", "LAUNCH_FAILED", "PREEMPTED"}:
        if w.requeue and w.over_s < REQUEUE_GRACE_S:
            return Status(State.PENDING, "requeued", f"{word}; Slurm is about to start it again")
        if word == "PREEMPTED":
            return Status(State.PREEMPTED, "preempted", "something more urgent took its node; retry goes on from there")
        return Status(State.NODE_FAIL, word.lower(), f"its node failed{where}; orchestrate retry sends it again")
    if word == "OUT_OF_MEMORY" or w.out_of_memory:
        return _out_of_memory(w)
    if word in {"TIMEOUT", "DEADLINE"}:
        return _over_time(w, "time_limit" if word == "TIMEOUT" else "deadline")
    if word == "CANCELLED":
        if w.cancelling:
            return Status(State.CANCELLED, "cancelled", "stopped by orchestrate cancel")
        by = cancelled_by(w.state)
        return Status(
            State.CANCELLED, "scancel", f"cancelled by user {by}" if by else "cancelled by scancel or the site"
        )
    if word == "FAILED" and _ended_at_the_limit(w):
        return _over_time(w, "time_limit")
    failed_by_itself = w.failure is not None or w.hung or any(w.rank_codes)
    if not failed_by_itself and (w.exit_code == INTERRUPTED_EXIT or w.interrupted_by):
        return _told_to_end(w)
    if word == "FAILED" and w.exit_code in SCRIPT_FAILURES:
        reason, what = SCRIPT_FAILURES[w.exit_code]
        return Status(State.FAILED, reason, f"{what}{where}: {w.last_words}" if w.last_words else f"{what}{where}")
    if word == "COMPLETED" and w.failure is None and not w.hung and w.over_s < FINISH_GRACE_S:
        return Status(State.RUNNING, "finishing", "the job has ended; its result is not to be seen from here yet")
    if w.result is not None:
        return w.result
    code = 0 if word == "COMPLETED" else w.exit_code
    if code is None and w.failure is None and not w.hung:
        return Status(State.FAILED, "program_error", w.last_words or "Slurm says FAILED, and the run said nothing")
    if code and w.failure is None and not w.hung and not any(w.rank_codes):
        said = f": {w.last_words}" if w.last_words else ""
        return Status(State.FAILED, "program_error", f"the job ended with exit code {code}{where}{said}")
    found = conclude(
        exit_codes=w.rank_codes if any(w.rank_codes) else [code],
        failure=w.failure,
        hung=w.hung,
        last_words=w.last_words,
    )
    return Status(found.state, found.reason, found.message)


_TASKS = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(.+))$", re.MULTILINE)
_SIGNALLED = {"Aborted": 6, "Killed": 9, "Segmentation fault": 11, "Terminated": 15, "Bus error": 7}


def parse_rank_codes(script_log: str, ranks: int) -> list[int | None]:
    """How the ranks ended that ended first, as ``srun`` told it; None for all others, which were ended for them."""
    codes: list[int | None] = [None] * ranks
    for tasks, text, words in _TASKS.findall(script_log):
        code = int(text) if text else -_SIGNALLED.get(words.split(" (")[0].strip(), 9)
        if code == INTERRUPTED_EXIT:
            continue
        for rank in parse_indices(tasks):
            if rank < ranks:
                codes[rank] = code
        break
    return codes


def parse_indices(text: str) -> list[int]:
    """The numbers in ``3``, ``1-119:2%120`` and ``0,2,7-9``; none in what is no such list."""
    found: list[int] = []
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+)(?::(\d+))?)?\s*", part)
        if match:
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            found += range(first, last + 1, step)
    return found


def _out_of_memory(w: SlurmObservation) -> Status:
    asked = f" of {w.memory}" if w.memory else ""
    return Status(
        State.OUT_OF_MEMORY, "host_memory", f"the job's memory{asked} was full; raise mem, then orchestrate submit"
    )


def _told_to_end(w: SlurmObservation) -> Status:
    """The run obeyed a signal: the announcement of the limit, or of an eviction."""
    by_clock = w.elapsed_s is not None and w.limit_s is not None and w.elapsed_s >= w.limit_s - LIMIT_SLACK_S
    if by_clock or (w.elapsed_s is None and w.interrupted_by == "SIGUSR2"):
        return _over_time(w, "time_limit")
    signal = w.interrupted_by or "a signal"
    return Status(State.PREEMPTED, "signal", f"told to end by {signal} before its time; retry goes on from there")


def _ended_at_the_limit(w: SlurmObservation) -> bool:
    """Whether it died of a signal when its time was over: some releases and sites call that FAILED."""
    if w.elapsed_s is None or w.limit_s is None or w.elapsed_s < w.limit_s or w.failure is not None or w.hung:
        return False
    codes = {code for code in (w.exit_code, *w.rank_codes) if code}
    return bool(codes) and codes <= _ENDING_SIGNALS


def _over_time(w: SlurmObservation, reason: str) -> Status:
    limit = f" of {w.limit_s} s" if w.limit_s else ""
    return Status(State.TIMEOUT, reason, f"its time limit{limit} was over; orchestrate retry goes on from there")


def _absent(w: SlurmObservation) -> Status:
    if w.cancelling and not w.started:
        return Status(State.CANCELLED, "cancelled", "stopped by orchestrate cancel before it started")
    if w.array_known and not w.started and w.over_s >= TASK_GRACE_S:
        return Status(State.CANCELLED, "scancel", "taken out of the queue before it started, not by orchestrate")
    if w.over_s < ABSENCE_GRACE_S:
        return Status(w.recorded if w.recorded is not State.SUBMITTING else State.PENDING, "unlisted")
    if w.out_of_memory:
        return _out_of_memory(w)
    if w.failure is not None or w.hung or any(w.rank_codes):
        codes = w.rank_codes if any(w.rank_codes) else [1]
        found = conclude(exit_codes=codes, failure=w.failure, hung=w.hung, last_words=w.last_words)
        return Status(found.state, found.reason, found.message)
    if w.interrupted_by:
        return _told_to_end(w)
    if w.cancelling:
        return Status(State.CANCELLED, "cancelled", "stopped by orchestrate cancel")
    if not w.started:
        return Status(State.LOST, "unknown_to_slurm", "Slurm does not know the job, and it never started")
    if w.silent_s is None or w.silent_s < SILENCE_S:
        return Status(State.RUNNING, "unlisted", "Slurm does not list the job, yet it shows signs of life")
    return Status(State.LOST, "no_sign_of_life", f"not listed by Slurm, no sign of life for {w.silent_s:.0f} s")
