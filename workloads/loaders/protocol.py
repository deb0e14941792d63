"""Interface between loaders and engines: shards, batches, errors of worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from workloads.errors import JobError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """One data-parallel rank's share of every batch. ``Shard(0, 1)`` gets all of it."""

    index: int
    count: int

    def part(self, n: int) -> slice:
        """Return this rank's consecutive part of ``n`` samples; part sizes differ by at most one, larger ones first."""
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
    """Samples of ``x`` that count. 0 when this rank has none of this batch: ``x`` then holds one sample of weight 0, so
    that every rank takes part in every collective call."""
    num_global: int
    """Samples of the batch over all ranks."""


class WorkerError(JobError):
    """A worker process of the ``dataloader`` loader died."""

    failure_class = "loader_worker"


def worker_error(error: RuntimeError) -> WorkerError | None:
    """Translate torch's RuntimeError about a dead worker; None for any other error.

    torch raises it in its SIGCHLD handler (torch/utils/data/_utils/signal_handling.py): it may appear anywhere.
    """
    if "DataLoader worker" not in str(error):
        return None
    return WorkerError(
        "a worker process of the dataloader died",
        why=str(error).strip(),
        hint="the usual reason is that the host ran out of memory: raise mem, or lower workers or batch_size",
    )


class Loader(Protocol):
    """Batches of one rank. Every rank yields the same number of batches, and each sample occurs exactly once."""

    num_train: int
    """Training samples over all ranks, after ``train_fraction``; ``drop_last`` leaves some of them out of an epoch."""
    num_test: int
    steps_per_epoch: int

    def train(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch (0-based) in the order that (seed, epoch) decides."""

    def test(self) -> Iterator[Batch]:
        """Yield the test samples in stored order, split over ranks into consecutive parts."""

    def close(self) -> None:
        """End worker processes and free device memory."""
