"""``eager``: plain PyTorch on one device. It defines what *correct* means for every other strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads.contract import Hardware, Topology
from workloads.registry import Options, StrategyDeclaration

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workloads.loaders.protocol import Batch
    from workloads.strategies.shared.compiled_steps import Model
    from workloads.strategies.shared.protocol import Task


def _unsupported_hardware(hardware: Hardware, _options: Options) -> str:
    if hardware.devices > 1:
        return f"eager trains on one device and {hardware} has {hardware.devices}"
    return ""


class Eager:
    """The whole batch, one device, no wrapper."""

    optimizer: torch.optim.Optimizer

    def __init__(self, task: Task) -> None:
        import torch

        from workloads.strategies.shared.compiled_steps import Steps

        self._task = task
        self._module = task.module.to(task.device)
        self._inference = torch.inference_mode
        self.optimizer = task.make_optimizer(self._module.parameters())
        learning = [*self._module.parameters(), *self._module.buffers()]
        self._steps = Steps(task, self._step, self._module, self.optimizer, learning)

    def train_step(self, batch: Batch) -> Tensor:
        return self._steps(batch)

    def prepare(self, batch: Batch) -> None:
        self._steps.prepare(batch)

    def _step(self, model: Model, batch: Batch) -> Tensor:
        self._task.set_training(self._module, True)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._task.loss_sum(self._task.forward(model, batch.x), batch.y)
        self._task.backward(loss, 1 / batch.num_global)
        self.optimizer.step()
        return loss.detach()

    def logits(self, x: Tensor) -> Tensor:
        self._task.set_training(self._module, False)
        with self._inference():
            return self._task.forward(self._module, x)

    def state_dict(self) -> dict[str, Any]:
        from workloads.engines.checkpoint import cpu_state

        return cpu_state(self._module, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        self._steps.close()


DECLARATION = StrategyDeclaration(
    name="eager",
    summary="Plain PyTorch on one device: the baseline, and the definition of correct.",
    framework="torch",
    topology=lambda _options: Topology.ONE_PROCESS,
    unsupported_hardware=_unsupported_hardware,
    unsupported_compile=lambda _how, _options: "",
    splits_batch=False,
    packages=("torch",),
    batch_norm_treatment="whole_batch",
    create=lambda: Eager,
)
