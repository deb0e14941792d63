"""Slurm's words: states, reasons and number lists as squeue, sacct, scontrol and srun print them."""

from __future__ import annotations

import re
from enum import StrEnum

from orchestrator.backends.exit_status import INTERRUPTED_EXIT


class Phase(StrEnum):
    """How far a task is, according to Slurm."""

    WAITING = "waiting"
    ACTIVE = "active"
    ENDED = "ended"
    ABSENT = "absent"
    """Every query was answered, and none listed the task."""
    UNKNOWN = "unknown"
    """No query was answered since the task was submitted."""


# squeue(1) and sacct(1), "JOB STATE CODES"; those that only newer releases have were added as they appeared.
_WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "RECONFIG_FAIL", "TIMEOUT"),
}
_ACTIVE = {
    *("COMPLETING", "CONFIGURING", "EXPEDITING", "POWER_UP_NODE", "RESIZING", "REVOKED", "RUNNING", "SIGNALING"),
    *("STAGE_OUT", "STOPPED", "SUSPENDED", "UPDATE_DB"),
}


def base_state(text: str) -> str:
    """Return a state without suffixes: of ``CANCELLED by 1000``, ``CANCELLED+`` and ``OUT_OF_ME+``."""
    word = (text.split() or [""])[0].upper()
    if word.endswith("+"):
        # sacct(1): a field wider than its column is cut and marked with "+".
        fitting = [state for state in _WAITING | _ENDED | _ACTIVE if state.startswith(word[:-1])]
        return fitting[0] if len(fitting) == 1 else word[:-1]
    return word


def phase_of(text: str) -> Phase:
    """Return the phase of a state; a state of a newer Slurm that is unknown here counts as active."""
    word = base_state(text)
    if word in _WAITING:
        return Phase.WAITING
    return Phase.ENDED if word in _ENDED else Phase.ACTIVE


def cancelled_by(text: str) -> str:
    """Return the user id of ``CANCELLED by 1000``; empty without one."""
    match = re.fullmatch(r"CANCELLED by (\d+)", text.strip())
    return match[1] if match else ""


_REASONS = {
    "None": "just submitted; the scheduler has not considered it yet",
    "Priority": "others are ahead in the queue; it starts when its turn comes",
    "Resources": "next in line, waits for free nodes of this kind",
    "BeginTime": "may not start before a set time; Slurm delays a requeued job by two minutes",
    "Dependency": "waits for another job to end",
    "DependencyNeverSatisfied": "the job it waits for did not end as required; cancel it and submit again",
    "JobArrayTaskLimit": "array_parallel of the cluster file is reached; raise it to run more at once",
    "JobHeldUser": "held by you; scontrol release it",
    "JobHeldAdmin": "held by an administrator; ask the site",
    "JobHoldMaxRequeue": "was requeued too often and is held; scontrol release it, or cancel and retry",
    "launch failed requeued held": "a node could not start it and Slurm holds it; scontrol release it",
    "ReqNodeNotAvail": "the nodes it requests are down or reserved, often before maintenance",
    "Reservation": "waits for its reservation to begin",
    "Licenses": "waits for a license",
    "PartitionDown": "the partition is down; ask the site, or use another queue",
    "PartitionInactive": "the partition is inactive; ask the site, or use another queue",
    "PartitionTimeLimit": "requests more time than the partition allows; lower time_limit, or use another queue",
    "PartitionNodeLimit": "requests more nodes than the partition allows, or its nodes are down; use another queue",
    "PartitionConfig": "the partition does not accept such a job; use another queue",
    "BadConstraints": "no node has what it requests; correct constraint or type in the cluster file",
    "NodeDown": "a node it needs is down",
    "InvalidAccount": "the account may not run here; correct account in the cluster file",
    "InvalidQOS": "the QOS may not be used here; correct qos in the cluster file",
    "AccountNotAllowed": "the account may not use this partition; correct account or partition in the cluster file",
    "Cleaning": "the node is still being cleaned after its last job",
    "Prolog": "the node is being prepared",
}
_REASON_PATTERNS = (
    (r"(QOS|Assoc).*(Max|Grp).*(Submit)", "your limit of queued jobs is reached; more can be submitted when some end"),
    (r"(QOS|Assoc).*Max.*(Wall|Minutes)", "requests more time than your QOS or account allows; lower time_limit"),
    (r"(QOS|Assoc)Max.*PerJob", "requests more than your QOS or account allows a job; request less"),
    (r"(QOS|Assoc)Max.*", "your own limit of running jobs or devices is reached; waits for your others"),
    (r"(QOS|Assoc)Grp", "your group's limit is reached; waits for jobs of your group"),
    (r"ReqNodeNotAvail|UnavailableNodes|Nodes required", "nodes it needs are down, reserved, or others are ahead"),
    (r".*[Hh]eld", "held; scontrol release it"),
)


def describe_reason(reason: str) -> str:
    """Describe why a job waits and what to do, with Slurm's word; the word alone if it is unknown here."""
    word = reason.strip("()")
    for known in (word, word.split(",")[0].strip()):
        if known in _REASONS:
            return f"{_REASONS[known]} ({known})"
    text = next((text for pattern, text in _REASON_PATTERNS if re.match(pattern, word)), "")
    return f"{text} ({word})" if text else word


_SRUN_ERROR = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(.+))$", re.MULTILINE)
_SIGNAL_NUMBERS = {"Aborted": 6, "Killed": 9, "Segmentation fault": 11, "Terminated": 15, "Bus error": 7}


def parse_rank_codes(script_log: str, ranks: int) -> list[int | None]:
    """Return the exit codes of the ranks that ended first, as ``srun`` logged them; None for those it ended then."""
    codes: list[int | None] = [None] * ranks
    for tasks, text, words in _SRUN_ERROR.findall(script_log):
        code = int(text) if text else -_SIGNAL_NUMBERS.get(words.split(" (")[0].strip(), 9)
        if code == INTERRUPTED_EXIT:
            continue
        for rank in parse_indices(tasks):
            if rank < ranks:
                codes[rank] = code
        break
    return codes


def parse_indices(text: str) -> list[int]:
    """Return the numbers of ``3``, ``1-119:2%120`` or ``0,2,7-9``; none for anything else."""
    found: list[int] = []
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+)(?::(\d+))?)?\s*", part)
        if match:
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            found += range(first, last + 1, step)
    return found


def parse_elapsed(text: str) -> float | None:
    """Return the seconds of ``[days-][hours:]minutes:seconds``; None for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(word or 0) for word in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_exit_code(text: str) -> int | None:
    """Return the exit code of ``75:0``; negative for a signal as in ``0:9``."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None:
        return None
    code, signal = int(match[1]), int(match[2])
    return code if code or not signal else -signal
