"""``ddp``: torch's DistributedDataParallel, one process per device, gradients averaged by all-reduce.

Each rank takes its own part of the global batch and batch norm normalises over that part; running statistics are
averaged over ranks before an evaluation or a checkpoint.

``gradient_compression`` rounds each rank's gradients before they are added, which halves what is sent of 32-bit ones:
to 8 bits of precision (bf16, any size) or 11 (fp16, nothing above 65504 or below 6e-8). Parameters and optimiser keep
their precision; what is learned differs by that rounding.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from workloads.contract import Topology
from workloads.registry import Option, Options, StrategyDeclaration
from workloads.strategies.shared.replica import Replica
from workloads.strategies.shared.running_statistics import RunningStatistics

if TYPE_CHECKING:
    from torch import Tensor

    from workloads.loaders.protocol import Batch
    from workloads.strategies.shared.compiled_steps import Model
    from workloads.strategies.shared.protocol import Task

GRAPH_WARMUP_STEPS = 11
"""DDP looks at its own timing in each of its first ten steps, which cannot be recorded."""


class Ddp(Replica):
    """A replica on each rank; gradients meet during the backward pass."""

    def __init__(self, task: Task) -> None:
        import inspect

        import torch
        from torch.nn.parallel import DistributedDataParallel

        from workloads.strategies.shared.compiled_steps import Steps, beside

        # torch 2.14 renamed the flag that stops a broadcast of all buffers before every step.
        known = inspect.signature(DistributedDataParallel).parameters
        no_broadcast: dict[str, Any] = {
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
        }
        self._task = task
        self._inference = torch.inference_mode
        self._module = task.module.to(task.device)
        recorded = task.config.compile in ("graphs", "default_graphs")
        # It holds on to the ends of the backward pass, which belong to the stream that it was made on.
        with beside(task.device) if recorded else contextlib.nullcontext():
            self._replica = DistributedDataParallel(
                self._module,
                device_ids=[task.device.index] if task.device.type == "cuda" else None,
                **no_broadcast,
                bucket_cap_mb=task.options["bucket_cap_mb"],
                gradient_as_bucket_view=task.options["gradient_as_bucket_view"],
                static_graph=task.options["static_graph"],
            )
        _compress(self._replica, task.options)
        self.optimizer = task.make_optimizer(self._module.parameters())
        self._steps = Steps(
            task,
            self._step,
            self._replica,
            self.optimizer,
            [*self._module.parameters(), *self._module.buffers()],
            warmup=GRAPH_WARMUP_STEPS,
        )
        self._statistics = RunningStatistics(task, self._module)

    def _step(self, model: Model, batch: Batch) -> Tensor:
        self._task.set_training(self._module, True)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._task.loss_sum(self._task.forward(model, batch.x), batch.y)
        if batch.num_local == 0:
            loss = loss * 0.0
        # DDP divides the summed gradients by the world size, whatever each rank's share of the samples is.
        weight = self._task.world.size / batch.num_global  # rank weighting
        self._task.backward(loss, weight)
        self.optimizer.step()
        return loss.detach()


def _compress(replica: Any, options: Options) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
    how = options["gradient_compression"]
    if how != "none":
        replica.register_comm_hook(None, hooks[str(how)])


def _unsupported_compile(how: str, options: Options) -> str:
    if how != "default" and options["gradient_compression"] != "none":
        return f'compile = "{how}" records DDP\'s own all-reduce, not one with gradient_compression'
    return ""


DECLARATION = StrategyDeclaration(
    name="ddp",
    summary="DistributedDataParallel: one process per device, each with its part of the batch, gradients all-reduced.",
    framework="torch",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    unsupported_compile=_unsupported_compile,
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
        Option(
            name="gradient_compression",
            type=str,
            default="none",
            choices=("none", "bf16", "fp16"),
            summary="Send gradients as they are, or rounded to 16 bits",
        ),
    ),
    batch_norm_treatment="per_rank",
    create=lambda: Ddp,
)
