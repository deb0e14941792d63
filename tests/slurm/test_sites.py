"""A site nobody described: its cluster file is written and used unchanged; queues are chosen; the doctor looks."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.study import DEFAULTS, Study, number_sent

pytestmark = pytest.mark.slurm

EVERY_SHAPE = """
[matrix]
hardware = ["a100:2", "a30:1", "cpu:2"]
"""


def go_through(lab: Lab, folder: Path) -> dict[str, object]:
    """``init --cluster``, then a study with the file as it is; the file's content."""
    folder.mkdir()
    study = Study(lab, folder)
    (folder / "experiment.toml").write_text(DEFAULTS + EVERY_SHAPE)
    said = study.run("init", "--cluster")
    assert "wrote cluster.toml (cluster lab, from what Slurm " in said.stderr
    assert "it was not touched" in study.run("init", "--cluster", expect=2).stderr
    written = (folder / "cluster.toml").read_text()
    assert number_sent(study.run("submit")) == 3
    rows = study.until_ended()
    assert [row["state"] for row in rows] == ["succeeded"] * 3, [row["message"] for row in rows]
    assert (folder / "cluster.toml").read_text() == written
    content = tomllib.loads(written)["cluster"]["lab"]
    assert list(content["gpu"]) == ["a100", "a30"] and content["array_index_max"] == 1000
    assert [queue["partition"] for queue in content["cpu"]["queue"]] == ["public", "htc"], "closed takes no jobs"
    return content


def test_a_cluster_file_for_a_site_without_accounting(lab: Lab, tmp_path: Path) -> None:
    """Written from sinfo and scontrol alone, it submits unchanged."""
    content = go_through(lab, tmp_path / "study")
    assert (content["account"], content["accounting"]) == ("", "squeue")


def test_a_cluster_file_for_a_site_with_accounting(accounting_lab: Lab, tmp_path: Path) -> None:
    """It names the user's account, and submits unchanged."""
    content = go_through(accounting_lab, tmp_path / "study")
    assert (content["account"], content["accounting"]) == ("group", "auto")


@contextlib.contextmanager
def partition(lab: Lab, name: str, nodes: str) -> Iterator[None]:
    """A further partition for a while."""
    lab.command("scontrol", "create", f"PartitionName={name}", f"Nodes={nodes}", "MaxTime=4:00:00", "State=UP")
    try:
        yield
    finally:
        lab.command("scontrol", "delete", f"PartitionName={name}")


def test_the_queue_that_starts_first_is_chosen_when_it_is_wanted(lab: Lab, tmp_path: Path) -> None:
    """The script stays as planned, the other queue goes to sbatch beside it and is recorded with the start that was
    promised; without the wish, the script's queue is taken and the runs wait in it."""
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
            assert number_sent(study.run("submit", "--queue", "earliest")) == 2
            rows = study.until_ended()
            assert [row["state"] for row in rows] == ["succeeded"] * 2, [row["message"] for row in rows]
            told = [json.loads(p.read_text()) for p in study.runs.glob("*/*/attempts/1/submission.json")]
            assert [(t["partition"], t["shape"]["partition"]) for t in told] == [("htc", "narrow")] * 2
            assert all(t["expected_start"].startswith("20") for t in told)
            (sent,) = (study.runs / "jobs").glob("*/*_submission.sh")
            assert sent.read_text() == planned["scripts"][0]["text"]
            study.write('[matrix]\nhardware = ["a100:2"]\nseed = [2]\n')
            (study.folder / "cluster.toml").write_text(config.replace('[{ partition = "htc", max_time = "4h" }]', both))
            assert number_sent(study.run("submit")) == 1
            waiting = lab.command("squeue", "-h", "--partition=narrow", "--states=PENDING", "-o", "%i")
            assert len(waiting.split()) == 1
        finally:
            study.forget()
            lab.command("scancel", job)
            lab.wait(job)
