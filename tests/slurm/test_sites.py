"""A new site: init writes its cluster file, which works unchanged; queues are chosen; doctor checks the site."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_readme import _shape as shape_of
from tests.slurm.lab import Lab
from tests.slurm.study import DEFAULTS, ROOT, Study, num_submitted

pytestmark = pytest.mark.slurm

EVERY_SHAPE = """
[matrix]
hardware = ["a100:2", "a30:1", "cpu:2"]
"""


def go_through(lab: Lab, folder: Path) -> dict[str, object]:
    """Run ``init --cluster``, then a study with the unchanged file; return the file's content."""
    folder.mkdir()
    study = Study(lab, folder)
    (folder / "experiment.toml").write_text(DEFAULTS + EVERY_SHAPE)
    said = study.run("init", "--cluster")
    assert "wrote cluster.toml (cluster lab, from what Slurm " in said.stderr
    assert "it is unchanged" in study.run("init", "--cluster", expect=2).stderr
    written = (folder / "cluster.toml").read_text()
    assert num_submitted(study.run("submit")) == 3
    rows = study.until_ended()
    assert [row["state"] for row in rows] == ["succeeded"] * 3, [row["message"] for row in rows]
    assert (folder / "cluster.toml").read_text() == written
    content = tomllib.loads(written)["cluster"]["lab"]
    assert list(content["gpu"]) == ["a100", "a30"] and content["array_index_max"] == 1000
    queues = {queue["partition"]: queue.get("preemptable", False) for queue in content["cpu"]["queue"]}
    assert queues == {"public": False, "htc": False, "urgent": False, "ended": True, "requeued": True}, "none is closed"
    assert next(iter(queues)) == "public", "the partition that Slurm takes by itself comes first"
    return content


def test_a_cluster_file_for_a_site_without_accounting(lab: Lab, tmp_path: Path) -> None:
    """Written from sinfo and scontrol alone; submit accepts it unchanged."""
    content = go_through(lab, tmp_path / "study")
    assert (content["account"], content["accounting"]) == ("", "squeue")


def test_a_cluster_file_for_a_site_with_accounting(accounting_lab: Lab, tmp_path: Path) -> None:
    """It names the user's account; submit accepts it unchanged."""
    content = go_through(accounting_lab, tmp_path / "study")
    assert (content["account"], content["accounting"]) == ("group", "auto")


def test_the_page_leads_from_nothing_to_the_first_table(accounting_lab: Lab, tmp_path: Path) -> None:
    """Every command of docs/slurm.md's transcripts runs in order in an empty folder, with the experiment that the page
    shows; every line of the page is printed again, except for numbers."""
    page = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
    study = Study(accounting_lab, tmp_path)
    (tmp_path / "experiment.toml").write_text(re.findall(r"```toml\n(name = .*?)```", page, re.DOTALL)[0])
    lines = "".join(re.findall(r"```console\n(.*?)```", page, re.DOTALL)).splitlines()
    printed: list[str] = []
    for line in lines:
        if line.startswith("$ "):
            program, *argv = shlex.split(line[2:])
            assert program == "orchestrate"
            done = study.run(*argv)
            printed = [shape_of(text) for text in (done.stdout + done.stderr).splitlines()]
        elif line.strip() != "...":
            assert shape_of(line) in printed, f"{line!r} not among\n" + "\n".join(printed)
    assert sum(line.startswith("$ ") for line in lines) >= 5


@contextlib.contextmanager
def partition(lab: Lab, name: str, nodes: str) -> Iterator[None]:
    """Add a partition for a while."""
    lab.command("scontrol", "create", f"PartitionName={name}", f"Nodes={nodes}", "MaxTime=4:00:00", "State=UP")
    try:
        yield
    finally:
        lab.command("scontrol", "delete", f"PartitionName={name}")


def test_the_queue_that_starts_first_is_chosen_when_it_is_wanted(lab: Lab, tmp_path: Path) -> None:
    """The script stays as planned; the other queue is an option of sbatch and recorded with its estimated start.

    Without --queue earliest the runs wait in the script's queue.
    """
    study = Study(lab, tmp_path / "study")
    study.write('[matrix]\nhardware = ["a100:2"]\nseed = [0, 1]\n')
    config = (study.folder / "cluster.toml").read_text()
    both = '[{ partition = "narrow", max_time = "4h" }, { partition = "htc", max_time = "4h" }]'
    (study.folder / "cluster.toml").write_text(config.replace('[{ partition = "htc", max_time = "4h" }]', both))
    blocker = tmp_path / "blocker.sh"
    blocker.write_text("#!/bin/bash\nsleep 60\n")
    with partition(lab, "narrow", "lab001"):
        job = lab.submit(blocker, "--partition=narrow", "--gres=gpu:a100:2", "--time=30", "--output=/dev/null")
        try:
            planned = json.loads(study.run("plan", "--json").stdout)
            assert planned["scripts"][0]["queues"] == ["narrow", "htc"]
            assert "#SBATCH --partition=narrow\n" in planned["scripts"][0]["text"]
            assert num_submitted(study.run("submit", "--queue", "earliest")) == 2
            rows = study.until_ended()
            assert [row["state"] for row in rows] == ["succeeded"] * 2, [row["message"] for row in rows]
            told = [json.loads(p.read_text()) for p in study.runs.glob("*/*/attempts/1/submission.json")]
            assert [(t["partition"], t["shape"]["partition"]) for t in told] == [("htc", "narrow")] * 2
            assert all(t["expected_start"].startswith("20") for t in told)
            (sent,) = (study.runs / "jobs").glob("*/*_submission.sh")
            assert sent.read_text() == planned["scripts"][0]["text"]
            study.write('[matrix]\nhardware = ["a100:2"]\nseed = [2]\n')
            (study.folder / "cluster.toml").write_text(config.replace('[{ partition = "htc", max_time = "4h" }]', both))
            assert num_submitted(study.run("submit")) == 1
            waiting = lab.command("squeue", "-h", "--partition=narrow", "--states=PENDING", "-o", "%i")
            assert len(waiting.split()) == 1
        finally:
            study.forget()
            lab.command("scancel", job)
            lab.wait(job)


def verdicts(done: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the findings of doctor by subject."""
    found: dict[str, list[tuple[str, str]]] = {}
    for row in json.loads(done.stdout):
        found.setdefault(row["subject"], []).append((row["verdict"], row["what"]))
    return found


def test_the_doctor_looks_at_a_cluster_and_at_its_nodes(accounting_lab: Lab, tmp_path: Path) -> None:
    """Each planned shape would start; probes report what nodes see; they leave no files, and no plan is written."""
    study = Study(accounting_lab, tmp_path / "study")
    study.write('[matrix]\nhardware = ["a100:2", "a30:1"]\n', top='account = "group"')
    found = verdicts(study.run("doctor", "--probe", "--json"))
    assert [verdict for verdict, _ in found["shape"]] == ["ok", "ok"]
    assert all("in htc: would start about 20" in what for _, what in found["shape"])
    assert found["accounting"] == [("ok", "sacct answers")] and found["account"] == [("ok", "group")]
    (pair, single) = (what for verdict, what in found["probe"] if verdict == "ok")
    assert pair.startswith("a100:2: 2 ranks, 2 devices, ") and single.startswith(
        "a30:1: 1 rank, 1 device, 1 core on lab00"
    )
    assert ("ok", "digits, seen from a node") in found["data"]
    assert {verdict for verdict, _ in found["clock"] + found["environment"]} == {"ok"}
    assert found["runs"][-1][1].endswith("nodes write there, and it is read here")
    assert not list(study.runs.glob("doctor-*")) and not (study.folder / "plan.json").exists()
    assert study.status() == []


def test_the_doctor_names_what_a_job_would_stumble_over(lab: Lab, tmp_path: Path) -> None:
    """A partition that is down, one that does not exist, a type that no node has: each is reported, exit code 1, and no
    probe is submitted. A failing prologue shows only in the probe, with its line."""
    study = Study(lab, tmp_path / "study")
    study.write('[matrix]\nhardware = ["a100:2"]\n', partition="closed")
    found = verdicts(study.run("doctor", "--probe", "--json", expect=1))
    assert ("fail", "partition closed is down: jobs would wait in it") in found["queue"]
    assert [verdict for verdict, _ in found["probe"]] == ["note"]
    study.write('[matrix]\nhardware = ["a100:2"]\n', partition="nowhere")
    found = verdicts(study.run("doctor", "--json", expect=1))
    assert ("fail", "there is no partition nowhere (gpu.a100)") in found["queue"]
    assert found["shape"] == [
        ("fail", "2xa100-2ranks in nowhere: invalid partition specified: nowhere; Invalid partition name specified")
    ]
    study.write('[matrix]\nhardware = ["a100:2"]\n')
    config = (study.folder / "cluster.toml").read_text()
    (study.folder / "cluster.toml").write_text(config.replace('type = "a100"', 'type = "h100"'))
    found = verdicts(study.run("doctor", "--json", expect=1))
    assert found["shape"] == [("fail", "2xa100-2ranks in htc: Requested node configuration is not available")]
    study.write('[matrix]\nhardware = ["a100:2"]\n', top='prologue = ["module load nothing"]')
    done = study.run("doctor", "--probe", "--json", expect=1)
    assert "correct prologue in the cluster file; its logs: " in done.stdout
    found = verdicts(done)
    assert any(v == "fail" and "prologue failed: module load nothing" in what for v, what in found["probe"])
    assert len(list(study.runs.glob("doctor-*"))) == 1, "its logs stay"
