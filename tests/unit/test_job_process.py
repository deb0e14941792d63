"""The job process around an engine: stop signals, events and results on a full disk, heartbeat, failure classes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from workloads.contract import RunResult, State
from workloads.errors import DatasetError, InputError, JobError, WrongHardwareError
from workloads.files.event_log import read_events
from workloads.files.json_file import read_json
from workloads.files.run_dir import AttemptDir, RunDir
from workloads.job import entry
from workloads.job.context import Events, Interrupted, Rank, StopSignals
from workloads.job.entry import ExitCode, classify, write_result
from workloads.job.watchdog import Pulse
from workloads.job.world import World

RUN_ID = "0123456789abcdef"


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return RunDir.of(tmp_path, RUN_ID).attempt(1).create()


@contextmanager
def _room(num_bytes: int) -> Iterator[None]:
    """Files may grow to so many bytes, then writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _result() -> RunResult:
    bulk = [{"class_name": f"class {n}", "precision": 0.5} for n in range(1000)]
    return RunResult(
        run_id=RUN_ID,
        attempt=1,
        state=State.SUCCEEDED,
        test_accuracy=0.97,
        per_class=bulk,
        provenance={"code_digest": "c0de", "packages_digest": "bac5", "environment": {"A": "x" * 5000}},
    )


def _rank(attempt: AttemptDir, result: RunResult) -> Rank:
    return Rank(
        run=RunDir(attempt.path.parents[1]),
        attempt=attempt,
        world=World.from_environment({}),
        events=Events(attempt.events()),
        stop_signals=StopSignals(),
        result=result,
    )


def test_on_a_full_disk_the_metrics_come_first(attempt: AttemptDir) -> None:
    """What does not fit is the bulk: the numbers and the digests that decide on staleness are written."""
    with _room(8000):
        assert write_result(attempt, _result())
    written = attempt.read_result()
    assert (written.test_accuracy, written.state, written.per_class) == (0.97, "succeeded", [])
    assert written.provenance == {"code_digest": "c0de", "packages_digest": "bac5"}


def test_on_a_completely_full_disk_the_metrics_go_to_stderr(
    attempt: AttemptDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing half-written is left, the text says what to do, and holds what was measured."""
    with _room(100):
        assert not write_result(attempt, _result())
    said = capsys.readouterr().err
    assert "the result cannot be written" in said and "free disk space, then orchestrate retry" in said
    assert json.loads(said.splitlines()[-1])["test_accuracy"] == 0.97
    assert [p.name for p in attempt.path.iterdir()] == ["job"]


def test_a_full_disk_loses_events_and_does_not_end_the_run(
    attempt: AttemptDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said once on stderr; later events come again when there is room."""
    events = Events(attempt.events())
    events.write("start")
    with _room(os.path.getsize(attempt.events())):
        events.write("lost")
        events.write("lost too")
    events.write("end")
    events.close()
    assert [e["event"] for e in read_events(attempt.events())[0]] == ["start", "end"]
    assert capsys.readouterr().err.count("events are being lost") == 1


def test_a_log_file_on_a_full_disk_does_not_fail_the_run(
    attempt: AttemptDir, capfd: pytest.CaptureFixture[str]
) -> None:
    """Standard error is a file there, too: what cannot be said is not said, and nothing is raised."""
    with _room(1):
        assert not write_result(attempt, _result())
    assert len(capfd.readouterr().err) <= 1


def test_signals_stop_the_start_at_once_and_training_between_steps() -> None:
    stop_signals = StopSignals()
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
    try:
        stop_signals.install()
        with pytest.raises(Interrupted, match="SIGUSR2"):
            os.kill(os.getpid(), signal.SIGUSR2)
        stop_signals.signal, stop_signals.deferred = None, True
        stop_signals.raise_if_stopped()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"):
            stop_signals.raise_if_stopped()
        with pytest.raises(Interrupted, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)  # a second signal does not wait
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class OutOfMemoryError(RuntimeError):
    """torch's has this name; torch need not be there."""


class HorovodInternalError(RuntimeError):
    """Horovod's has this name, and one message for all that can happen to a connection."""


@pytest.mark.parametrize(
    ("error", "state", "reason", "code"),
    [
        (WrongHardwareError("x"), State.WRONG_HARDWARE, "wrong_hardware", ExitCode.WRONG_HARDWARE),
        (DatasetError("x"), State.FAILED, "dataset", ExitCode.FAILED),
        (JobError("x"), State.FAILED, "program_error", ExitCode.FAILED),
        (InputError("x"), State.FAILED, "input", ExitCode.FAILED),
        (OutOfMemoryError("CUDA out of memory"), State.OUT_OF_MEMORY, "device_memory", ExitCode.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory"), State.OUT_OF_MEMORY, "device_memory", ExitCode.OUT_OF_MEMORY),
        (MemoryError(), State.OUT_OF_MEMORY, "host_memory", ExitCode.OUT_OF_MEMORY),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
            State.OUT_OF_MEMORY,
            "host_memory",
            ExitCode.OUT_OF_MEMORY,
        ),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:2"),
            State.FAILED,
            "rank_lost",
            ExitCode.FAILED,
        ),
        (HorovodInternalError("Unknown error"), State.FAILED, "rank_lost", ExitCode.FAILED),
        (ZeroDivisionError("x"), State.FAILED, "program_error", ExitCode.FAILED),
    ],
)
def test_errors_are_classified(error: Exception, state: State, reason: str, code: ExitCode) -> None:
    assert classify(error) == (state, reason, code)


def test_the_pulse_writes_progress_and_deletes_its_empty_stacks_file(attempt: AttemptDir) -> None:
    """Phase, place and rate are in the file within seconds; a good end removes the empty file for stacks."""
    with Pulse(attempt, 2, hang_timeout_s=60) as pulse:
        pulse.epochs, pulse.steps = 3, 30
        pulse.beat("train")
        pulse.step, pulse.samples = 7, 700
        deadline = time.monotonic() + 5
        while not (attempt.progress(2).exists() and read_json(attempt.progress(2))["step"] == 7):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        shown = read_json(attempt.progress(2))
        assert attempt.hang(2).exists()
    assert (shown["rank"], shown["phase"], shown["epochs"], shown["steps"]) == (2, "train", 3, 30)
    assert 0 < shown["samples_per_s"] <= 7000
    assert not attempt.hang(2).exists()


PATIENT = """
import sys, time
from pathlib import Path
from workloads.files.run_dir import AttemptDir
from workloads.job.watchdog import Pulse
from workloads.job.world import World
with Pulse(AttemptDir(Path(sys.argv[1])), 0, hang_timeout_s=1) as pulse:
    pulse.await_for(60)
    time.sleep(2)
    print("compiled", flush=True)
    pulse.beat("train")
    time.sleep(60)
"""


def test_compiling_may_take_long_and_training_not(attempt: AttemptDir) -> None:
    """Two seconds without a beat are allowed at first; after the next beat one second is the limit again."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PATIENT, str(attempt.path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "compiled\n")
    assert time.monotonic() - started < 40
    assert "most recent call first" in attempt.hang(0).read_text()


def test_a_damaged_spec_is_an_error_that_names_the_file(attempt: AttemptDir) -> None:
    """The rank's last words name the file; see ``tests/contract/test_faults.py`` for how ranks end."""
    rank = _rank(attempt, _result())
    rank.run.spec.write_text('{"spec_version": 1, ')
    with pytest.raises(JobError, match="the run's spec cannot be read") as caught:
        entry._execute(rank)
    assert str(rank.run.spec) in str(caught.value)


def test_the_root_cause_replaces_a_lost_peer_in_the_result(
    attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that only saw its peer go was first to write; the peer says why. Nobody writes over what is known."""
    monkeypatch.setattr(entry, "ROOT_CAUSE_WAIT_S", 0.0)
    reasons = []
    for error in (ConnectionError("Connection closed by peer"), ValueError("boom"), ConnectionError("Broken pipe")):
        result = RunResult(run_id=RUN_ID, attempt=1, state=State.RUNNING)
        entry._fail(_rank(attempt, result), error)
        reasons.append(attempt.read_result().reason)
    assert reasons == ["rank_lost", "program_error", "program_error"]
