"""Time to submit 1,000 cells to a real Slurm, compared with submitit and a bare ``sbatch --array``.

    python -m benchmarks.submit [--cells 1000] [--repeats 5] [--folder FOLDER] [--json]

Boots the tests' throw-away cluster and submits to a partition that starts no jobs, so that only submission is measured;
the queue is emptied after each turn. "ours" is everything that ``orchestrate submit`` does once the plan exists: commit
the intents, write specs and calls to disk, call ``sbatch``, and record the job ids in the store. Peers:

    submitit loop   ``submit`` once per cell, as in submitit's documentation; measured on a sample, because submitit
                    submits five jobs per second
    map_array       submitit's array: pickles and one ``sbatch``, without protection against interruption
    sbatch --array  the same number of tasks of a one-line script: the time that Slurm itself needs

The kinds alternate; ratios are medians of the ratios within a turn. ``--folder`` holds all files: with a memory file
system such as /dev/shm, disk time is excluded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from submitit import SlurmExecutor

from orchestrator.cluster import cluster_file
from orchestrator.config import experiment
from orchestrator.environment.interpreter import Packages
from orchestrator.planning import planner
from orchestrator.submission import submitter
from orchestrator.workspace import Workspace
from tests.slurm.lab import Lab, running

PARTITION = "closed"
LOOP_CELLS = 20
TARGETS = {"submitit loop": 200.0, "map_array": 0.8, "sbatch --array": None}
CLUSTER = """
[cluster.lab]
poll_seconds = 1
[cluster.lab.gpu.a100]
type = "a100"
node_gpus = 2
cpus_per_gpu = 1
mem_per_gpu = "200M"
queue = [{ partition = "closed", max_time = "4h" }]
"""
STUDY = """
name = "many"
[defaults]
model = "cnn"
dataset = "digits"
strategy = "probe"
hardware = "a100:1"
time_limit = "10m"
[matrix]
seed = {seeds}
"""


@dataclass(frozen=True, slots=True)
class Bench:
    """A cluster, a folder, a number of cells."""

    lab: Lab
    folder: Path
    """Where the files of all kinds go."""
    cells: int

    def ours(self) -> float:
        """Return the seconds to submit a plan of new runs in a new workspace."""
        from db import queries
        from db.connect import open_store

        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / "experiment.toml").write_text(STUDY.format(seeds=list(range(self.cells))))
        (folder / "cluster.toml").write_text(CLUSTER)
        workspace = Workspace.at(
            runs=folder / "runs", database=str(folder / "results.db"), experiment=folder / "experiment.toml"
        )
        spec = experiment.load(workspace.experiment)
        with open_store(workspace.database) as store:
            records, durations = queries.run_records(store), queries.durations(store)
        profile = cluster_file.load(folder / "cluster.toml")
        packages = Packages("python", None, "not queried in a benchmark")
        plan = planner.make_plan(workspace, spec, profile, None, records, durations, packages)
        start = time.perf_counter()
        done = submitter.submit_plan(workspace, plan, newest_known={})
        seconds = time.perf_counter() - start
        assert len(done.submitted) == self.cells, done
        return seconds

    def loop(self) -> float:
        """Return the seconds for all cells, extrapolated from a sample."""
        executor = self._executor()
        start = time.perf_counter()
        for number in range(LOOP_CELLS):
            executor.submit(_nothing, number)
        return (time.perf_counter() - start) / LOOP_CELLS * self.cells

    def map_array(self) -> float:
        executor = self._executor()
        start = time.perf_counter()
        jobs = executor.map_array(_nothing, list(range(self.cells)))
        seconds = time.perf_counter() - start
        assert len(jobs) == self.cells
        return seconds

    def bare(self) -> float:
        script = self.folder / "bare.sh"
        script.write_text("#!/bin/bash\ntrue\n")
        argv = ["sbatch", "--parsable", f"--partition={PARTITION}", f"--array=0-{self.cells - 1}", str(script)]
        start = time.perf_counter()
        subprocess.run(argv, cwd=self.folder, check=True, capture_output=True)
        return time.perf_counter() - start

    def _executor(self) -> SlurmExecutor:
        executor = SlurmExecutor(Path(tempfile.mkdtemp(dir=self.folder)) / "%A")
        executor.update_parameters(partition=PARTITION, time=10, array_parallelism=self.cells)
        return executor

    def empty(self) -> None:
        """Cancel all jobs and wait until the queue is empty."""
        self.lab.command("scancel", f"--user={os.getuid()}")
        while self.lab.command("squeue", "-h"):
            time.sleep(0.1)


def _nothing(number: int) -> int:
    return number


def measure(cells: int, repeats: int, folder: Path | None) -> dict[str, list[float]]:
    """Return the seconds of each kind, turn by turn."""
    times: dict[str, list[float]] = {}
    # A short prefix: unix(7) limits the path of a socket to 107 characters.
    with (
        tempfile.TemporaryDirectory(prefix="lab-") as place,
        tempfile.TemporaryDirectory(prefix="files-", dir=folder) as name,
        running(Path(place) / "slurm") as lab,
    ):
        os.environ["SLURM_CONF"] = str(lab.conf)
        bench = Bench(lab, Path(name).resolve(), cells)
        kinds: dict[str, Callable[[], float]] = {
            "ours": bench.ours,
            "submitit loop": bench.loop,
            "map_array": bench.map_array,
            "sbatch --array": bench.bare,
        }
        bench.ours()  # warm up: import modules and write byte code
        bench.empty()
        for _ in range(repeats):
            for label, seconds in kinds.items():
                times.setdefault(label, []).append(seconds())
                bench.empty()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    times = measure(arguments.cells, arguments.repeats, arguments.folder)
    rows = []
    for peer, target in TARGETS.items():
        ratios = [theirs / ours for theirs, ours in zip(times[peer], times["ours"], strict=True)]
        ratio = statistics.median(ratios)
        met = None if target is None else ratio >= target
        rows.append(
            {"peer": peer, "ratio": ratio, "low": min(ratios), "high": max(ratios), "target": target, "met": met}
        )
    if arguments.json:
        print(json.dumps({"cells": arguments.cells, "seconds": times, "ratios": rows}, indent=1))
        return
    for label, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{label:16} {median:8.3f} s   {arguments.cells / median:10,.0f} cells/s")
    for row in rows:
        verdict = "" if row["met"] is None else f"   target {row['target']}x: {'met' if row['met'] else 'missed'}"
        print(f"ours / {row['peer']:16} {row['ratio']:8.3g}x ({row['low']:.3g} to {row['high']:.3g}){verdict}")


if __name__ == "__main__":
    main()
