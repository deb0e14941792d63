"""Batch norm's running mean and variance where every rank collects its own: one answer out of several.

Broadcasting them every step would cost a collective a step and keep one rank's only. They are averaged over ranks
before they are used: in an evaluation, and in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from workloads.strategies.shared.protocol import Task


def learning(task: Task, module: nn.Module) -> list[Tensor]:
    """Running statistics that training changes: none where batch norm is frozen."""
    from torch import nn

    if task.config.batch_norm == "frozen":
        return []
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    return [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]


class RunningStatistics:
    """The statistics of one rank's replica.

    Args:
        mean: over ranks, of a tensor, in place or not; None is torch's all-reduce.
    """

    def __init__(self, task: Task, module: nn.Module, mean: Callable[[Tensor], Tensor] | None = None) -> None:
        self._buffers = learning(task, module) if task.world.size > 1 else []
        self._size = task.world.size
        self._mean = mean or self._all_reduce
        self.differ = False
        """Whether a step was made since they were averaged; whoever trains sets it."""

    def average(self) -> None:
        """Make them the same on all ranks. Collective; cheap when nothing changed."""
        if not self.differ:
            return
        self.differ = False
        average(self._buffers, self._mean)

    def _all_reduce(self, flat: Tensor) -> Tensor:
        from torch import distributed

        distributed.all_reduce(flat)
        return flat.div_(self._size)


def average(tensors: list[Tensor], mean: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors by their mean over ranks, in one message: hundreds of small ones would cost more than the
    rest."""
    import torch

    if not tensors:
        return
    flat = mean(torch.cat([t.detach().reshape(-1) for t in tensors]))
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view_as(tensor))
