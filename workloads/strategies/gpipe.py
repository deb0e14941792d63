"""``gpipe``: torchgpipe, the pipeline of the GPipe paper. One process drives all devices, a thread for each.

The model is a list of layers. ``segments`` groups them first, by their share of the time, as the published study did; a
``balance`` such as [1, 1] then counts segments, else layers. Micro-batches are what ``torch.chunk`` makes of a batch.

Batch norm normalises each micro-batch by itself. With ``deferred_batch_norm`` its running statistics move once a batch,
by the whole batch's mean and (biased) variance, else once a micro-batch, and once more when it is recomputed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads.contract import Hardware, Topology
from workloads.registry import Option, Options, StrategyDeclaration
from workloads.strategies.shared.partition import ignores_balance_by, misfit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workloads.loaders.protocol import Batch
    from workloads.strategies.shared.protocol import Task


class Gpipe:
    """The whole model, spread over the devices of this process."""

    optimizer: torch.optim.Optimizer

    def __init__(self, task: Task) -> None:
        import warnings

        import torch

        # torchgpipe 0.0.7 asks for a tensor's storage the way torch 1 wanted it.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        from torchgpipe import GPipe

        from workloads.models.shared import layer_lists
        from workloads.strategies.shared.partition import sizes_of_parts
        from workloads.strategies.shared.under_autocast import under_autocast

        chunks = task.options["chunks"]
        assert isinstance(chunks, int)
        self._task = task
        self._chunks = chunks
        self._module = task.module
        self._deferred = self._defer_batch_norm() if task.options["deferred_batch_norm"] else []
        layers = task.layers()
        sizes = sizes_of_parts(task, layers, len(task.devices), samples=-(-task.config.batch_size // chunks))
        parts = [under_autocast(task, part) for part in layer_lists.cut(layers, sizes)]
        self._pipeline = GPipe(
            torch.nn.Sequential(*parts),
            balance=[1] * len(parts),
            devices=task.devices,
            chunks=chunks,
            checkpoint=str(task.options["checkpoint"]),
        )
        self._pipeline.eval()
        self._first, self._last = self._pipeline.devices[0], self._pipeline.devices[-1]
        self.optimizer = task.make_optimizer(self._module.parameters())

    def train_step(self, batch: Batch) -> Tensor:
        self._task.set_training(self._pipeline, True)
        samples = len(batch.x)
        for layer in self._deferred:
            layer.chunks = -(-samples // -(-samples // self._chunks))  # a small batch makes fewer micro-batches
        self.optimizer.zero_grad(set_to_none=True)
        logits = self._pipeline(batch.x.to(self._first))
        loss = self._task.loss_sum(logits, batch.y.to(self._last, non_blocking=True))
        self._task.backward(loss, 1 / batch.num_global)
        self.optimizer.step()
        return loss.detach().to(self._task.device, non_blocking=True)

    def logits(self, x: Tensor) -> Tensor:
        import torch

        self._task.set_training(self._pipeline, False)
        with torch.no_grad():  # what its threads inherit; inference mode they do not
            logits: Tensor = self._pipeline(x.to(self._first))
        return logits.to(self._task.device)

    def state_dict(self) -> dict[str, Any]:
        from workloads.engines.checkpoint import cpu_state

        state = cpu_state(self._module, self.optimizer)
        scratch = tuple(f".{name}" for name in ("sum", "sum_squares")) if self._deferred else ()
        state["model"] = {k: v for k, v in state["model"].items() if not f".{k}".endswith(scratch)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state["model"], strict=not self._deferred)
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Its threads end with every step."""

    def _defer_batch_norm(self) -> list[Any]:
        import torch
        from torchgpipe.batchnorm import DeferredBatchNorm

        class Deferred(DeferredBatchNorm):
            """Sums in the precision of its statistics: a variance is what is left of two sums that nearly cancel out,
            and of bfloat16's eight bits nothing is left."""

            def _track(self, x: Tensor) -> bool:
                with torch.autocast(x.device.type, enabled=False):
                    return bool(super()._track(x.to(self.sum.dtype)))

        # In the model itself, before it is cut: so names in a checkpoint stay the model's.
        self._module = DeferredBatchNorm.convert_deferred_batch_norm(self._module, self._chunks)
        layers: list[Any] = [m for m in self._module.modules() if isinstance(m, DeferredBatchNorm)]
        for layer in layers:
            layer.__class__ = Deferred  # the conversion makes torchgpipe's own only
            layer.to(layer.running_mean.dtype)  # its sums are float32 otherwise
        return layers


def _unsupported_hardware(hardware: Hardware, options: Options) -> str:
    balance, segments = options["balance"], options["segments"]
    assert isinstance(balance, tuple) and isinstance(segments, int)
    if hardware.nodes > 1:
        return f"gpipe is one process, which cannot drive the devices of {hardware.nodes} nodes"
    if balance and len(balance) != hardware.devices:
        return f"balance {list(balance)} is for {len(balance)} devices and {hardware} has {hardware.devices}"
    if balance and segments and sum(balance) != segments:
        return f"balance {list(balance)} adds up to {sum(balance)} and there are {segments} segments"
    if segments and segments < hardware.devices:
        return f"{segments} segments cannot be shared out to the {hardware.devices} devices of {hardware}"
    return ignores_balance_by(options, "time")


DECLARATION = StrategyDeclaration(
    name="gpipe",
    summary="torchgpipe: one process, the model's layers spread over devices, micro-batches streaming through them.",
    framework="torch",
    topology=lambda _options: Topology.ONE_PROCESS,
    unsupported_hardware=_unsupported_hardware,
    unsupported_layers=lambda layers, hardware, options: misfit(layers, hardware.devices, options),
    unsupported_compile=lambda _how, _options: (
        "torchgpipe runs a model's parts in threads of its own, where torch.compile and CUDA graphs do not reach"
    ),
    needs_layers=True,
    splits_batch=False,
    micro_batches=lambda options: int(options["chunks"]),  # type: ignore[arg-type]
    packages=("torch", "torchgpipe"),
    options=(
        Option(
            name="chunks",
            type=int,
            default=4,
            minimum=1,
            summary="Micro-batches a batch",
        ),
        Option(
            name="checkpoint",
            type=str,
            default="except_last",
            choices=("always", "except_last", "never"),
            summary="Of which micro-batches activations are computed again in the backward pass",
        ),
        Option(
            name="balance",
            type=tuple[int, ...],
            default=(),
            minimum=1,
            summary="Layers, or segments, on each device; [] shares them out",
        ),
        Option(
            name="balance_by",
            type=str,
            default="time",
            choices=("time", "size"),
            summary="Layers are shared out by measured time or by number of parameters",
        ),
        Option(
            name="segments",
            type=int,
            default=0,
            minimum=0,
            summary="Group layers to so many segments of equal cost first, which balance counts then; 0 does not",
        ),
        Option(
            name="deferred_batch_norm",
            type=bool,
            default=True,
            summary="Move running statistics once a batch and not once a micro-batch",
        ),
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
