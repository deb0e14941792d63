"""Loss, accuracy and per-class figures over a whole test set, each sample counted once at any world size.

A sample has one answer, or one at each of its positions; of those, each counts.
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
    """Sums on the device: nothing is read before the end."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self._classes = classes
        self._samples = 0
        # One row each: right answers, given answers and due answers by class. Below 2^53 a double counts exactly.
        self._rows = torch.zeros(3, classes, dtype=torch.float64, device=device)
        self._loss = torch.zeros(1, dtype=torch.float64, device=device)

    def take(self, logits: Tensor, y: Tensor) -> None:
        """Samples of one batch."""
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        self._loss += functional.cross_entropy(logits, y, reduction="none").double().sum()
        self._samples += len(y)
        answers, y = logits.argmax(dim=1).reshape(-1), y.reshape(-1)
        ones = torch.ones(len(y), dtype=torch.float64, device=y.device)
        self._rows[0].index_add_(0, y, (answers == y).double())
        self._rows[1].index_add_(0, answers, ones)
        self._rows[2].index_add_(0, y, ones)

    def total(self, communication: Communication) -> tuple[int, float, list[list[float]]]:
        """(samples, summed loss, the three rows) over all ranks, in one message."""
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
    """Run the test set once. Collective.

    Raises:
        JobError: another number of samples was counted than the test set has.
    """
    counts = _Counts(len(class_names), device)
    for batch in loader.test():
        logits = strategy.logits(batch.x)
        if logits is not None and batch.num_local:
            counts.take(logits, batch.y)
        beat()
    samples, loss, rows = counts.total(communication)
    return evaluation.evaluation(class_names, samples, loss, rows, loader.num_test)
