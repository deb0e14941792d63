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
    # Read once, at the end, in one message. A double counts exactly up to 2^53.
    counts = torch.zeros(evaluation.num_counts(class_names), dtype=torch.float64, device=device)
    for batch in loader.test():
        logits = strategy.logits(batch.x)
        if logits is not None and batch.num_local:
            _add(counts, logits, batch.y)
        beat()
    return evaluation.from_counts(class_names, communication.add(counts).tolist(), loader.num_test)


def _add(counts: Tensor, logits: Tensor, y: Tensor) -> None:
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    counts[0] += len(y)
    counts[1] += functional.cross_entropy(logits, y, reduction="none").double().sum()
    correct, predicted, true = counts[2:].view(3, -1)
    answers, y = logits.argmax(dim=1).reshape(-1), y.reshape(-1)
    ones = torch.ones(len(y), dtype=torch.float64, device=y.device)
    correct.index_add_(0, y, (answers == y).double())
    predicted.index_add_(0, answers, ones)
    true.index_add_(0, y, ones)
