"""A module that brings the run's autocast along, for threads of a library, which do not inherit it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from workloads.strategies.shared.protocol import Task


def under_autocast(task: Task, module: nn.Module) -> nn.Module:
    """A module that computes what ``task.forward`` computes with ``module``, on whatever thread."""
    from torch import nn

    if task.config.precision != "bf16":
        return module

    class UnderAutocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return task.forward(self.module, x)

    return UnderAutocast().eval()
