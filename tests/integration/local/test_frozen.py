"""What was submitted is what runs, in local mode: edits while a run waits are not measured, or refused by name."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.sources import Sources, notes, results

EXPERIMENT = """
name = "frozen"
[defaults]
model = "cnn"
dataset = "digits"
epochs = 1
time_limit = "5m"
[matrix]
strategy = ["acme", "solid"]
hardware = "cpu:1"
"""

ASLEEP = (
    "from orchestrator.backends.local.executor import LocalExecutor; LocalExecutor.ensure_running = lambda self: None"
)
"""No queue process is started, so what is submitted waits."""


@pytest.fixture
def sources(tmp_path: Path, domain: str) -> Sources:
    made = Sources.make(tmp_path)
    made.work.mkdir()
    (made.work / "experiment.toml").write_text(EXPERIMENT)
    return made


def test_edits_while_a_run_waits_are_not_measured(sources: Sources) -> None:
    """Our own editable install, an editable plug-in and what it imports are edited between submit and start: runs are
    of the code that was submitted, and say so. The next submit knows that they are out of date."""
    submitted = json.loads(sources.orchestrate("submit", "--local", "--json", patch=ASLEEP))
    assert len(submitted["sent"]) == 2
    sources.edit()
    sources.orchestrate("submit", "--local", "--wait")
    found = results(sources.runs)
    for result in found.values():
        assert result["state"] == "succeeded" and result["device_name"] != "edited"
        assert notes(result) == {"acme": "1", "tools": "1", "solid": "1"}
        about = result["provenance"]["snapshot"]
        assert about["id"] == submitted["snapshot"] and list(about["installed"]) == ["solid_ways"]
        metadata = "acme_ways-1.0.dist-info"
        assert sorted(about["frozen"]) == ["acme_late.py", "acme_tools.py", "acme_ways", metadata, "workloads"]
        assert "unfrozen" not in result["provenance"]
    for submission in sources.runs.glob("*/*/attempts/1/submission.json"):
        assert json.loads(submission.read_text())["snapshot"] == submitted["snapshot"]
    assert (sources.runs / "snapshots" / submitted["snapshot"] / "experiment.toml").read_text() == EXPERIMENT
    assert sources.orchestrate("plan", "--local").count("code changed since attempt 1") == 2


def test_what_is_installed_and_changed_while_a_run_waits_is_refused_by_name(sources: Sources) -> None:
    """A package in site-packages changes between submit and start: nothing is measured, the message names package and
    remedy, and the remedy works."""
    sources.orchestrate("submit", "--local", patch=ASLEEP)
    sources.edit_installed()
    said = sources.orchestrate("status")  # starts the queue; submit would send again what has failed by then
    deadline = time.monotonic() + 100
    while said.count("failed") < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
        said = sources.orchestrate("status")
    assert "the installed package solid_ways differs from the submitted one" in said
    assert "run orchestrate submit to use the current code" in said
    assert {(r["state"], r["reason"], r["test_accuracy"]) for r in results(sources.runs).values()} == {
        ("failed", "code_changed", None)
    }
    sources.orchestrate("submit", "--local", "--wait")
    assert [(r["state"], notes(r)["solid"]) for r in results(sources.runs).values()] == [("succeeded", "2")] * 2
