"""``local_sgd``: each rank trains its own replica; every ``period`` steps the parameters are averaged.

It saves the communication that asynchronous training saves, but deterministically, so that the accuracy it costs can be
measured. With period 1 and SGD, with or without momentum, it computes what ``ddp`` computes. Optimizer states are not
averaged.

An evaluation uses the average of the replicas and leaves them as they are. A checkpoint has the average as its model,
and all replicas in its optimizer part.
"""

from __future__ import annotations

from typing import Any

from workloads.contract import Topology
from workloads.lazy import lazy_imports
from workloads.registry import Option, StrategyDeclaration
from workloads.strategies.shared.protocol import Task
from workloads.strategies.shared.torch_strategy import TorchStrategy, average, trained_statistics

with lazy_imports(__name__):
    from torch import Tensor, distributed

    from workloads.loaders.protocol import Batch


class LocalSgd(TorchStrategy):
    """One replica."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._averaged = [p.detach() for p in self.parameters] + trained_statistics(task, self.module)
        self._own: list[Tensor] | None = None
        """The replica's own values while the module holds the average; None while the module holds the replica."""
        self._period = int(task.options["period"])  # type: ignore[arg-type]
        self._steps_done = 0

    def train_step(self, batch: Batch) -> Tensor:
        self._restore_replica()
        loss = super().train_step(batch)
        self._steps_done += 1
        if self._steps_done % self._period == 0:
            average(self._averaged, self.task.world.size)
        return loss

    def logits(self, x: Tensor) -> Tensor | None:
        self._load_average()
        return super().logits(x)

    def state_dict(self) -> dict[str, Any]:
        self._restore_replica()
        own = super().state_dict()
        replicas: list[dict[str, Any]] = [own] * self.task.world.size
        if self.task.world.size > 1:
            distributed.gather_object(own, replicas if self.task.world.rank == 0 else None, group=self.task.host_group)
        self._load_average()
        model = super().state_dict()["model"]
        return {"model": model, "optimizer": {**own["optimizer"], "replicas": replicas, "steps": self._steps_done}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._own = None
        super().load_state_dict(state["optimizer"]["replicas"][self.task.world.rank])
        self._steps_done = state["optimizer"]["steps"]

    def _load_average(self) -> None:
        if self._own is None:
            self._own = [t.clone() for t in self._averaged]
            average(self._averaged, self.task.world.size)

    def _restore_replica(self) -> None:
        if self._own is not None:
            for tensor, own in zip(self._averaged, self._own, strict=True):
                tensor.copy_(own)
            self._own = None


DECLARATION = StrategyDeclaration(
    name="local_sgd",
    summary="One replica per device that trains alone; parameters are averaged every period steps.",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    unsupported_compile=lambda _how, _options: "",
    splits_batch=True,
    options=(Option("period", 8, "Steps between two averages of the replicas", minimum=1),),
    batch_norm_treatment="per_rank",
    contract_options=({"period": 1},),
    equal_under=("sgd",),
    create=lambda: LocalSgd,
)
