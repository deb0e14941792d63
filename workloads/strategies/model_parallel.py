"""``model_parallel``: the model in two parts on two devices, one of which always waits for the other.

The naive split, without micro-batches: what it gains is memory, never time. The whole batch goes through, so batch norm
sees all of it, and the result is eager's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workloads.contract import Hardware, Topology
from workloads.registry import Option, Options, StrategyDeclaration
from workloads.strategies.shared.partition import ignores_balance_by, misfit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workloads.loaders.protocol import Batch
    from workloads.strategies.shared.compiled_steps import Model
    from workloads.strategies.shared.protocol import Task


class ModelParallel:
    """Both parts, in one process."""

    optimizer: torch.optim.Optimizer

    def __init__(self, task: Task) -> None:
        from workloads.models.shared import layer_lists
        from workloads.strategies.shared.compiled_steps import Steps, compiled
        from workloads.strategies.shared.partition import sizes_of_parts

        self._task = task
        layers = task.layers()
        self._parts = layer_lists.cut(layers, sizes_of_parts(task, layers, PARTS, samples=task.config.batch_size))
        for part, device in zip(self._parts, task.devices, strict=True):
            part.to(device)
        self.optimizer = task.make_optimizer(task.module.parameters())
        self._steps = Steps(
            task,
            self._step,
            self._over(self._parts),
            self.optimizer,
            [*task.module.parameters(), *task.module.buffers()],
            compile_model=lambda _: self._over([compiled(part) for part in self._parts]),
        )

    def train_step(self, batch: Batch) -> Tensor:
        return self._steps(batch)

    def prepare(self, batch: Batch) -> None:
        self._steps.prepare(batch)

    def _step(self, model: Model, batch: Batch) -> Tensor:
        self._set_training(True)
        self.optimizer.zero_grad(set_to_none=True)
        logits = self._task.forward(model, batch.x)
        loss = self._task.loss_sum(logits, batch.y.to(logits.device, non_blocking=True))
        self._task.backward(loss, 1 / batch.num_global)
        self.optimizer.step()
        return loss.detach().to(self._task.device, non_blocking=True)

    def logits(self, x: Tensor) -> Tensor:
        import torch

        self._set_training(False)
        with torch.inference_mode():
            return self._task.forward(self._over(self._parts), x).to(self._task.device)

    def state_dict(self) -> dict[str, Any]:
        from workloads.engines.checkpoint import cpu_state

        return cpu_state(self._task.module, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._task.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        self._steps.close()

    def _over(self, parts: Sequence[Model]) -> Model:
        def compute(x: Tensor) -> Tensor:
            for part, device in zip(parts, self._task.devices, strict=True):
                x = part(x.to(device, non_blocking=True))
            return x

        return compute

    def _set_training(self, training: bool) -> None:
        for part in self._parts:
            self._task.set_training(part, training)


PARTS = 2


def unsupported_hardware(name: str, hardware: Hardware, options: Options) -> str:
    """Why a strategy of two parts cannot run there."""
    balance = options["balance"]
    assert isinstance(balance, tuple)
    if hardware.devices != PARTS or hardware.nodes > 1:
        return f"{name} has two parts for two devices of one node, not for {hardware}"
    if balance and len(balance) != PARTS:
        return f"{name} has two parts, and balance {list(balance)} names {len(balance)}"
    return ""


def _unsupported_compile(how: str, _options: Options) -> str:
    return "" if how == "default" else "a step over two GPUs of one process is more than one CUDA graph can hold"


DECLARATION = StrategyDeclaration(
    name="model_parallel",
    summary="The model in two parts on two devices, which take turns: saves memory, costs time.",
    framework="torch",
    topology=lambda _options: Topology.ONE_PROCESS,
    unsupported_hardware=lambda hardware, options: (
        unsupported_hardware("model_parallel", hardware, options) or ignores_balance_by(options, "size")
    ),
    unsupported_layers=lambda layers, _hardware, options: misfit(layers, PARTS, options),
    unsupported_compile=_unsupported_compile,
    needs_layers=True,
    splits_batch=False,
    packages=("torch",),
    options=(
        Option(
            name="balance",
            type=tuple[int, ...],
            default=(),
            minimum=1,
            summary="Layers on each of the two devices; [] shares them out",
        ),
        Option(
            name="balance_by",
            type=str,
            default="size",
            choices=("size", "time"),
            summary="Layers are shared out by number of parameters or by measured time",
        ),
    ),
    batch_norm_treatment="whole_batch",
    contract_options=({}, {"balance_by": "time"}),
    divides_state=lambda _options: True,
    create=lambda: ModelParallel,
)
