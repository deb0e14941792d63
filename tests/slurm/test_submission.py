"""Submissions on a real Slurm: kills at any point, lost answers, rejections, limits."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from db.connect import open_store
from tests.slurm.kill_points import ACCEPTED, TIMED_OUT, Point, all_points, fake_sbatch, spread, submit_killed
from tests.slurm.lab import Lab
from tests.slurm.releases import both
from tests.slurm.study import Study, job_ids, num_submitted

pytestmark = pytest.mark.slurm

FOUR_RUNS = """
[matrix]
hardware = ["a100:1", "a30:1"]
seed = [0, 1]
"""
REJECTION = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)


@pytest.fixture
def study(any_lab: Lab, tmp_path: Path) -> Iterator[Study]:
    """Four runs of two shapes in a queue that starts nothing."""
    made = Study(any_lab, tmp_path / "study")
    made.write(FOUR_RUNS, partition="closed")
    yield made
    made.forget()


def quick_to_decide() -> None:
    """Wait less for an array that Slurm may have accepted: on one machine messages take no time."""
    from orchestrator.backends.slurm import executor

    executor.ADOPTION_GRACE_S = 0.6


def clear(study: Study) -> None:
    """Delete the runs folder and the store."""
    study.forget()
    shutil.rmtree(study.runs, ignore_errors=True)
    for path in study.folder.glob("results.db*"):
        path.unlink()
    empty = study.folder / "empty.db"
    if not empty.exists():
        with open_store(str(empty)):
            pass
    shutil.copy(empty, study.folder / "results.db")


def assert_each_submitted_once(study: Study, runs: int = 4) -> None:
    """Assert that every run has one job, and that Slurm has no other."""
    rows = study.status()
    assert [row["state"] for row in rows] == ["pending"] * runs, rows
    assert job_ids(rows) == study.queued(), "the store and the queue know the same tasks"
    assert num_submitted(study.run("submit")) == 0


def test_a_submit_killed_anywhere_is_continued(study: Study) -> None:
    """kill -9 before changes of files, before and after each transaction and each Slurm call; then submit again.

    ``python -m tests.slurm.kill_sweep`` does it with many runs that are carried out.
    """
    study.run("plan")
    clear(study)
    points = all_points(study)
    assert_each_submitted_once(study)
    chosen = spread(points, 60)
    assert len(chosen) == 60 and {point.what for point in chosen} == {point.what for point in points}
    assert {"before rename", "after commit", "before sbatch", "after sbatch"} <= {point.what for point in chosen}
    for point in chosen:
        clear(study)
        done = submit_killed(study, point)
        assert done.exit_code == -signal.SIGKILL, (point, done)
        assert point != Point("after sbatch") or len(study.queued()) == 2
        study.run("submit", before=quick_to_decide)
        assert_each_submitted_once(study)


@both
def test_jobs_of_a_killed_submit_run(any_lab: Lab, tmp_path: Path) -> None:
    """Killed right after sbatch, before the job id was written: jobs find their calls, and status finds the jobs."""
    study = Study(any_lab, tmp_path / "study")
    study.write('[matrix]\nhardware = ["a100:1"]\nseed = [0, 1]\n')
    done = submit_killed(study, Point("after sbatch"))
    assert done.exit_code == -signal.SIGKILL
    rows = study.until_ended()
    assert [row["state"] for row in rows] == ["succeeded"] * 2 and job_ids(rows) == study.queued()


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        (ACCEPTED, 2),
        # The controller accepts it a second after the client gave up.
        ('(sleep 1; $real "$@") </dev/null >/dev/null 2>&1 &\n{no}', 2),
        # Two jobs with one name: a wrapper called sbatch twice.
        ('$real "$@" >/dev/null; $real "$@" >/dev/null\n{no}', 2),
        # The controller did not accept it; after the grace period it is submitted again.
        ('[ $n -le 1 ] || exec $real "$@"\n{no}', 3),
    ],
    ids=["accepted", "accepted-late", "accepted-twice", "not-accepted"],
)
def test_sbatch_that_reports_a_time_out(study: Study, tmp_path: Path, body: str, calls: int) -> None:
    """Before an array is submitted again, squeue is searched for its name: one job per run, whatever sbatch printed."""
    study.path = [fake_sbatch(tmp_path / "bin", body.format(no=f'echo "{TIMED_OUT}" >&2; exit 1'))]

    def shorten_grace() -> None:
        from orchestrator.backends.slurm import executor

        executor.ADOPTION_GRACE_S, executor.ADOPTION_POLL_S = 4.0, 0.3

    study.run("submit", expect=None, before=shorten_grace)
    study.run("submit", before=shorten_grace)
    assert_each_submitted_once(study)
    assert len((tmp_path / "bin" / "calls").read_text().split()) == calls


def test_sbatch_that_kills_its_caller(study: Study, tmp_path: Path) -> None:
    """The job is in the queue, and no process has read its id."""
    study.path = [fake_sbatch(tmp_path / "bin", '$real "$@" >/dev/null; kill -9 $PPID')]
    assert study.run("submit", expect=None).exit_code == -signal.SIGKILL
    study.path = []
    assert num_submitted(study.run("submit", before=quick_to_decide)) == 0
    assert_each_submitted_once(study)


def test_a_rejected_array_does_not_affect_the_others(study: Study, tmp_path: Path) -> None:
    """Slurm rejects the second of three: exit 3, its message in the store, the others queue; it can be resubmitted."""
    six = '[matrix]\nhardware = ["a100:1"]\nseed = [0, 1, 2, 3, 4, 5]\n'
    study.write(six, top="array_index_max = 1", partition="closed")
    study.path = [
        fake_sbatch(tmp_path / "bin", f'[ $n != 2 ] || {{ echo "{REJECTION}" >&2; exit 1; }}\nexec $real "$@"')
    ]
    done = study.run("submit", expect=3)
    assert num_submitted(done) == 4
    assert REJECTION in done.stderr and "time_limit against the queue's max_time" in done.stderr
    rows = study.status()
    assert [row["state"] for row in rows] == ["pending"] * 2 + ["failed"] * 2 + ["pending"] * 2
    assert {(row["reason"], row["message"]) for row in rows[2:4]} == {("rejected", REJECTION)}
    assert len(study.queued()) == 4
    assert num_submitted(study.run("submit")) == 2
    assert_each_submitted_once(study, 6)


@both
def test_the_backlog_waits_for_the_next_submit(study: Study) -> None:
    """Arrays are no longer than the site allows, indices start at 0 in each, and the submit limit is kept."""
    study.write(
        '[matrix]\nhardware = ["a100:1"]\nseed = [0, 1, 2, 3, 4, 5, 6]\n',
        top="array_index_max = 1\nmax_submit = 5\narray_parallel = 1",
        partition="closed",
    )
    done = study.run("submit")
    assert num_submitted(done) == 5 and "2 stay planned, as the site's limit is reached" in done.stdout
    assert num_submitted(study.run("submit")) == 0
    tasks = study.queued()
    assert sorted(task.partition("_")[2] for task in tasks) == ["0", "0", "0", "1", "1"]
    throttles = study.lab.command("scontrol", "show", "job", tasks[0].partition("_")[0])
    assert "ArrayTaskThrottle=1" in throttles
    study.lab.command("scancel", *tasks[:2])
    study.until(lambda rows: sum(row["state"] == "cancelled" for row in rows) == 2)
    assert num_submitted(study.run("submit")) == 2
    assert len([row for row in study.status() if row["state"] == "pending"]) == 5


@both
def test_a_job_around_submit_has_no_effect(study: Study) -> None:
    """SLURM_* and SBATCH_* of the caller are not passed on, and a message says so."""

    def in_a_job() -> None:
        os.environ |= {"SBATCH_PARTITION": "htc", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "7", "SBATCH_JOB_NAME": "mine"}

    done = study.run("submit", before=in_a_job)
    assert "not passed on to sbatch: SBATCH_JOB_NAME, SBATCH_PARTITION, SLURM_JOB_ID, SLURM_NTASKS" in done.stderr
    shown = study.lab.command("scontrol", "--oneliner", "show", "job", study.queued()[0])
    assert "Partition=closed" in shown and "JobName=orc-" in shown and "NumTasks=1 " in shown
    assert_each_submitted_once(study)


def test_retry_reports_a_changed_plan(study: Study) -> None:
    """An edited cluster file and a plan made from it: retry repeats the old submission, submit uses the plan."""

    def cancel_all() -> None:
        study.lab.command("scancel", *study.queued())
        study.until(lambda rows: {row["state"] for row in rows} == {"cancelled"})

    study.run("submit")
    cancel_all()
    assert "note:" not in study.run("retry", "--failed").stderr
    cancel_all()
    study.write(FOUR_RUNS, top='prologue = ["true"]', partition="closed")
    said = study.run("retry", "--failed").stderr
    assert "note: the cluster file has changed since the last plan; retry keeps their time limit" in said
    cancel_all()
    study.run("plan")
    said = study.run("retry", "--failed").stderr
    assert "note: the plan of cnn-probe-a100x1-s0 and 3 more has changed since the last submit" in said
    cancel_all()
    study.run("submit")
    script = max((study.runs / "jobs").glob("*/*_submission.sh"), key=lambda path: path.stat().st_mtime_ns)
    assert "\ntrue\n" in script.read_text()


def test_a_second_workspace_sees_the_jobs_of_the_first(study: Study, tmp_path: Path) -> None:
    """Two folders, one plan: the second submit names the queued runs and their folder. Other jobs do not matter."""
    study.write(FOUR_RUNS.replace("seed = [0, 1]", "seed = [0, 2]"), partition="closed")
    assert "would run twice" not in study.run("submit").stderr
    second = Study(study.lab, tmp_path / "it's a copy")
    second.write(FOUR_RUNS, partition="closed")
    done = second.run("submit")
    assert num_submitted(done) == 4
    assert "note: 2 of these runs, such as cnn-probe-a" in done.stderr
    assert f"are queued from {study.runs} too, and would run twice" in done.stderr
    assert "cancel one, or share a folder with --runs" in done.stderr
    done = study.run("submit")
    assert "would run twice" not in done.stderr, "nothing is to be submitted from here"
    second.forget()


def test_a_waiting_run_has_no_folder_yet(study: Study) -> None:
    """The verbs work all the same, a new store gets the run, and a cancelled run gets its folder."""
    study.run("submit")
    sent = study.queued()
    assert not list(study.runs.glob("??/*"))
    run_id = study.status()[0]["run_id"]
    said = study.run("logs", run_id, expect=1).stderr
    assert f"run {run_id} attempt 1 has no output yet" in said and "it is pending" in said
    assert "has no attempt 2" in study.run("logs", run_id, "--attempt", "2", expect=2).stderr
    assert "nothing to remove" in study.run("clean", "--yes").stdout
    assert study.run("cancel", run_id).stdout == "1 run cancelled\n"
    study.until(lambda rows: [row["state"] for row in rows] == ["cancelled"] + ["pending"] * 3)
    assert [path.name for path in study.runs.glob("??/*")] == [run_id]
    (study.folder / "results.db").unlink()
    rows = study.status()
    assert [row["state"] for row in rows] == ["cancelled"] + ["pending"] * 3
    assert sorted(row["job_id"] for row in rows) == sent
    assert num_submitted(study.run("retry", run_id)) == 1
    assert_each_submitted_once(study)
