"""``data_parallel``: torch's nn.DataParallel: one process, the model copied to all its GPUs in every step.

Batches are cut as ``torch.chunk`` cuts, so an odd or small one may leave a GPU without samples. Each GPU normalises its
part; the running statistics are those of the first one, as torch has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads.contract import Hardware, Topology
from workloads.registry import Options, StrategyDeclaration

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workloads.loaders.protocol import Batch
    from workloads.strategies.shared.protocol import Task


class DataParallel:
    """The model on the first GPU, and a wrapper that copies it to the others."""

    optimizer: torch.optim.Optimizer

    def __init__(self, task: Task) -> None:
        from torch import nn

        from workloads.strategies.shared.under_autocast import under_autocast

        self._task = task
        self._module = task.module.to(task.device)
        # Its threads would run autocast in float16, whatever the caller's is.
        self._replicas = nn.DataParallel(under_autocast(task, self._module), list(task.devices)).eval()
        self.optimizer = task.make_optimizer(self._module.parameters())

    def train_step(self, batch: Batch) -> Tensor:
        self._task.set_training(self._replicas, True)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._task.loss_sum(self._replicas(batch.x), batch.y)
        self._task.backward(loss, 1 / batch.num_global)
        self.optimizer.step()
        return loss.detach()

    def logits(self, x: Tensor) -> Tensor:
        import torch

        self._task.set_training(self._replicas, False)
        with torch.no_grad():
            logits: Tensor = self._replicas(x)
        return logits

    def state_dict(self) -> dict[str, Any]:
        from workloads.engines.checkpoint import cpu_state

        return cpu_state(self._module, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Nothing outlives the object."""


def _unsupported_hardware(hardware: Hardware, _options: Options) -> str:
    if hardware.is_cpu:
        return (
            "data_parallel needs GPUs: on a CPU nn.DataParallel is the module itself, so eager would be measured twice"
        )
    if hardware.nodes > 1:
        return f"data_parallel is one process, which cannot drive the GPUs of {hardware.nodes} nodes"
    return ""


DECLARATION = StrategyDeclaration(
    name="data_parallel",
    summary="nn.DataParallel: one process that copies the model to all its GPUs in every step. GPUs only.",
    framework="torch",
    topology=lambda _options: Topology.ONE_PROCESS,
    unsupported_hardware=_unsupported_hardware,
    unsupported_compile=lambda _how, _options: (
        "nn.DataParallel copies the model in every step: neither compiled code nor a CUDA graph outlives a copy"
    ),
    splits_batch=True,
    packages=("torch",),
    batch_norm_treatment="per_gpu",
    create=lambda: DataParallel,
)
