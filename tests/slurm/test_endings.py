"""How runs end on a real Slurm: each class of failure, and its state and message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.releases import both
from tests.slurm.study import DEFAULTS, Study, num_submitted

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
    """Four ranks on two nodes connect, although node names do not resolve; each has its own device."""
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
def test_cancel_ends_our_jobs_only(study: Study, tmp_path: Path) -> None:
    """A running, a waiting and a foreign job with nearly the same name; one scancel, and each state names its cause."""
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
    """The command fails with Slurm's message, and the run keeps its state."""
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
def test_a_waiting_task_cancelled_by_scancel(study: Study) -> None:
    """Neither squeue nor sacct ever lists it again; they list its array without it."""
    study.write('[matrix]\nhardware = ["a100:1"]\nseed = [0, 1, 2]\n', partition="closed")
    study.run("submit")
    rows = study.status()
    assert {row["reason"] for row in rows} <= {"PartitionDown", "None"}
    study.lab.command("scancel", rows[1]["job_id"])
    rows = study.until(lambda rows: rows[1]["state"] == "cancelled", 20)
    assert [row["state"] for row in rows] == ["pending", "cancelled", "pending"]
    assert rows[1]["message"] == "removed from the queue before it started, not by orchestrate"
    assert num_submitted(study.run("submit")) == 1


@both
def test_classes_and_messages_of_failures(study: Study) -> None:
    """A crash on rank 1, a silent exit, a hang, full memory, a failing prologue: each has its reason and message."""
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
def test_a_failing_prologue_is_quoted(study: Study) -> None:
    """The rank never starts; the message quotes the script's own log."""
    study.write('[matrix]\nhardware = ["a100:1"]\n', top='prologue = ["module load nothing"]')
    study.run("submit")
    (row,) = study.until_ended()
    assert (row["state"], row["reason"]) == ("failed", "prologue")
    assert "prologue failed: module load nothing" in row["message"]
    assert "module: command not found" in study.log(row["run_id"])


def test_wait_shows_the_end(study: Study) -> None:
    """submit --wait ends with the runs, and its exit code shows that some failed."""
    strategies = '{ name = "probe" }, { name = "probe", fault = "crash" }'
    study.write(f'[matrix]\nhardware = ["a30:1"]\nstrategy = [{strategies}]\n', defaults=THREE)
    done = study.run("submit", "--wait", expect=3)
    assert num_submitted(done) == 2
    assert "failed: rank 0: RuntimeError: crash on purpose" in done.stderr
