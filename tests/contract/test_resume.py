"""A resumed run equals an uninterrupted one under every strategy: parameters, statistics, optimizer state, losses.

``test_faults.py`` kills ranks at any point, with ``eager`` and ``ddp``; here strategies restore their own state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.variants import Variant, variants

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

VARIANTS = [Variant("eager", 1), *variants(2)]
TRAIN: dict[str, Any] = {
    "dataset": "imagefolder/few",
    "model": "cnn",
    "dropout": 0.2,
    "batch_size": 12,
    "drop_last": True,
    "epochs": 3,
    "augment": "crop_flip",
    "optimizer": "adam",
    "lr": 1e-3,
    "schedule": "cosine",
}
"""Batch norm is live; an epoch has three steps."""
LAYERS = 22
"""Of ``cnn``."""

COPY_FIRST_CHECKPOINT = """
from pathlib import Path
import shutil
from workloads.engines import checkpoint
from workloads.strategies.shared import partition
save = checkpoint.save
def save_and_copy(path, run_id, state, progress):
    save(path, run_id, state, progress)
    if progress["epoch"] == 1:
        other = Path(str(path).replace("/undisturbed/", "/resumed/"))
        other.parent.mkdir(exist_ok=True)
        shutil.copy(path, other)
checkpoint.save = save_and_copy
measured = []
def measure_layers_s(task, layers, samples):
    measured.append(task)
    return [1.0 if len(measured) % 2 else 2.0 ** -number for number in range(len(layers))]
partition.measure_layers_s = measure_layers_s
"""
"""A run in ``undisturbed`` copies its first checkpoint to the run in ``resumed``, which comes later.

Measured times of layers differ between the two."""


@pytest.fixture(scope="module")
def pairs(launcher: Any, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Variant, tuple[Any, Any]]:
    """(undisturbed run, run that resumes its first checkpoint) of every variant; one launch per number of ranks."""
    root = tmp_path_factory.mktemp("runs")
    pairs = {
        variant: tuple(
            launcher.write(root / name, data_root=data_root, **TRAIN, **variant.train)
            for name in ("undisturbed", "resumed")
        )
        for variant in VARIANTS
    }
    for ranks in sorted({variant.ranks for variant in VARIANTS}):
        runs = [run for variant in VARIANTS if variant.ranks == ranks for run in pairs[variant]]
        launcher.succeed(runs, ranks=ranks, prelude=COPY_FIRST_CHECKPOINT, within_s=600)
    return pairs


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_resumed_run_equals_an_uninterrupted_one(
    launcher: Any, pairs: dict[Variant, tuple[Any, Any]], variant: Variant
) -> None:
    """Every bit of the last checkpoint and every loss, with dropout, augmentation and live batch norm."""
    undisturbed, resumed = pairs[variant]
    assert resumed.attempt(1).read_result().resumed_from_epoch == 1
    assert undisturbed.attempt(1).read_result().resumed_from_epoch is None
    one, two = (torch.load(run.checkpoint, weights_only=True) for run in (undisturbed, resumed))
    _same(one["model"], two["model"], "model")
    _same(one["optimizer"], two["optimizer"], "optimizer")
    losses = [
        [loss for e in launcher.events(run.attempt(1), "steps") for loss in e["loss"]] for run in (undisturbed, resumed)
    ]
    assert len(losses[0]) == 9 and losses[0][3:] == losses[1]
    assert undisturbed.attempt(1).read_result().test_loss == resumed.attempt(1).read_result().test_loss


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_balance_is_recorded_and_kept(pairs: dict[Variant, tuple[Any, Any]], variant: Variant) -> None:
    """Layers of each part, the same in both; models that stay whole have no balance."""
    one, two = (run.attempt(1).read_result().balance_applied for run in pairs[variant])
    assert one == two
    assert sum(one) == LAYERS if variant.declaration.needs_layers else one is None


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_checkpoint_holds_the_whole_model(pairs: dict[Variant, tuple[Any, Any]], variant: Variant) -> None:
    """Names, shapes and dtypes of model and optimizer are eager's, in its order."""
    eager, other = (torch.load(pairs[w][0].checkpoint, weights_only=True) for w in (VARIANTS[0], variant))
    assert _outline(other["model"]) == _outline(eager["model"])
    assert _outline(other["optimizer"]["state"]) == _outline(eager["optimizer"]["state"])
    assert other["optimizer"]["param_groups"][0]["params"] == eager["optimizer"]["param_groups"][0]["params"]


def _same(one: Any, other: Any, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict | list):
        items = one.items() if isinstance(one, dict) else enumerate(one)
        assert len(one) == len(other), where
        for key, value in items:
            _same(value, other[key], f"{where}: {key}")
    else:
        assert one == other, where


def _outline(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return tuple(state.shape), state.dtype
    return {k: _outline(v) for k, v in state.items()} if isinstance(state, dict) else state
