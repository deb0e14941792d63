"""How an attempt ended: what its files report, and the pure functions that both backends decide with."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.backends.base import Observation, Status
from workloads.contract import RANK_LOST, State
from workloads.files.event_log import read_events
from workloads.files.run_dir import AttemptDir

_STATE_OF_REASON = {
    "device_memory": State.OUT_OF_MEMORY,
    "host_memory": State.OUT_OF_MEMORY,
    "wrong_hardware": State.WRONG_HARDWARE,
}
"""Failure classes with a state of their own; all others are ``failed``."""

INTERRUPTED_EXIT = os.EX_TEMPFAIL
"""Exit code of a rank that obeyed SIGTERM, SIGINT or SIGUSR2 (``ExitCode.INTERRUPTED`` of the job)."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A failure that a rank recorded in its events."""

    rank: int
    time: float
    reason: str
    message: str


def events_since_start(directory: AttemptDir, kind: str, *, rank: int = 0) -> list[dict[str, Any]]:
    """Return a rank's events of a kind since its last start; a requeued job leaves those of earlier starts."""
    events, _ = read_events(directory.events(rank), 0, "start", kind)
    starts = [index for index, e in enumerate(events) if e["event"] == "start"]
    return [e for e in events[starts[-1] if starts else 0 :] if e["event"] == kind]


def first_failure(directory: AttemptDir, num_ranks: int) -> RankFailure | None:
    """Return the earliest error since the last start, except of ranks that only lost their peer."""
    failures = [
        RankFailure(rank, float(e["time"]), str(e.get("failure_class", "program_error")), str(e.get("message", "")))
        for rank in range(num_ranks)
        for e in events_since_start(directory, "error", rank=rank)
        if isinstance(e.get("time"), (int, float)) and e.get("failure_class") != RANK_LOST
    ]
    return min(failures, key=lambda f: f.time, default=None)


def hung_ranks(directory: AttemptDir, num_ranks: int) -> list[int]:
    """Return the ranks whose watchdog wrote their stacks."""
    return [rank for rank in range(num_ranks) if read_tail(directory.hang(rank), 1)]


def result_status(directory: AttemptDir) -> Status | None:
    """Return the status in ``result.json``; None without a valid one, or from a rank that only lost its peer."""
    try:
        result = directory.read_result()
    except (OSError, ValueError):
        return None
    return None if result.reason == RANK_LOST else Status(State(result.state), result.reason, result.message)


def last_change(paths: Iterable[Path]) -> float | None:
    """Return the newest modification time of those files that exist, in seconds since the epoch."""
    times = []
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)


def read_tail(path: Path, size: int = 4096) -> str:
    """Return the last bytes of a log as text; empty if it cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - size))
        return stream.read().decode(errors="replace")
    return ""


def final_status(o: Observation) -> Status | None:
    """Return the status of an attempt that has a successful result or ``exit.json``; None for others."""
    if o.result is not None and o.result.state is State.SUCCEEDED:
        return o.result
    return o.exit


def unsubmitted_status(o: Observation) -> Status:
    """Return the status of an attempt whose intent is recorded and that no queue has."""
    if o.submit_host is not None:
        at_work = f"a submit on {o.submit_host} is at work on it" if o.submit_host else ""
        return Status(State.SUBMITTING, "submitting", at_work)
    return Status(State.SUBMITTING, "interrupted", "submit was interrupted; orchestrate submit continues it")


def conclude(
    *,
    exit_codes: Sequence[int | None],
    stopped: Status | None = None,
    result: Status | None = None,
    failure: RankFailure | None = None,
    hung: Sequence[int] = (),
    oom_killed: bool = False,
    last_line: str = "",
) -> Status:
    """Return the status of an attempt whose ranks have all ended.

    A successful ``result.json`` stands, whatever came after it. Next in rank: why the supervisor ``stopped`` it, what
    the ranks reported (``hung`` by their watchdogs), how they exited. ``last_line`` is of the failed rank's log.
    """
    codes = tuple(exit_codes)
    killed = [rank for rank, code in enumerate(codes) if code == -signal.SIGKILL]
    failed = [rank for rank, code in enumerate(codes) if code not in {0, None, INTERRUPTED_EXIT}]

    status = partial(Status, exit_codes=codes)

    def copy(known: Status, line: str = "") -> Status:
        return status(known.state, known.reason, _join(known.message, line))

    if result is not None and result.state is State.SUCCEEDED:
        return copy(result)
    if stopped is not None and stopped.state in {State.CANCELLED, State.TIMEOUT}:
        return copy(stopped)
    if hung:
        stacks = " and ".join(f"hang.{rank}.txt" for rank in hung)
        return status(State.FAILED, "hang", f"no progress; see where the run hung in {stacks}")
    if stopped is not None and stopped.reason == "hang":
        return copy(stopped)
    if failure is not None:
        state = _STATE_OF_REASON.get(failure.reason, State.FAILED)
        return status(state, failure.reason, f"rank {failure.rank}: {failure.message}")
    if result is not None:
        return copy(result)
    if killed and oom_killed:
        full = f"the kernel's OOM killer ended rank {killed[0]}: this machine's memory was full"
        return status(State.OUT_OF_MEMORY, "host_memory", full)
    if stopped is not None:
        return copy(stopped, last_line)
    if failed:
        how = describe_exit(codes[failed[0]])
        return status(State.FAILED, "program_error", _join(f"rank {failed[0]} {how}", last_line))
    if INTERRUPTED_EXIT in codes:
        rank = codes.index(INTERRUPTED_EXIT)
        return status(State.PREEMPTED, "signal", f"rank {rank} ended on a signal that orchestrate did not send")
    return status(State.FAILED, "no_result", "all ranks exited with code 0 but wrote no result")


def describe_exit(code: int | None) -> str:
    if code is None:
        return "ended with an unknown exit code"
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def _join(message: str, line: str) -> str:
    return f"{message}: {line}" if line else message
