"""``ddp``: torch's DistributedDataParallel, one process per device, gradients averaged by all-reduce.

Each rank takes its own part of the global batch and batch norm normalises over that part. Running statistics are not
broadcast every step, which would cost a collective a step and keep rank 0's only; they are averaged over ranks before
an evaluation or a checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads.contract import Topology
from workloads.registry import Option, StrategyDeclaration

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workloads.loaders import Batch
    from workloads.strategies.protocol import Task


class Ddp:
    """A replica on each rank; gradients meet during the backward pass."""

    optimizer: torch.optim.Optimizer

    def __init__(self, task: Task) -> None:
        import inspect

        import torch
        from torch.nn.parallel import DistributedDataParallel

        # torch 2.14 renamed the flag that stops a broadcast of all buffers before every step.
        known = inspect.signature(DistributedDataParallel).parameters
        no_broadcast: dict[str, Any] = {
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
        }
        self._task = task
        self._inference = torch.inference_mode
        self._module = task.module.to(task.device)
        self._replica = DistributedDataParallel(
            self._module,
            device_ids=[task.device.index] if task.device.type == "cuda" else None,
            **no_broadcast,
            bucket_cap_mb=task.options["bucket_cap_mb"],
            gradient_as_bucket_view=task.options["gradient_as_bucket_view"],
            static_graph=task.options["static_graph"],
        )
        self.optimizer = task.make_optimizer(self._module.parameters())
        norms = [m for m in self._module.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
        learning = [m for m in norms if m.track_running_stats and task.config.batch_norm == "batch"]
        self._statistics = [b for m in learning for b in (m.running_mean, m.running_var) if b is not None]
        self._statistics_differ = False

    def train_step(self, batch: Batch) -> Tensor:
        self._task.set_training(self._module, True)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._task.loss_sum(self._task.forward(self._replica, batch.x), batch.y)
        if batch.num_local == 0:
            loss = loss * 0.0
        # DDP divides the summed gradients by the world size, whatever each rank's share of the samples is.
        weight = self._task.world.size / batch.num_global  # rank weighting
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self._statistics_differ = True
        return loss.detach()

    def logits(self, x: Tensor) -> Tensor:
        self._average_statistics()
        self._task.set_training(self._module, False)
        with self._inference():
            return self._task.forward(self._module, x)

    def state_dict(self) -> dict[str, Any]:
        from workloads.checkpoint import cpu_state

        self._average_statistics()
        return cpu_state(self._module, self.optimizer) if self._task.world.rank == 0 else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._statistics_differ = False

    def close(self) -> None:
        """Nothing outlives the object."""

    def _average_statistics(self) -> None:
        if not self._statistics_differ:
            return
        self._statistics_differ = False
        if self._statistics and self._task.world.size > 1:
            import torch
            from torch import distributed

            # One message for all layers: hundreds of small ones cost more than the evaluation of a small test set.
            flat = torch.cat([b.reshape(-1) for b in self._statistics])
            distributed.all_reduce(flat)
            parts = torch.split(flat / self._task.world.size, [b.numel() for b in self._statistics])
            for buffer, mean in zip(self._statistics, parts, strict=True):
                buffer.copy_(mean.view_as(buffer))


DECLARATION = StrategyDeclaration(
    name="ddp",
    summary="DistributedDataParallel: one process per device, each with its part of the batch, gradients all-reduced.",
    framework="torch",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    refuses=lambda _hardware, _options: "",
    splits_batch=True,
    packages=("torch",),
    options=(
        Option(
            name="bucket_cap_mb",
            type=int,
            default=25,
            minimum=1,
            summary="Gradients are all-reduced in buckets this large",
        ),
        Option(
            name="gradient_as_bucket_view",
            type=bool,
            default=True,
            summary="Gradients live inside the buckets, which saves a copy and their memory",
        ),
        Option(
            name="static_graph",
            type=bool,
            default=False,
            summary="Promise that every step uses the same parameters in the same order",
        ),
    ),
    batch_norm_treatment="per_rank",
    create=lambda: Ddp,
)
