"""``ddp``: torch's DistributedDataParallel, one process per device, gradients averaged by all-reduce.

Each rank trains on its own part of the global batch, which its batch norm sees; running statistics are averaged over
ranks before an evaluation or a checkpoint.

``gradient_compression`` rounds each rank's gradients before they are added, which halves the traffic of 32-bit ones: to
8 bits of precision (bf16, any magnitude) or 11 (fp16, magnitudes from 6e-8 to 65504). Parameters and optimizer state
keep their precision; the training result differs by the rounding.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from workloads.contract import Topology
from workloads.lazy import lazy_imports
from workloads.registry import Option, Options, StrategyDeclaration
from workloads.strategies.shared.compiled_steps import CAPTURED, side_stream
from workloads.strategies.shared.protocol import Task
from workloads.strategies.shared.torch_strategy import ReplicaStrategy

with lazy_imports(__name__):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn import parallel

GRAPH_WARMUP_STEPS = 11
"""Torch's note "CUDA semantics: usage with DistributedDataParallel" asks for 11 steps before capture; DDP collects
timing statistics in its first ten."""


class Ddp(ReplicaStrategy):
    """A replica on each rank; gradients are all-reduced during the backward pass."""

    def __init__(self, task: Task) -> None:
        # No broadcast of buffers before each step. torch 2.14 renamed the flag.
        known = inspect.signature(parallel.DistributedDataParallel).parameters
        flag = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        no_broadcast: dict[str, Any] = {flag: False}
        module = task.module.to(task.device)
        # DDP's constructor makes the AccumulateGrad node of each parameter and keeps it, so a captured backward pass
        # needs them on the capture stream (torch's note "CUDA semantics: usage with DistributedDataParallel").
        with side_stream(task.device) if task.config.compile in CAPTURED else contextlib.nullcontext():
            replica = parallel.DistributedDataParallel(
                module,
                device_ids=[task.device.index] if task.device.type == "cuda" else None,
                **no_broadcast,
                bucket_cap_mb=task.options["bucket_cap_mb"],
                gradient_as_bucket_view=task.options["gradient_as_bucket_view"],
                static_graph=task.options["static_graph"],
            )
        hooks: dict[str, Any] = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
        compression = str(task.options["gradient_compression"])
        if compression != "none":
            replica.register_comm_hook(None, hooks[compression])
        super().__init__(task, module, model=replica, warmup_steps=GRAPH_WARMUP_STEPS)


def _unsupported_compile(how: str, options: Options) -> str:
    if how != "default" and options["gradient_compression"] != "none":
        return f'compile = "{how}" captures DDP\'s own all-reduce, not one with gradient_compression'
    return ""


DECLARATION = StrategyDeclaration(
    name="ddp",
    summary="DistributedDataParallel: one process per device, each with its part of the batch, gradients all-reduced.",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    unsupported_compile=_unsupported_compile,
    splits_batch=True,
    options=(
        Option("bucket_cap_mb", 25, "Gradients are all-reduced in buckets this large", minimum=1),
        Option(
            "gradient_as_bucket_view", True, "Gradients live inside the buckets, which saves a copy and their memory"
        ),
        Option("static_graph", False, "Promise that every step uses the same parameters in the same order"),
        Option(
            "gradient_compression",
            "none",
            "Send gradients as they are, or rounded to 16 bits",
            choices=("none", "bf16", "fp16"),
        ),
    ),
    batch_norm_treatment="per_rank",
    create=lambda: Ddp,
)
