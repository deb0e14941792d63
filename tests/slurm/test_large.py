"""More runs than the submit limit: ``submit --watch`` submits them as others end, and seldom queries Slurm."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.slurm.conftest import booted
from tests.slurm.lab import Lab
from tests.slurm.study import Study

pytestmark = pytest.mark.slurm

COUNTED = ("sbatch", "squeue", "sacct", "scontrol", "scancel")
RUNS, MAX_ARRAY_SIZE, LIMIT = 100, 31, 40


@dataclass
class Campaign:
    """A study of probe runs on a cluster with a submit limit."""

    study: Study
    num_runs: int
    max_array_size: int
    limit: int
    poll_seconds: int = 1
    calls: Counter[str] = field(default_factory=Counter)
    """How often commands reached the controller, by name."""
    largest_queue: int = 0

    def prepare(self) -> None:
        self.study.write(
            f'[matrix]\nhardware = ["a100:1", "a30:1"]\nseed = {list(range(self.num_runs // 2))}\n',
            top=f"max_submit = {self.limit}\narray_index_max = {self.max_array_size - 1}\n",
        )
        cluster = self.study.folder / "cluster.toml"
        cluster.write_text(cluster.read_text().replace("poll_seconds = 1", f"poll_seconds = {self.poll_seconds}"))
        self.study.lab.command("sacctmgr", "-i", "modify", "user", "root", "set", f"MaxSubmitJobs={self.limit}")
        self.study.path = [self._counting()]

    def _counting(self) -> Path:
        """Return a folder with Slurm commands that are counted before they run."""
        folder = self.study.folder / "counted"
        folder.mkdir()
        (folder / "log").touch()
        for name in COUNTED:
            real = shutil.which(name, path=self.study.lab.env["PATH"])
            (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >>"{folder}/log"\nexec {real} "$@"\n')
            (folder / name).chmod(0o755)
        return folder

    @property
    def log(self) -> list[str]:
        return (self.study.folder / "counted" / "log").read_text().splitlines()

    def go_through(self) -> float:
        """Run ``submit --watch`` until all runs have ended; return the seconds that took."""
        started = time.monotonic()
        done = self.study.run("submit", "--watch")
        seconds = time.monotonic() - started
        self.calls = Counter(line.split()[0] for line in self.log)
        assert re.match(
            rf"{self.limit} runs submitted to lab, {self.num_runs - self.limit} stay planned", done.stdout
        ), done
        return seconds

    def arrays(self) -> list[int]:
        """Return the size of each array that was submitted."""
        return [int(found[1]) + 1 for line in self.log if (found := re.search(r"--array=0-(\d+)", line))]


@pytest.fixture
def limited_lab() -> Iterator[Lab]:
    """A cluster with small arrays, and with accounting, which enforces limits."""
    yield from booted(accounting=True, extra=(f"MaxArraySize={MAX_ARRAY_SIZE}",))


def test_more_runs_than_the_submit_limit_all_finish(limited_lab: Lab, tmp_path: Path) -> None:
    """100 runs, at most 40 queued, arrays of at most 31: each runs once; a poll is one squeue and at most one sacct."""
    campaign = Campaign(Study(limited_lab, tmp_path / "study"), RUNS, MAX_ARRAY_SIZE, LIMIT)
    campaign.prepare()
    seconds = campaign.go_through()
    rows = campaign.study.status()
    assert [(row["state"], row["attempt"]) for row in rows] == [("succeeded", 1)] * RUNS
    assert len({row["job_id"] for row in rows}) == RUNS
    sizes = campaign.arrays()
    assert sum(sizes) == RUNS and max(sizes) <= MAX_ARRAY_SIZE, "nothing was refused, nothing sent twice"
    # A refill waits until a quarter of the limit is free; two shapes make two arrays of it.
    assert len(sizes) <= 2 * (2 + (RUNS - LIMIT) / (LIMIT / 4))
    polls = seconds / campaign.poll_seconds + 2
    assert campaign.calls["squeue"] <= polls and campaign.calls["sacct"] <= polls, (campaign.calls, seconds)
    assert campaign.calls["scontrol"] <= 1, "asked for the cluster's name once"


def test_an_unknown_submit_limit_is_found(limited_lab: Lab, tmp_path: Path) -> None:
    """Slurm rejects an array that exceeds the user's limit: smaller ones are tried, the rest stays planned."""
    campaign = Campaign(Study(limited_lab, tmp_path / "study"), 20, MAX_ARRAY_SIZE, limit=7)
    campaign.prepare()
    cluster = campaign.study.folder / "cluster.toml"
    cluster.write_text(cluster.read_text().replace("max_submit = 7", "").replace('"htc"', '"closed"'))
    done = campaign.study.run("submit")
    assert done.stdout.startswith("7 runs submitted to lab, 13 stay planned, as the site's limit is reached"), done
    assert len(campaign.study.queued()) == 7
    assert Counter(campaign.study.states()) == {"pending": 7, "planned": 13}
    records = campaign.study.runs.glob("jobs/orc-*/array.json")
    assert sum(len(json.loads(path.read_text())["tasks"]) for path in records) == 7, (
        "nothing is left of what was not sent"
    )
    assert not list(campaign.study.runs.glob("*/*/attempts")), "what waits has no folder"
    assert campaign.study.run("submit").stdout.startswith("0 runs submitted"), (
        "the limit is still reached, and nothing is submitted twice"
    )
    assert len(campaign.study.queued()) == 7
    campaign.study.forget()
