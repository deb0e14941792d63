"""Time to plan 40,000 cells, compared with Hydra's compose and ReFrame's listing.

    python -m benchmarks.plan [--cells 40000] [--repeats 5] [--json]

Needs hydra-core and reframe-hpc. The benchmark times what ``orchestrate plan`` does inside Python: parse and check the
file, exclude cells with reasons, compute run ids, compare with a store that knows half of the runs, and render the job
scripts. Writing the plan file is a separate row. The peers are measured on samples: Hydra composes configurations with
the same keys one after another in one process; ReFrame lists two sizes, and its rate is that of the difference, so its
start-up does not count. Reports medians over interleaved repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.cluster import cluster_file, resources
from orchestrator.config import experiment
from orchestrator.environment.interpreter import Packages
from orchestrator.planning import matrix, plan_file, planner
from orchestrator.planning.plan import CellState, Plan
from orchestrator.workspace import Workspace
from workloads.contract import State

CELLS_PER_SEED = 40
STUDY = """
name = "many"
[defaults]
dataset = "synthetic"
epochs = 3
time_limit = "1h"
[matrix]
model = ["resnet18", "resnet50"]
strategy = ["eager", "ddp"]
hardware = ["a100:1", "a100:2"]
lr = [0.01, 0.02, 0.05, 0.1, 0.2]
seed = {seeds}
[[when]]
if = {{ strategy = "ddp" }}
set = {{ batch_size = 256 }}
[[exclude]]
match = {{ model = "resnet50", hardware = "a100:2", lr = 0.2 }}
why = "diverges"
"""
HYDRA_CELLS = 50
REFRAME_CELLS = (100, 500)
TARGETS = {"hydra": 1000, "reframe": 100}


@dataclass(frozen=True, slots=True)
class Ours:
    """A workspace whose store knows half of the runs."""

    workspace: Workspace
    profile: cluster_file.ClusterProfile
    packages: Packages

    @classmethod
    def prepare(cls, folder: Path, cells: int) -> Ours:
        from db import submissions
        from db.connect import open_store

        text = STUDY.format(seeds=list(range(-(-cells // CELLS_PER_SEED))))
        (folder / "experiment.toml").write_text(text)
        workspace = Workspace.at(
            runs=folder / "runs", database=str(folder / "results.db"), experiment=folder / "experiment.toml"
        )
        ours = cls(workspace, cluster_file.load("sol"), Packages("python", None, "not queried in a benchmark"))
        plan = ours.plan()
        known = plan.runs[::2]
        with open_store(workspace.database) as store:
            intents = submissions.record_intents(
                store, workspace.runs, [(plan.spec(run), run.shape) for run in known], plan.target
            )
            submissions.update_statuses(
                store,
                [submissions.StatusUpdate(i.run_id, i.attempt, State.FAILED, reason="program_error") for i in intents],
            )
        return ours

    def expand(self) -> None:
        """Parse the experiment and expand its matrix, without store and cluster."""
        spec = experiment.load(self.workspace.experiment)
        matrix.expand(spec, default_cpus=resources.default_cpus(self.profile))

    def plan(self) -> Plan:
        """Make a whole plan, except writing its file."""
        from db import queries
        from db.connect import open_store

        spec = experiment.load(self.workspace.experiment)
        with open_store(self.workspace.database) as store:
            records, durations = queries.run_records(store), queries.durations(store)
        return planner.make_plan(self.workspace, spec, self.profile, None, records, durations, self.packages)


def hydra_rate(folder: Path) -> float:
    """Return the configurations that Hydra composes per second."""
    from hydra import compose, initialize_config_dir

    (folder / "config.yaml").write_text(
        "model: cnn\nstrategy: eager\nhardware: a100:1\ndataset: synthetic\nepochs: 3\nlr: 0.1\nseed: 0\n"
        "batch_size: 128\noptimizer: sgd\nmomentum: 0.9\nweight_decay: 0.0\n"
    )
    with initialize_config_dir(str(folder), version_base=None):
        start = time.perf_counter()
        for seed in range(HYDRA_CELLS):
            compose("config", ["model=resnet18", "strategy=ddp", "hardware='a100:2'", "lr=0.2", f"seed={seed}"])
        return HYDRA_CELLS / (time.perf_counter() - start)


def reframe_rate(folder: Path) -> float:
    """Return the tests that ReFrame lists per second."""
    seconds = [_reframe_s(folder, cells) for cells in REFRAME_CELLS]
    return (REFRAME_CELLS[1] - REFRAME_CELLS[0]) / (seconds[1] - seconds[0])


def _reframe_s(folder: Path, cells: int) -> float:
    checks = folder / f"cells_{cells}.py"
    checks.write_text(
        "import reframe as rfm\n"
        "import reframe.utility.sanity as sn\n"
        "@rfm.simple_test\n"
        "class Cell(rfm.RunOnlyRegressionTest):\n"
        "    valid_systems = ['*']\n"
        "    valid_prog_environs = ['*']\n"
        "    executable = 'true'\n"
        "    model = parameter(['resnet18', 'resnet50'])\n"
        "    lr = parameter([0.01, 0.02, 0.05, 0.1, 0.2])\n"
        f"    seed = parameter(range({cells // 10}))\n"
        "    @sanity_function\n"
        "    def ok(self):\n"
        "        return sn.assert_true(True)\n"
    )
    reframe = Path(sys.executable).parent / "reframe"
    start = time.perf_counter()
    done = subprocess.run(
        [reframe, "-c", checks, "-l", "--prefix", folder], cwd=folder, check=True, capture_output=True, text=True
    )
    seconds = time.perf_counter() - start
    assert f"Found {cells} check(s)" in done.stdout, done.stdout[-500:]
    return seconds


def _rate(count: int, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def measure(cells: int, repeats: int) -> dict[str, float]:
    """Return cells per second for each kind of work, median over repeats."""
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        ours = Ours.prepare(folder, cells)
        plan = ours.plan()
        count = len(plan.runs) + len(plan.excluded)
        counts = plan.counts()
        assert count >= cells and plan.excluded and counts[CellState.NEW] and counts[CellState.FAILED]
        del plan
        kinds: dict[str, Callable[[], float]] = {
            "load and expand": lambda: _rate(count, ours.expand),
            "plan": lambda: _rate(count, ours.plan),
            "plan and write": lambda: _rate(count, lambda: plan_file.save(ours.plan(), folder / "plan.json")),
            "hydra": lambda: hydra_rate(folder),
            "reframe": lambda: reframe_rate(folder),
        }
        for _ in range(repeats):
            for label, rate in kinds.items():
                rates.setdefault(label, []).append(rate())
    return {label: statistics.median(values) for label, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=40_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rates = measure(arguments.cells, arguments.repeats)
    rows = [
        {
            "peer": peer,
            "ours_per_s": rates["plan"],
            "peer_per_s": rates[peer],
            "ratio": rates["plan"] / rates[peer],
            "target": target,
            "met": rates["plan"] / rates[peer] >= target,
        }
        for peer, target in TARGETS.items()
    ]
    if arguments.json:
        print(json.dumps({"cells": arguments.cells, "cells_per_s": rates, "ratios": rows}, indent=1))
        return
    for label, rate in rates.items():
        print(f"{label:16} {rate:10,.0f} cells/s   {arguments.cells / rate:8.2f} s for {arguments.cells:,}")
    for row in rows:
        outcome = "met" if row["met"] else "missed"
        print(f"plan / {row['peer']:9} {row['ratio']:10,.0f}x   target {row['target']:,}x: {outcome}")


if __name__ == "__main__":
    main()
