"""``submit --canary`` and ``--max-gpu-hours`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workloads.files.run_dir import RunDir

from .conftest import Lab, wait_until

EXPERIMENT = """
name = "tiny"
[defaults]
dataset = "digits"
model = "cnn"
epochs = 1
strategy = "probe"
time_limit = "30m"
[matrix]
hardware = ["cpu:1", "gpu:1"]
seed = [0, 1, 2]
"""


@pytest.fixture
def planned(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Six runs of two shapes."""
    lab.root.mkdir()
    (lab.root / "experiment.toml").write_text(EXPERIMENT)
    return lab


def started(lab: Lab) -> list[dict[str, Any]]:
    """What was trained, in order of starts."""
    path = lab.runs / "starts.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    specs = [json.loads((RunDir.of(lab.runs, line.split()[0]).spec).read_text()) for line in lines]
    return [{"hardware": spec["train"]["hardware"], "seed": spec["train"]["seed"]} for spec in specs]


def test_one_run_of_each_shape_goes_first(planned: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs of one GPU for half an hour each are 1.5 GPU-hours: with less allowed nothing goes. Else both canaries
    have ended before another run starts; then all the rest goes, and is counted as one submit."""
    monkeypatch.setenv("ORCHESTRATE_LAB_TODO", '{"sleep": 0.3}')
    code, stdout, stderr = planned.run("submit", "--local", "--canary", "--max-gpu-hours", "1.4")
    assert (code, stdout) == (2, "") and not planned.starts()
    assert "the plan may use 1.5 GPU-hours and --max-gpu-hours is 1.4: nothing was submitted" in stderr
    code, stdout, stderr = planned.run("submit", "--local", "--canary", "--max-gpu-hours", "1.5", "--wait")
    assert code == 0, stderr
    assert stdout == "6 runs submitted to local (2 canaries among them)\n"
    assert "2 canaries, one of each resource shape, before 4 more runs" in stderr
    first, second, *rest = started(planned)
    assert {first["hardware"], second["hardware"]} == {"cpu:1", "gpu:1"} and first["seed"] == second["seed"] == 0
    assert len(rest) == 4 and planned.starts().total() == 6


def test_a_failed_canary_stops_the_rest(planned: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason and what to do; the next time the failed one goes first again, what was proven is not."""
    monkeypatch.setenv("ORCHESTRATE_LAB_TODO", '{"bad_seed": 0}')
    code, stdout, stderr = planned.run("submit", "--local", "--canary")
    assert (code, stdout) == (1, "")
    assert "failed as canary; not submitted: 4 more runs" in stderr
    assert "exit code 3" in stderr and "orchestrate submit --canary tries again" in stderr
    assert len(started(planned)) == 2
    monkeypatch.setenv("ORCHESTRATE_LAB_TODO", "{}")
    code, stdout, stderr = planned.run("submit", "--local", "--canary")
    assert (code, stdout) == (0, "6 runs submitted to local (2 canaries among them)\n"), stderr
    assert [row["seed"] for row in started(planned)[:4]] == [0, 0, 0, 0]  # the two that failed, again first


def test_kill_9_while_canaries_run(planned: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same command again waits for the canaries that are under way and sends the rest: every run starts once."""
    monkeypatch.setenv("ORCHESTRATE_LAB_TODO", '{"sleep": 2}')
    process = planned.command("submit", "--local", "--canary")
    wait_until(lambda: len(started(planned)) == 2, what="canaries start")
    process.kill()
    process.communicate()
    monkeypatch.setenv("ORCHESTRATE_LAB_TODO", "{}")
    code, stdout, stderr = planned.run("submit", "--local", "--canary", "--wait")
    assert code == 0, stderr
    assert stdout == "4 runs submitted to local (2 done)\n"
    assert sorted(planned.starts().values()) == [1] * 6
