"""The tracker: which executor it queries, and what it writes into the store."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from db.connect import Store, open_store
from db.submissions import AttemptRecord, StatusUpdate, record_intents, update_statuses
from orchestrator.backends import leases, submit_lock
from orchestrator.backends.base import Attempt, Status
from orchestrator.backends.local.executor import LocalExecutor
from orchestrator.backends.local.records import QueueFolder, claim_start
from orchestrator.backends.processes import Host
from orchestrator.backends.slurm.records import ClusterFolder, ClusterLimits
from orchestrator.submission import submitter
from orchestrator.tracking import tracker
from workloads.contract import Execution, Expectation, Hardware, ResourceShape, RunSpec, State, TrainConfig
from workloads.files.json_file import write_json
from workloads.files.run_dir import AttemptDir, RunDir

TRAIN = TrainConfig(model="cnn", dataset="digits", strategy="eager", hardware=Hardware("cpu", 1), cpus=1)


class Folder:
    """A runs folder with one run that was submitted."""

    def __init__(self, store: Store, runs: Path) -> None:
        self.store, self.runs = store, runs

    def send(self, target: str = "local", job_id: str | None = "77") -> tuple[AttemptRecord, AttemptDir]:
        spec = RunSpec(
            run_id=TRAIN.run_id(),
            label="cnn",
            experiment="e",
            train=TRAIN,
            execution=Execution(),
            expect=Expectation(ranks=1, nodes=1, gpus_per_node=0, cpus_per_rank=1),
            target=target,
            data_root="",
        )
        (intent,) = record_intents(self.store, self.runs, [(spec, ResourceShape())], target)
        run = RunDir.of(self.runs, spec.run_id)
        run.write_spec(spec)
        attempt = run.attempt(intent.attempt).create()
        write_json(attempt.submission, {"token": intent.token, "target": target, "attempt": 1, "job_id": job_id})
        return intent, attempt

    def status(self) -> tracker.RunStatus:
        tracker.refresh(self.store, self.runs)
        (status,) = tracker.statuses(self.store, self.runs)
        return status


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    monkeypatch.setenv(leases.DOMAIN_VARIABLE, str(tmp_path))
    runs = tmp_path / "runs"
    runs.mkdir()
    with open_store(str(tmp_path / "results.db")) as store:
        yield Folder(store, runs)


def test_a_living_supervisor_is_a_running_run_with_progress(folder: Folder) -> None:
    intent, attempt = folder.send()
    claim_start(attempt)
    lease = leases.acquire(leases.supervisor_name(intent.token))
    assert lease is not None
    write_json(
        attempt.progress(0),
        {"time": 0.0, "phase": "train", "epoch": 2, "epochs": 5, "step": 10, "steps": 25, "samples_per_s": 512.5},
    )
    status = folder.status()
    assert (status.state, status.job_id, status.attempt, status.label) == (State.RUNNING, "77", 1, "cnn")
    assert (status.progress.epoch, status.progress.epochs, status.progress.samples_per_s) == (2, 5, 512.5)
    assert (status.progress.silent_s or 0) > 1e9
    lease.release()
    # It ended without an exit.json: killed.
    assert (folder.status().state, folder.status().reason) == (State.LOST, "supervisor_lost")
    assert Status.read_exit(attempt) is not None


def test_an_exit_file_reaches_the_store(folder: Folder) -> None:
    _, attempt = folder.send()
    claim_start(attempt)
    Status(State.TIMEOUT, "time_limit", "it reached its time limit of 60 s").write_exit(attempt)
    status = folder.status()
    assert (status.state, status.reason) == (State.TIMEOUT, "time_limit")
    assert status.message == "it reached its time limit of 60 s"


def test_a_run_without_its_queue_entry_is_lost(folder: Folder) -> None:
    """Somebody removed RUNS/queue. The run may be submitted again, and never starts twice."""
    intent, attempt = folder.send()
    update_statuses(folder.store, [StatusUpdate(intent.run_id, 1, State.PENDING)])
    assert (folder.status().state, folder.status().reason) == (State.LOST, "entry_lost")
    assert not claim_start(attempt)


def test_interrupted_submit_or_one_at_work(folder: Folder) -> None:
    folder.send(job_id=None)
    assert (folder.status().state, folder.status().reason) == (State.SUBMITTING, "interrupted")
    lease = leases.acquire(f"submit/{os.path.realpath(folder.runs)}")
    assert lease is not None
    assert (folder.status().state, folder.status().reason) == (State.SUBMITTING, "submitting")
    lease.release()


@pytest.mark.parametrize("target", ["local", "lab"])
def test_a_submit_on_another_host_is_left_alone(folder: Folder, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status shows where, and neither status nor another submit continues it."""
    ClusterFolder(folder.runs, "lab").keep(ClusterLimits(name="lab"), {})
    folder.send(target, job_id=None)
    with submit_lock.acquire(folder.runs):
        monkeypatch.setattr(Host, "here", classmethod(lambda cls: Host("login2", "boot", "net")))
        monkeypatch.setenv(leases.DOMAIN_VARIABLE, "of another host")
        status = folder.status()
        assert (status.state, status.reason) == (State.SUBMITTING, "submitting")
        assert status.message.startswith("a submit on ") and status.message.endswith(" is at work on it")
        assert submitter.resume_submissions(folder.store, folder.runs) == []
        assert folder.status().state is State.SUBMITTING
    assert folder.status().reason == "interrupted"


def test_a_cancelled_intent_never_starts(folder: Folder) -> None:
    """Cancelled between the intent and the queue: the command that continues the submit cannot start it."""
    intent, attempt = folder.send()
    LocalExecutor(folder.runs).cancel([Attempt(intent.token, attempt)])
    assert folder.status().state is State.CANCELLED
    assert not claim_start(attempt)


def test_a_cancel_on_a_full_disk_has_requested_every_end(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file can be created there, but no exit.json written."""
    intent, attempt = folder.send()
    others = RunDir.of(folder.runs, "f" * 16).attempt(1)

    def full(_status: Status, _directory: AttemptDir) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Status, "write_exit", full)
    executor = LocalExecutor(folder.runs)
    with pytest.raises(OSError, match="No space left"):
        executor.cancel([Attempt(intent.token, attempt), Attempt("token", others)])
    assert all(map(QueueFolder(folder.runs).is_cancelled, (intent.token, "token")))


def test_a_target_without_an_executor_keeps_its_state(folder: Folder) -> None:
    _, attempt = folder.send("sol")
    for _ in range(2):
        status = folder.status()
        assert (status.state, status.reason, status.job_id) == (State.PENDING, "", "77")
    assert Status.read_exit(attempt) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"epoch": "two", "samples_per_s": null, "time": "now"}'])
def test_damaged_progress_is_no_progress(tmp_path: Path, content: str) -> None:
    attempt = RunDir.of(tmp_path, "0" * 16).attempt(1).create()
    attempt.progress(0).write_text(content)
    assert tracker.read_progress(attempt) == tracker.Progress()


def test_a_silent_run_of_another_machine_is_lost(folder: Folder) -> None:
    _, attempt = folder.send()
    claim_start(attempt)
    said = json.loads(attempt.supervisor.read_text())
    said["host"]["name"] = "node7"
    write_json(attempt.supervisor, said)
    assert (folder.status().state, folder.status().message) == (State.RUNNING, "on node7")
    for path in (attempt.path, *attempt.path.rglob("*")):
        os.utime(path, (1, 1))
    status = folder.status()
    assert (status.state, status.reason) == (State.LOST, "no_sign_of_life")
    assert status.message.startswith("no sign of life from node7 for")
