"""``model_parallel``: the model in two parts on two devices, one of which always waits for the other.

The naive split without micro-batches, which saves memory and never time. The whole batch passes through, so batch norm
sees all of it, and the result is eager's.
"""

from __future__ import annotations

from collections.abc import Sequence

from workloads.contract import Topology
from workloads.lazy import lazy_imports
from workloads.registry import StrategyDeclaration
from workloads.strategies.shared import limits, partition
from workloads.strategies.shared.compiled_steps import Model, compile_for_one_shape
from workloads.strategies.shared.protocol import Task
from workloads.strategies.shared.torch_strategy import TorchStrategy

with lazy_imports(__name__):
    from torch import Tensor

    from workloads.models.shared import layer_lists


class ModelParallel(TorchStrategy):
    """Both parts, in one process."""

    def __init__(self, task: Task) -> None:
        layers = task.layers()
        balance = partition.decide_balance(task, layers, partition.TWO_PARTS, samples=task.config.batch_size)
        self._devices = task.devices
        self._parts = layer_lists.cut(layers, balance)
        for part, device in zip(self._parts, self._devices, strict=True):
            part.to(device)
        chain = self._chain(self._parts)
        super().__init__(
            task,
            task.module,
            model=chain,
            evaluated=chain,
            compile_model=lambda _model: self._chain([compile_for_one_shape(part) for part in self._parts]),
        )

    def set_training(self, training: bool) -> None:
        for part in self._parts:
            self.task.set_training(part, training)

    def _chain(self, parts: Sequence[Model]) -> Model:
        def compute(x: Tensor) -> Tensor:
            for part, device in zip(parts, self._devices, strict=True):
                x = part(x.to(device, non_blocking=True))
            return x

        return compute


DECLARATION = StrategyDeclaration(
    name="model_parallel",
    summary="The model in two parts on two devices, which take turns: saves memory, costs time.",
    topology=lambda _options: Topology.ONE_PROCESS,
    unsupported_hardware=lambda hardware, options: (
        partition.unsupported_on_two_devices("model_parallel", hardware, options)
        or partition.ignored_balance_by(options, "size")
    ),
    unsupported_layers=lambda layers, _, options: partition.unsupported_layers(layers, partition.TWO_PARTS, options),
    unsupported_compile=limits.not_captured("one CUDA graph cannot capture a step over two GPUs"),
    needs_layers=True,
    splits_batch=False,
    options=(
        partition.balance_option("Layers on each of the two devices; [] shares them out"),
        partition.balance_by_option("size"),
    ),
    batch_norm_treatment="whole_batch",
    contract_options=({}, {"balance_by": "time"}),
    divides_state=lambda _options: True,
    create=lambda: ModelParallel,
)
