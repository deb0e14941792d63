"""How ddp treats real batch norm: each rank normalises its own part, running statistics are the mean over ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

RANKS, STEPS = 2, 4
TRAIN: dict[str, Any] = {
    "model": "cnn",
    "strategy": "ddp",
    "hardware": f"cpu:{RANKS}",
    "dropout": 0.0,
    "precision": "fp64",
    "optimizer": "sgd",
    "lr": 0.01,
    "dataset": "imagefolder/few",
    "batch_size": 20,
    "steps": STEPS,
}


def test_ddp_normalises_per_rank_and_averages_running_statistics(
    launcher: Any, data_root: Path, tmp_path: Path
) -> None:
    """Equal to a loop written by hand: a copy of the model a rank, 10 and 9 samples of each 19, gradients summed.

    The evaluation, too, runs with the averaged statistics, and result and store are told the treatment.
    """
    run = launcher.write(tmp_path, data_root=data_root, **TRAIN)
    launcher.succeed(run, ranks=RANKS)
    result = run.attempt(1).read_result()
    learned = torch.load(run.checkpoint, weights_only=True)["model"]

    by_hand, test_loss = _by_hand(run.read_spec().train, data_root, RANKS)
    whole_batch, _ = _by_hand(run.read_spec().train, data_root, 1)

    assert result.batch_norm_treatment == "per_rank"
    assert result.test_loss == pytest.approx(test_loss, abs=1e-9)
    for name, tensor in by_hand.items():
        assert float((learned[name] - tensor).abs().max()) < 1e-9, name
    assert max(float((learned[name] - whole_batch[name]).abs().max()) for name in learned) > 1e-3, "it does matter"


def _by_hand(config: Any, data_root: Path, ranks: int) -> tuple[dict[str, Any], float]:
    from torch.nn.functional import cross_entropy

    from workloads import loaders, registry
    from workloads.engines import recipe

    data = registry.datasets()["imagefolder/*"].load(data_root, config.dataset, config)
    replicas = [recipe.build_model(config, data, 28).train()]
    replicas += [copy.deepcopy(replicas[0]) for _ in range(ranks - 1)]
    optimizers = [torch.optim.SGD(r.parameters(), lr=config.lr, momentum=config.momentum) for r in replicas]

    def loader(shard: loaders.Shard) -> loaders.Loader:
        return loaders.make(data, config, image_size=28, device=torch.device("cpu"), dtype=torch.float64, shard=shard)

    own = [loader(loaders.Shard(rank, ranks)) for rank in range(ranks)]
    batches = [[b for epoch in range(2) for b in part.train(epoch)][:STEPS] for part in own]
    for parts in zip(*batches, strict=True):
        for replica, part in zip(replicas, parts, strict=True):
            replica.zero_grad()
            (cross_entropy(replica(part.x), part.y, reduction="sum") / part.num_global).backward()
        for shared in zip(*(r.parameters() for r in replicas), strict=True):
            total = sum(p.grad for p in shared)
            for p in shared:
                p.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()

    first = replicas[0].state_dict()
    for name in first:
        if "running" in name:
            first[name].copy_(sum(r.state_dict()[name] for r in replicas) / ranks)
    replicas[0].eval()
    whole = loader(loaders.Shard(0, 1))
    with torch.no_grad():
        loss = sum(float(cross_entropy(replicas[0](b.x), b.y, reduction="sum")) for b in whole.test())
    return first, loss / whole.num_test
