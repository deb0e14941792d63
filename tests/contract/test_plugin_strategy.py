"""A strategy of another package: it overrides a part of eager's step, and the contract tests find it by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.variants import Variant
from workloads import registry
from workloads.contract import Topology

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
TOY = '''
"""Gradients are summed by one all-reduce per parameter, after the backward pass."""

from workloads.contract import Topology
from workloads.registry import StrategyDeclaration
from workloads.strategies.shared.torch_strategy import ReplicaStrategy


class Toy(ReplicaStrategy):
    def update(self):
        from torch import distributed

        for parameter in self.parameters:
            distributed.all_reduce(parameter.grad)
            parameter.grad /= self.task.world.size
        super().update()


DECLARATION = StrategyDeclaration(
    name="toy",
    summary="ddp without overlap.",
    framework="torch",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    splits_batch=True,
    packages=("torch",),
    batch_norm_treatment="per_rank",
    create=lambda: Toy,
)
'''
TRAIN: dict[str, Any] = {
    "model": "cnn",
    "dataset": "imagefolder/few",
    "dropout": 0.0,
    "batch_norm": "frozen",
    "precision": "fp64",
    "optimizer": "adam",
    "lr": 1e-3,
    "batch_size": 19,
    "epochs": 2,
}
"""Batches of 19, 19 and 1 samples: of the last one, the second rank has none."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with a distribution whose entry point is the strategy ``toy``."""
    folder = tmp_path_factory.mktemp("site-packages")
    (folder / "toy_strategy.py").write_text(TOY)
    about = folder / "toy_strategy-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-strategy\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[orchestrate.strategies]\ntoy = toy_strategy:DECLARATION\n")
    return folder


def test_a_strategy_that_overrides_one_method_equals_eager(
    launcher: Any, data_root: Path, tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every loss and parameter within 1e-9; the result names the package whose code ran."""
    namespace: dict[str, Any] = {}
    exec(TOY, namespace)
    known = registry.strategies() | {"toy": namespace["DECLARATION"]}
    monkeypatch.setattr(registry, "strategies", lambda: known)
    assert known["toy"].topology({}) is Topology.PROCESS_PER_DEVICE
    eager, toy = (
        launcher.write(tmp_path, data_root=data_root, **TRAIN, **variant.train)
        for variant in (Variant("eager", 1), Variant("toy", 2))
    )
    launcher.succeed(eager)
    launcher.succeed(toy, ranks=2, env={"PYTHONPATH": str(installed)})
    losses = [[loss for e in launcher.events(r.attempt(1), "steps") for loss in e["loss"]] for r in (eager, toy)]
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], abs=1e-9)
    models = [torch.load(run.checkpoint, weights_only=True)["model"] for run in (eager, toy)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.allclose(models[1][name], tensor, rtol=0, atol=1e-9) for name, tensor in models[0].items())


def test_contract_tests_find_a_new_strategy(installed: Path) -> None:
    """Every test that compares all strategies has a case of it."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/contract"]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {line.partition("::")[0] for line in done.stdout.splitlines() if "[toy" in line or "-toy-" in line}
    names = ("equal_to_eager", "batch_norm", "resume", "options", "sequences")
    assert files == {f"tests/contract/test_{name}.py" for name in names}
