"""Options and axes that change how a strategy computes, not the result: close to eager with the same axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.variants import Variant, option_variants, widest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SHARED: dict[str, Any] = {"dataset": "imagefolder/few", "dropout": 0.0, "batch_size": 8, "steps": 5, "lr": 0.01}
AXES: dict[str, dict[str, Any]] = {
    "fp32": SHARED | {"model": "vit_tiny"},
    "bf16": SHARED | {"model": "vit_tiny", "precision": "bf16"},
    "channels_last": SHARED | {"model": "resnet18", "image_size": 16, "channels_last": True, "batch_norm": "frozen"},
}
TOLERANCE = {"bf16": 0.03, "fp32": 1e-3, "channels_last": 1e-4}
"""Absolute, for losses of about 1: bfloat16 has eight bits, and fp16 eleven, in which some send their gradients."""

EAGER = Variant("eager", 1)
NUMBERS = [
    Variant("fsdp", 2, (("min_unit_parameters", 0),)),
    Variant("horovod", 2, (("compression", "fp16"), ("cycle_time_ms", 0.5), ("fusion_threshold_mb", 1))),
    Variant("horovod", 1),
    Variant("gpipe", 2, (("balance", (9, 11)),)),
    Variant("gpipe", 1, (("segments", 2), ("balance", (2,)))),
    Variant("pipeline", 2, (("balance", (5, 15)),)),
    Variant("model_parallel", 2, (("balance", (1, 19)),)),
]
"""Options with numbers, which have no choices to go through; ``vit_tiny`` has 20 layers."""


def _cases() -> list[tuple[str, Variant]]:
    """First options under all axes, every other choice of an option under the first axes that support it."""
    supported = {
        variant: [axes for axes, train in AXES.items() if variant.supports(**train)]
        for variant in dict.fromkeys([*(v for v in widest(1, 2) if v.is_first), *option_variants(2), *NUMBERS])
        if variant.can_run and variant != EAGER
    }
    return [(a, v) for v, axes in supported.items() for a in (axes if v.is_first else axes[:1])]


CASES = _cases()


@pytest.fixture(scope="module")
def trained(launcher: Any, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, Variant], Any]:
    root = tmp_path_factory.mktemp("runs")
    wanted = [(axes, EAGER) for axes in AXES] + CASES
    runs = {
        (axes, variant): launcher.write(root, data_root=data_root, **AXES[axes], **variant.train)
        for axes, variant in wanted
    }
    for ranks in (1, 2):
        launcher.succeed(
            [run for (_, variant), run in runs.items() if variant.ranks == ranks], ranks=ranks, within_s=400
        )
    return runs


@pytest.fixture(scope="module")
def losses(launcher: Any, trained: dict[tuple[str, Variant], Any]) -> dict[tuple[str, Variant], Any]:
    return {
        key: [loss for e in launcher.events(run.attempt(1), "steps") for loss in e["loss"]]
        + [run.attempt(1).read_result().test_loss]
        for key, run in trained.items()
    }


@pytest.mark.parametrize(("axes", "variant"), CASES, ids=str)
def test_close_to_eager(losses: dict[tuple[str, Variant], Any], axes: str, variant: Variant) -> None:
    assert losses[axes, variant] == pytest.approx(losses[axes, EAGER], abs=TOLERANCE[axes])


def test_without_batch_norm_the_treatment_is_none(trained: dict[tuple[str, Variant], Any]) -> None:
    """A transformer has none, whatever the strategy's treatment."""
    found = {(axes, run.attempt(1).read_result().batch_norm_treatment) for (axes, _), run in trained.items()}
    assert found == {("bf16", "none"), ("fp32", "none"), ("channels_last", "frozen")}


def test_bf16_computes_in_bfloat16(losses: dict[tuple[str, Variant], Any]) -> None:
    """Losses differ from those of fp32, in threads and stages too, so the tolerance hides no missing autocast."""
    for axes, variant in losses:
        if axes == "bf16":
            assert losses[axes, variant][0] != pytest.approx(losses["fp32", EAGER][0], abs=1e-6), variant


def test_compressed_gradients_are_rounded(losses: dict[tuple[str, Variant], Any]) -> None:
    """After the first update, losses differ from those of whole gradients, and more so with fewer bits."""
    eager = losses["fp32", EAGER]
    off = {}
    for how in ("bf16", "fp16"):
        found = losses["fp32", Variant("ddp", 2, (("gradient_compression", how),))]
        assert found[0] == pytest.approx(eager[0], abs=1e-6)
        off[how] = max(abs(a - b) for a, b in zip(found[1:], eager[1:], strict=True))
    assert off["bf16"] > off["fp16"] > 0 and off["bf16"] > 1e-6


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        (Variant("gpipe", 2, (("balance", (9, 12)),)), "gpipe cannot cut vit_tiny: balance [9, 12] adds up to 21"),
        (Variant("model_parallel", 2, (("balance", (1, 1)),)), "model_parallel cannot cut vit_tiny: balance [1, 1]"),
    ],
    ids=str,
)
def test_a_balance_that_does_not_add_up_is_an_error(
    launcher: Any, data_root: Path, tmp_path: Path, variant: Variant, why: str
) -> None:
    """The job counts layers itself, as it must for models whose number of layers the plan does not know."""
    if not variant.can_run:
        pytest.skip(f"{variant.strategy} is not installed")
    run = launcher.write(tmp_path, data_root=data_root, **AXES["fp32"], **variant.train)
    started = launcher.start(run)
    assert started.exit_codes() == [1]
    assert run.attempt(1).read_result().message.startswith(f"rank 0: {why}") or why in started.stderr()
    assert "Traceback" not in started.stderr()
