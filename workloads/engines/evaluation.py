"""Loss, accuracy and per-class figures over a whole test set, each sample counted once at any world size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workloads.engines.communication import Communication
from workloads.errors import JobError
from workloads.loaders import Loader
from workloads.strategies.protocol import Strategy


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a trained model does on the test set."""

    loss: float
    """Mean cross-entropy, without label smoothing."""
    accuracy: float
    """0 to 1."""
    samples: int
    per_class: list[dict[str, Any]]
    """``class_name``, ``precision``, ``recall``, ``f1`` (None where nothing defines it) and ``support``."""


class _Counts:
    """Sums on the device: nothing is read before the end."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self._classes = classes
        # One row each: right answers by class, answers by class, samples by class. Below 2^53 a double counts exactly.
        self._rows = torch.zeros(3, classes, dtype=torch.float64, device=device)
        self._loss = torch.zeros(1, dtype=torch.float64, device=device)

    def take(self, logits: Tensor, y: Tensor) -> None:
        """Samples of one batch."""
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        self._loss += functional.cross_entropy(logits, y, reduction="none").double().sum()
        answers = logits.argmax(dim=1)
        ones = torch.ones(len(y), dtype=torch.float64, device=y.device)
        self._rows[0].index_add_(0, y, (answers == y).double())
        self._rows[1].index_add_(0, answers, ones)
        self._rows[2].index_add_(0, y, ones)

    def total(self, communication: Communication) -> tuple[float, list[list[float]]]:
        """(summed loss, the three rows) over all ranks, in one message."""
        flat = communication.add(torch.cat([self._loss, self._rows.reshape(-1)])).tolist()
        n = self._classes
        return flat[0], [flat[1 + row * n : 1 + (row + 1) * n] for row in range(3)]


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
    loss, (right, answered, support) = counts.total(communication)
    samples = round(sum(support))
    if samples != loader.num_test:
        raise JobError(
            f"evaluation counted {samples} test samples of {loader.num_test}",
            why="a strategy or loader answered for a sample twice or not at all",
        )
    per_class = [_figures(*row) for row in zip(class_names, right, answered, support, strict=True)]
    return Evaluation(loss / samples, sum(right) / samples, samples, per_class)


def _figures(class_name: str, right: float, answered: float, support: float) -> dict[str, Any]:
    return {
        "class_name": class_name,
        "precision": right / answered if answered else None,
        "recall": right / support if support else None,
        "f1": 2 * right / (answered + support) if answered + support else None,
        "support": round(support),
    }
