"""Run 2,500 probe runs on a cluster that accepts 600 at once: wall time, and number of queries to the controller.

    python -m benchmarks.many_runs [--runs 2500] [--max-array-size 1001] [--limit 600] [--poll-seconds 10] [--json]

Boots the tests' throw-away cluster with accounting, MaxArraySize and MaxSubmitJobsPerUser, and submits the study with
``orchestrate submit --watch``. Fails unless every run succeeds in its first attempt.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.slurm.lab import Lab, running
from tests.slurm.study import Study
from tests.slurm.test_large import COUNTED, Campaign


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of one campaign."""

    runs: int
    seconds: float
    states: dict[str, int]
    attempts: int
    calls: dict[str, int]
    arrays: list[int]
    """Tasks of each array, in the order of submission."""
    watch_cpu_s: float
    """CPU seconds of ``submit --watch`` and of its child processes."""
    status_s: float
    """Wall time of ``status`` after all runs have ended."""

    def text(self) -> str:
        calls = ", ".join(f"{self.calls.get(name, 0)} {name}" for name in COUNTED)
        return (
            f"{self.runs} runs in {self.seconds:.0f} s ({self.runs / self.seconds:.1f}/s): {self.states}, "
            f"{self.attempts} attempts\n"
            f"controller calls: {calls}\n"
            f"{len(self.arrays)} arrays: {' '.join(map(str, self.arrays))}\n"
            f"submit --watch used {self.watch_cpu_s:.1f} CPU seconds ({self.watch_cpu_s / self.seconds:.1%} load), "
            f"a status afterwards takes {self.status_s:.2f} s"
        )


def measure(lab: Lab, folder: Path, arguments: argparse.Namespace) -> Figures:
    campaign = Campaign(
        Study(lab, folder / "study"), arguments.runs, arguments.max_array_size, arguments.limit, arguments.poll_seconds
    )
    campaign.prepare()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = campaign.go_through()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    rows = campaign.study.status()
    status_s = time.monotonic() - started
    assert len({row["job_id"] for row in rows}) == arguments.runs
    return Figures(
        runs=len(rows),
        seconds=seconds,
        states=dict(Counter(row["state"] for row in rows)),
        attempts=sum(row["attempt"] for row in rows),
        calls=dict(campaign.calls),
        arrays=campaign.arrays(),
        watch_cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        status_s=status_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2500)
    parser.add_argument("--max-array-size", type=int, default=1001)
    parser.add_argument("--limit", type=int, default=600)
    parser.add_argument("--poll-seconds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    # A short prefix: unix(7) limits the path of a socket to 107 characters.
    with tempfile.TemporaryDirectory(prefix="lab-") as name:
        folder = Path(name).resolve()
        settings = (f"MaxArraySize={arguments.max_array_size}",)
        with running(folder / "slurm", accounting=True, extra=settings) as lab:
            figures = measure(lab, folder, arguments)
    print(json.dumps(asdict(figures), indent=1) if arguments.json else figures.text())
    assert figures.states == {"succeeded": arguments.runs} and figures.attempts == arguments.runs


if __name__ == "__main__":
    main()
