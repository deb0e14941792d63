"""Kills ``submit`` of many runs at many points, submits again, and lets all run on a throw-away Slurm.

    python -m tests.slurm.kill_sweep --runs 40 --points 36 --json sweep.json

Each point has a folder of its own on one cluster with accounting. A run is lost when it did not succeed, and there
twice when it started twice, or when Slurm gave a node to a job that had nothing to do. Exit code 1 if any was.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.slurm.kill_points import ACCEPTED, Point, all_points, fake_sbatch, spread, submit_killed
from tests.slurm.lab import Lab, running
from tests.slurm.study import Study
from workloads.files.event_log import read_events
from workloads.files.run_dir import run_dirs

SBATCHES = {"real": "", "accepts and reports a time-out": ACCEPTED}
TIMEOUT_S = 600.0
_UNENDED = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The runs after a kill and a second ``submit``."""

    sbatch: str
    point: str
    sent_before: int
    """Array tasks that Slurm had after the first submit was killed."""
    rerun: str
    """Output of the second submit."""
    attempts: int
    lost: int
    duplicate: int
    unlike: int
    """Jobs that are not in all of the store, ``sacct`` and the run folders."""
    duration_s: float
    killed: bool = True

    @property
    def good(self) -> bool:
        return self.killed and not (self.lost or self.duplicate or self.unlike)

    def row(self, number: int) -> str:
        cells = (number, self.sbatch, self.point, self.sent_before, self.rerun, self.attempts, self.lost)
        killed = "" if self.killed else " NOT REACHED"
        return f"| {' | '.join(map(str, cells))} | {self.duplicate} | {self.unlike}{killed} | {self.duration_s:.0f} |"


HEAD = (
    "| no. | sbatch | killed | in Slurm then | second submit | attempts | lost | duplicate | unlike | s |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass
class Sweep:
    """One kind of ``sbatch`` on a cluster without other users."""

    lab: Lab
    folder: Path
    num_runs: int
    sbatch: str = "real"
    seen: set[str] = field(default_factory=set)
    """Jobs of earlier points."""
    num_studies: int = 0

    def study(self) -> Study:
        """Return a study in a new folder."""
        self.num_studies += 1
        made = Study(self.lab, self.folder / f"study{self.num_studies}")
        seeds = list(range(self.num_runs // 2))
        made.write(f'[matrix]\nhardware = ["a100:1", "a30:1"]\nseed = {seeds}\n')
        if body := SBATCHES[self.sbatch]:
            made.path = [fake_sbatch(made.folder / "bin", body)]
        return made

    def undisturbed(self) -> tuple[list[Point], Outcome]:
        """Return all points, and the outcome of a second submit after an uninterrupted one."""
        began, study = time.monotonic(), self.study()
        points = all_points(study)
        return points, self._outcome(study, "nowhere", began)

    def killed(self, point: Point) -> Outcome:
        began, study = time.monotonic(), self.study()
        done = submit_killed(study, point)
        return self._outcome(study, str(point), began, killed=done.exit_code == -signal.SIGKILL)

    def _outcome(self, study: Study, point: str, began: float, *, killed: bool = True) -> Outcome:
        sent_before = len(self._in_queue())
        rerun = study.run("submit")
        nodes = self._nodes_of_ended(began)
        self.seen.update(nodes)
        started = {job for job, node in nodes.items() if node != "None assigned"}
        rows = study.status()
        starts = list(_starts(study.runs))
        carried_out = [job for jobs in starts for job in jobs]
        succeeded = [row for row in rows if row["state"] == "succeeded"]
        recorded = {str(row["job_id"]) for row in rows}
        outcome = Outcome(
            self.sbatch,
            point,
            sent_before,
            "; ".join([*(rerun.stdout.splitlines()[:1]), *re.findall("^.*interrupted.*", rerun.stderr, re.MULTILINE)]),
            sum(row["attempt"] for row in rows),
            lost=self.num_runs - len({row["run_id"] for row in succeeded}),
            duplicate=sum(len(jobs) - 1 for jobs in starts) + len(started - set(carried_out)),
            unlike=len((recorded | started | set(carried_out)) - (recorded & started & set(carried_out))),
            duration_s=round(time.monotonic() - began, 1),
            killed=killed,
        )
        if outcome.good:
            shutil.rmtree(study.folder)
        else:
            print(f"kept: {study.folder}", Counter(row["state"] for row in rows), rerun, file=sys.stderr)
        return outcome

    def _nodes_of_ended(self, began: float) -> dict[str, str]:
        """Wait until all jobs have ended in the accounting; return the node of each."""
        while True:
            queued = self._in_queue()
            nodes = {job: node for job, node, state in self._in_accounting() if state not in _UNENDED}
            if not self.lab.command("squeue", "--noheader") and nodes.keys() >= set(queued):
                return nodes
            assert time.monotonic() - began < TIMEOUT_S, self.lab.command("squeue")
            time.sleep(1)

    def _in_queue(self) -> list[str]:
        """Return the array tasks since the last point, ended ones too."""
        listed = self.lab.command("squeue", "--noheader", "--array", "--states=all", "--format=%F_%K")
        return [job for job in listed.splitlines() if job not in self.seen]

    def _in_accounting(self) -> list[tuple[str, str, str]]:
        """Return job, node and state of each array task since the last point."""
        listed = self.lab.command(
            *("sacct", "--allusers", "--allocations", "--noheader", "--parsable2", "--starttime=now-1day"),
            "--format=JobID,NodeList,State",
        )
        rows = (line.split("|") for line in listed.splitlines())
        return [(job, node, state.split()[0]) for job, node, state in rows if job not in self.seen]


def _starts(runs: Path) -> Iterator[list[str]]:
    """Yield for each run the jobs that started it, in any attempt."""
    for run in run_dirs(runs):
        events = (event for attempt in run.attempts() for event in read_events(attempt.events(), 0, "start")[0])
        if jobs := [str(event["job_id"]) for event in events]:
            yield jobs


def sweep(lab: Lab, folder: Path, num_runs: int, num_points: int) -> Iterator[Outcome]:
    """Yield the outcome of each kind of ``sbatch`` at so many points, after one uninterrupted submit."""
    seen: set[str] = set()
    for place, sbatch in enumerate(SBATCHES):
        (folder / str(place)).mkdir()
        one = Sweep(lab, folder / str(place), num_runs, sbatch, seen)
        points, outcome = one.undisturbed()
        kinds = {(point.what, point.where) for point in points}
        print(f"sbatch: {sbatch}; {len(points)} points of {len(kinds)} kinds", file=sys.stderr, flush=True)
        yield outcome
        for point in spread(points, num_points):
            yield one.killed(point)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40, help="even: half on each of two types of GPU")
    parser.add_argument("--points", type=int, default=36, help="with each kind of sbatch")
    parser.add_argument("--json", type=Path, help="the outcomes so far, after each point")
    given = parser.parse_args(arguments)
    # Short: a socket's path has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    outcomes: list[Outcome] = []
    with running(folder / "slurm", accounting=True) as lab:
        print(HEAD)
        for outcome in sweep(lab, folder, given.runs, given.points):
            outcomes.append(outcome)
            print(outcome.row(len(outcomes)), flush=True)
            if given.json:
                given.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    bad = [outcome for outcome in outcomes if not outcome.good]
    print(
        f"\n{len(outcomes)} submits of {given.runs} runs: {sum(o.lost for o in outcomes)} lost, "
        f"{sum(o.duplicate for o in outcomes)} duplicate, {sum(o.duration_s for o in outcomes):.0f} s"
    )
    if not bad:
        shutil.rmtree(folder)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
