"""What a trained model does on the test set, from what was counted; the same for every framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workloads.errors import JobError


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a trained model does on the test set."""

    loss: float
    """Mean cross-entropy, without label smoothing."""
    accuracy: float
    """0 to 1."""
    samples: int
    """Of the test set, however many answers each has."""
    per_class: list[dict[str, Any]]
    """``class_name``, ``precision``, ``recall``, ``f1`` (None where nothing defines it) and ``support``, in answers."""


def evaluation(
    class_names: tuple[str, ...], samples: int, loss_sum: float, rows: Sequence[Sequence[float]], num_test: int
) -> Evaluation:
    """Figures from counts over all ranks.

    Args:
        loss_sum: summed over answers.
        rows: right answers, given answers and due answers, each by class.
        num_test: samples that the test set has.

    Raises:
        JobError: another number of samples was counted.
    """
    if samples != num_test:
        raise JobError(
            f"evaluation counted {samples} test samples of {num_test}",
            why="a strategy or loader answered for a sample twice or not at all",
        )
    right, given, due = rows
    per_class = [_figures(*row) for row in zip(class_names, right, given, due, strict=True)]
    return Evaluation(loss_sum / sum(due), sum(right) / sum(due), samples, per_class)


def _figures(class_name: str, right: float, given: float, due: float) -> dict[str, Any]:
    return {
        "class_name": class_name,
        "precision": right / given if given else None,
        "recall": right / due if due else None,
        "f1": 2 * right / (given + due) if given + due else None,
        "support": round(due),
    }
