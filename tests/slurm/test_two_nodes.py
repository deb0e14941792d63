"""Four ranks on two nodes of two learn what four ranks of one machine learn: ``ddp``, and Horovod started by srun."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.contract.conftest import Launcher
from tests.slurm.lab import Lab
from tests.slurm.study import Study
from workloads.files.packed_specs import unpack_specs
from workloads.files.run_dir import AttemptDir, RunDir

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.slurm, pytest.mark.torch]

STEPS = 6
CLOSE = 1e-9
"""Absolute, for every parameter, running statistic and loss in float64. It holds for Horovod too, which reduces
gradients in their own type, but adds them up in an order of its own that differs from run to run: 1e-16 of a gradient
at first, and training makes that up to ten times as much with each step. ddp's own sums are the same to the bit.
"""

CPU_NODES = """
[cluster.lab.cpu]
cpus_per_rank = 1
mem_per_rank = "1500M"
queue = [{ partition = "htc", max_time = "4h" }]
"""
# Batches of 30 are 8, 8, 7 and 7 samples: the ranks' gradients must be weighted. Batch norm is each rank's own.
EXPERIMENT = """
name = "two nodes"
[defaults]
model = "cnn"
dataset = "digits"
precision = "fp64"
dropout = 0.0
lr = 0.01
steps = 6
batch_size = 30
eval_every = 0
time_limit = "10m"
checkpoint_every = 1000
[matrix]
hardware = ["cpu:2x2"]
strategy = ["ddp", "horovod"]
"""


@dataclass(frozen=True)
class Learned:
    """Weights and losses of a run."""

    model: dict[str, Any]
    losses: list[float]
    """Losses of each step, then of the test."""
    result: Any

    def distance(self, other: Learned) -> float:
        """Return the largest absolute difference of any parameter, running statistic or loss."""
        assert self.model.keys() == other.model.keys() and len(self.losses) == len(other.losses)
        tensors = max(float((self.model[k].double() - other.model[k].double()).abs().max()) for k in self.model)
        return max(tensors, *(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)))


def learned(run: RunDir) -> Learned:
    attempt = run.attempt(1)
    result = attempt.read_result()
    losses = [loss for event in events(attempt, "steps") for loss in event["loss"]]
    assert result.steps_done == len(losses) == STEPS and losses[-1] < losses[0]
    return Learned(torch.load(run.checkpoint, weights_only=True)["model"], [*losses, result.test_loss], result)


def events(attempt: AttemptDir, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return Launcher.events(attempt, kind, rank)


@pytest.fixture(scope="module")
def study(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    """Both runs, after plan and submit; each has two of the four nodes."""
    made = Study(lab, tmp_path_factory.mktemp("two") / "study")
    made.write("", defaults=EXPERIMENT)
    with (made.folder / "cluster.toml").open("a") as file:
        file.write(CPU_NODES)
    made.run("plan")
    made.run("submit")
    yield made
    made.forget()


@pytest.fixture(scope="module")
def runs(study: Study, one_machine: Learned) -> dict[str, RunDir]:
    """Strategy -> its run on two nodes, which succeeded."""
    rows = study.until_ended()
    assert [row["state"] for row in rows] == ["succeeded"] * 2, rows
    directories = [RunDir.of(study.runs, row["run_id"]) for row in rows]
    return {directory.read_spec().train.strategy: directory for directory in directories}


@pytest.fixture(scope="module")
def one_machine(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """The same ddp run by four ranks of this machine, without Slurm; its runs go on meanwhile."""
    launcher = Launcher()
    try:
        # The spec of the submitted array: a waiting run has no folder.
        arrays = study.runs.glob("jobs/orc-*/specs.json")
        (spec,) = (spec for path in arrays for spec in unpack_specs(path.read_bytes()) if spec.train.strategy == "ddp")
        train = spec.train.to_json() | {"hardware": "cpu:4"}
        run = launcher.write(tmp_path_factory.mktemp("one"), execution={"checkpoint_every": 1000}, **train)
        launcher.succeed(run, ranks=4)
        return learned(run)
    finally:
        launcher.close()


def test_ddp_on_two_nodes_gives_the_weights_of_one_machine(runs: dict[str, RunDir], one_machine: Learned) -> None:
    """Through plan and submit, two ranks on each of two nodes: every weight and loss as on one machine."""
    found = learned(runs["ddp"])
    assert found.distance(one_machine) < CLOSE
    assert_on_two_nodes(runs["ddp"], found)
    assert one_machine.result.world_size == 4


def test_horovod_under_srun_gives_the_weights_of_ddp(runs: dict[str, RunDir], one_machine: Learned) -> None:
    """No ssh, no horovodrun: Horovod's ranks are srun's tasks. Gradients are Horovod's, weights are ddp's."""
    found = learned(runs["horovod"])
    assert found.distance(one_machine) < CLOSE
    assert_on_two_nodes(runs["horovod"], found)


def assert_on_two_nodes(run: RunDir, found: Learned) -> None:
    """Assert that the run had four tasks of one Slurm step, two per node: else equal weights would prove nothing."""
    attempt = run.attempt(1)
    (world,) = events(attempt, "world")
    assert (world["world_size"], world["nodes"], world["launcher"]) == (4, 2, "slurm")
    nodes = [events(attempt, "start", rank)[0]["node"] for rank in range(4)]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3], nodes
    assert found.result.world_size == 4
