"""``submit --canary`` on a real Slurm: one job of each resource shape, then the rest, or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.study import Study

pytestmark = pytest.mark.slurm

RUNS = """
[matrix]
hardware = ["a30:1", "a30:2"]
seed = [0, 1, 2]
[[when]]
if = { seed = 0, hardware = "a30:2" }
set = { strategy = "FIRST" }
"""


def sizes(study: Study) -> list[int]:
    """Return the number of tasks of each array, in order of submission."""
    arrays = [json.loads(path.read_text()) for path in (study.runs / "jobs").glob("orc-*/array.json")]
    return [len(array["tasks"]) for array in sorted(arrays, key=lambda array: array["asked_at"])]


def test_canaries_go_first_and_a_failed_one_stops_the_rest(lab: Lab, tmp_path: Path) -> None:
    """The canary of one shape crashes: two jobs are submitted and no more. After the fix the proven shape needs no
    canary: the other's goes first, then all other runs."""
    study = Study(lab, tmp_path / "study")
    study.write(RUNS.replace('"FIRST"', '{ name = "probe", fault = "crash" }'))
    done = study.run("submit", "--canary", "--no-recover", expect=1)
    assert "2 canaries, one of each resource shape, before 4 more runs" in done.stderr
    assert "failed as canary; not submitted: 4 more runs" in done.stderr and "crash on purpose" in done.stderr
    assert sizes(study) == [1, 1]

    study.write(RUNS.replace('"FIRST"', '"probe"'))
    done = study.run("submit", "--canary", "--wait")
    assert "1 canary," in done.stderr and sizes(study)[2:] == [1, 2, 2]
    assert sorted(study.states()) == ["failed"] + ["succeeded"] * 6
