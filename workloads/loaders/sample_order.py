"""Order of the samples in each epoch, and each rank's part of every batch.

All randomness is a hash of integers, not the state of a generator: the order of an epoch, the augmentation of a sample
and the subset of ``train_fraction`` are the same on every machine, in every process, and after a resume. The hash
exists twice (Python integers for loader workers, arrays or tensors for whole epochs); a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from workloads.contract import TrainConfig
from workloads.errors import DatasetError
from workloads.loaders.protocol import Shard

if TYPE_CHECKING:
    import torch

# splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

Integers = TypeVar("Integers", "torch.Tensor", "NDArray[np.int64]")
"""Many integers, int64."""


class Stream(IntEnum):
    """Purpose of a random number, so that no two purposes share one."""

    ORDER = 0
    AUGMENT = 1
    SUBSET = 2


def hash_of(key: int, index: int) -> int:
    """Return 64 bits that a key and an index determine."""
    z = (key + index * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _MULTIPLIERS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIERS[1]) & _MASK
    return z ^ (z >> 31)


def hashes_of(key: int, indices: Integers) -> Integers:
    """:func:`hash_of` for many indices, as int64 with the same 64 bits; runs on the device of ``indices``."""
    z = indices * _signed(_GOLDEN) + _signed(key)
    z = (z ^ _shifted(z, 30)) * _signed(_MULTIPLIERS[0])
    z = (z ^ _shifted(z, 27)) * _signed(_MULTIPLIERS[1])
    return z ^ _shifted(z, 31)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _shifted(z: Integers, places: int) -> Integers:
    """Shift right and fill with zeros; torch and numpy shift int64 arithmetically, which repeats the sign."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def stream_key(stream: Stream, seed: int, epoch: int = 0) -> int:
    """Return the key of all random numbers for one purpose in one epoch."""
    return hash_of(hash_of(hash_of(0, stream + 1), seed + 1), epoch + 1)


def epoch_order(indices: Integers, seed: int, epoch: int) -> Integers:
    """Return positions in ``indices`` (training samples, ascending) in the order of an epoch, on the same device."""
    return hashes_of(stream_key(Stream.ORDER, seed, epoch), indices).argsort(stable=True)


def subset(labels: NDArray[np.int64], fraction: float, seed: int) -> NDArray[np.int64]:
    """Draw ``max(1, round(fraction * images))`` images, in stored order: the meaning of ``train_fraction``.

    Only the seed decides, so every strategy trains on the same ones; each class keeps its share to within one image.
    """
    if fraction >= 1.0:
        return np.arange(len(labels))
    wanted = max(1, round(fraction * len(labels)))
    counts = np.bincount(labels)
    shares = counts * wanted / len(labels)
    quotas = np.floor(shares).astype(int)
    largest_remainders = np.argsort(quotas - shares, kind="stable")
    quotas[largest_remainders[: wanted - quotas.sum()]] += 1
    ranks = hashes_of(stream_key(Stream.SUBSET, seed), np.arange(len(labels)))
    chosen = []
    for label, quota in enumerate(quotas):
        members = np.flatnonzero(labels == label)
        chosen.append(members[np.argsort(ranks[members], kind="stable")[:quota]])
    return np.sort(np.concatenate(chosen))


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's consecutive part of one batch, as positions in the epoch's order or in the test split."""

    start: int
    num_local: int
    num_global: int

    @property
    def rows(self) -> slice:
        """Positions to load; a rank without samples loads one that does not count."""
        return slice(self.start, self.start + self.num_local) if self.num_local else slice(0, 1)


def training_parts(num_train: int, batch_size: int, *, drop_last: bool, shard: Shard) -> list[Part]:
    """Cut an epoch into global batches, each into a part per rank. Raises DatasetError where no step is left."""
    if drop_last:
        if num_train < batch_size:
            raise DatasetError(
                f"no step is left: {num_train} training images are fewer than one batch of {batch_size}",
                why="drop_last leaves out the last, smaller batch",
                hint="lower batch_size, or set drop_last = false",
            )
        num_train -= num_train % batch_size
    parts = []
    for start in range(0, num_train, batch_size):
        size = min(batch_size, num_train - start)
        part = shard.part(size)
        parts.append(Part(start + part.start, part.stop - part.start, size))
    return parts


def evaluation_parts(num_test: int, batch_size: int, shard: Shard) -> list[Part]:
    """Cut the test split into one consecutive run per rank, each in batches of a rank's share of ``batch_size``."""
    per_rank = -(-batch_size // shard.count)
    runs = [Shard(index, shard.count).part(num_test) for index in range(shard.count)]
    mine = runs[shard.index]
    parts = []
    for offset in range(0, runs[0].stop, per_rank):  # the first rank's run is the longest
        sizes = [min(per_rank, max(0, run.stop - run.start - offset)) for run in runs]
        parts.append(Part(mine.start + offset, sizes[shard.index], sum(sizes)))
    return parts


class SamplePlan:
    """Samples and batches of one rank, as ``config`` says; base class of the loaders.

    ``labels`` are the classes of the training samples, ``num_test`` is the number of test samples.
    """

    def __init__(self, labels: NDArray[np.int64], num_test: int, config: TrainConfig, shard: Shard) -> None:
        self._seed = config.seed
        self._chosen = subset(labels, config.train_fraction, config.seed)
        self.num_train, self.num_test = len(self._chosen), num_test
        batch_size = config.batch_size
        self._training_parts = training_parts(self.num_train, batch_size, drop_last=config.drop_last, shard=shard)
        self._evaluation_parts = evaluation_parts(num_test, batch_size, shard)
        self.steps_per_epoch = len(self._training_parts)
