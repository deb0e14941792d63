"""Average over ranks the batch norm statistics that each rank collects on its own part of the batch.

They are averaged before use, in an evaluation or a checkpoint. A broadcast in every step, DDP's default, would cost a
collective a step and keep one rank's statistics only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from workloads.strategies.shared.protocol import Task


def trained_statistics(task: Task, module: nn.Module) -> list[Tensor]:
    """Return the running statistics that training changes: none where batch norm is frozen."""
    from torch import nn

    if task.config.batch_norm == "frozen":
        return []
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    return [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]


class RunningStatistics:
    """The running statistics of one rank's replica."""

    def __init__(self, task: Task, module: nn.Module) -> None:
        self._buffers = trained_statistics(task, module) if task.world.size > 1 else []
        self._ranks = task.world.size
        self.differ = False
        """Whether ranks may differ: whoever trains a step sets it."""

    def average(self) -> None:
        """Make the statistics the same on all ranks. Collective; returns at once when nothing changed."""
        if self.differ:
            self.differ = False
            average(self._buffers, self._ranks)


def average(tensors: list[Tensor], ranks: int) -> None:
    """Replace tensors by their mean over ranks, in one message: hundreds of small ones are bound by latency."""
    import torch
    from torch import distributed

    if not tensors:
        return
    flat = torch.cat([t.detach().reshape(-1) for t in tensors])
    if ranks > 1:
        distributed.all_reduce(flat)
    flat.div_(ranks)
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view_as(tensor))  # autograd rejects in-place writes to parameters themselves
