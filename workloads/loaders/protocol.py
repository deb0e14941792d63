"""What a loader is to an engine: its rank's share, its batches, and how its worker processes fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from workloads.errors import JobError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """One data-parallel rank's share of every batch. ``Shard(0, 1)`` sees everything."""

    index: int
    count: int

    def part(self, n: int) -> slice:
        """This rank's consecutive part of ``n`` samples; sizes differ by at most one, the larger parts come first."""
        base, odd = divmod(n, self.count)
        start = self.index * base + min(self.index, odd)
        return slice(start, start + base + (self.index < odd))


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's part of a global batch."""

    x: torch.Tensor
    """(samples, channels, height, width), normalised, or (samples, positions) of symbols; on the device."""
    y: torch.Tensor
    """(samples,) or (samples, positions), int64, on the device."""
    num_local: int
    """Samples of ``x`` that count. 0 when this rank has none of this batch: then ``x`` holds one stand-in sample, whose
    weight must be 0, so that every rank still takes part in every collective call."""
    num_global: int
    """Samples of the batch over all ranks."""


class WorkerError(JobError):
    """A worker process of the ``dataloader`` loader died."""

    failure_class = "loader_worker"


def worker_error(error: RuntimeError) -> WorkerError | None:
    """What torch's RuntimeError about a dead worker means; None for any other.

    torch raises it from a signal handler, so it may surface anywhere in the training process, not only in a loader.
    """
    if "DataLoader worker" not in str(error):
        return None
    return WorkerError(
        "a worker process of the dataloader died",
        why=str(error).strip(),
        hint="most often the host's memory ran out: raise mem, or lower workers or batch_size",
    )


class Loader(Protocol):
    """Batches of one rank. Every rank yields the same number of them, and every sample comes exactly once."""

    num_train: int
    """Training samples over all ranks, after ``train_fraction``; ``drop_last`` leaves some of them out of an epoch."""
    num_test: int
    steps_per_epoch: int

    def train(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch (0-based), in the order that (seed, epoch) gives."""
        ...

    def test(self) -> Iterator[Batch]:
        """The test samples in stored order, split over ranks into consecutive parts."""
        ...

    def close(self) -> None:
        """End worker processes and let go of device memory."""
        ...
