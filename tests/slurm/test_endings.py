"""How runs end on a real Slurm: each class of failure provoked for real, and what the user is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.releases import both
from tests.slurm.study import DEFAULTS, Study, number_sent

pytestmark = pytest.mark.slurm


@pytest.fixture
def study(any_lab: Lab, tmp_path: Path) -> Iterator[Study]:
    made = Study(any_lab, tmp_path / "study")
    yield made
    made.forget()


def probe(hardware: str = "a100:1", **options: object) -> str:
    shown = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    return f'[matrix]\nhardware = ["{hardware}"]\nstrategy = [{{ name = "probe", {shown} }}]\n'


SLOW = DEFAULTS.replace("epochs = 3", "epochs = 400").replace('strategy = "probe"\n', "")
THREE = DEFAULTS.replace('strategy = "probe"\n', "")


@both
def test_two_nodes_of_two_ranks(study: Study) -> None:
    """Four ranks over two nodes meet, although node names do not resolve; each has a device of its own."""
    study.write('[matrix]\nhardware = ["a100:2x2"]\n')
    study.run("submit")
    (row,) = study.until_ended()
    assert row["state"] == "succeeded", study.log(row["run_id"])
    (result,) = json.loads(study.run("results", "--json").stdout)
    assert (result["world_size"], result["devices_seen"]) == (4, 4)
    (events,) = study.runs.glob("*/*/attempts/1/events.jsonl")
    world = next(json.loads(line) for line in events.read_text().splitlines() if '"event":"world"' in line)
    assert [rank["host"] for rank in world["ranks"]] == ["lab001", "lab001", "lab002", "lab002"]
    start = json.loads(events.read_text().splitlines()[0])
    assert (start["job_id"], start["job_name"][:4], start["restarts"]) == (row["job_id"], "orc-", 0)


@both
def test_cancel_ends_ours_and_nobody_elses(study: Study, tmp_path: Path) -> None:
    """A running, a waiting and a foreign job of nearly the same name; one scancel, and every state says who did it."""
    other = tmp_path / "other.sh"
    other.write_text("#!/bin/bash\nsleep 60\n")
    foreign = study.lab.submit(
        other, "--job-name=orc-0123456789abcdef", "-phtc", "-wlab003", "--mem=100", "--output=/dev/null"
    )
    study.write(probe("a100:2", epoch_s=0.5) + "seed = [0, 1, 2]\n", defaults=SLOW)
    study.run("submit")
    study.until(lambda rows: sum(row["state"] == "running" for row in rows) == 2)
    done = study.run("cancel", "--all")
    assert done.stdout == "3 runs cancelled\n"
    rows = study.until_ended(20)
    assert {(row["state"], row["reason"]) for row in rows} == {("cancelled", "cancelled")}
    assert study.lab.command("squeue", "-h", f"--jobs={foreign}", "--format=%T") in {"RUNNING", "PENDING"}
    study.lab.command("scancel", foreign)


def test_a_failing_scancel_changes_nothing(study: Study, tmp_path: Path) -> None:
    """The command fails with Slurm's words, and the run goes on being what it is."""
    study.write('[matrix]\nhardware = ["a100:1"]\n', partition="closed")
    study.run("submit")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scancel").write_text(
        "#!/bin/sh\necho 'scancel: error: Kill job error: no route' >&2; exit 1\n"
    )
    (tmp_path / "bin" / "scancel").chmod(0o755)
    study.path = [tmp_path / "bin"]
    done = study.run("cancel", "--all", expect=1)
    assert "scancel ended with exit code 1" in done.stderr and "no route" in done.stderr
    assert study.states() == ["pending"]


@both
def test_a_waiting_task_that_somebody_cancels_alone(study: Study) -> None:
    """Neither the queue nor accounting ever names it again; its array does, without it."""
    study.write('[matrix]\nhardware = ["a100:1"]\nseed = [0, 1, 2]\n', partition="closed")
    study.run("submit")
    rows = study.status()
    assert {row["reason"] for row in rows} <= {"PartitionDown", "None"}
    study.lab.command("scancel", rows[1]["job_id"])
    rows = study.until(lambda rows: rows[1]["state"] == "cancelled", 20)
    assert [row["state"] for row in rows] == ["pending", "cancelled", "pending"]
    assert rows[1]["message"] == "taken out of the queue before it started, not by orchestrate"
    assert number_sent(study.run("submit")) == 1


@both
def test_failures_have_their_class_and_their_words(study: Study) -> None:
    """A crash on rank 1, a silent exit, a hang, full memory, a broken prologue: each is told as what it is."""
    faults = ["crash", "exit", "hang", "memory"]
    strategies = [f'{{ name = "probe", fault = "{fault}", fault_epoch = 2, fault_rank = 1 }}' for fault in faults]
    defaults = THREE + "hang_timeout_s = 3\n"
    study.write(f'[matrix]\nhardware = ["a100:2"]\nstrategy = [{", ".join(strategies)}]\n', defaults=defaults)
    study.run("submit")
    rows = {fault: next(r for r in study.until_ended() if f"fault={fault}" in r["label"]) for fault in faults}
    said = {fault: (row["state"], row["reason"]) for fault, row in rows.items()}
    assert said == {
        "crash": ("failed", "program_error"),
        "exit": ("failed", "program_error"),
        "hang": ("failed", "hang"),
        "memory": ("out_of_memory", "host_memory"),
    }, rows
    assert rows["crash"]["message"] == "rank 1: RuntimeError: crash on purpose"
    assert "rank 1: exit on purpose" in rows["exit"]["message"]
    assert "hang.1.txt" in rows["hang"]["message"] and "400M" in rows["memory"]["message"]
    assert "crash on purpose" in study.log(rows["crash"]["run_id"])


@both
def test_a_broken_prologue_is_told_in_its_own_words(study: Study) -> None:
    """The rank never starts; the script's own log is what there is to show."""
    study.write('[matrix]\nhardware = ["a100:1"]\n', top='prologue = ["module load nothing"]')
    study.run("submit")
    (row,) = study.until_ended()
    assert (row["state"], row["reason"]) == ("failed", "prologue")
    assert "prologue failed: module load nothing" in row["message"]
    assert "module: command not found" in study.log(row["run_id"])


def test_wait_shows_the_end(study: Study) -> None:
    """submit --wait ends with the runs, and its exit code says that some failed."""
    strategies = '{ name = "probe" }, { name = "probe", fault = "crash" }'
    study.write(f'[matrix]\nhardware = ["a30:1"]\nstrategy = [{strategies}]\n', defaults=THREE)
    done = study.run("submit", "--wait", expect=3)
    assert number_sent(done) == 2
    assert "failed: rank 0: RuntimeError: crash on purpose" in done.stderr
