"""``local_sgd``: every rank trains a replica of its own; every ``period`` steps their parameters are averaged.

Asynchronous training without its non-determinism: the same saving in communication, and the accuracy it costs can be
measured. With period 1 and SGD, with or without momentum, it computes what ``ddp`` computes. Optimiser states stay
apart.

An evaluation sees the average of the replicas, which does not change them; so does a checkpoint, which also carries
every replica, in the optimiser's part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads.contract import Topology
from workloads.registry import Option, StrategyDeclaration
from workloads.strategies.shared.host_group import host_group
from workloads.strategies.shared.running_statistics import average, learning

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workloads.loaders.protocol import Batch
    from workloads.strategies.shared.compiled_steps import Model
    from workloads.strategies.shared.protocol import Task


class LocalSgd:
    """One replica."""

    optimizer: torch.optim.Optimizer

    def __init__(self, task: Task) -> None:
        from workloads.strategies.shared.compiled_steps import Steps

        self._task = task
        self._module = task.module.to(task.device)
        self.optimizer = task.make_optimizer(self._module.parameters())
        self._averaged = [p.detach() for p in self._module.parameters()] + learning(task, self._module)
        self._own: list[Tensor] | None = None
        """What the replica learned, while the average stands in its place."""
        self._period = int(task.options["period"])  # type: ignore[arg-type]
        self._steps_done = 0
        self._host_group = host_group(task)
        learned = [*self._module.parameters(), *self._module.buffers()]
        self._steps = Steps(task, self._step, self._module, self.optimizer, learned)

    def train_step(self, batch: Batch) -> Tensor:
        self._step_back()
        loss = self._steps(batch)
        self._steps_done += 1
        if self._steps_done % self._period == 0:
            average(self._averaged, self._mean)
        return loss

    def prepare(self, batch: Batch) -> None:
        self._steps.prepare(batch)

    def _step(self, model: Model, batch: Batch) -> Tensor:
        self._task.set_training(self._module, True)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._task.loss_sum(self._task.forward(model, batch.x), batch.y)
        if batch.num_local == 0:
            loss = loss * 0.0
        # The average over ranks of such gradients is that of the global batch, whatever each rank's share of it.
        self._task.backward(loss, self._task.world.size / batch.num_global)
        self.optimizer.step()
        return loss.detach()

    def logits(self, x: Tensor) -> Tensor:
        import torch

        self._stand_in()
        self._task.set_training(self._module, False)
        with torch.inference_mode():
            return self._task.forward(self._module, x)

    def state_dict(self) -> dict[str, Any]:
        from torch import distributed

        from workloads.engines.checkpoint import cpu_state

        self._step_back()
        own = cpu_state(self._module, self.optimizer)
        replicas: list[dict[str, Any]] = [own] * self._task.world.size
        if self._task.world.size > 1:
            answers = replicas if self._task.world.rank == 0 else None
            distributed.gather_object(own, answers, group=self._host_group)
        self._stand_in()
        model = cpu_state(self._module, self.optimizer)["model"]
        return {"model": model, "optimizer": {**own["optimizer"], "replicas": replicas, "steps": self._steps_done}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = state["optimizer"]["replicas"][self._task.world.rank]
        self._own = None
        self._module.load_state_dict(own["model"])
        self.optimizer.load_state_dict(own["optimizer"])
        self._steps_done = state["optimizer"]["steps"]

    def close(self) -> None:
        self._steps.close()

    def _stand_in(self) -> None:
        if self._own is None:
            self._own = [t.clone() for t in self._averaged]
            average(self._averaged, self._mean)

    def _step_back(self) -> None:
        if self._own is not None:
            for tensor, own in zip(self._averaged, self._own, strict=True):
                tensor.copy_(own)
            self._own = None

    def _mean(self, flat: Tensor) -> Tensor:
        from torch import distributed

        if self._task.world.size > 1:
            distributed.all_reduce(flat)
        return flat.div_(self._task.world.size)


DECLARATION = StrategyDeclaration(
    name="local_sgd",
    summary="One replica per device that trains alone; parameters are averaged every period steps.",
    framework="torch",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    unsupported_compile=lambda _how, _options: "",
    splits_batch=True,
    packages=("torch",),
    options=(
        Option(
            name="period",
            type=int,
            default=8,
            minimum=1,
            summary="Steps between two averages of the replicas",
        ),
    ),
    batch_norm_treatment="per_rank",
    contract_options=({"period": 1},),
    equal_under=("sgd",),
    create=lambda: LocalSgd,
)
