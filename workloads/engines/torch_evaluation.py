"""Evaluate a torch strategy on the whole test set, counting each sample once at any world size.

An image has one label, a sequence one at each position, and each counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from workloads.engines import evaluation
from workloads.engines.communication import Communication
from workloads.engines.evaluation import Evaluation
from workloads.loaders.protocol import Loader
from workloads.strategies.shared.protocol import Strategy


class _Counts:
    """Counts on the device, read once at the end."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self._classes = classes
        self._samples = 0
        # One row each: correct, predicted and true labels by class. A double counts exactly up to 2^53.
        self._rows = torch.zeros(3, classes, dtype=torch.float64, device=device)
        self._loss = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, y: Tensor) -> None:
        """Add the samples of one batch."""
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        self._loss += functional.cross_entropy(logits, y, reduction="none").double().sum()
        self._samples += len(y)
        predicted, y = logits.argmax(dim=1).reshape(-1), y.reshape(-1)
        ones = torch.ones(len(y), dtype=torch.float64, device=y.device)
        self._rows[0].index_add_(0, y, (predicted == y).double())
        self._rows[1].index_add_(0, predicted, ones)
        self._rows[2].index_add_(0, y, ones)

    def total(self, communication: Communication) -> tuple[int, float, list[list[float]]]:
        """Return (samples, summed loss, the three rows) over all ranks, in one message. Collective."""
        samples = torch.full_like(self._loss, self._samples)
        flat = communication.add(torch.cat([samples, self._loss, self._rows.reshape(-1)])).tolist()
        n = self._classes
        return round(flat[0]), flat[1], [flat[2 + row * n : 2 + (row + 1) * n] for row in range(3)]


def evaluate(
    strategy: Strategy,
    loader: Loader,
    class_names: tuple[str, ...],
    device: torch.device,
    communication: Communication,
    beat: Callable[[], None],
) -> Evaluation:
    """Evaluate the test set once. Collective.

    Raises:
        JobError: the number of counted samples differs from the test set's.
    """
    counts = _Counts(len(class_names), device)
    for batch in loader.test():
        logits = strategy.logits(batch.x)
        if logits is not None and batch.num_local:
            counts.add(logits, batch.y)
        beat()
    samples, loss, rows = counts.total(communication)
    return evaluation.from_counts(class_names, samples, loss, rows, loader.num_test)
