"""How an attempt ended: from exit codes, why the supervisor stopped it, and what the job reported."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.base import CANCELLED, Status
from orchestrator.backends.exit_status import (
    RankFailure,
    conclude,
    describe_exit,
    events_since_start,
    first_failure,
    hung_ranks,
    result_status,
)
from orchestrator.backends.local import supervisor
from workloads.contract import RunResult, State
from workloads.files.event_log import EventLog
from workloads.files.run_dir import RunDir

RUN_ID = "0123456789abcdef"
TIMEOUT = Status(State.TIMEOUT, "time_limit", "over")
DIED = Status(State.FAILED, "program_error", "rank 1 was killed by SIGKILL, so the others were stopped")
HANG = Status(State.FAILED, "hang", "rank 0 made no progress for 600 s")
LOST = Status(State.LOST, "supervisor_lost", "its supervisor was killed")


@pytest.mark.parametrize(
    ("known", "state", "reason", "message"),
    [
        ({"exit_codes": [0, 0], "result": Status(State.SUCCEEDED)}, State.SUCCEEDED, "", ""),
        # A crash at interpreter exit or a late cancel does not invalidate a result.
        ({"exit_codes": [-11], "result": Status(State.SUCCEEDED)}, State.SUCCEEDED, "", ""),
        ({"exit_codes": [-9], "result": Status(State.SUCCEEDED), "stopped": CANCELLED}, State.SUCCEEDED, "", ""),
        ({"exit_codes": [-9], "stopped": CANCELLED}, State.CANCELLED, "cancelled", CANCELLED.message),
        (
            {"exit_codes": [1], "stopped": CANCELLED, "failure": RankFailure(0, 1.0, "program_error", "x")},
            State.CANCELLED,
            "cancelled",
            CANCELLED.message,
        ),
        ({"exit_codes": [75], "stopped": TIMEOUT}, State.TIMEOUT, "time_limit", "over"),
        (
            {"exit_codes": [1], "hung": [0]},
            State.FAILED,
            "hang",
            "no progress; see where the run hung in hang.0.txt",
        ),
        ({"exit_codes": [1, -9], "hung": [0, 1], "stopped": DIED}, State.FAILED, "hang", None),
        ({"exit_codes": [-9], "stopped": HANG}, State.FAILED, "hang", HANG.message),
        (
            {"exit_codes": [1, 1], "failure": RankFailure(1, 1.0, "program_error", "boom"), "stopped": DIED},
            State.FAILED,
            "program_error",
            "rank 1: boom",
        ),
        (
            {"exit_codes": [71], "failure": RankFailure(0, 1.0, "device_memory", "full")},
            State.OUT_OF_MEMORY,
            "device_memory",
            "rank 0: full",
        ),
        (
            {"exit_codes": [78], "failure": RankFailure(0, 1.0, "wrong_hardware", "1 GPU")},
            State.WRONG_HARDWARE,
            "wrong_hardware",
            "rank 0: 1 GPU",
        ),
        ({"exit_codes": [1], "result": Status(State.FAILED, "dataset", "gone")}, State.FAILED, "dataset", "gone"),
        # A rank that only lost its peer (result_status is None) knows less than the peer's exit code shows.
        (
            {"exit_codes": [1, -9], "result": None, "stopped": DIED},
            State.FAILED,
            "program_error",
            DIED.message,
        ),
        (
            {"exit_codes": [-9], "oom_killed": True},
            State.OUT_OF_MEMORY,
            "host_memory",
            "the kernel's OOM killer ended rank 0: this machine's memory was full",
        ),
        ({"exit_codes": [-9]}, State.FAILED, "program_error", "rank 0 was killed by SIGKILL"),
        (
            {"exit_codes": [0, 3], "last_line": "Oops"},
            State.FAILED,
            "program_error",
            "rank 1 ended with exit code 3: Oops",
        ),
        (
            {"exit_codes": [os.EX_TEMPFAIL]},
            State.PREEMPTED,
            "signal",
            "rank 0 ended on a signal that orchestrate did not send",
        ),
        ({"exit_codes": [0, 0]}, State.FAILED, "no_result", None),
        ({"exit_codes": [], "stopped": LOST}, State.LOST, "supervisor_lost", LOST.message),
        ({"exit_codes": [], "stopped": LOST, "result": Status(State.SUCCEEDED)}, State.SUCCEEDED, "", ""),
        (
            {"exit_codes": [], "stopped": LOST, "result": Status(State.FAILED, "dataset", "gone")},
            State.FAILED,
            "dataset",
            "gone",
        ),
    ],
)
def test_conclude(known: dict[str, Any], state: State, reason: str, message: str | None) -> None:
    found = conclude(**known)
    assert (found.state, found.reason) == (state, reason)
    if message is not None:
        assert found.message == message
    assert found.exit_codes == tuple(known["exit_codes"])


def test_describe_exit() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert describe_exit(-99) == "was killed by signal 99"
    assert describe_exit(None) == "ended with an unknown exit code"


def test_exit_file_is_read_back_whole_or_not_at_all(tmp_path: Path) -> None:
    attempt = RunDir.of(tmp_path, RUN_ID).attempt(1).create()
    assert Status.read_exit(attempt) is None
    status = Status(State.FAILED, "hang", "stuck: “µ”\n", (0, None, -9))
    status.write_exit(attempt)
    assert Status.read_exit(attempt) == status
    for damaged in ("", "{", "[]", '{"state": "no such state"}', '{"state": "failed"}'):
        attempt.exit.write_text(damaged)
        assert Status.read_exit(attempt) is None


def test_the_first_failure_counts(tmp_path: Path) -> None:
    """Rank 0 only lost its partner, rank 2 failed after rank 1."""
    attempt = RunDir.of(tmp_path, RUN_ID).attempt(1).create()
    for rank, reason in ((0, "rank_lost"), (1, "program_error"), (2, "program_error")):
        log = EventLog(attempt.events(rank))
        log.write("start", rank=rank)
        log.write("error", failure_class=reason, message=f"of {rank}", rank=rank)
        log.close()
    found = first_failure(attempt, 3)
    assert found is not None
    assert (found.rank, found.message) == (1, "of 1")
    assert first_failure(attempt, 1) is None


def test_events_before_a_requeue_do_not_count(tmp_path: Path) -> None:
    attempt = RunDir.of(tmp_path, RUN_ID).attempt(1).create()
    log = EventLog(attempt.events())
    log.write("start", rank=0)
    log.write("interrupt", signal="SIGTERM")
    log.write("error", failure_class="program_error", message="of the first start", rank=0)
    assert first_failure(attempt, 1) is not None
    log.write("start", rank=0)
    log.close()
    assert first_failure(attempt, 1) is None
    assert events_since_start(attempt, "interrupt") == []


def test_status_in_the_result(tmp_path: Path) -> None:
    """A rank that only lost its peer reports none."""
    attempt = RunDir.of(tmp_path, RUN_ID).attempt(1).create()
    assert result_status(attempt) is None
    for reason, expected in (("rank_lost", None), ("program_error", Status(State.FAILED, "program_error", "boom"))):
        attempt.write_result(RunResult(run_id=RUN_ID, attempt=1, state=State.FAILED, reason=reason, message="boom"))
        assert result_status(attempt) == expected


def test_only_a_watchdog_that_fired_is_a_hang(tmp_path: Path) -> None:
    """Its file exists from the start and is empty until it fires."""
    attempt = RunDir.of(tmp_path, RUN_ID).attempt(1).create()
    attempt.hang(0).write_text("")
    attempt.hang(1).write_text("Thread 0x1 (most recent call first)")
    assert hung_ranks(attempt, 3) == [1]


def test_a_damaged_or_foreign_result_is_none(tmp_path: Path) -> None:
    attempt = RunDir.of(tmp_path, RUN_ID).attempt(1).create()
    assert result_status(attempt) is None
    attempt.result.write_text('{"spec_version": 1')
    assert result_status(attempt) is None
    attempt.write_result(RunResult(run_id="f" * 16, attempt=1, state="succeeded"))
    assert result_status(attempt) is None


def test_an_exit_that_a_full_disk_rejects_is_marked_unreported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds the dead supervisor writes it later; without the queue entry the end would be lost."""
    monkeypatch.setattr(supervisor, "WRITE_RETRY_S", -1.0)
    attempt = RunDir.of(tmp_path, "ab" * 8).attempt(1).create()
    failures: list[None] = []
    attempt.exit.mkdir()
    assert not supervisor._write_exit(Status(State.FAILED), attempt, on_failure=lambda: failures.append(None))
    assert len(failures) == 1
    attempt.exit.rmdir()
    assert supervisor._write_exit(Status(State.FAILED), attempt, on_failure=lambda: failures.append(None))
    assert len(failures) == 1 and Status.read_exit(attempt) == Status(State.FAILED)
