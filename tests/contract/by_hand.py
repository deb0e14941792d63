"""Data-parallel training written by hand: a copy of the model a rank in one process, no strategy, no engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any


def train_by_hand(config: Any, data_root: Path, ranks: int, period: int = 0) -> tuple[dict[str, Any], float]:
    """(model, test loss) after ``config.steps`` steps of SGD; running statistics are the mean over replicas.

    Args:
        period: every so many steps the replicas are averaged, as in local SGD; 0 sums gradients in each, as DDP does.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from workloads import loaders, registry
    from workloads.engines import recipe

    data = registry.datasets()["imagefolder/*"].load(data_root, config.dataset, config)
    replicas = [recipe.build_model(config, data, 28).train()]
    replicas += [copy.deepcopy(replicas[0]) for _ in range(ranks - 1)]
    optimizers = [torch.optim.SGD(r.parameters(), lr=config.lr, momentum=config.momentum) for r in replicas]

    def loader(shard: loaders.Shard) -> loaders.Loader:
        return loaders.make(data, config, image_size=28, device=torch.device("cpu"), dtype=torch.float64, shard=shard)

    def averages() -> dict[str, Any]:
        states = [r.state_dict() for r in replicas]
        wanted = [n for n in states[0] if "running" in n or (period and "num_batches" not in n)]
        return {n: sum(s[n] for s in states) / ranks for n in wanted}

    own = [loader(loaders.Shard(rank, ranks)) for rank in range(ranks)]
    batches = [[b for epoch in range(9) for b in part.train(epoch)][: config.steps] for part in own]
    for step, parts in enumerate(zip(*batches, strict=True), start=1):
        for replica, part in zip(replicas, parts, strict=True):
            replica.zero_grad()
            share = ranks if period else 1
            (cross_entropy(replica(part.x), part.y, reduction="sum") * share / part.num_global).backward()
        if not period:
            for shared in zip(*(r.parameters() for r in replicas), strict=True):
                total = sum(p.grad for p in shared)
                for p in shared:
                    p.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
        if period and step % period == 0:
            mean = averages()
            for replica in replicas:
                replica.load_state_dict(mean, strict=False)

    replicas[0].load_state_dict(averages(), strict=False)
    replicas[0].eval()
    whole = loader(loaders.Shard(0, 1))
    with torch.no_grad():
        loss = sum(float(cross_entropy(replicas[0](b.x), b.y, reduction="sum")) for b in whole.test())
    return replicas[0].state_dict(), loss / whole.num_test
