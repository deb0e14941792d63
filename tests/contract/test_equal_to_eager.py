"""Every way of training learns what eager learns: same seed, same global batch, float64.

The ways are those that the registry finds, so a new strategy is under test by being there. Runs go the way of users'
runs: ``spec.json``, one process a rank, launch world, engine, checkpoint, events.
"""

from __future__ import annotations

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
from tests.contract.ways import Way, missing_packages, ways
from workloads import registry
from workloads.contract import Hardware

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

STEPS = 20
CLOSE = 1e-9
"""Absolute, for every parameter and loss."""
NUM_TRAIN, NUM_TEST = 39, 21
"""Training batches of 8 are four whole ones and one of 7, so 20 steps are four epochs, and 7 have one odd batch."""

MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny": {"model": "vit_tiny"},
    "cnn": {"model": "cnn", "batch_norm": "frozen"},
    "resnet18": {"model": "resnet18", "batch_norm": "frozen"},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.01, "momentum": 0.9},
    "adam": {"optimizer": "adam", "lr": 1e-3},
}
FEW_STEPS = 7


@dataclass(frozen=True)
class Case:
    """What is trained, whichever way."""

    model: str
    optimizer: str
    steps: int = STEPS

    def __str__(self) -> str:
        return f"{self.model}-{self.optimizer}-{self.steps}"


THOROUGH = [
    *(Case("vit_tiny", "adam"), Case("vit_tiny", "sgd", FEW_STEPS)),
    *(Case("resnet18", "sgd"), Case("resnet18", "adam", FEW_STEPS)),
]
"""Of the first options of a strategy, on two devices."""
QUICK = [Case("vit_tiny", "sgd", FEW_STEPS), Case("cnn", "adam")]
"""Of its other options, and of the first on four devices."""
ODD = Case("cnn", "sgd", 6)
ODD_BATCH_SIZE = 19
"""Batches of 19, 19 and 1 sample: of the last one, a second rank has none."""


EAGER, DDP_2 = Way("eager", 1), Way("ddp", 2)


def _is_first(way: Way) -> bool:
    return dict(way.options) == way.declaration.contract_options[0]


WAYS = [way for way in ways(2, 4) if way.has_double_precision and (way.devices == 2 or _is_first(way))]


def _cases(way: Way) -> list[Case]:
    if way is EAGER:
        return sorted({*THOROUGH, *QUICK, ODD}, key=str)
    cases = [*THOROUGH, ODD] if way.devices == 2 and _is_first(way) else QUICK
    return [case for case in cases if case.optimizer in way.declaration.equal_under]


def _train(way: Way, case: Case) -> dict[str, Any]:
    return {
        **MODELS[case.model],
        **OPTIMIZERS[case.optimizer],
        **way.train,
        "dataset": "imagefolder/few",
        "dropout": 0.0,
        "precision": "fp64",
        "steps": case.steps,
        "batch_size": ODD_BATCH_SIZE if case == ODD else 8,
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
    distance: float = 0.0
    """From what eager learned."""


def _learned(launcher: Any, run: Any) -> Learned:
    attempt, steps = run.attempt(1), run.read_spec().train.steps
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


Found = dict[tuple[Way, Case], Learned]


@pytest.fixture(scope="module")
def learned(launcher: Any, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases of all ways; one launch for each number of ranks runs its specs one after another: imports are slow."""
    runs = tmp_path_factory.mktemp("runs")
    written = {
        (way, case): _write(launcher, runs, data_root, **_train(way, case))
        for way in (EAGER, *WAYS)
        for case in _cases(way)
    }
    for ranks in sorted({way.ranks for way, _ in written}):
        launcher.succeed([run for (way, _), run in written.items() if way.ranks == ranks], ranks=ranks, within_s=900)
    found = {}
    for (way, case), run in written.items():
        found[way, case] = _learned(launcher, run)
        found[way, case].distance = _farthest(found[EAGER, case], found[way, case])
        if way is not EAGER:
            found[way, case].parameters.clear()  # all together are gigabytes
    return found


@pytest.mark.parametrize(("way", "case"), [(way, case) for way in WAYS for case in _cases(way)], ids=str)
def test_every_way_learns_what_eager_learns(learned: Found, way: Way, case: Case) -> None:
    """Every fifth batch odd (7 samples are 4 + 3, or 2 + 2 + 2 + 1): every parameter and every loss within 1e-9.

    In ``ODD`` the batches have 19, 19 and 1 sample: of the last one, a second device has none.
    """
    assert learned[way, case].distance < CLOSE
    eager = learned[EAGER, case]
    if case.steps == STEPS:
        assert eager.losses[STEPS - 1] < eager.losses[0], "it learns, so they are not equal by standing still"


@pytest.mark.parametrize("way", [EAGER, *WAYS], ids=str)
def test_evaluation_counts_every_sample_once(learned: Found, way: Way) -> None:
    """21 test images, which neither 2 nor 4 ranks in batches of 8 split evenly: 21 counted, and eager's figures."""
    case = Case("vit_tiny", "sgd", FEW_STEPS)
    eager, found = (learned[w, case].result for w in (EAGER, way))
    assert found.num_test_samples == NUM_TEST == sum(row["support"] for row in found.per_class)
    assert (found.test_accuracy, found.per_class) == (eager.test_accuracy, eager.per_class)
    assert found.test_loss == pytest.approx(eager.test_loss, abs=CLOSE)
    assert found.num_train_samples == NUM_TRAIN


@pytest.mark.parametrize("name", [name for name, d in registry.strategies().items() if d.framework == "torch"])
def test_every_strategy_of_torch_is_under_test(name: str) -> None:
    """On two and four CPU devices, or it says why CPUs cannot; eager is what the others are compared with.

    One without double precision has a test of its own, as close as its precision allows.
    """
    declaration = registry.strategies()[name]
    missing = missing_packages(declaration)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    options = declaration.options_with_defaults({})
    for devices in (2, 4):
        refused = declaration.unsupported_hardware(Hardware("cpu", devices), options)
        own_test = not Way(name, devices).has_double_precision and name == "deepspeed"
        assert name in {way.strategy for way in WAYS if way.devices == devices} or refused or own_test
    assert not refused or name in {"eager", "model_parallel", "data_parallel"}


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
        run = _write(launcher, tmp_path / "runs", data_root, **_train(way, Case("cnn", "sgd")))
        launcher.succeed(run, ranks=way.ranks, env=env)
        mutants.append(_learned(launcher, run))
        assert mutants[-1].result.provenance["code_digest"] == _digest_of_code(env), "it was the mutant that ran"

    assert _farthest(*mutants) > 1000 * CLOSE


def _digest_of_code(env: dict[str, str]) -> str:
    code = "from workloads.provenance.software import code_digest; print(code_digest())"
    return subprocess.check_output([sys.executable, "-c", code], env=os.environ | env, text=True).strip()
