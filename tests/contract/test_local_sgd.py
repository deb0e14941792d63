"""What ``local_sgd`` does between two averages; with period 1 it is compared with eager like any other strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.by_hand import train_by_hand

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TRAIN: dict[str, Any] = {
    "model": "cnn",
    "strategy": "local_sgd",
    "strategy_options": {"period": 3},
    "hardware": "cpu:2",
    "dropout": 0.0,
    "precision": "fp64",
    "optimizer": "sgd",
    "lr": 0.01,
    "dataset": "imagefolder/few",
    "batch_size": 20,
    "steps": 5,
}
"""An epoch is two steps, so an evaluation falls between two averages."""


def test_replicas_train_apart_between_averages(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """Equal to a loop by hand that averages after step 3 only, with and without evaluations in between."""
    often, once = (
        launcher.write(
            tmp_path, data_root=data_root, **TRAIN, eval_every=every, execution={"checkpoint_every": every or 1000}
        )
        for every in (1, 0)
    )
    launcher.succeed([often, once], ranks=2)

    model, test_loss = train_by_hand(often.read_spec().train, data_root, 2, period=3)
    summed, _ = train_by_hand(often.read_spec().train, data_root, 2)
    for run in (often, once):
        learned = torch.load(run.checkpoint, weights_only=True)["model"]
        assert max(float((learned[name] - model[name]).abs().max()) for name in model) < 1e-9
        assert run.attempt(1).read_result().test_loss == pytest.approx(test_loss, abs=1e-9)
    assert max(float((summed[name] - model[name]).abs().max()) for name in model) > 1e-5, "a period matters"
