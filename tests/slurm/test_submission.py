"""What a submission survives on a real Slurm: kills at any point, answers that get lost, refusals, limits."""

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
from tests.slurm.study import Study, job_ids, number_sent

pytestmark = pytest.mark.slurm

FOUR_RUNS = """
[matrix]
hardware = ["a100:1", "a30:1"]
seed = [0, 1]
"""
REFUSED = (
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
    """Wait less long for word of an array that Slurm may have: on one machine messages take no time."""
    from orchestrator.backends.slurm import executor

    executor.ADOPTION_GRACE_S = 0.6


def clear(study: Study) -> None:
    """An empty runs folder and an empty store."""
    study.forget()
    shutil.rmtree(study.runs, ignore_errors=True)
    for path in study.folder.glob("results.db*"):
        path.unlink()
    empty = study.folder / "empty.db"
    if not empty.exists():
        with open_store(str(empty)):
            pass
    shutil.copy(empty, study.folder / "results.db")


def assert_each_is_there_once(study: Study, runs: int = 4) -> None:
    """Nothing lost, nothing twice: every run has one job, and Slurm has no other."""
    rows = study.status()
    assert [row["state"] for row in rows] == ["pending"] * runs, rows
    assert job_ids(rows) == study.queued(), "the store and the queue know the same tasks"
    assert number_sent(study.run("submit")) == 0


def test_a_submit_killed_anywhere_is_made_up_for(study: Study) -> None:
    """kill -9 before changes of files, before and after each transaction and each Slurm call; then submit again.

    ``python -m tests.slurm.kill_sweep`` does it with many runs that are carried out.
    """
    study.run("plan")
    clear(study)
    points = all_points(study)
    assert_each_is_there_once(study)
    chosen = spread(points, 60)
    assert len(chosen) == 60 and {point.what for point in chosen} == {point.what for point in points}
    assert {"before rename", "after commit", "before sbatch", "after sbatch"} <= {point.what for point in chosen}
    for point in chosen:
        clear(study)
        done = submit_killed(study, point)
        assert done.exit_code == -signal.SIGKILL, (point, done)
        assert point != Point("after sbatch") or len(study.queued()) == 2
        study.run("submit", before=quick_to_decide)
        assert_each_is_there_once(study)


@both
def test_what_is_submitted_runs_although_nobody_came_back(any_lab: Lab, tmp_path: Path) -> None:
    """Killed right after sbatch, nothing moved, no number known: jobs find their calls, and are found themselves."""
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
        # The controller takes it a second after the client gave up.
        ('(sleep 1; $real "$@") </dev/null >/dev/null 2>&1 &\n{no}', 2),
        # Two jobs of one name: the caller before us tried twice.
        ('$real "$@" >/dev/null; $real "$@" >/dev/null\n{no}', 2),
        # It was not taken at all; only after a while of silence it is sent again.
        ('[ $n -le 1 ] || exec $real "$@"\n{no}', 3),
    ],
    ids=["accepted", "accepted-late", "accepted-twice", "not-accepted"],
)
def test_sbatch_that_reports_a_time_out(study: Study, tmp_path: Path, body: str, calls: int) -> None:
    """The queue is asked for the name before anything is sent again: one job a run, whatever sbatch said."""
    study.path = [fake_sbatch(tmp_path / "bin", body.format(no=f'echo "{TIMED_OUT}" >&2; exit 1'))]

    def a_moment() -> None:
        from orchestrator.backends.slurm import executor

        executor.ADOPTION_GRACE_S, executor.ADOPTION_POLL_S = 4.0, 0.3

    study.run("submit", expect=None, before=a_moment)
    study.run("submit", before=a_moment)
    assert_each_is_there_once(study)
    assert len((tmp_path / "bin" / "calls").read_text().split()) == calls


def test_sbatch_that_kills_its_caller(study: Study, tmp_path: Path) -> None:
    """The job is in the queue and nobody has read its number."""
    study.path = [fake_sbatch(tmp_path / "bin", '$real "$@" >/dev/null; kill -9 $PPID')]
    assert study.run("submit", expect=None).exit_code == -signal.SIGKILL
    study.path = []
    assert number_sent(study.run("submit", before=quick_to_decide)) == 0
    assert_each_is_there_once(study)


def test_a_refused_array_leaves_the_others_alone(study: Study, tmp_path: Path) -> None:
    """The middle one of three is refused: exit 3, Slurm's words in the store, the rest is queued; it can be sent."""
    six = '[matrix]\nhardware = ["a100:1"]\nseed = [0, 1, 2, 3, 4, 5]\n'
    study.write(six, top="array_index_max = 1", partition="closed")
    study.path = [fake_sbatch(tmp_path / "bin", f'[ $n != 2 ] || {{ echo "{REFUSED}" >&2; exit 1; }}\nexec $real "$@"')]
    done = study.run("submit", expect=3)
    assert number_sent(done) == 4
    assert REFUSED in done.stderr and "time_limit against the queue's max_time" in done.stderr
    rows = study.status()
    assert [row["state"] for row in rows] == ["pending"] * 2 + ["failed"] * 2 + ["pending"] * 2
    assert {(row["reason"], row["message"]) for row in rows[2:4]} == {("refused", REFUSED)}
    assert len(study.queued()) == 4
    assert number_sent(study.run("submit")) == 2
    assert_each_is_there_once(study, 6)


@both
def test_what_does_not_fit_waits_for_the_next_submit(study: Study) -> None:
    """Arrays no longer than the site allows, indices from 0 in each, and no more jobs than one user may have."""
    study.write(
        '[matrix]\nhardware = ["a100:1"]\nseed = [0, 1, 2, 3, 4, 5, 6]\n',
        top="array_index_max = 1\nmax_submit = 5\narray_parallel = 1",
        partition="closed",
    )
    done = study.run("submit")
    assert number_sent(done) == 5 and "2 stay planned, as the site's limit is reached" in done.stdout
    assert number_sent(study.run("submit")) == 0
    tasks = study.queued()
    assert sorted(task.partition("_")[2] for task in tasks) == ["0", "0", "0", "1", "1"]
    throttles = study.lab.command("scontrol", "show", "job", tasks[0].partition("_")[0])
    assert "ArrayTaskThrottle=1" in throttles
    study.lab.command("scancel", *tasks[:2])
    study.until(lambda rows: sum(row["state"] == "cancelled" for row in rows) == 2)
    assert number_sent(study.run("submit")) == 2
    assert len([row for row in study.status() if row["state"] == "pending"]) == 5


@both
def test_a_job_around_submit_leaves_no_trace(study: Study) -> None:
    """SLURM_* and SBATCH_* of the caller decide nothing, and that is said."""

    def in_a_job() -> None:
        os.environ |= {"SBATCH_PARTITION": "htc", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "7", "SBATCH_JOB_NAME": "mine"}

    done = study.run("submit", before=in_a_job)
    assert "not passed on to sbatch: SBATCH_JOB_NAME, SBATCH_PARTITION, SLURM_JOB_ID, SLURM_NTASKS" in done.stderr
    shown = study.lab.command("scontrol", "--oneliner", "show", "job", study.queued()[0])
    assert "Partition=closed" in shown and "JobName=orc-" in shown and "NumTasks=1 " in shown
    assert_each_is_there_once(study)


def test_retry_says_when_the_plan_is_another_one_than_what_was_sent(study: Study) -> None:
    """An edited cluster file, and a plan made from it; retry sends what was sent, submit what is planned."""

    def take_out() -> None:
        study.lab.command("scancel", *study.queued())
        study.until(lambda rows: {row["state"] for row in rows} == {"cancelled"})

    study.run("submit")
    take_out()
    assert "note:" not in study.run("retry", "--failed").stderr
    take_out()
    study.write(FOUR_RUNS, top='prologue = ["true"]', partition="closed")
    said = study.run("retry", "--failed").stderr
    assert "note: the cluster file has changed since the last plan; retry keeps their time limit" in said
    take_out()
    study.run("plan")
    said = study.run("retry", "--failed").stderr
    assert "note: the plan of cnn-probe-a100x1-s0 and 3 more has changed since the last submit" in said
    take_out()
    study.run("submit")
    script = max((study.runs / "jobs").glob("*/*_submission.sh"), key=lambda path: path.stat().st_mtime_ns)
    assert "\ntrue\n" in script.read_text()


def test_a_second_working_copy_learns_of_the_first_ones_jobs(study: Study, tmp_path: Path) -> None:
    """Two folders, one plan: which runs are queued already, and from where. Other jobs of ours say nothing."""
    study.write(FOUR_RUNS.replace("seed = [0, 1]", "seed = [0, 2]"), partition="closed")
    assert "would run twice" not in study.run("submit").stderr
    second = Study(study.lab, tmp_path / "it's a copy")
    second.write(FOUR_RUNS, partition="closed")
    done = second.run("submit")
    assert number_sent(done) == 4
    assert "note: 2 of these runs, such as cnn-probe-a" in done.stderr
    assert f"are queued from {study.runs} too, and would run twice" in done.stderr
    assert "cancel one, or share a folder with --runs" in done.stderr
    done = study.run("submit")
    assert "would run twice" not in done.stderr, "nothing is to be submitted from here"
    second.forget()


def test_what_waits_has_no_folder_yet(study: Study) -> None:
    """The verbs answer all the same, a new store learns of it, and what is cancelled gets its folder."""
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
    assert number_sent(study.run("retry", run_id)) == 1
    assert_each_is_there_once(study)
