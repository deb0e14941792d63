"""Whole studies on a real Slurm, with the commands that a user runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.lab import Lab
from tests.slurm.releases import newer
from tests.slurm.study import ROOT, Study, job_ids, num_submitted

pytestmark = pytest.mark.slurm

TWO_SHAPES = """
[matrix]
hardware = ["a100:1", "a30:2"]
seed = [0, 1, 2, 3, 4, 5, 6, 7, 8]
"""

ACCOUNTED_WITHIN_S = 30
"""Jobs appear in the accounting a moment after their end, on a busy machine later."""


def go_through(study: Study, top: str = "") -> list[dict[str, Any]]:
    """Run plan, submit, watch, status and results; return the rows of the last status."""
    study.write(TWO_SHAPES, top=top)
    planned = json.loads(study.run("plan", "--json").stdout)
    assert len(planned["runs"]) == 18 and len(planned["scripts"]) == 2
    assert num_submitted(study.run("submit")) == 18
    assert num_submitted(study.run("submit")) == 0
    watched = study.run("watch").stdout.splitlines()
    assert watched[-1] == "18/18 done, 0 running, 0 waiting", watched
    rows = study.status()
    assert [row["state"] for row in rows] == ["succeeded"] * 18, [row["message"] for row in rows]
    assert len(set(job_ids(rows))) == 18 and len({job.partition("_")[0] for job in job_ids(rows)}) == 2
    results = json.loads(study.run("results", "--json").stdout)
    assert sorted({(row["hardware"], row["world_size"], row["devices_seen"]) for row in results}) == [
        ("a100:1", 1, 1),
        ("a30:2", 2, 2),
    ]
    for script in planned["scripts"]:
        sent = [path.read_bytes() for path in (study.runs / "jobs").glob("*/*_submission.sh")]
        assert script["text"].encode() in sent, "what was shown is what Slurm got, byte for byte"
    assert num_submitted(study.run("submit")) == 0
    study.run("db", "rebuild")
    assert job_ids(study.status()) == job_ids(rows), "the directories tell the job ids too"
    return rows


def test_a_study_without_accounting(lab: Lab, tmp_path: Path) -> None:
    """18 runs of two shapes in two arrays; each succeeds once, with the requested resources."""
    go_through(Study(lab, tmp_path / "it's a study"))


def test_a_study_with_accounting(accounting_lab: Lab, tmp_path: Path) -> None:
    """The same with accounting: sacct and the store agree on every job."""
    study = Study(accounting_lab, tmp_path / "study")
    _agree(accounting_lab, go_through(study))


@newer
@pytest.mark.parametrize("accounting", ["sacct", "squeue"])
def test_a_study_on_the_newer_release(any_lab: Lab, tmp_path: Path, accounting: str) -> None:
    """The same, with states from accounting and with states from the controller."""
    study = Study(any_lab, tmp_path / "study")
    _agree(any_lab, go_through(study, top=f'accounting = "{accounting}"'))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; all other tests ran unprivileged")
@pytest.mark.optional
def test_a_study_of_an_unprivileged_user(accounting_lab: Lab) -> None:
    """The same as ``nobody``, in its own environment."""
    folder = accounting_lab.folder.parent / "nobody"
    folder.mkdir()
    study = Study(accounting_lab, folder / "study", user="nobody", python=_python_for_everybody(folder))
    study.folder.mkdir()
    shutil.chown(study.folder, "nobody")
    _agree(accounting_lab, go_through(study))


def _agree(lab: Lab, rows: list[dict[str, Any]]) -> None:
    arrays = sorted({job.partition("_")[0] for job in job_ids(rows)})
    wanted, deadline = dict.fromkeys(job_ids(rows), "COMPLETED"), time.monotonic() + ACCOUNTED_WITHIN_S
    while True:
        listed = lab.command("sacct", "-nPX", "--allusers", f"--jobs={','.join(arrays)}", "--format=JobID,State")
        told = dict(line.split("|") for line in listed.splitlines())
        if told == wanted or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert told == wanted


def _python_for_everybody(folder: Path) -> Path:
    """Return an interpreter outside of all homes, with the packages of this one."""
    python = folder / "venv" / "bin" / "python"
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    tried = [str(python), "-c", "import numpy, sqlalchemy, pydantic, submitit, orchestrator.cli"]
    done = subprocess.run(tried, user="nobody", cwd="/", env={}, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nobody cannot use the packages of {sys.executable} from /usr/bin/python3: {done.stderr[-200:]}")
    return python
