"""How an attempt ended: the verdict in ``exit.json``, and the pure function that reaches it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from orchestrator.backends.base import Status
from workloads.contract import RANK_LOST, RunResult, State
from workloads.files.event_log import read_events
from workloads.files.json_file import read_json, write_json
from workloads.files.run_dir import AttemptDir

_STATE_OF_REASON = {
    "device_memory": State.OUT_OF_MEMORY,
    "host_memory": State.OUT_OF_MEMORY,
    "wrong_hardware": State.WRONG_HARDWARE,
}
"""Failure classes that are states of their own; every other one is ``failed``."""

_TOLD_TO_END = os.EX_TEMPFAIL
"""Exit code of a rank that obeyed SIGTERM, SIGINT or SIGUSR2 (``workloads.job.entry.ExitCode.INTERRUPTED``)."""


@dataclass(frozen=True, slots=True)
class Exit:
    """The content of ``exit.json``."""

    state: State
    reason: str = ""
    message: str = ""
    exit_codes: tuple[int | None, ...] = ()
    """By rank; negative for a signal, None for a rank that was not waited for."""
    ended_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    nodes: str = ""
    """Where it ran, as the scheduler says it; empty in local mode, and where nobody knows."""

    def write(self, attempt: AttemptDir) -> None:
        data = {"state": self.state.value, "reason": self.reason, "message": self.message}
        data |= {"nodes": self.nodes} if self.nodes else {}
        write_json(attempt.exit, {**data, "exit_codes": list(self.exit_codes), "ended_at": self.ended_at})

    @classmethod
    def read(cls, attempt: AttemptDir) -> Exit | None:
        """None when there is none, or a damaged one."""
        try:
            data = read_json(attempt.exit)
            return cls(
                State(data["state"]),
                str(data["reason"]),
                str(data["message"]),
                tuple(data["exit_codes"]),
                str(data["ended_at"]),
                str(data.get("nodes", "")),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a supervisor ended a run that was still going."""

    state: State
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank said of its own failure."""

    rank: int
    time: float
    reason: str
    message: str


def since_start(attempt: AttemptDir, kind: str, *, rank: int = 0) -> list[dict[str, Any]]:
    """A rank's events of a kind since its last start: what a requeued job did before says nothing of how it ended."""
    events, _ = read_events(attempt.events(rank), 0, "start", kind)
    starts = [index for index, e in enumerate(events) if e["event"] == "start"]
    return [e for e in events[starts[-1] if starts else 0 :] if e["event"] == kind]


def first_failure(attempt: AttemptDir, num_ranks: int) -> Failure | None:
    """The earliest error that a rank recorded since it last started, without those that only lost their partner."""
    failures = []
    for rank in range(num_ranks):
        failures += [
            Failure(rank, float(e["time"]), str(e.get("failure_class", "program_error")), str(e.get("message", "")))
            for e in since_start(attempt, "error", rank=rank)
            if isinstance(e.get("time"), (int, float)) and e.get("failure_class") != RANK_LOST
        ]
    return min(failures, key=lambda f: f.time, default=None)


def hung_ranks(attempt: AttemptDir, num_ranks: int) -> list[int]:
    """Ranks whose own watchdog wrote down where they were stuck."""
    hung = []
    for rank in range(num_ranks):
        try:
            if attempt.hang(rank).stat().st_size > 0:
                hung.append(rank)
        except OSError:
            continue
    return hung


def read_result_or_none(attempt: AttemptDir) -> RunResult | None:
    """The job's ``result.json``; None when it is missing, damaged or another run's."""
    try:
        return attempt.read_result()
    except (OSError, ValueError):
        return None


def result_status(attempt: AttemptDir) -> Status | None:
    """How the job itself says that it ended; None when it did not, or only a rank that saw its peer go did."""
    result = read_result_or_none(attempt)
    if result is None or result.reason == RANK_LOST:
        return None
    return Status(State(result.state), result.reason, result.message)


def conclude(
    *,
    exit_codes: Sequence[int | None],
    ending: Ending | None = None,
    result: RunResult | None = None,
    failure: Failure | None = None,
    hung: Sequence[int] = (),
    oom_killed: bool = False,
    last_words: str = "",
) -> Exit:
    """Weigh what is known of an attempt whose ranks have all ended.

    A result of success stands whatever came after it. Then counts why the supervisor ended the run, then what the ranks
    said themselves, then how they exited.

    Args:
        exit_codes: by rank.
        ending: set when the supervisor ended the run.
        result: the job's own, if it wrote one.
        failure: the first error that a rank recorded.
        hung: ranks whose watchdog fired.
        oom_killed: the kernel ran out of memory meanwhile.
        last_words: the end of the failed rank's error log.
    """
    codes = tuple(exit_codes)

    def verdict(state: State, reason: str = "", message: str = "") -> Exit:
        return Exit(state, reason, message, codes)

    if result is not None and result.state == State.SUCCEEDED:
        return verdict(State.SUCCEEDED)
    if ending is not None and ending.state in {State.CANCELLED, State.TIMEOUT}:
        return verdict(ending.state, ending.reason, ending.message)
    if hung:
        stacks = " and ".join(f"hang.{rank}.txt" for rank in hung)
        return verdict(State.FAILED, "hang", f"no progress; {stacks} shows where the run was stuck")
    if ending is not None and ending.reason == "hang":
        return verdict(ending.state, ending.reason, ending.message)
    if failure is not None:
        state = _STATE_OF_REASON.get(failure.reason, State.FAILED)
        return verdict(state, failure.reason, f"rank {failure.rank}: {failure.message}")
    if result is not None and result.reason != RANK_LOST:
        return verdict(State(result.state), result.reason, result.message)
    killed = [rank for rank, code in enumerate(codes) if code == -signal.SIGKILL]
    if killed and oom_killed:
        return verdict(
            State.OUT_OF_MEMORY, "host_memory", f"the kernel killed rank {killed[0]}: the machine's memory was full"
        )
    if ending is not None:
        return verdict(ending.state, ending.reason, _with(ending.message, last_words))
    failed = [rank for rank, code in enumerate(codes) if code not in {0, None, _TOLD_TO_END}]
    if failed:
        how = describe_exit(codes[failed[0]])
        return verdict(State.FAILED, "program_error", _with(f"rank {failed[0]} {how}", last_words))
    if _TOLD_TO_END in codes:
        rank = codes.index(_TOLD_TO_END)
        return verdict(State.PREEMPTED, "signal", f"rank {rank} was told to end by a signal that was not ours")
    return verdict(State.FAILED, "no_result", "all ranks ended as if all was well, but wrote no result")


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "ended unseen"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}"
    return f"ended with exit code {code}"


def _with(message: str, last_words: str) -> str:
    return f"{message}: {last_words}" if last_words else message
