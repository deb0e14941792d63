"""``resident`` for sequences: one byte a symbol on the device, a batch of whole numbers made of it for each step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workloads.contract import TrainConfig
from workloads.datasets.shared.sequence_data import SequenceData
from workloads.loaders.order import epoch_order, evaluation_parts, subset, training_parts
from workloads.loaders.protocol import Batch, Shard


class SequenceLoader:
    """See :class:`workloads.loaders.protocol.Loader`. ``Batch.x`` and ``Batch.y`` are (sequences, positions), int64."""

    def __init__(self, data: SequenceData, config: TrainConfig, *, device: torch.device, shard: Shard) -> None:
        import numpy as np

        self._seed = config.seed
        one_class = np.zeros(len(data.train), np.int64)  # a sequence has no class of its own to stratify by
        chosen = subset(one_class, config.train_fraction, config.seed)
        self.num_train, self.num_test = len(chosen), len(data.test)
        self._training_parts = training_parts(
            self.num_train, config.batch_size, drop_last=config.drop_last, shard=shard
        )
        self._evaluation_parts = evaluation_parts(self.num_test, config.batch_size, shard)
        self.steps_per_epoch = len(self._training_parts)
        self._train = torch.tensor(data.train[chosen], device=device)
        self._test = torch.tensor(data.test, device=device)
        self._indices = torch.tensor(chosen, device=device)

    def train(self, epoch: int) -> Iterator[Batch]:
        order = epoch_order(self._indices, self._seed, epoch)
        for part in self._training_parts:
            yield _batch(self._train[order[part.rows]], part.num_local, part.num_global)

    def test(self) -> Iterator[Batch]:
        for part in self._evaluation_parts:
            yield _batch(self._test[part.rows], part.num_local, part.num_global)

    def close(self) -> None:
        for name in ("_train", "_test"):
            vars(self).pop(name, None)  # a second call finds nothing to do


def _batch(symbols: torch.Tensor, num_local: int, num_global: int) -> Batch:
    wide = symbols.long()
    return Batch(wide[:, :-1].contiguous(), wide[:, 1:].contiguous(), num_local, num_global)
