"""Loss, accuracy and per-class figures from counts over the test set; the same for every framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workloads.errors import JobError


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of a model on the test set."""

    loss: float
    """Mean cross-entropy, without label smoothing."""
    accuracy: float
    """0 to 1."""
    samples: int
    """Test samples, of which a sequence is one."""
    per_class: list[dict[str, Any]]
    """``class_name``, ``precision``, ``recall``, ``f1`` (None where undefined) and ``support``, in labels."""


def from_counts(class_names: tuple[str, ...], counts: Sequence[float], num_test: int) -> Evaluation:
    """Compute the figures from counts over all ranks.

    Args:
        counts: samples; loss summed over labels, of which an image has one and a sequence one at each position; then by
            class correct, predicted and true labels.
        num_test: samples in the test set.

    Raises:
        JobError: the number of counted samples differs from ``num_test``.
    """
    samples, loss_sum, n = round(counts[0]), counts[1], len(class_names)
    if samples != num_test:
        raise JobError(
            f"evaluation counted {samples} test samples of {num_test}",
            why="a strategy or loader counted a sample twice or not at all",
        )
    correct, predicted, true = (counts[2 + row * n : 2 + (row + 1) * n] for row in range(3))
    per_class = [_class_figures(*row) for row in zip(class_names, correct, predicted, true, strict=True)]
    return Evaluation(loss_sum / sum(true), sum(correct) / sum(true), samples, per_class)


def _class_figures(class_name: str, correct: float, predicted: float, true: float) -> dict[str, Any]:
    return {
        "class_name": class_name,
        "precision": correct / predicted if predicted else None,
        "recall": correct / true if true else None,
        "f1": 2 * correct / (predicted + true) if predicted + true else None,
        "support": round(true),
    }
