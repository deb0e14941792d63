"""``gpipe``: torchgpipe, the pipeline of the GPipe paper. One process drives all devices, with a thread for each.

The model is a list of layers. ``segments`` first groups them by their share of the time, as the published study did; a
``balance`` such as [1, 1] then counts segments instead of layers. ``torch.chunk`` splits a batch into micro-batches.

Batch norm normalizes each micro-batch by itself. With ``deferred_batch_norm`` its running statistics move once a batch,
by mean and (biased) variance of the whole batch; otherwise once a micro-batch, and once more when it is recomputed.
"""

from __future__ import annotations

import warnings
from typing import Any

from workloads.contract import Hardware, Topology
from workloads.lazy import lazy_imports
from workloads.registry import Option, Options, StrategyDeclaration
from workloads.strategies.shared import limits, partition
from workloads.strategies.shared.compiled_steps import Model
from workloads.strategies.shared.protocol import Task
from workloads.strategies.shared.torch_strategy import TorchStrategy, under_autocast

with lazy_imports(__name__):
    import torch
    from torch import Tensor, nn

    from workloads.loaders.protocol import Batch
    from workloads.models.shared import layer_lists


class Gpipe(TorchStrategy):
    """The whole model, spread over the devices of this process."""

    inference_mode = False
    """torchgpipe's threads inherit whether gradients are enabled (torchgpipe/worker.py), not inference mode."""

    def __init__(self, task: Task) -> None:
        # torchgpipe 0.0.7 calls Tensor.storage() (torchgpipe/stream.py), which torch 2 deprecates.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        from torchgpipe import GPipe

        chunks = task.options["chunks"]
        assert isinstance(chunks, int)
        self._chunks = chunks
        deferred = bool(task.options["deferred_batch_norm"])
        module, self._deferred = _defer_batch_norm(task.module, chunks) if deferred else (task.module, [])
        layers = task.layers()
        samples = -(-task.config.batch_size // chunks)
        balance = partition.decide_balance(task, layers, len(task.devices), samples)
        parts = [under_autocast(task, part) for part in layer_lists.cut(layers, balance)]
        pipeline = GPipe(
            torch.nn.Sequential(*parts),
            balance=[1] * len(parts),
            devices=task.devices,
            chunks=chunks,
            checkpoint=str(task.options["checkpoint"]),
        )
        pipeline.eval()
        super().__init__(task, module, model=pipeline, evaluated=pipeline)

    def train_step(self, batch: Batch) -> Tensor:
        samples = len(batch.x)
        for layer in self._deferred:
            layer.chunks = -(-samples // -(-samples // self._chunks))  # a small batch makes fewer micro-batches
        return super().train_step(batch)

    def compute(self, model: Model, x: Tensor) -> Tensor:
        return model(x)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        # DeferredBatchNorm's own buffers, which eager's model does not have.
        scratch = (".sum", ".sum_squares") if self._deferred else ()
        state["model"] = {k: v for k, v in state["model"].items() if not f".{k}".endswith(scratch)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"], strict=not self._deferred)
        self.optimizer.load_state_dict(state["optimizer"])


def _defer_batch_norm(module: nn.Module, chunks: int) -> tuple[nn.Module, list[Any]]:
    """Convert the model's batch norm, before it is cut, so that names in a checkpoint stay the model's.

    Returns:
        The converted model and its deferred layers.
    """
    from torchgpipe.batchnorm import DeferredBatchNorm

    class Deferred(DeferredBatchNorm):
        """Sums in the precision of its statistics: a variance is the small difference of two large sums, and of
        bfloat16's eight bits nothing is left in it."""

        def _track(self, x: Tensor) -> bool:
            with torch.autocast(x.device.type, enabled=False):
                return bool(super()._track(x.to(self.sum.dtype)))

    module = DeferredBatchNorm.convert_deferred_batch_norm(module, chunks)
    layers: list[Any] = [m for m in module.modules() if isinstance(m, DeferredBatchNorm)]
    for layer in layers:
        layer.__class__ = Deferred  # convert_deferred_batch_norm makes DeferredBatchNorm whatever class it is called on
        layer.to(layer.running_mean.dtype)  # it creates the sums in float32
    return module, layers


def _unsupported_hardware(hardware: Hardware, options: Options) -> str:
    balance, segments = options["balance"], options["segments"]
    assert isinstance(balance, tuple) and isinstance(segments, int)
    if why := limits.one_node("gpipe", hardware):
        return why
    if balance and len(balance) != hardware.devices:
        return f"balance {list(balance)} is for {len(balance)} devices and {hardware} has {hardware.devices}"
    if balance and segments and sum(balance) != segments:
        return f"balance {list(balance)} adds up to {sum(balance)} and there are {segments} segments"
    if segments and segments < hardware.devices:
        return f"{segments} segments are too few for the {hardware.devices} devices of {hardware}"
    return partition.ignored_balance_by(options, "time")


DECLARATION = StrategyDeclaration(
    name="gpipe",
    summary="torchgpipe: one process, the model's layers spread over devices, micro-batches streaming through them.",
    topology=lambda _options: Topology.ONE_PROCESS,
    unsupported_hardware=_unsupported_hardware,
    unsupported_layers=lambda layers, hardware, options: partition.unsupported_layers(
        layers, hardware.devices, options
    ),
    unsupported_compile=lambda _how, _options: (
        "torchgpipe runs the model's parts in its own threads, which torch.compile and CUDA graphs do not cover"
    ),
    needs_layers=True,
    splits_batch=False,
    micro_batches=lambda options: int(options["chunks"]),  # type: ignore[arg-type]
    packages=("torch", "torchgpipe"),
    options=(
        partition.CHUNKS,
        Option(
            "checkpoint",
            "except_last",
            "Of which micro-batches activations are computed again in the backward pass",
            choices=("always", "except_last", "never"),
        ),
        partition.balance_option("Layers, or segments, on each device; [] shares them out"),
        partition.balance_by_option("time"),
        Option(
            "segments",
            0,
            "Group layers to so many segments of equal cost first, which balance counts then; 0 does not",
            minimum=0,
        ),
        Option("deferred_batch_norm", True, "Move running statistics once a batch and not once a micro-batch"),
    ),
    batch_norm_treatment="per_micro_batch",
    contract_options=(
        {},
        {"checkpoint": "always", "segments": 4, "balance_by": "size", "deferred_batch_norm": False},
        {"checkpoint": "never", "chunks": 3},
    ),
    divides_state=lambda _options: True,
    create=lambda: Gpipe,
)
