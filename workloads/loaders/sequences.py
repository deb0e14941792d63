"""``resident`` for sequences: one byte per symbol on the device, converted to int64 for each step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from workloads.contract import TrainConfig
from workloads.datasets.shared.sequence_data import SequenceData
from workloads.loaders.protocol import Batch, Shard
from workloads.loaders.sample_order import SamplePlan, epoch_order


class SequenceLoader(SamplePlan):
    """See :class:`workloads.loaders.protocol.Loader`. ``Batch.x`` and ``Batch.y`` are (sequences, positions), int64."""

    def __init__(self, data: SequenceData, config: TrainConfig, *, device: torch.device, shard: Shard) -> None:
        one_class = np.zeros(len(data.train), np.int64)  # a sequence has no class to stratify by
        super().__init__(one_class, len(data.test), config, shard)
        self._train = torch.tensor(data.train[self._chosen], device=device)
        self._test = torch.tensor(data.test, device=device)
        self._indices = torch.tensor(self._chosen, device=device)

    def train(self, epoch: int) -> Iterator[Batch]:
        order = epoch_order(self._indices, self._seed, epoch)
        for part in self._training_parts:
            yield _batch(self._train[order[part.rows]], part.num_local, part.num_global)

    def test(self) -> Iterator[Batch]:
        for part in self._evaluation_parts:
            yield _batch(self._test[part.rows], part.num_local, part.num_global)

    def close(self) -> None:
        for name in ("_train", "_test"):
            vars(self).pop(name, None)  # closing twice is allowed


def _batch(symbols: torch.Tensor, num_local: int, num_global: int) -> Batch:
    wide = symbols.long()
    return Batch(wide[:, :-1].contiguous(), wide[:, 1:].contiguous(), num_local, num_global)
