"""Training loops written by hand, in one process, without strategy or engine: references for contract tests."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any


def train_by_hand(config: Any, data_root: Path, ranks: int, period: int = 0) -> tuple[dict[str, Any], float]:
    """Return (model, test loss) after ``config.steps`` steps of SGD; running statistics are the mean over replicas.

    Args:
        period: every so many steps the replicas are averaged, as in local SGD; 0 sums gradients in each, as DDP does.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from workloads.loaders.protocol import Shard

    model, make_loader = _start(config, data_root)
    replicas = [model] + [copy.deepcopy(model) for _ in range(ranks - 1)]
    optimizers = [torch.optim.SGD(r.parameters(), lr=config.lr, momentum=config.momentum) for r in replicas]

    def averages() -> dict[str, Any]:
        states = [r.state_dict() for r in replicas]
        wanted = [n for n in states[0] if "running" in n or (period and "num_batches" not in n)]
        return {n: sum(s[n] for s in states) / ranks for n in wanted}

    own = [make_loader(Shard(rank, ranks)) for rank in range(ranks)]
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

    model.load_state_dict(averages(), strict=False)
    return model.state_dict(), _test_loss(model, make_loader(Shard(0, 1)))


def train_in_micro_batches(
    config: Any, data_root: Path, chunks: int, *, deferred: bool, recomputed: bool
) -> tuple[dict[str, Any], float]:
    """Return (model, test loss) when batch norm sees one micro-batch at a time.

    Args:
        deferred: running statistics move once a batch, by mean and biased variance of all of it.
        recomputed: every micro-batch passes the model once more, in reverse order, before the update.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from workloads.loaders.protocol import Shard

    model, make_loader = _start(config, data_root)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    seen: dict[Any, list[Any]] = {}
    if deferred:
        for norm in (m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)):
            norm.momentum = 0.0
            seen[norm] = []
            norm.register_forward_pre_hook(lambda module, given: seen[module].append(given[0].detach()))
    loader = make_loader(Shard(0, 1))
    batches = [b for epoch in range(9) for b in loader.train(epoch)][: config.steps]
    for step, batch in enumerate(batches, start=1):
        optimizer.zero_grad()
        for x, y in zip(batch.x.chunk(chunks), batch.y.chunk(chunks), strict=True):
            (cross_entropy(model(x), y, reduction="sum") / batch.num_global).backward()
        if recomputed:
            with torch.no_grad():
                for x in reversed(batch.x.chunk(chunks)):
                    model(x)
        for norm, inputs in seen.items():
            whole = torch.cat(inputs).transpose(0, 1).flatten(1)
            norm.running_mean.lerp_(whole.mean(1), 0.1)
            norm.running_var.lerp_(whole.var(1, correction=0), 0.1)
            norm.num_batches_tracked.fill_(step)
            inputs.clear()
        optimizer.step()
    return model.state_dict(), _test_loss(model, loader)


def _start(config: Any, data_root: Path) -> tuple[Any, Any]:
    """Return the model, in training mode, and (shard) -> its loader."""
    import torch

    from workloads import loaders, registry
    from workloads.engines import recipe

    data = registry.datasets()["imagefolder/*"].load(data_root, config.dataset, config)
    model = recipe.build_model(config, data, 28).train()
    device = torch.device("cpu")
    return model, lambda shard: loaders.make(
        data, config, image_size=28, device=device, dtype=torch.float64, shard=shard
    )


def _test_loss(model: Any, loader: Any) -> float:
    import torch
    from torch.nn.functional import cross_entropy

    model.eval()
    with torch.no_grad():
        total = sum(float(cross_entropy(model(b.x), b.y, reduction="sum")) for b in loader.test())
    return total / int(loader.num_test)
