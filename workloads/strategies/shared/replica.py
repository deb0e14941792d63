"""What strategies share in which each rank has the whole model and gradients meet before the update: ddp, Horovod."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from workloads.loaders.protocol import Batch
    from workloads.strategies.shared.compiled_steps import Steps
    from workloads.strategies.shared.protocol import Task
    from workloads.strategies.shared.running_statistics import RunningStatistics


class Replica:
    """All but the step of such a strategy; what it works with is set by the strategy that inherits from it."""

    optimizer: torch.optim.Optimizer
    _task: Task
    _module: nn.Module
    _inference: Callable[[], Any]
    _steps: Steps
    _statistics: RunningStatistics

    def train_step(self, batch: Batch) -> Tensor:
        self._statistics.differ = True
        return self._steps(batch)

    def prepare(self, batch: Batch) -> None:
        self._steps.prepare(batch)

    def logits(self, x: Tensor) -> Tensor:
        self._statistics.average()
        self._task.set_training(self._module, False)
        with self._inference():
            return self._task.forward(self._module, x)

    def state_dict(self) -> dict[str, Any]:
        from workloads.engines.checkpoint import cpu_state

        self._statistics.average()
        return cpu_state(self._module, self.optimizer) if self._task.world.rank == 0 else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._statistics.differ = False

    def close(self) -> None:
        self._steps.close()
