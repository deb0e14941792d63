"""Recovery on a real Slurm: each class of failure, what recovery does about it, and where it stops.

``status`` is what acts here, as a user types it; nobody retries. The slow ones are under way while the others go on.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import booted
from tests.slurm.lab import Lab
from tests.slurm.study import DEFAULTS, Study, num_submitted
from workloads.files.event_log import read_events

pytestmark = pytest.mark.slurm

Rows = list[dict[str, Any]]
MB = 2**20


@pytest.fixture(scope="module")
def fragile() -> Iterator[Lab]:
    """A cluster without accounting that detects a dead node within seconds."""
    yield from booted(extra=("SlurmdTimeout=5",))


@pytest.fixture(scope="module")
def doomed() -> Iterator[Lab]:
    """A cluster whose controller is killed."""
    yield from booted(extra=("MessageTimeout=3",))


@pytest.fixture
def study(fragile: Lab, tmp_path: Path) -> Iterator[Study]:
    made = Study(fragile, tmp_path / "study")
    yield made
    made.forget()


def probe(hardware: str = "a100:1", **options: object) -> str:
    shown = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    return f'[matrix]\nhardware = ["{hardware}"]\nstrategy = [{{ name = "probe", {shown} }}]\n'


EPOCHS = DEFAULTS.replace('strategy = "probe"\n', "")
TEN = EPOCHS.replace("epochs = 3", "epochs = 10")


def until_settled(study: Study, timeout_s: float = 90, *, before: Callable[[], None] | None = None) -> Rows:
    """Run status until no run is live and recovery has nothing left to do."""
    deadline = time.monotonic() + timeout_s
    while True:
        rows: Rows = json.loads(study.run("status", "--json", before=before).stdout)
        if all(row["state"] in {"succeeded", "cancelled"} or row["recovery"] == "stop" for row in rows):
            return rows
        assert time.monotonic() < deadline, [{k: r[k] for k in ("state", "reason", "message")} for r in rows]
        time.sleep(0.3)


def attempts(study: Study) -> Rows:
    """Return all attempts in the store, oldest first."""
    with sqlite3.connect(study.folder / "results.db") as connection:
        connection.row_factory = sqlite3.Row
        found = [dict(row) for row in connection.execute("SELECT * FROM attempts ORDER BY run_id, attempt")]
    for row in found:
        row["shape"] = json.loads(row["shape"])
        row["recovery"] = row["recovery"] and json.loads(row["recovery"])
    return found


def until_epoch(study: Study, epoch: int = 2, timeout_s: float = 60) -> Path:
    """Wait until the newest attempt of the only run has a checkpoint of an epoch; return its events."""
    deadline = time.monotonic() + timeout_s
    while True:
        for path in sorted(study.runs.glob("*/*/attempts/*/events.jsonl"), reverse=True):
            if any(e["epoch"] >= epoch for e in read_events(path, 0, "checkpoint")[0]):
                return path
        assert time.monotonic() < deadline, study.run("status").stdout
        time.sleep(0.1)


def start_of(events: Path) -> dict[str, Any]:
    return read_events(events, 0, "start")[0][-1]


# --- time ---

CPU_NODES = """
[cluster.lab.cpu]
cpus_per_rank = 1
mem_per_rank = "1500M"
queue = [{ partition = "htc", max_time = "4h" }]
"""
TRAINED = """
name = "check"
[defaults]
model = "cnn"
dataset = "digits"
strategy = "eager"
epochs = 20
batch_size = 64
train_fraction = 0.1
time_limit = "{limit}"
[matrix]
hardware = ["cpu:1"]
"""


def trained(study: Study, *, limit: str = "10m") -> None:
    study.write("", top=CPU_NODES, defaults=TRAINED.format(limit=limit))


@pytest.fixture(scope="module")
def frozen(fragile: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    """A training that stops making progress after its first epochs and then reaches its limit of a minute.

    So it needs no work to reach its time limit, and reaches it in the middle; Slurm wakes it with the announcement.
    """
    pytest.importorskip("torch")
    made = Study(fragile, tmp_path_factory.mktemp("frozen") / "study")
    trained(made, limit="2m")
    made.run("submit")
    freezer = subprocess.Popen(["bash", "-c", FREEZE], cwd=made.folder, env=made.env)
    yield made
    freezer.kill()
    freezer.wait()
    made.forget()


FREEZE = """
events='runs/*/*/attempts/1/events.jsonl'
until grep -q '"event":"checkpoint"' $events; do sleep 0.05; done 2>/dev/null
kill -STOP "$(grep -om1 '"pid":[0-9]*' $events | cut -d: -f2)"
scontrol update TimeLimit=1 JobId="$(grep -om1 '"job_id":"[0-9_]*"' $events | cut -d'"' -f4)"
"""


@pytest.fixture(scope="module")
def timed(fragile: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    """A run of 55 s under a limit of a minute, which Slurm announces up to a minute early."""
    made = Study(fragile, tmp_path_factory.mktemp("timed") / "study")
    defaults = EPOCHS.replace("epochs = 3", "epochs = 92").replace('"10m"', '"1m"')
    made.write(probe("a30:1", epoch_s=0.6), defaults=defaults)
    made.run("submit")
    yield made
    made.forget()


@pytest.fixture(scope="module", autouse=True)
def background(frozen: Study, timed: Study) -> None:
    """Runs while the other tests run."""


def test_preemption_where_the_site_cancels_jobs(study: Study, tmp_path: Path) -> None:
    """An urgent job takes the node; recovery resubmits the run unchanged, and it continues on another node."""
    study.write(probe(epoch_s=0.3), defaults=TEN, partition="ended", top='requeue = "cancel"')
    study.run("submit")
    node = start_of(until_epoch(study))["node"]
    urgent = push_off(study.lab, node, tmp_path)
    (row,) = until_settled(study)
    study.lab.command("scancel", urgent)
    assert (row["state"], row["attempt"], row["recoveries"], row["recovery"]) == ("succeeded", 2, 1, "resubmit")
    first, second = attempts(study)
    assert (first["state"], first["recovery"], second["recovery"]["failure"]) == ("preempted", None, "preempted")
    assert second["shape"] == first["shape"]
    (result,) = json.loads(study.run("results", "--json").stdout)
    assert result["resumed_from_epoch"] >= 2 and result["epochs_done"] == 10


def test_preemption_where_the_site_requeues_jobs(study: Study, tmp_path: Path) -> None:
    """Slurm starts the same job again: the same attempt continues, no row is doubled, recovery does nothing."""
    study.write(probe(epoch_s=0.3), defaults=TEN, partition="requeued", top='requeue = "requeue"')
    study.run("submit")
    events = until_epoch(study)
    urgent = push_off(study.lab, start_of(events)["node"], tmp_path)
    (row,) = study.until(lambda rows: rows[0]["state"] == "pending")
    assert (row["reason"], row["attempt"], row["recovery"]) == ("requeued", 1, "")
    study.lab.command("scancel", urgent)
    # Slurm delays a requeued job by cred_expire, 120 s (slurm.conf(5)); its owner may change that.
    study.until(lambda rows: "StartTime" in study.lab.command("scontrol", "show", "job", rows[0]["job_id"]))
    study.lab.command("scontrol", "update", f"JobId={row['job_id']}", "StartTime=now")
    (row,) = until_settled(study)
    assert (row["state"], row["attempt"], row["recoveries"]) == ("succeeded", 1, 0)
    assert [e["restarts"] for e in read_events(events, 0, "start")[0]] == [0, 1]
    with sqlite3.connect(study.folder / "results.db") as connection:
        assert [e for (e,) in connection.execute("SELECT epoch FROM epochs ORDER BY epoch")] == list(range(1, 11))
        assert connection.execute("SELECT count(*) FROM results").fetchone() == (1,)


def push_off(lab: Lab, node: str, folder: Path) -> str:
    """Submit an urgent job that needs both devices of a node; return its id."""
    script = folder / "urgent.sh"
    script.write_text("#!/bin/bash\nsleep 300\n")
    return lab.submit(script, "-purgent", f"-w{node}", "--gres=gpu:2", "--mem=100", "--output=/dev/null")


# --- memory ---


def test_memory_is_raised_until_it_is_enough(study: Study) -> None:
    """A run that needs 300 MB and requested 200 gets twice as much, continues from its checkpoint and succeeds."""
    study.write(probe(fault="memory", fault_epoch=2, fault_mb=300), defaults=EPOCHS)
    study.run("submit")
    (row,) = until_settled(study)
    assert (row["state"], row["recovery"], row["recoveries"]) == ("succeeded", "raise_memory", 1), row
    first, second = attempts(study)
    assert (first["state"], first["reason"], first["shape"]["mem_bytes"]) == ("out_of_memory", "host_memory", 200 * MB)
    assert (second["shape"]["mem_bytes"], second["shape"]["arguments"]) == (400 * MB, {"mem": "400M"})
    assert "MinMemoryNode=400M" in study.lab.command("scontrol", "--oneliner", "show", "job", row["job_id"])
    (result,) = json.loads(study.run("results", "--json").stdout)
    assert (result["resumed_from_epoch"], result["epochs_done"]) == (1, 3)


def test_memory_that_is_never_enough_stops_at_its_bound(study: Study) -> None:
    """Twice as much, as much as a node has, and then no more: the message says what was tried and what to do."""
    study.write(probe("small:1", fault="memory"), defaults=EPOCHS, top=NODE_OF_300M)
    done = study.run("submit", "--wait", expect=1)
    assert "resubmitted with 300M instead of 200M after attempt 1 (1 of 2 for host_memory)" in done.stderr
    (row,) = json.loads(study.run("status", "--json").stdout)
    assert (row["state"], row["attempt"], row["recovery"], row["recoveries"]) == ("out_of_memory", 2, "stop", 1)
    assert "a node has no more memory" in row["recovery_message"] and "300M" in row["message"]
    # A person may retry, and the counter starts again.
    assert num_submitted(study.run("retry", "--failed")) == 1
    assert [a["recovery"] and a["recovery"]["number"] for a in attempts(study)] == [None, 1, None]


NODE_OF_300M = """
[cluster.lab.gpu.small]
type = "a100"
node_gpus = 2
node_mem = "300M"
cpus_per_gpu = 1
mem_per_gpu = "200M"
queue = [{ partition = "htc" }]
"""


# --- program errors ---


def test_a_failing_program_is_resubmitted_as_often_as_retries(study: Study) -> None:
    """A rank that crashes and one that hangs: retries = 1 adds one attempt, then recovery stops; measurements stay."""
    strategies = ", ".join(f'{{ name = "probe", fault = "{fault}", fault_epoch = 3 }}' for fault in ("crash", "hang"))
    matrix = f'[matrix]\nhardware = ["a100:2"]\nstrategy = [{strategies}]\nretries = [1]\n'
    study.write(matrix, defaults=EPOCHS + "hang_timeout_s = 3\n")
    study.run("submit")
    rows = until_settled(study)
    assert {(row["state"], row["reason"]) for row in rows} == {("failed", "program_error"), ("failed", "hang")}, rows
    for row in rows:
        assert (row["attempt"], row["recovery"], row["recoveries"]) == (2, "stop", 1)
        assert row["recovery_message"].startswith(
            "not resubmitted: after 1 of 1 for program_error; correct the program"
        )
    with sqlite3.connect(study.folder / "results.db") as connection:
        kept = connection.execute("SELECT count(*), max(epoch) FROM epochs").fetchone()
    assert kept == (4, 2), "two epochs of each run, measured once, although each ran twice"


# --- nodes ---


def test_a_node_with_other_hardware_is_excluded(study: Study, tmp_path: Path) -> None:
    """One node has the smaller A100: the run ends within seconds, and its next attempt uses another node."""
    small = tmp_path / "bin"
    small.mkdir()
    (small / "nvidia-smi").write_text(NVIDIA_SMI.format(folder=small))
    (small / "nvidia-smi").chmod(0o755)
    top = f'prologue = ["export PATH={small}:$PATH"]\n'
    study.write('[matrix]\nhardware = ["big:1"]\n', top=top + BIG_GPUS)
    study.run("submit")
    (row,) = until_settled(study)
    first, second = attempts(study)
    node = (small / "first").read_text().strip()
    assert (first["state"], row["state"], row["recovery"]) == ("wrong_hardware", "succeeded", "exclude_node"), row
    assert "42.9 GB, 80 GB planned" in first["message"]
    assert (
        second["shape"]["arguments"] == {"exclude": node} and second["recovery"]["changes"] == f"node {node} excluded"
    )
    assert f"ExcNodeList={node} " in study.lab.command("scontrol", "--oneliner", "show", "job", row["job_id"])


def test_the_last_node_of_a_kind_is_not_excluded(study: Study, tmp_path: Path) -> None:
    """No node has the planned hardware: recovery stops and says so, and ``retry`` uses all nodes again."""
    small = tmp_path / "bin"
    small.mkdir()
    (small / "nvidia-smi").write_text(NVIDIA_SMI.format(folder=small).replace("81920", "40960"))
    (small / "nvidia-smi").chmod(0o755)
    study.write('[matrix]\nhardware = ["big:1"]\n', top=f'prologue = ["export PATH={small}:$PATH"]\n' + BIG_GPUS)
    study.run("submit")
    (row,) = until_settled(study)
    assert (row["state"], row["attempt"], row["recovery"]) == ("wrong_hardware", 2, "stop"), row
    assert "42.9 GB, 80 GB planned" in row["message"]
    assert re.fullmatch(
        r"not resubmitted: without lab00[12], lab00[12] Slurm has no node for it \(Requested node configuration is not "
        r"available\); correct type, expect_name or expect_mem_gb in the cluster file, then orchestrate submit",
        row["recovery_message"],
    )
    assert "42.9 GB, 80 GB planned" in study.run("logs", row["run_id"]).stdout
    study.run("retry", "--no-recover", row["run_id"])
    third = attempts(study)[2]
    assert "arguments" not in third["shape"] and third["recovery"] is None


NVIDIA_SMI = """#!/bin/bash
set -o noclobber
{{ echo "$SLURMD_NODENAME" >{folder}/first; }} 2>/dev/null
memory=81920
[ "$(cat {folder}/first)" != "$SLURMD_NODENAME" ] || memory=40960
for i in 0 1; do echo "$i, GPU-$SLURMD_NODENAME-$i, NVIDIA A100-SXM4, $memory"; done
"""
BIG_GPUS = """
[cluster.lab.gpu.big]
type = "a100"
node_gpus = 2
cpus_per_gpu = 1
mem_per_gpu = "200M"
expect_name = "A100"
expect_mem_gb = 80
queue = [{ partition = "htc" }]
"""


def test_a_dead_node_is_excluded(study: Study) -> None:
    """Its daemon and all its processes end at once; the run continues from its checkpoint on another node."""
    study.write(probe("a30:1", epoch_s=0.3), defaults=TEN, top='requeue = "cancel"')
    study.run("submit")
    node = start_of(until_epoch(study))["node"]
    study.lab.kill(f"slurmd-{node}")
    try:
        (row,) = until_settled(study)
    finally:
        study.lab.start_again(f"slurmd-{node}")
    first, second = attempts(study)
    assert (first["state"], row["state"], row["attempt"]) == ("node_fail", "succeeded", 2), row
    assert node in first["message"] and second["shape"]["arguments"] == {"exclude": node}
    (result,) = json.loads(study.run("results", "--json").stdout)
    assert result["resumed_from_epoch"] >= 2 and result["epochs_done"] == 10


# --- the daemons of the whole cluster ---


def impatient() -> None:
    """Shorten waits that take minutes on a real cluster because of its network."""
    from orchestrator.backends.slurm import executor, status

    executor.ADOPTION_GRACE_S, executor.ADOPTION_POLL_S = 3.0, 0.3
    status.ABSENCE_GRACE_S, status.TASK_GRACE_S = 1.0, 1.0


def test_a_controller_that_dies_after_it_accepted_jobs(doomed: Lab, tmp_path: Path) -> None:
    """It loses them: states stay while it is down, then the runs are lost and recovery resubmits each once."""
    study = Study(doomed, tmp_path / "study")
    study.write(TWO_RUNS)
    study.path = [fake_sbatch(tmp_path, study.lab, '{real} --hold "$@"; rc=$?; {kill}; exit $rc')]
    assert num_submitted(study.run("submit", before=impatient)) == 2
    study.path = []
    assert [row["state"] for row in study.status()] == ["pending"] * 2, "a query that fails changes nothing"
    # It saves its state within seconds; this is the state before.
    for path in (doomed.folder / "state").glob("job_state*"):
        path.unlink()
    doomed.start_again("slurmctld")
    study.lab.until_answers()
    rows = until_settled(study, before=impatient)
    assert [(row["state"], row["attempt"], row["recovery"]) for row in rows] == [("succeeded", 2, "resubmit")] * 2
    assert {a["reason"] for a in attempts(study) if a["attempt"] == 1} == {"unknown_to_slurm"}
    assert len(study.queued()) == 2, "Slurm knows of no job but theirs"


def test_a_controller_that_is_down_during_submit(doomed: Lab, tmp_path: Path) -> None:
    """sbatch does not reach it: no answer until the controller is back, then each run is submitted once."""
    study = Study(doomed, tmp_path / "study")
    study.write(TWO_RUNS)
    study.path = [fake_sbatch(tmp_path, study.lab, '{kill}; exec {real} "$@"')]
    done = study.run("submit", expect=1, before=impatient)
    assert "Slurm gave no answer for" in done.stderr
    assert [row["state"] for row in study.status()] == ["submitting"] * 2
    study.path = []
    study.lab.start_again("slurmctld")
    study.lab.until_answers()
    study.run("submit", before=impatient)
    rows = until_settled(study, before=impatient)
    assert [(row["state"], row["attempt"], row["recoveries"]) for row in rows] == [("succeeded", 1, 0)] * 2
    assert len(study.queued()) == 2


TWO_RUNS = '[matrix]\nhardware = ["a100:1"]\nseed = [0, 1]\n'


def fake_sbatch(folder: Path, lab: Lab, body: str) -> Path:
    """Return a folder for PATH whose ``sbatch`` runs a line of bash, which may kill the controller."""
    (pid,) = (process.pid for name, process in lab.processes if name == "slurmctld" and process.poll() is None)
    program = folder / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text("#!/bin/bash\n" + body.format(real=shutil.which("sbatch"), kill=f"kill -9 {pid}") + "\n")
    program.chmod(0o755)
    return program.parent


def test_accounting_that_is_down(accounting_lab: Lab, tmp_path: Path) -> None:
    """The controller alone reports how runs ended; those states stay when slurmdbd is back."""
    study = Study(accounting_lab, tmp_path / "study")
    strategies = '{ name = "probe" }, { name = "probe", fault = "exit" }'
    study.write(f'[matrix]\nhardware = ["a100:1"]\nstrategy = [{strategies}]\n')
    accounting_lab.kill("slurmdbd")
    try:
        assert num_submitted(study.run("submit")) == 2
        rows = until_settled(study)
        assert {(row["state"], row["recovery"]) for row in rows} == {("succeeded", ""), ("failed", "stop")}, rows
    finally:
        accounting_lab.start_again("slurmdbd")
    jobs = ",".join(row["job_id"] for row in rows)
    ended = ("sacct", "--noheader", "--allocations", f"--jobs={jobs}", "--format=State%20")
    deadline = time.monotonic() + 60
    while sorted(accounting_lab.attempt(*ended).stdout.split()) != ["COMPLETED", "FAILED"]:
        assert time.monotonic() < deadline, "the controller has told the accounts what they missed"
        time.sleep(0.5)
    assert sorted(study.states()) == ["failed", "succeeded"]


# --- the slow runs, which started with the first test ---


def test_a_time_limit_is_raised_and_the_run_continues(timed: Study) -> None:
    """Slurm announces the limit 6 to 60 s early, and the run obeys: twice the time, nothing trained twice."""
    (row,) = until_settled(timed, 150)
    assert (row["state"], row["recovery"]) == ("succeeded", "raise_time"), row
    found = attempts(timed)
    assert [(a["state"], a["reason"]) for a in found] == [("timeout", "time_limit"), ("succeeded", "")]
    assert [a["time_limit_s"] for a in found] == [60, 120]
    assert found[1]["shape"]["arguments"] == {"time": "0-00:02:00"}
    assert "TimeLimit=00:02:00" in timed.lab.command("scontrol", "show", "job", row["job_id"])
    (result,) = json.loads(timed.run("results", "--json").stdout)
    assert result["epochs_done"] == 92 and result["resumed_from_epoch"] > 0
    with sqlite3.connect(timed.folder / "results.db") as connection:
        assert connection.execute("SELECT count(*), count(DISTINCT epoch) FROM epochs").fetchone() == (92, 92)


def test_a_resumed_training_learns_what_an_uninterrupted_one_learns(frozen: Study, study: Study) -> None:
    """Resumed from its checkpoint, every loss and metric of every epoch is bit for bit the same."""
    trained(study)
    study.run("submit")
    (row,) = until_settled(frozen, 150)
    assert [a["state"] for a in attempts(frozen)] == ["timeout", "succeeded"], row
    (resumed,) = json.loads(frozen.run("results", "--json").stdout)
    assert 1 <= resumed["resumed_from_epoch"] < 20
    until_settled(study)
    disturbed, undisturbed = (learned(made) for made in (frozen, study))
    assert disturbed == undisturbed and len(disturbed) == 21


def learned(study: Study) -> list[tuple[Any, ...]]:
    """Return losses and accuracies of each epoch, then of the result."""
    measured = "train_loss, test_loss, test_accuracy"
    with sqlite3.connect(study.folder / "results.db") as connection:
        epochs = connection.execute(f"SELECT epoch, {measured} FROM curves ORDER BY epoch").fetchall()
        (result,) = connection.execute(f"SELECT epochs_done, {measured} FROM results WHERE state = 'succeeded'")
    return [*epochs, result]
