"""Every way of training learns what eager learns: same seed, same global batch, float64.

The ways are those that the registry finds, so a new strategy is under test by being there. Runs go the way of users'
runs: ``spec.json``, one process a rank, launch world, engine, checkpoint, events.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import workloads
from workloads import registry
from workloads.contract import Hardware, Topology

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

STEPS = 20
CLOSE = 1e-9
"""Absolute, for every parameter and loss."""
NUM_TRAIN, NUM_TEST = 39, 21
"""Training batches of 8 are four whole ones and one of 7, so 20 steps are four epochs."""

MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny": {"model": "vit_tiny"},
    "cnn": {"model": "cnn", "batch_norm": "frozen"},
    "resnet18": {"model": "resnet18", "batch_norm": "frozen"},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.01, "momentum": 0.9},
    "adam": {"optimizer": "adam", "lr": 1e-3},
}
CASES = list(itertools.product(MODELS, OPTIMIZERS))
ONE_ODD_SAMPLE = {"batch_size": 19, "steps": 6}
"""Batches of 19, 19 and 1 sample: of the last one, a second rank has none."""


@dataclass(frozen=True)
class Way:
    """A strategy on so many CPU devices."""

    strategy: str
    devices: int

    @property
    def ranks(self) -> int:
        one_process = registry.strategies()[self.strategy].topology({}) is Topology.ONE_PROCESS
        return 1 if one_process else self.devices

    @property
    def exists(self) -> bool:
        declaration = registry.strategies()[self.strategy]
        return declaration.framework == "torch" and not declaration.refuses(Hardware("cpu", self.devices), {})

    def __str__(self) -> str:
        return f"{self.strategy}-{self.devices}"


EAGER, DDP_2 = Way("eager", 1), Way("ddp", 2)
WAYS = [w for w in itertools.starmap(Way, itertools.product(registry.strategies(), (2, 3))) if w.exists]


def _train(way: Way, model: str, optimizer: str) -> dict[str, Any]:
    return {
        **MODELS[model],
        **OPTIMIZERS[optimizer],
        "dataset": "imagefolder/few",
        "strategy": way.strategy,
        "hardware": f"cpu:{way.devices}",
        "dropout": 0.0,
        "precision": "fp64",
        "steps": STEPS,
        "batch_size": 8,
        "eval_every": 0,
        "seed": 3,
    }


@dataclass
class Learned:
    """What one run ended with."""

    parameters: dict[str, Any]
    losses: list[float]
    """Of each step, then the test loss."""
    result: Any


def _learned(launcher: Any, run: Any, *, steps: int = STEPS) -> Learned:
    attempt = run.attempt(1)
    result = attempt.read_result()
    assert (result.state, result.steps_done) == ("succeeded", steps)
    losses = [loss for e in launcher.events(attempt, "steps") for loss in e["loss"]]
    assert len(losses) == steps and all(map(math.isfinite, losses))
    model = torch.load(run.checkpoint, weights_only=True)["model"]
    run.checkpoint.unlink()  # resnet18's is large
    return Learned(model, [*losses, result.test_loss], result)


def _farthest(one: Learned, other: Learned) -> float:
    """The largest absolute difference of any parameter or loss."""
    assert one.parameters.keys() == other.parameters.keys()
    parameters = max((one.parameters[k].double() - other.parameters[k].double()).abs().max() for k in one.parameters)
    losses = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    return max(float(parameters), losses)


def _write(launcher: Any, runs: Path, data_root: Path, **train: Any) -> Any:
    # One checkpoint, at the end.
    execution = {"checkpoint_every": 1000, "hang_timeout_s": 200}
    return launcher.write(runs, execution=execution, data_root=data_root, **train)


Found = dict[tuple[Way, str, str], Learned]


@pytest.fixture(scope="module")
def learned(launcher: Any, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases of all ways; a launch runs its specs one after another, which saves imports."""
    runs = tmp_path_factory.mktemp("runs")
    found = {}
    for way in (EAGER, *WAYS):
        trains = {case: _train(way, *case) for case in CASES}
        if way.devices < 3:
            trains["cnn", "one odd sample"] = _train(way, "cnn", "sgd") | ONE_ODD_SAMPLE
        directories = {case: _write(launcher, runs, data_root, **train) for case, train in trains.items()}
        launcher.succeed(list(directories.values()), ranks=way.ranks)
        for case, run in directories.items():
            found[way, *case] = _learned(launcher, run, steps=trains[case]["steps"])
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_every_way_learns_what_eager_learns(learned: Found, model: str, optimizer: str, way: Way) -> None:
    """20 steps, the last batch odd (7 samples are 4 + 3, or 3 + 2 + 2): every parameter and every loss within 1e-9."""
    eager, other = learned[EAGER, model, optimizer], learned[way, model, optimizer]
    assert _farthest(eager, other) < CLOSE
    assert eager.losses[STEPS - 1] < eager.losses[0], "it learns, so they are not equal by standing still"


@pytest.mark.parametrize("way", [w for w in WAYS if w.devices == 2], ids=str)
def test_a_rank_without_samples_weighs_nothing(learned: Found, way: Way) -> None:
    """With batches of 19, 19 and 1 sample on two devices, the second has none of the last: the result is eager's."""
    case = "cnn", "one odd sample"
    assert _farthest(learned[EAGER, *case], learned[way, *case]) < CLOSE


@pytest.mark.parametrize("way", [EAGER, *WAYS], ids=str)
def test_evaluation_counts_every_sample_once(learned: Found, way: Way) -> None:
    """21 test images, which neither 2 nor 3 ranks in batches of 8 split evenly: 21 counted, and eager's figures."""
    eager, found = (learned[w, "vit_tiny", "adam"].result for w in (EAGER, way))
    assert found.num_test_samples == NUM_TEST == sum(row["support"] for row in found.per_class)
    assert (found.test_accuracy, found.per_class) == (eager.test_accuracy, eager.per_class)
    assert found.test_loss == pytest.approx(eager.test_loss, abs=CLOSE)
    assert found.num_train_samples == NUM_TRAIN


def test_both_strategies_of_the_first_studies_are_under_test() -> None:
    """Discovery found what it must: ddp on two and three ranks."""
    assert {Way("ddp", 2), Way("ddp", 3)} <= set(WAYS)
    assert not Way("eager", 2).exists


MUTATIONS = {
    "rank means unweighted": (
        "strategies/ddp.py",
        "weight = self._task.world.size / batch.num_global  # rank weighting",
        "weight = 1.0 / max(1, batch.num_local)  # rank weighting",
    ),
    "batch norm thawed": (
        "engines/recipe.py",
        "layer.eval()  # batch norm freezing",
        "layer.train()  # batch norm freezing",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_of_the_engine_is_noticed(launcher: Any, data_root: Path, tmp_path: Path, mutation: str) -> None:
    """With one line of the engine changed, for eager and ddp alike, they end far apart: the test above can turn red."""
    file, line, replacement = MUTATIONS[mutation]
    shutil.copytree(Path(workloads.__file__).parent, tmp_path / "mutant" / "workloads")
    source = tmp_path / "mutant" / "workloads" / file
    text = source.read_text()
    assert text.count(line) == 1
    source.write_text(text.replace(line, replacement))
    env = {"PYTHONPATH": str(tmp_path / "mutant"), "PYTHONSAFEPATH": "1"}

    mutants = []
    for way in (EAGER, DDP_2):
        run = _write(launcher, tmp_path / "runs", data_root, **_train(way, "cnn", "sgd"))
        launcher.succeed(run, ranks=way.ranks, env=env)
        mutants.append(_learned(launcher, run))
        assert mutants[-1].result.provenance["code_digest"] == _digest_of_code(env), "it was the mutant that ran"

    assert _farthest(*mutants) > 1000 * CLOSE


def _digest_of_code(env: dict[str, str]) -> str:
    code = "from workloads.provenance import code_digest; print(code_digest())"
    return subprocess.check_output([sys.executable, "-c", code], env=os.environ | env, text=True).strip()
