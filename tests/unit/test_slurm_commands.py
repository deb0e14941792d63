"""Queries to Slurm: which, how often, and how the answers are read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import ClassVar

import pytest

from orchestrator.backends.processes import Answer
from orchestrator.backends.slurm import commands, query
from orchestrator.backends.slurm.array_job import SbatchOutcome, outcome_of, parse_job_id
from orchestrator.backends.slurm.states import Phase
from tests.unit.slurm_fakes import Fakes
from workloads.files.json_file import write_json
from workloads.files.run_dir import AttemptDir, RunDir
from workloads.job import slurm_owner


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(tmp_path, monkeypatch)


def test_ten_polls_of_500_tasks_are_one_squeue_and_one_sacct(cluster: Fakes) -> None:
    """However many tasks and polls there are within poll_seconds."""
    record = cluster.array(500)
    cluster.listed(record, ("300-499:1%20", "PENDING", "Priority"))
    rows = [f"77_{i}|{record.name}|COMPLETED|0:0|12|n1" for i in range(300)]
    cluster.answer("sacct", "\n".join(rows) + "\n")
    for _ in range(10):
        report = cluster.poll(record)
    assert (len(cluster.calls("squeue")), len(cluster.calls("sacct")), len(cluster.calls("scontrol"))) == (1, 1, 1)
    tasks = report.arrays[record.name].tasks
    assert len(tasks) == 500
    assert [tasks[i].phase for i in (0, 299, 300, 499)] == [Phase.ENDED] * 2 + [Phase.WAITING] * 2
    cluster.poll(record, fresh=True)
    assert len(cluster.calls("squeue")) == 2, "a command that has just acted queries again"


def test_without_accounting_the_controller_is_queried(cluster: Fakes) -> None:
    """sacct is tried once; then squeue reports the state and scontrol the exit code."""
    record = cluster.array(2)
    cluster.listed(record, ("0", "FAILED", "NonZeroExitCode"), ("1", "RUNNING", "None"))
    cluster.answer("sacct", error="Slurm accounting storage is disabled\n")
    job = f"JobId=77 ArrayJobId=77 ArrayTaskId=0 JobName={record.name} JobState=FAILED ExitCode=3:0 RunTime=00:01:10"
    cluster.answer("scontrol", f"ClusterName = one\n{job} NodeList=n1\n")
    for _ in range(3):
        report = cluster.poll(record, fresh=True)
    seen = report.arrays[record.name].tasks
    assert (seen[0].exit_code, seen[0].elapsed_s, seen[1].state) == (3, 70.0, "RUNNING")
    assert len(cluster.calls("sacct")) == 1


def test_a_failed_query_changes_nothing_and_slows_polling_down(cluster: Fakes) -> None:
    """The last report stays, and the pause grows with each failure."""
    record = cluster.array(1)
    cluster.listed(record, ("0", "RUNNING", "None"))
    before = cluster.poll(record)
    cluster.answer("squeue", error="slurm_load_jobs error: Unable to contact slurm controller\n")
    after = cluster.poll(record, fresh=True)
    assert after.arrays == before.arrays and after.failures == 1 and "Unable to contact" in after.problem
    report = query.SlurmReport.read(cluster.folder)
    report.asked_at = time.time() - 90
    report.write(cluster.folder)
    cluster.poll(record)
    assert len(cluster.calls("squeue")) == 2, "60 s after a failure are not enough"


def test_a_failure_of_accounting_is_not_missing_accounting(cluster: Fakes) -> None:
    record = cluster.array(1)
    cluster.listed(record)
    cluster.answer("sacct", error="sacct: error: slurm_persist_conn_open: failed to open connection to host:db:6819\n")
    report = cluster.poll(record)
    assert report.accounting_failed and not report.no_accounting


def test_a_reused_job_id(cluster: Fakes) -> None:
    """Rows with another job name are not ours, in squeue and in sacct."""
    record = cluster.array(1)
    cluster.answer("squeue", "77|0|orc-other|RUNNING|0:05|n1|None\n")
    cluster.answer("sacct", "77_0|training|COMPLETED|0:0|12|n1\n")
    assert not cluster.poll(record).arrays.get(record.name, query.ArrayReport()).tasks


def test_another_cluster_is_not_queried(cluster: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of cluster two, runs on cluster one keep their states."""
    record = cluster.array(1)
    cluster.listed(record, ("0", "RUNNING", "None"))
    cluster.poll(record)
    cluster.answer("scontrol", "ClusterName = two\n")
    cluster.listed(record)
    monkeypatch.setenv("SLURM_CONF", "/etc/two.conf")
    report = cluster.poll(record, fresh=True)
    assert report.problem == "this machine talks to cluster two, the runs are on one"
    assert report.arrays[record.name].tasks[0].state == "RUNNING"


def test_steps_report_the_memory_limit(cluster: Fakes) -> None:
    record = cluster.array(1)
    cluster.listed(record)
    rows = [f"77_0|{record.name}|FAILED|1:0|12|n1", "77_0.batch|batch|FAILED|1:0|12|n1"]
    rows += ["77_0.0|python|OUT_OF_MEMORY|0:125|12|n1"]
    cluster.answer("sacct", "\n".join(rows) + "\n")
    assert cluster.poll(record).arrays[record.name].tasks[0].out_of_memory


@pytest.mark.parametrize(
    ("stdout", "job_id"),
    [
        ("4242\n", "4242"),
        ("4242;clusterA\n", "4242"),
        ("Note: job 5 limit applies\nSubmitted batch job 4242\n", "4242"),
        ("4242\nYour quota: job 3 of 100\n", "4242"),
        ("Submitted batch job 4242 on cluster east\n", "4242"),
        ("welcome\n", None),
        ("", None),
    ],
)
def test_job_id_in_noisy_output(stdout: str, job_id: str | None) -> None:
    """Only a line of its own counts, never a number inside other text."""
    assert parse_job_id(stdout) == job_id
    assert outcome_of(Answer(("sbatch",), 0, stdout, "")) == (
        SbatchOutcome.ACCEPTED if job_id else SbatchOutcome.NO_ANSWER,
        job_id,
    )


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (
            1,
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
            SbatchOutcome.NO_ANSWER,
        ),
        (1, "sbatch: error: Batch job submission failed: Unable to contact slurm controller", SbatchOutcome.NO_ANSWER),
        (
            1,
            "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received",
            SbatchOutcome.NO_ANSWER,
        ),
        (None, "sbatch did not end within 180 s", SbatchOutcome.NO_ANSWER),
        (-9, "", SbatchOutcome.NO_ANSWER),
        (1, "sbatch: error: Batch job submission failed: Invalid job array specification", SbatchOutcome.REJECTED),
        (1, "sbatch: error: Batch job submission failed: Requested time limit is invalid", SbatchOutcome.REJECTED),
        (1, "sbatch: error: QOSMaxSubmitJobPerUserLimit", SbatchOutcome.REJECTED),
    ],
)
def test_rejected_or_no_answer(code: int | None, text: str, expected: SbatchOutcome) -> None:
    assert outcome_of(Answer(("sbatch",), code, "", text)) == (expected, None)


def test_the_environment_of_client_commands() -> None:
    """The choice of the cluster stays; options from the caller's environment do not."""
    caller = {"SLURM_CONF": "/c", "SLURM_JOB_ID": "1", "SLURM_CPU_BIND": "x", "SBATCH_PARTITION": "p", "HOME": "/h"}
    assert commands.environment(caller) == {"SLURM_CONF": "/c", "HOME": "/h", "SLURM_BITSTR_LEN": "0"}
    assert commands.option_variables(caller) == ["SBATCH_PARTITION", "SLURM_CPU_BIND", "SLURM_JOB_ID"]


def test_a_command_that_does_not_end_or_does_not_exist(cluster: Fakes) -> None:
    (cluster.bin / "slow").write_text("#!/bin/sh\nexec sleep 20\n")
    (cluster.bin / "slow").chmod(0o755)
    assert commands.run("slow", timeout_s=0.2).text == "slow did not end within 0 s"
    assert commands.run("sgoodbye").text == "there is no sgoodbye on PATH"


class TestClaim:
    """Of all jobs of an attempt, one executes it."""

    JOB: ClassVar = {
        "SUBMITIT_EXECUTOR": "slurm",
        "SLURM_JOB_ID": "9",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "2",
    }

    @pytest.fixture
    def attempt(self, tmp_path: Path) -> AttemptDir:
        return RunDir.of(tmp_path, "0" * 16).attempt(1).create()

    def test_the_first_job_has_it_on_all_ranks(self, attempt: AttemptDir) -> None:
        for rank in ("0", "1"):
            assert slurm_owner.claim(attempt, self.JOB | {"SLURM_PROCID": rank}) == ""
        other = self.JOB | {"SLURM_ARRAY_JOB_ID": "8"}
        assert slurm_owner.claim(attempt, other) == "job 7_2 owns it, and this is job 8_2"
        assert json.loads(attempt.owner.read_text())["job_id"] == "7_2"

    def test_a_requeued_job_takes_away_what_its_first_start_left(self, attempt: AttemptDir) -> None:
        assert slurm_owner.claim(attempt, self.JOB) == ""
        write_json(attempt.exit, {"state": "node_fail"})
        assert slurm_owner.claim(attempt, self.JOB | {"SLURM_RESTART_COUNT": "1"}) == ""
        assert not attempt.exit.exists()

    def test_what_was_cancelled_does_not_start(self, attempt: AttemptDir) -> None:
        write_json(attempt.exit, {"state": "cancelled"})
        assert "cancelled before it started" in slurm_owner.claim(attempt, self.JOB)
        assert not attempt.owner.exists()

    def test_a_job_whose_attempt_was_taken_over_does_nothing(self, attempt: AttemptDir) -> None:
        """A scheduler started it again after all, when a later attempt was on its way already."""
        assert slurm_owner.claim(attempt, self.JOB) == ""
        RunDir(attempt.path.parents[1]).attempt(10).create()
        assert slurm_owner.claim(attempt, self.JOB | {"SLURM_RESTART_COUNT": "1"}) == "attempt 10 has replaced it"

    def test_outside_of_slurm_there_is_nothing_to_claim(self, attempt: AttemptDir) -> None:
        assert slurm_owner.claim(attempt, {}) == "" and slurm_owner.facts({}) == {}
        assert os.listdir(attempt.job_folder) == []
