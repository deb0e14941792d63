"""Live batch norm under each strategy, against a loop written by hand; the declaration names the treatment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.by_hand import train_by_hand, train_in_micro_batches
from tests.contract.variants import Variant, variants

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

RANKS = 2
TRAIN: dict[str, Any] = {
    "model": "cnn",
    "dropout": 0.0,
    "precision": "fp64",
    "optimizer": "sgd",
    "lr": 0.01,
    "dataset": "imagefolder/few",
    "batch_size": 20,
    "steps": 4,
}
VARIANTS = [variant for variant in variants(RANKS) if variant.has_double_precision]


def _treating(treatment: str) -> list[Variant]:
    return [variant for variant in VARIANTS if variant.declaration.batch_norm_treatment == treatment]


PER_RANK, PER_MICRO_BATCH, WHOLE_BATCH = map(_treating, ("per_rank", "per_micro_batch", "whole_batch"))


def _train(variant: Variant) -> dict[str, Any]:
    if variant not in PER_MICRO_BATCH:
        return TRAIN
    # 15, 15 and 9 samples: in four micro-batches, of the last of which torch.chunk makes three. No more steps, because
    # batch norm of so few samples makes ever more of the last digit.
    batches = {"batch_size": 12, "drop_last": True} if variant.declaration.equal_micro_batches else {"batch_size": 15}
    return TRAIN | {"steps": 3} | batches


@pytest.fixture(scope="module")
def trained(launcher: Any, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Variant, Any]:
    runs = tmp_path_factory.mktemp("runs")
    trained = {
        variant: launcher.write(runs, data_root=data_root, **_train(variant), **variant.train) for variant in VARIANTS
    }
    for ranks in sorted({variant.ranks for variant in VARIANTS}):
        launcher.succeed([run for variant, run in trained.items() if variant.ranks == ranks], ranks=ranks)
    return trained


@pytest.fixture(scope="module")
def by_hand(trained: dict[Variant, Any], data_root: Path) -> Any:
    return train_by_hand(trained[PER_RANK[0]].read_spec().train, data_root, RANKS)


@pytest.mark.parametrize("variant", PER_RANK, ids=str)
def test_each_rank_normalizes_its_part_and_statistics_are_averaged(
    trained: dict[Variant, Any], by_hand: Any, variant: Variant
) -> None:
    """Equal to a loop written by hand: a copy of the model per rank, 10 and 9 samples of each 19, gradients summed.

    The evaluation uses the averaged statistics too, and the result names the treatment.
    """
    _assert_same(trained[variant], by_hand, "per_rank")


@pytest.mark.parametrize("variant", PER_MICRO_BATCH, ids=str)
def test_pipelines_normalize_each_micro_batch(trained: dict[Variant, Any], data_root: Path, variant: Variant) -> None:
    """Equal to a loop written by hand, also in the running statistics: once a micro-batch, once more when it is
    recomputed, or once a batch where they are deferred, whose variance is the biased one."""
    options = variant.all_options
    by_hand = train_in_micro_batches(
        trained[variant].read_spec().train,
        data_root,
        variant.declaration.micro_batches(options),
        deferred=bool(options.get("deferred_batch_norm")),
        recomputed=options.get("checkpoint") == "always",
    )
    _assert_same(trained[variant], by_hand, "per_micro_batch")


@pytest.mark.parametrize("variant", WHOLE_BATCH, ids=str)
def test_a_split_model_normalizes_the_whole_batch(
    trained: dict[Variant, Any], data_root: Path, variant: Variant
) -> None:
    _assert_same(trained[variant], train_by_hand(trained[variant].read_spec().train, data_root, 1), "whole_batch")


def test_deferred_statistics_are_exact_under_autocast(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """One step in bf16 moves running statistics as eager does, within 0.1 %, once the variance is unbiased.

    One micro-batch, so that every layer sees what eager's sees.
    """
    both = {name: Variant(name, 1, options) for name, options in (("eager", ()), ("gpipe", (("chunks", 1),)))}
    if not both["gpipe"].can_run:
        pytest.skip("torchgpipe is not installed")
    train = TRAIN | {"precision": "bf16", "steps": 1}
    runs = {
        name: launcher.write(tmp_path, data_root=data_root, **train, **variant.train) for name, variant in both.items()
    }
    launcher.succeed(list(runs.values()))
    eager, gpipe = (torch.load(runs[name].checkpoint, weights_only=True)["model"] for name in ("eager", "gpipe"))
    image_sides = {"1": 28, "4": 28, "8": 14}  # pixels that the norms of cnn see; others see a number a sample
    for name in (name for name in eager if ".running_" in name):
        layer, _, statistic = name.partition(".")
        count = 20 * image_sides.get(layer, 1) ** 2
        start, bias = (0.9, 1 - 1 / count) if statistic == "running_var" else (0.0, 1.0)
        moved, expected = gpipe[name] - start, (eager[name] - start) * bias
        assert torch.allclose(moved, expected, rtol=1e-3, atol=1e-6), name


def test_every_treatment_is_compared() -> None:
    assert {*PER_RANK, *PER_MICRO_BATCH, *WHOLE_BATCH} == set(VARIANTS)


def test_the_treatments_differ(trained: dict[Variant, Any], by_hand: Any, data_root: Path) -> None:
    """Normalizing two parts ends apart from normalizing the whole batch, so the tests here can fail."""
    whole_batch, _ = train_by_hand(trained[PER_RANK[0]].read_spec().train, data_root, 1)
    assert max(float((by_hand[0][name] - whole_batch[name]).abs().max()) for name in whole_batch) > 1e-3


def _assert_same(run: Any, by_hand: tuple[dict[str, Any], float], treatment: str) -> None:
    model, test_loss = by_hand
    result = run.attempt(1).read_result()
    assert result.batch_norm_treatment == treatment
    assert result.test_loss == pytest.approx(test_loss, abs=1e-9)
    learned = torch.load(run.checkpoint, weights_only=True)["model"]
    assert learned.keys() == model.keys()
    for name, tensor in learned.items():
        assert float((tensor - model[name]).abs().max()) < 1e-9, name
