"""How an attempt ended, from exit codes, the supervisor's own act, and what the job said."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.base import Status
from orchestrator.backends.exit_status import (
    Ending,
    Exit,
    Failure,
    conclude,
    describe_exit,
    first_failure,
    hung_ranks,
    read_result_or_none,
    result_status,
    since_start,
)
from orchestrator.backends.local import supervisor
from workloads.contract import RunResult, State
from workloads.files.event_log import EventLog
from workloads.files.run_dir import RunDir

RUN_ID = "0123456789abcdef"
CANCELLED = Ending(State.CANCELLED, "cancelled", "stopped by orchestrate cancel")
TIMEOUT = Ending(State.TIMEOUT, "time_limit", "over")
DIED = Ending(State.FAILED, "program_error", "rank 1 was killed by SIGKILL, so the others were stopped")
HANG = Ending(State.FAILED, "hang", "rank 0 made no progress for 600 s")
LOST = Ending(State.LOST, "supervisor_lost", "its supervisor was killed")


def result(state: State, reason: str = "", message: str = "") -> RunResult:
    return RunResult(run_id=RUN_ID, attempt=1, state=state, reason=reason, message=message)


@pytest.mark.parametrize(
    ("known", "state", "reason", "message"),
    [
        ({"exit_codes": [0, 0], "result": result(State.SUCCEEDED)}, State.SUCCEEDED, "", ""),
        # A crash while Python takes itself down, or a late cancel, does not undo a result.
        ({"exit_codes": [-11], "result": result(State.SUCCEEDED)}, State.SUCCEEDED, "", ""),
        ({"exit_codes": [-9], "result": result(State.SUCCEEDED), "ending": CANCELLED}, State.SUCCEEDED, "", ""),
        ({"exit_codes": [-9], "ending": CANCELLED}, State.CANCELLED, "cancelled", CANCELLED.message),
        (
            {"exit_codes": [1], "ending": CANCELLED, "failure": Failure(0, 1.0, "program_error", "x")},
            State.CANCELLED,
            "cancelled",
            CANCELLED.message,
        ),
        ({"exit_codes": [75], "ending": TIMEOUT}, State.TIMEOUT, "time_limit", "over"),
        (
            {"exit_codes": [1], "hung": [0]},
            State.FAILED,
            "hang",
            "no progress; hang.0.txt shows where the run was stuck",
        ),
        ({"exit_codes": [1, -9], "hung": [0, 1], "ending": DIED}, State.FAILED, "hang", None),
        ({"exit_codes": [-9], "ending": HANG}, State.FAILED, "hang", HANG.message),
        (
            {"exit_codes": [1, 1], "failure": Failure(1, 1.0, "program_error", "boom"), "ending": DIED},
            State.FAILED,
            "program_error",
            "rank 1: boom",
        ),
        (
            {"exit_codes": [71], "failure": Failure(0, 1.0, "device_memory", "no room")},
            State.OUT_OF_MEMORY,
            "device_memory",
            "rank 0: no room",
        ),
        (
            {"exit_codes": [78], "failure": Failure(0, 1.0, "wrong_hardware", "1 GPU")},
            State.WRONG_HARDWARE,
            "wrong_hardware",
            "rank 0: 1 GPU",
        ),
        ({"exit_codes": [1], "result": result(State.FAILED, "dataset", "gone")}, State.FAILED, "dataset", "gone"),
        # A rank that only saw its peer vanish knows less than the one who saw the peer's exit code.
        (
            {"exit_codes": [1, -9], "result": result(State.FAILED, "rank_lost", "peer"), "ending": DIED},
            State.FAILED,
            "program_error",
            DIED.message,
        ),
        (
            {"exit_codes": [-9], "oom_killed": True},
            State.OUT_OF_MEMORY,
            "host_memory",
            "the kernel killed rank 0: the machine's memory was full",
        ),
        ({"exit_codes": [-9]}, State.FAILED, "program_error", "rank 0 was killed by SIGKILL"),
        (
            {"exit_codes": [0, 3], "last_words": "Oops"},
            State.FAILED,
            "program_error",
            "rank 1 ended with exit code 3: Oops",
        ),
        (
            {"exit_codes": [os.EX_TEMPFAIL]},
            State.PREEMPTED,
            "signal",
            "rank 0 was told to end by a signal that was not ours",
        ),
        ({"exit_codes": [0, 0]}, State.FAILED, "no_result", None),
        ({"exit_codes": [], "ending": LOST}, State.LOST, "supervisor_lost", LOST.message),
        ({"exit_codes": [], "ending": LOST, "result": result(State.SUCCEEDED)}, State.SUCCEEDED, "", ""),
        (
            {"exit_codes": [], "ending": LOST, "result": result(State.FAILED, "dataset", "gone")},
            State.FAILED,
            "dataset",
            "gone",
        ),
    ],
)
def test_the_table(known: dict[str, Any], state: State, reason: str, message: str | None) -> None:
    found = conclude(**known)
    assert (found.state, found.reason) == (state, reason)
    if message is not None:
        assert found.message == message
    assert found.exit_codes == tuple(known["exit_codes"])


def test_exit_codes_in_words() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert describe_exit(-99) == "was killed by signal 99"
    assert describe_exit(None) == "ended unseen"


def test_the_verdict_file_comes_back_whole_or_not_at_all(tmp_path: Path) -> None:
    attempt = RunDir.of(tmp_path, RUN_ID).attempt(1).create()
    assert Exit.read(attempt) is None
    said = Exit(State.FAILED, "hang", "stuck: “µ”\n", (0, None, -9))
    said.write(attempt)
    assert Exit.read(attempt) == said
    for damaged in ("", "{", "[]", '{"state": "no such state"}', '{"state": "failed"}'):
        attempt.exit.write_text(damaged)
        assert Exit.read(attempt) is None


def test_the_first_to_fail_is_heard(tmp_path: Path) -> None:
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


def test_what_a_requeued_job_did_before_says_nothing_of_its_end(tmp_path: Path) -> None:
    attempt = RunDir.of(tmp_path, RUN_ID).attempt(1).create()
    log = EventLog(attempt.events())
    log.write("start", rank=0)
    log.write("interrupt", signal="SIGTERM")
    log.write("error", failure_class="program_error", message="of the first start", rank=0)
    assert first_failure(attempt, 1) is not None
    log.write("start", rank=0)
    log.close()
    assert first_failure(attempt, 1) is None
    assert since_start(attempt, "interrupt") == []


def test_a_verdict_of_the_job_itself(tmp_path: Path) -> None:
    """A rank that only saw its peer go gives none."""
    attempt = RunDir.of(tmp_path, RUN_ID).attempt(1).create()
    assert result_status(attempt) is None
    for reason, told in (("rank_lost", None), ("program_error", Status(State.FAILED, "program_error", "boom"))):
        attempt.write_result(RunResult(run_id=RUN_ID, attempt=1, state=State.FAILED, reason=reason, message="boom"))
        assert result_status(attempt) == told


def test_only_a_watchdog_that_fired_is_a_hang(tmp_path: Path) -> None:
    """Its file is there, empty, while it waits."""
    attempt = RunDir.of(tmp_path, RUN_ID).attempt(1).create()
    attempt.hang(0).write_text("")
    attempt.hang(1).write_text("Thread 0x1 (most recent call first)")
    assert hung_ranks(attempt, 3) == [1]


def test_a_damaged_or_foreign_result_is_none(tmp_path: Path) -> None:
    attempt = RunDir.of(tmp_path, RUN_ID).attempt(1).create()
    assert read_result_or_none(attempt) is None
    attempt.result.write_text('{"spec_version": 1')
    assert read_result_or_none(attempt) is None
    attempt.write_result(RunResult(run_id="f" * 16, attempt=1, state="succeeded"))
    assert read_result_or_none(attempt) is None


def test_a_verdict_without_room_is_noted_and_its_entry_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds the supervisor gone writes it later; to forget the entry would be to lose the end."""
    monkeypatch.setattr(supervisor, "WRITE_RETRY_S", -1.0)
    attempt = RunDir.of(tmp_path, "ab" * 8).attempt(1).create()
    said: list[None] = []
    attempt.exit.mkdir()
    assert not supervisor._write_persistently(Exit(State.FAILED), attempt, lambda: said.append(None))
    assert len(said) == 1
    attempt.exit.rmdir()
    assert supervisor._write_persistently(Exit(State.FAILED), attempt, lambda: said.append(None))
    assert len(said) == 1 and Exit.read(attempt) == Exit(State.FAILED)
