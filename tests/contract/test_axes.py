"""Every value of every training axis runs through the engine; other tests check the numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

AXES: list[dict[str, Any]] = [
    {"precision": "bf16", "channels_last": True, "optimizer": "adamw", "weight_decay": 0.01},
    {"precision": "tf32", "schedule": "cosine", "warmup_steps": 2, "label_smoothing": 0.1},
    {"loader": "dataloader", "workers": 1, "augment": "flip", "test_fraction": 0.4},
    {"drop_last": True, "nesterov": True, "eval_every": 0, "schedule": "linear"},
    {"strategy_options": {"static_graph": True, "bucket_cap_mb": 1, "gradient_as_bucket_view": False}},
    {"steps": 3, "model": "resnet18", "stem": "cifar", "image_size": 16, "train_fraction": 0.95, "test_fraction": 0.01},
]


def test_every_axis_runs_under_ddp(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """On two ranks, one spec after another: finite losses, the test images and steps that the spec asks for."""
    shared: dict[str, Any] = {"dataset": "imagefolder/few", "strategy": "ddp", "hardware": "cpu:2", "epochs": 2}
    runs = [
        launcher.write(tmp_path, data_root=data_root, **(shared | {"batch_size": 16, "lr": 0.01} | axes))
        for axes in AXES
    ]
    launcher.succeed(runs, ranks=2)
    steps, tested = [], []
    for run in runs:
        result = run.attempt(1).read_result()
        assert math.isfinite(result.train_loss) and math.isfinite(result.test_loss)
        assert result.world_size == 2 and not result.diverged
        tested.append(result.num_test_samples)
        assert len(result.memory_by_rank) == 2
        evaluations = sum("test_loss" in e for e in launcher.events(run.attempt(1), "epoch"))
        assert evaluations == (1 if run.read_spec().train.eval_every == 0 else result.epochs_done)
        steps.append(result.steps_done)
    assert steps == [6, 6, 6, 4, 6, 3]
    assert tested == [21, 21, 8, 21, 21, 1]
