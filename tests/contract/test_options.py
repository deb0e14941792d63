"""Options and axes that change how a strategy computes, not what it learns: close to eager with the same axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.ways import Way

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SHARED: dict[str, Any] = {"dataset": "imagefolder/few", "dropout": 0.0, "batch_size": 8, "steps": 5, "lr": 0.01}
AXES: dict[str, dict[str, Any]] = {
    "bf16": SHARED | {"model": "vit_tiny", "precision": "bf16"},
    "fp32": SHARED | {"model": "vit_tiny"},
    "channels_last": SHARED | {"model": "resnet18", "image_size": 16, "channels_last": True, "batch_norm": "frozen"},
}
TOLERANCE = {"bf16": 0.03, "fp32": 1e-3, "channels_last": 1e-4}
"""Absolute, for losses of about 1: bfloat16 has eight bits, and fp16 eleven, in which some send their gradients."""

CASES = [
    ("bf16", Way("fsdp", 2, (("mixed_precision", "cast"),))),
    ("bf16", Way("fsdp", 2)),
    ("bf16", Way("gpipe", 2)),
    ("bf16", Way("pipeline", 2)),
    ("bf16", Way("model_parallel", 2)),
    ("fp32", Way("fsdp", 2, (("min_unit_parameters", 0),))),
    ("fp32", Way("horovod", 2, (("compression", "fp16"), ("cycle_time_ms", 0.5), ("fusion_threshold_mb", 1)))),
    ("fp32", Way("horovod", 1)),
    *(("fp32", Way("ddp", 2, (("gradient_compression", how),))) for how in ("bf16", "fp16")),
    ("fp32", Way("gpipe", 2, (("balance", (9, 11)),))),
    ("fp32", Way("gpipe", 1, (("segments", 2), ("balance", (2,))))),
    ("fp32", Way("pipeline", 2, (("balance", (5, 15)),))),
    ("fp32", Way("model_parallel", 2, (("balance", (1, 19)),))),
    *(("channels_last", Way(name, 2)) for name in ("gpipe", "model_parallel", "ddp")),
    ("channels_last", Way("local_sgd", 2, (("period", 1),))),
]
"""``vit_tiny`` has 20 layers."""


@pytest.fixture(scope="module")
def trained(launcher: Any, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, Way], Any]:
    root = tmp_path_factory.mktemp("runs")
    wanted = [(axes, Way("eager", 1)) for axes in AXES] + [case for case in CASES if case[1].exists]
    runs = {(axes, way): launcher.write(root, data_root=data_root, **AXES[axes], **way.train) for axes, way in wanted}
    for ranks in (1, 2):
        launcher.succeed([run for (_, way), run in runs.items() if way.ranks == ranks], ranks=ranks, within_s=400)
    return runs


@pytest.fixture(scope="module")
def losses(launcher: Any, trained: dict[tuple[str, Way], Any]) -> dict[tuple[str, Way], Any]:
    return {
        key: [loss for e in launcher.events(run.attempt(1), "steps") for loss in e["loss"]]
        + [run.attempt(1).read_result().test_loss]
        for key, run in trained.items()
    }


@pytest.mark.parametrize(("axes", "way"), CASES, ids=str)
def test_close_to_eager(losses: dict[tuple[str, Way], Any], axes: str, way: Way) -> None:
    if (axes, way) not in losses:
        pytest.skip(f"{way.strategy} is not installed")
    assert losses[axes, way] == pytest.approx(losses[axes, Way("eager", 1)], abs=TOLERANCE[axes])


def test_no_batch_norm_is_treated_where_there_is_none(trained: dict[tuple[str, Way], Any]) -> None:
    """A transformer has none, whatever its strategy does with it."""
    told = {(axes, run.attempt(1).read_result().batch_norm_treatment) for (axes, _), run in trained.items()}
    assert told == {("bf16", "none"), ("fp32", "none"), ("channels_last", "frozen")}


def test_bfloat16_is_in_force(losses: dict[tuple[str, Way], Any]) -> None:
    """The tolerance hides nothing: losses under bf16 are not those of fp32, in threads and stages either."""
    for axes, way in losses:
        if axes == "bf16":
            assert losses[axes, way][0] != pytest.approx(losses["fp32", Way("eager", 1)][0], abs=1e-6), way


def test_gradients_are_sent_rounded(losses: dict[tuple[str, Way], Any]) -> None:
    """The tolerance hides nothing here either: after the first update, losses are not those of whole gradients.

    Fewer bits are farther off.
    """
    eager = losses["fp32", Way("eager", 1)]
    off = {}
    for how in ("bf16", "fp16"):
        found = losses["fp32", Way("ddp", 2, (("gradient_compression", how),))]
        assert found[0] == pytest.approx(eager[0], abs=1e-6)
        off[how] = max(abs(a - b) for a, b in zip(found[1:], eager[1:], strict=True))
    assert off["bf16"] > off["fp16"] > 0 and off["bf16"] > 1e-6


@pytest.mark.parametrize(
    ("way", "why"),
    [
        (Way("gpipe", 2, (("balance", (9, 12)),)), "gpipe cannot cut vit_tiny: balance [9, 12] adds up to 21"),
        (Way("model_parallel", 2, (("balance", (1, 1)),)), "model_parallel cannot cut vit_tiny: balance [1, 1]"),
    ],
    ids=str,
)
def test_a_balance_that_does_not_add_up_is_said(
    launcher: Any, data_root: Path, tmp_path: Path, way: Way, why: str
) -> None:
    """The job counts layers itself, as it must for models whose number no plan knows."""
    if not way.exists:
        pytest.skip(f"{way.strategy} is not installed")
    run = launcher.write(tmp_path, data_root=data_root, **AXES["fp32"], **way.train)
    started = launcher.start(run)
    assert started.exit_codes() == [1]
    assert run.attempt(1).read_result().message.startswith(f"rank 0: {why}") or why in started.stderr()
    assert "Traceback" not in started.stderr()
