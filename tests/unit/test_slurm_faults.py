"""Faults of clusters that must not matter: late accounting, wrong clocks, odd names, missing folders, many ids."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.backends.base import UNREACHABLE, Attempt, Request, Status
from orchestrator.backends.processes import Answer
from orchestrator.backends.slurm import commands, query
from orchestrator.backends.slurm.executor import SlurmExecutor
from orchestrator.backends.slurm.status import ABSENCE_GRACE_S, FINISH_GRACE_S
from orchestrator.cli import submit_report
from orchestrator.errors import OperationError
from orchestrator.submission.submitter import SubmitResult
from orchestrator.workspace import Workspace
from tests.unit.slurm_fakes import Fakes
from workloads.contract import Execution, Expectation, Hardware, ResourceShape, RunSpec, State, Submission, TrainConfig
from workloads.files.json_file import write_json
from workloads.files.run_dir import AttemptDir, jobs_folder

TRAIN = TrainConfig(model="cnn", dataset="digits", strategy="probe", hardware=Hardware("cpu", 1), cpus=1)


class Observed:
    """Attempts of one array on a fake cluster. Each query's states are the recorded ones of the next query."""

    def __init__(self, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tasks: int = 1) -> None:
        self.fakes = fakes
        self.record = fakes.array(tasks)
        self.executor = SlurmExecutor(fakes.runs, fakes.limits)
        self.attempts = [
            Attempt(task.token, task.directory(fakes.runs).create(), State.PENDING) for task in self.record.tasks
        ]
        self._now = time.time()
        monkeypatch.setattr(time, "time", lambda: self._now)

    @property
    def directory(self) -> AttemptDir:
        return self.attempts[0].directory

    def query(self, after_s: float = 1.0, queue: Sequence[str] = (), accounting: Sequence[str] = ()) -> Status:
        """Return the status of the first attempt when squeue and sacct print these states of it."""
        self._now += after_s
        self.fakes.listed(self.record, *(("0", word, "None") for word in queue))
        rows = [f"77_0|{self.record.name}|{word}|0:0|12|n1" for word in accounting]
        self.fakes.answer("sacct", "".join(f"{row}\n" for row in rows))
        found = self.executor.status(self.attempts, fresh=True)
        self.attempts = [replace(a, recorded=status.state) for a, status in zip(self.attempts, found, strict=True)]
        return found[0]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(tmp_path, monkeypatch)


@pytest.fixture
def observed(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Observed:
    return Observed(fakes, monkeypatch)


def test_late_accounting_ends_no_run(observed: Observed) -> None:
    """First without the job, then with it as running after squeue dropped it; only an ended state is an end."""
    for _ in range(2):
        assert observed.query(queue=["PENDING"]).state is State.PENDING
    write_json(observed.directory.owner, {"job_id": "77_0"})
    assert observed.query(queue=["RUNNING"]).state is State.RUNNING
    for _ in range(3):
        assert observed.query(after_s=300, accounting=["RUNNING"]).state is State.RUNNING
    finishing = observed.query(accounting=["COMPLETED"])
    assert (finishing.state, finishing.reason) == (State.RUNNING, "finishing")
    ended = observed.query(after_s=FINISH_GRACE_S + 1, accounting=["COMPLETED"])
    assert (ended.state, ended.reason) == (State.FAILED, "no_result")
    assert not observed.fakes.calls("sbatch"), "nothing was submitted again"


def test_a_job_that_nobody_lists_is_lost_after_the_grace_period(observed: Observed) -> None:
    assert observed.query().state is State.PENDING
    unlisted = observed.query(after_s=ABSENCE_GRACE_S - 10)
    assert (unlisted.state, unlisted.reason) == (State.PENDING, "unlisted")
    lost = observed.query(after_s=20)
    assert (lost.state, lost.message) == (State.LOST, "Slurm does not know the job, and it never started")


@pytest.mark.parametrize("skew_s", [-600, 600])
def test_a_wrong_clock_of_a_node_makes_no_run_look_dead(observed: Observed, skew_s: float) -> None:
    """Ten minutes behind or ahead: such files are signs of life too, and Slurm's state goes first."""
    write_json(observed.directory.owner, {"job_id": "77_0"})
    written_at = time.time() + skew_s
    os.utime(observed.directory.owner, (written_at, written_at))
    assert observed.query(queue=["RUNNING"]) == Status(State.RUNNING, job_id="77_0")
    assert observed.query(after_s=ABSENCE_GRACE_S + 1).state is State.RUNNING
    assert observed.query(queue=["RUNNING"]) == Status(State.RUNNING, job_id="77_0")


def test_accounting_is_queried_from_a_day_before(observed: Observed) -> None:
    """The controller's clock may be behind ours: a window that starts now could exclude a new job."""
    unknown = observed.fakes.array(1, job_id=None)
    observed.fakes.answer("squeue")
    assert query.find(observed.executor._folder, observed.fakes.limits, unknown) == []
    (call,) = observed.fakes.calls("sacct")
    (since,) = re.findall(r"--starttime=(\S+)", call)
    assert time.mktime(time.strptime(since, "%Y-%m-%dT%H:%M:%S")) == pytest.approx(unknown.asked_at - 86400, abs=2)


def test_cancelling_500_tasks_takes_three_calls(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ids of our records only: no names, no users."""
    observed = Observed(fakes, monkeypatch, tasks=500)
    observed.executor.cancel(observed.attempts)
    calls = fakes.calls("scancel")
    assert [len(call.split()) - 1 for call in calls] == [200, 200, 100]
    assert {word for call in calls for word in call.split()[1:]} == {f"77_{index}" for index in range(500)}


def test_the_runs_folder_has_one_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another directory and through a link: jobs, store and logs get one absolute path."""
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "link" / "sub")
    for given in ("../runs", f"{tmp_path}/link/runs", "./../../link/runs"):
        assert Workspace.at(runs=Path(given)).runs == tmp_path / "real" / "runs"


def _request(fakes: Fakes, label: str) -> Request:
    spec = RunSpec(
        run_id=TRAIN.run_id(),
        label=label,
        experiment=label,
        train=TRAIN,
        execution=Execution(),
        expect=Expectation(ranks=1, nodes=1, gpus_per_node=0, cpus_per_rank=1),
        target="one",
        data_root="",
    )
    shape = ResourceShape(nodes=1)
    fakes.folder.keep(fakes.limits, {shape.key(): "#!/bin/bash\n"})
    return Request(fakes.runs, spec, Submission(token="t", target="one", attempt=1, shape=shape))


def test_without_slurm_nothing_fails(fakes: Fakes) -> None:
    """Clients without a configuration contact no controller: runs stay planned, and the fix is another machine."""
    (fakes.bin / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: fetch_config: DNS SRV lookup failed' >&2\n"
        "echo 'sbatch: fatal: Could not establish a configuration source' >&2\nexit 1\n"
    )
    (receipt,) = SlurmExecutor(fakes.runs, fakes.limits).submit([_request(fakes, "x")])
    assert (receipt.state, receipt.reason) == (State.PLANNED, UNREACHABLE)
    with pytest.raises(OperationError, match="Slurm cannot be reached from here: 1 run not submitted") as caught:
        submit_report.raise_for_failures(SubmitResult(rejected=[receipt]))
    assert "DNS SRV" in caught.value.why and "login node" in caught.value.hint


def test_arguments_of_sbatch_for_a_run_of_any_name(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short ASCII name; and the folder of logs exists, without which Slurm fails the job."""
    (fakes.bin / "sbatch").write_text(f'#!/bin/sh\n[ -d "{jobs_folder(fakes.runs)}" ] && echo "$*" >&2 && echo 4242\n')
    request = _request(fakes, "résumé 实验/" * 40)
    given: list[Answer] = []
    run = commands.run
    monkeypatch.setattr(commands, "run", lambda *argv, **more: given.append(run(*argv, **more)) or given[-1])
    (receipt,) = SlurmExecutor(fakes.runs, fakes.limits).submit([request])
    assert (receipt.state, receipt.job_id) == (State.PENDING, "4242_0")
    (sent,) = (answer for answer in given if answer.argv[0] == "sbatch")
    assert re.search(r"--job-name=orc-[0-9a-f]{16} ", sent.stderr)
    assert all(word.isascii() and len(word) < 255 for word in sent.argv)
