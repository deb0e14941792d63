"""How each strategy treats real batch norm, against the same written by hand; the declaration names the treatment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.by_hand import train_by_hand
from tests.contract.ways import Way, ways

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
WAYS = ways(RANKS)
PER_RANK = [way for way in WAYS if way.declaration.batch_norm_treatment == "per_rank"]


@pytest.fixture(scope="module")
def trained(launcher: Any, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Way, Any]:
    runs = tmp_path_factory.mktemp("runs")
    trained = {way: launcher.write(runs, data_root=data_root, **TRAIN, **way.train) for way in WAYS}
    for ranks in sorted({way.ranks for way in WAYS}):
        launcher.succeed([run for way, run in trained.items() if way.ranks == ranks], ranks=ranks)
    return trained


@pytest.fixture(scope="module")
def by_hand(trained: dict[Way, Any], data_root: Path) -> Any:
    return train_by_hand(next(iter(trained.values())).read_spec().train, data_root, RANKS)


@pytest.mark.parametrize("way", PER_RANK, ids=str)
def test_ranks_normalise_their_part_and_average_running_statistics(
    trained: dict[Way, Any], by_hand: Any, way: Way
) -> None:
    """Equal to a loop written by hand: a copy of the model a rank, 10 and 9 samples of each 19, gradients summed.

    The evaluation, too, runs with the averaged statistics, and result and store are told the treatment.
    """
    model, test_loss = by_hand
    result = trained[way].attempt(1).read_result()
    assert result.batch_norm_treatment == "per_rank"
    assert result.test_loss == pytest.approx(test_loss, abs=1e-9)
    _assert_close(_model(trained[way]), model)


def test_it_matters_what_batch_norm_sees(trained: dict[Way, Any], by_hand: Any, data_root: Path) -> None:
    """Ranks that normalise apart learn something else than one that has the whole batch, so the tests here can fail."""
    whole_batch, _ = train_by_hand(trained[PER_RANK[0]].read_spec().train, data_root, 1)
    assert max(float((by_hand[0][name] - whole_batch[name]).abs().max()) for name in whole_batch) > 1e-3


def _model(run: Any) -> dict[str, Any]:
    model: dict[str, Any] = torch.load(run.checkpoint, weights_only=True)["model"]
    return model


def _assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert float((tensor - other[name]).abs().max()) < 1e-9, name
