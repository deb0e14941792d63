"""A real Slurm runs the submitted code: edits while a job waits are not measured, or end the run with their name."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.study import CLUSTER
from tests.sources import Sources, notes, results

pytestmark = pytest.mark.slurm

EXPERIMENT = """
name = "frozen"
[defaults]
model = "cnn"
dataset = "digits"
epochs = 1
time_limit = "5m"
[matrix]
strategy = ["acme", "solid"]
hardware = "a30:1"
"""


def test_edits_while_a_job_waits(lab: Lab, tmp_path: Path) -> None:
    """Two jobs wait in a partition that is down while their sources are edited: they run the submitted code. Then the
    same with a change in site-packages: both fail at once and name it, and nothing is measured."""
    sources = Sources.make(tmp_path)
    sources.work.mkdir()
    (sources.work / "experiment.toml").write_text(EXPERIMENT)
    top = f"python = {json.dumps(str(sources.python))}\n"
    (sources.work / "cluster.toml").write_text(CLUSTER.format(top=top, partition="htc"))

    def submit_and_meanwhile(edit: object, *more: str) -> list[dict[str, str]]:
        lab.command("scontrol", "update", "PartitionName=htc", "State=DOWN")
        try:
            sent = json.loads(sources.orchestrate("submit", "--json", *more, env=lab.env))
            assert len(sent["sent"]) == 2
            edit()  # type: ignore[operator]
        finally:
            lab.command("scontrol", "update", "PartitionName=htc", "State=UP")
        deadline = time.monotonic() + 60
        while True:
            rows = json.loads(sources.orchestrate("status", "--json", env=lab.env))
            if not {row["state"] for row in rows} & {"submitting", "pending", "running"}:
                return list(rows)
            assert time.monotonic() < deadline, rows
            time.sleep(0.5)

    rows = submit_and_meanwhile(sources.edit)
    assert [row["state"] for row in rows] == ["succeeded"] * 2, rows
    for result in results(sources.runs).values():
        assert result["device_name"] != "edited"
        assert notes(result) == {"acme": "1", "tools": "1", "solid": "1"}
        assert "unfrozen" not in result["provenance"]

    rows = submit_and_meanwhile(sources.edit_installed, "--stale")
    assert [(row["state"], row["reason"]) for row in rows] == [("failed", "code_changed")] * 2
    assert all("the installed package solid_ways differs from the submitted one" in row["message"] for row in rows)
