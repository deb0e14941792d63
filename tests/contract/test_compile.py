"""``compile = "default"`` learns what ``off`` learns, under every strategy that takes it; recording needs GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.ways import Way

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SHARED: dict[str, Any] = {
    "dataset": "imagefolder/few",
    "model": "cnn",
    "dropout": 0.0,
    "batch_norm": "frozen",
    "precision": "fp64",
    "batch_size": 16,
    "steps": 5,
    "lr": 0.01,
    "eval_every": 0,
}
"""Of three batches an epoch, the last has 7 samples: it goes the way that is not compiled."""

WAYS = [
    Way("eager", 1),
    Way("ddp", 2),
    Way("local_sgd", 2, (("period", 1),)),
    Way("fsdp", 2),
    Way("horovod", 2),
    Way("model_parallel", 2),
    Way("pipeline", 2, (("schedule", "interleaved"),)),
]

TRACED_ONLY = """
import functools, torch
torch.compile = functools.partial(torch.compile, backend="aot_eager")
"""
"""Models are traced and differentiated as ever, and their code is run as it was traced: no C++ compiler for each."""


@pytest.fixture(scope="module")
def runs(launcher: Any, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    root = tmp_path_factory.mktemp("runs")
    written = {way: launcher.write(root, data_root=data_root, compile="default", **SHARED, **way.train) for way in WAYS}
    reference = launcher.write(root, data_root=data_root, **SHARED, **WAYS[0].train)
    launcher.succeed(reference)
    for ranks in (1, 2):
        group = [run for way, run in written.items() if way.ranks == ranks and way.exists]
        launcher.succeed(group, ranks=ranks, within_s=400, prelude=TRACED_ONLY)
    return written | {"off": reference}


def _losses(launcher: Any, run: Any) -> list[float]:
    steps = [loss for e in launcher.events(run.attempt(1), "steps") for loss in e["loss"]]
    return [*steps, run.attempt(1).read_result().test_loss]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_compiled_model_learns_what_it_learns_otherwise(launcher: Any, runs: dict[Any, Any], way: Way) -> None:
    """Momentum, and an odd batch between whole ones, within 1e-9 of eager as it is."""
    if not way.exists:
        pytest.skip(f"{way.strategy} is not installed")
    assert _losses(launcher, runs[way]) == pytest.approx(_losses(launcher, runs["off"]), abs=1e-9)
    result = runs[way].attempt(1).read_result()
    (event,) = launcher.events(runs[way].attempt(1), "compile")
    assert (event["compile"], event["compile_s"]) == ("default", result.compile_s)
    assert result.compile_s > 0
    assert 0 < result.startup_s < result.total_time_s - result.compile_s - result.train_time_s


def test_without_compile_there_is_no_time_for_it(runs: dict[Any, Any]) -> None:
    """And without GPUs no telemetry, which is said."""
    result = runs["off"].attempt(1).read_result()
    assert (result.compile_s, result.telemetry, result.energy_j) == (None, "no GPUs", None)
