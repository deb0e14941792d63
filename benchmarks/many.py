"""2,500 probe runs on a cluster that takes 600 at once: seconds, and how often the controller was asked.

    python -m benchmarks.many [--runs 2500] [--max-array-size 1001] [--limit 600] [--poll-seconds 10] [--json]

Boots the throw-away cluster of the tests with accounting, MaxArraySize and MaxSubmitJobsPerUser, and leaves the study
to ``orchestrate submit --watch``. Fails unless every run succeeded, in its first attempt.
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
    """What one campaign took."""

    runs: int
    seconds: float
    states: dict[str, int]
    attempts: int
    calls: dict[str, int]
    arrays: list[int]
    """Tasks of each array, in the order of sending."""
    look_cpu_s: float
    """Processor seconds of ``submit --watch`` and of the commands that it ran."""
    status_s: float
    """Of a ``status`` afterwards, when all runs have ended."""

    def text(self) -> str:
        calls = ", ".join(f"{self.calls.get(name, 0)} {name}" for name in COUNTED)
        return (
            f"{self.runs} runs in {self.seconds:.0f} s ({self.runs / self.seconds:.1f}/s): {self.states}, "
            f"{self.attempts} attempts\n"
            f"controller calls: {calls}\n"
            f"{len(self.arrays)} arrays: {' '.join(map(str, self.arrays))}\n"
            f"submit --watch used {self.look_cpu_s:.1f} s of a processor ({self.look_cpu_s / self.seconds:.1%} of it), "
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
        look_cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
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
    # Short: a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="lab-") as name:
        folder = Path(name).resolve()
        settings = (f"MaxArraySize={arguments.max_array_size}",)
        with running(folder / "slurm", accounting=True, extra=settings) as lab:
            figures = measure(lab, folder, arguments)
    print(json.dumps(asdict(figures), indent=1) if arguments.json else figures.text())
    assert figures.states == {"succeeded": arguments.runs} and figures.attempts == arguments.runs


if __name__ == "__main__":
    main()
