"""The path of one value, from the experiment file to a filtered table: the test to read first.

``[matrix] lr = [0.05, 0.1]`` goes through every stage under one name; one assertion a step of ARCHITECTURE.md's list.
"""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission

from orchestrator.config import experiment
from orchestrator.planning import matrix
from workloads.contract import Hardware, TrainConfig
from workloads.files.event_log import read_events
from workloads.files.json_file import read_json
from workloads.files.run_dir import RunDir

pytestmark = pytest.mark.torch

STUDY = """
name = "value-path"
[defaults]
dataset = "digits"
model = "cnn"
strategy = "eager"
hardware = "cpu:1"
steps = 3
batch_size = 32
[matrix]
lr = [0.05, 0.1]
"""


def _orchestrate(folder: Path, *argv: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _one_core(hardware: Hardware, ranks: int) -> int:
    return ranks


def test_lr_keeps_its_name_and_value_from_file_to_table(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(STUDY)

    # Typed and range-checked.
    spec = experiment.load(tmp_path / "experiment.toml")
    cells = matrix.expand(spec, default_cpus=_one_core).cells
    # -> TrainConfig.lr
    assert [cell.train.lr for cell in cells] == [0.05, 0.1]
    run_id = cells[1].run_id
    assert run_id == cells[1].train.run_id()

    _orchestrate(tmp_path, "plan", "--local")
    _orchestrate(tmp_path, "submit", "--local", "--wait")

    # -> spec.json, its only executor: neither the pickle nor the command line of a rank holds it.
    run = RunDir.of(tmp_path / "runs", run_id)
    assert read_json(run.spec)["train"]["lr"] == 0.1
    assert TrainConfig.from_json(read_json(run.spec)["train"]).run_id() == run_id
    pickles = list(run.attempt(1).job_folder.glob("*_submitted.pkl"))
    assert len(pickles) == 1
    call = DelayedSubmission.load(pickles[0])
    assert (call.args, call.kwargs) == ((str(run.path), 1), {})
    # -> optimiser -> lr_applied, read back at step 0
    events, _ = read_events(run.attempt(1).events())
    assert [e["lr_applied"] for e in events if e["event"] == "setup"] == [0.1]
    # What it printed meanwhile.
    (line,) = [text for text in _orchestrate(tmp_path, "logs", run_id).splitlines() if text.startswith("epoch")]
    assert re.fullmatch(r"epoch 1/1: loss [\d.]+, [\d,]+ samples/s, test accuracy [\d.]+%", line)
    # -> result.json
    assert read_json(run.attempt(1).result)["lr_applied"] == 0.1
    # -> columns runs.lr and results.lr_applied
    _orchestrate(tmp_path, "collect")
    with sqlite3.connect(tmp_path / "results.db") as database:
        row = database.execute(
            "select runs.lr, results.lr_applied from runs join results using (run_id) where run_id = ?", [run_id]
        ).fetchone()
    assert row == (0.1, 0.1)
    # -> orchestrate results --where lr=0.1
    rows = json.loads(_orchestrate(tmp_path, "results", "--where", "lr=0.1", "--json"))
    assert [(r["run_id"], r["lr"], r["lr_applied"]) for r in rows] == [(run_id, 0.1, 0.1)]
