"""Every variant of every strategy equals eager: same seed, same global batch, float64.

The registry names the strategies and their declarations name the variants. Runs start as users' runs do: ``spec.json``,
one process per rank, launch world, engine, checkpoint, events.
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
from tests.contract.variants import Variant, missing_packages, strategies_of, variants
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
    """What to train, with every variant."""

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


EAGER, DDP_2 = Variant("eager", 1), Variant("ddp", 2)


VARIANTS = [
    variant for variant in variants(2, 4) if variant.has_double_precision and (variant.devices == 2 or variant.is_first)
]


def _cases(variant: Variant) -> list[Case]:
    if variant is EAGER:
        return sorted({*THOROUGH, *QUICK, ODD}, key=str)
    cases = [*THOROUGH, ODD] if variant.devices == 2 and variant.is_first else QUICK
    return [case for case in cases if case.optimizer in variant.declaration.equal_under]


def _train(variant: Variant, case: Case) -> dict[str, Any]:
    return {
        **MODELS[case.model],
        **OPTIMIZERS[case.optimizer],
        **variant.train,
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
    """The end of one run."""

    parameters: dict[str, Any]
    losses: list[float]
    """Of each step, then the test loss."""
    result: Any
    distance: float = 0.0
    """From eager."""


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


Found = dict[tuple[Variant, Case], Learned]


@pytest.fixture(scope="module")
def learned(launcher: Any, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases of all variants. One launch for each number of ranks runs them one after another: imports are slow."""
    runs = tmp_path_factory.mktemp("runs")
    written = {
        (variant, case): _write(launcher, runs, data_root, **_train(variant, case))
        for variant in (EAGER, *VARIANTS)
        for case in _cases(variant)
    }
    for ranks in sorted({variant.ranks for variant, _ in written}):
        launcher.succeed(
            [run for (variant, _), run in written.items() if variant.ranks == ranks], ranks=ranks, within_s=900
        )
    found = {}
    for (variant, case), run in written.items():
        found[variant, case] = _learned(launcher, run)
        found[variant, case].distance = _farthest(found[EAGER, case], found[variant, case])
        if variant is not EAGER:
            found[variant, case].parameters.clear()  # all together take gigabytes
    return found


@pytest.mark.parametrize(
    ("variant", "case"), [(variant, case) for variant in VARIANTS for case in _cases(variant)], ids=str
)
def test_every_variant_equals_eager(learned: Found, variant: Variant, case: Case) -> None:
    """Every parameter and loss within 1e-9; every fifth batch is odd (7 samples are 4 + 3, or 2 + 2 + 2 + 1).

    In ``ODD`` the batches have 19, 19 and 1 samples: of the last one, a second device has none.
    """
    assert learned[variant, case].distance < CLOSE
    eager = learned[EAGER, case]
    if case.steps == STEPS:
        assert eager.losses[STEPS - 1] < eager.losses[0], "both learn, so they are not equal by standing still"


@pytest.mark.parametrize("variant", [EAGER, *VARIANTS], ids=str)
def test_evaluation_counts_every_sample_once(learned: Found, variant: Variant) -> None:
    """21 test images, which neither 2 nor 4 ranks in batches of 8 split evenly: 21 counted, and eager's figures."""
    case = Case("vit_tiny", "sgd", FEW_STEPS)
    eager, found = (learned[w, case].result for w in (EAGER, variant))
    assert found.num_test_samples == NUM_TEST == sum(row["support"] for row in found.per_class)
    assert (found.test_accuracy, found.per_class) == (eager.test_accuracy, eager.per_class)
    assert found.test_loss == pytest.approx(eager.test_loss, abs=CLOSE)
    assert found.num_train_samples == NUM_TRAIN


@pytest.mark.parametrize("name", strategies_of("torch"))
def test_every_torch_strategy_is_compared(name: str) -> None:
    """On two and four CPU devices, or its declaration says why not.

    Strategies without double precision are compared in ``test_single_precision.py``; those that no number of CPU
    devices can run, in ``tests/gpu``.
    """
    declaration = strategies_of("torch")[name]
    if missing := missing_packages(declaration):
        pytest.skip(f"not installed: {', '.join(missing)}")
    options = declaration.options_with_defaults(declaration.contract_options[0])
    compared = {(v.strategy, v.devices) for v in VARIANTS}
    for devices in (2, 4):
        unsupported = declaration.unsupported_hardware(Hardware("cpu", devices), options)
        assert (name, devices) in compared or unsupported or not Variant(name, devices).has_double_precision
    if all(declaration.unsupported_hardware(Hardware("cpu", devices), options) for devices in (1, 2, 4)):
        assert not declaration.unsupported_hardware(Hardware("gpu", 2), options)


MUTATIONS = {
    "rank means unweighted": (
        "strategies/shared/torch_strategy.py",
        "weight = self.task.world.size / batch.num_global  # rank weighting",
        "weight = 1.0 / max(1, batch.num_local)  # rank weighting",
    ),
    "batch norm thawed": (
        "engines/recipe.py",
        "layer.eval()  # batch norm freezing",
        "layer.train()  # batch norm freezing",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_of_the_engine_turns_the_comparison_red(
    launcher: Any, data_root: Path, tmp_path: Path, mutation: str
) -> None:
    """With one line changed, eager and ddp end far apart."""
    file, line, replacement = MUTATIONS[mutation]
    shutil.copytree(Path(workloads.__file__).parent, tmp_path / "mutant" / "workloads")
    source = tmp_path / "mutant" / "workloads" / file
    text = source.read_text()
    assert text.count(line) == 1
    source.write_text(text.replace(line, replacement))
    env = {"PYTHONPATH": str(tmp_path / "mutant"), "PYTHONSAFEPATH": "1"}

    mutants = []
    for variant in (EAGER, DDP_2):
        run = _write(launcher, tmp_path / "runs", data_root, **_train(variant, Case("cnn", "sgd")))
        launcher.succeed(run, ranks=variant.ranks, env=env)
        mutants.append(_learned(launcher, run))
        assert mutants[-1].result.provenance["code_digest"] == _digest_of_code(env), "the mutant ran"

    assert _farthest(*mutants) > 1000 * CLOSE


def _digest_of_code(env: dict[str, str]) -> str:
    code = "from workloads.provenance.software import code_digest; print(code_digest())"
    return subprocess.check_output([sys.executable, "-c", code], env=os.environ | env, text=True).strip()
