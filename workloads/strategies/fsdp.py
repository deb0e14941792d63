"""``fsdp``: torch's FSDP2, ``fully_shard``: parameters, gradients and optimiser state are split over ranks.

A unit, such as a residual or transformer block, is gathered for the time it computes. Which modules are units follows
from the model's list of layers: those of at least ``min_unit_parameters`` that the model itself calls. What is left is
a unit that stays gathered between forward and backward pass; with ``wrap = "model"`` it is everything, and ``reshard``
says whether it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from workloads.contract import Topology
from workloads.errors import InputError
from workloads.registry import Option, Options, StrategyDeclaration
from workloads.strategies.shared.running_statistics import RunningStatistics

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from workloads.loaders.protocol import Batch
    from workloads.strategies.shared.compiled_steps import Model
    from workloads.strategies.shared.protocol import Task

SMALLEST_UNIT = 100_000


class Fsdp:
    """This rank's share of the model."""

    optimizer: torch.optim.Optimizer

    def __init__(self, task: Task) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from workloads.strategies.shared.compiled_steps import Steps

        self._task = task
        self._module = task.module
        policy = MixedPrecisionPolicy()
        if task.options["mixed_precision"] == "cast":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        reshard = bool(task.options["reshard"])
        mesh = init_device_mesh(task.device.type, (task.world.size,))
        # Unit by unit from the CPU: no device ever holds the whole model.
        self._units = list(_units(task))
        for unit in self._units:
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        # What blocks leave over is needed first in the backward pass, or small.
        rest = reshard and task.options["wrap"] == "model"
        fully_shard(self._module, mesh=mesh, reshard_after_forward=rest, mp_policy=policy)
        self._parameters: list[Any] = list(self._module.parameters())
        # The optimiser sees plain tensors in the same memory: it has no fused update of sharded ones.
        self._shards = [torch.nn.Parameter(p.detach().to_local()) for p in self._parameters]
        self.optimizer = task.make_optimizer(self._shards)
        self._statistics = RunningStatistics(task, self._module)
        self._steps = Steps(
            task,
            self._step,
            self._module,
            self.optimizer,
            [*self._shards, *self._module.buffers()],
            compile_model=self._compiled_units,
        )

    def train_step(self, batch: Batch) -> Tensor:
        self._statistics.differ = True
        return self._steps(batch)

    def prepare(self, batch: Batch) -> None:
        self._steps.prepare(batch)

    def _compiled_units(self, model: Model) -> Model:
        """The model, whose units compute by compiled code: gathering and giving up happen between units, outside."""
        from workloads.strategies.shared.compiled_steps import compiled

        units: list[Any] = self._units or [self._module]
        plain = [unit.forward for unit in units]
        fast = [compiled(forward) for forward in plain]

        def compute(x: Tensor) -> Tensor:
            for unit, forward in zip(units, fast, strict=True):
                unit.forward = forward
            try:
                return model(x)
            finally:
                for unit, forward in zip(units, plain, strict=True):
                    unit.forward = forward

        return compute

    def _step(self, model: Model, batch: Batch) -> Tensor:
        self._task.set_training(self._module, True)
        self._module.zero_grad(set_to_none=True)
        loss = self._task.loss_sum(self._task.forward(model, batch.x), batch.y)
        if batch.num_local == 0:
            loss = loss * 0.0
        # As DDP does, FSDP divides the summed gradients by the world size.
        self._task.backward(loss, self._task.world.size / batch.num_global)
        for shard, parameter in zip(self._shards, self._parameters, strict=True):
            shard.grad = None if parameter.grad is None else parameter.grad.to_local()
        self.optimizer.step()
        return loss.detach()

    def logits(self, x: Tensor) -> Tensor:
        import torch

        self._statistics.average()
        self._task.set_training(self._module, False)
        with torch.no_grad():  # inference mode would leave gathered parameters that no later step can train
            return self._task.forward(self._module, x)

    def state_dict(self) -> dict[str, Any]:
        self._statistics.average()
        keep = self._task.world.rank == 0
        model = _whole(self._module.state_dict(), keep)
        optimizer = self.optimizer.state_dict()
        states = {
            i: _whole({k: self._sharded(v, i) for k, v in state.items()}, keep)
            for i, state in optimizer["state"].items()
        }
        return {"model": model, "optimizer": {**optimizer, "state": states}} if keep else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self._module.state_dict()
        self._module.load_state_dict({name: _like(tensor, own[name]) for name, tensor in state["model"].items()})
        states = {
            i: {k: _like(v, self._parameters[i]).to_local() if _has_parts(v) else v for k, v in values.items()}
            for i, values in state["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict({**state["optimizer"], "state": states})
        self._statistics.differ = False

    def close(self) -> None:
        self._steps.close()

    def _sharded(self, value: Any, index: int) -> Any:
        """What the optimiser keeps for a shard, as part of what it would keep for the whole parameter."""
        from torch.distributed.tensor import DTensor

        like = self._parameters[index]
        if not _has_parts(value):
            return value
        return DTensor.from_local(
            value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def _units(task: Task) -> Iterator[nn.Module]:
    if task.options["wrap"] == "model":
        return
    smallest = task.options["min_unit_parameters"]
    assert isinstance(smallest, int)
    modules = [module for module in task.module.modules() if module is not task.module]
    found: dict[nn.Module, None] = {}
    for layer in _layers(task):
        own = set(layer.parameters())
        # A layer may be a part of a module that is called as a whole, such as half a block.
        holders = [layer] if layer in modules else [m for m in modules if own and own <= set(m.parameters())]
        sizes = {module: sum(p.numel() for p in module.parameters()) for module in holders}
        unit = min(sizes, key=sizes.__getitem__, default=None)
        if unit is not None and sizes[unit] >= smallest:
            found[unit] = None
    yield from found


def _layers(task: Task) -> list[nn.Module]:
    try:
        return task.layers()
    except InputError as error:
        raise InputError(
            error.what,
            where="experiment.toml: strategy",
            why=error.why or 'wrap = "blocks" gathers layers',
            hint='set wrap = "model", which gathers the model as a whole',
        ) from error


def _whole(tensors: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Sharded tensors put together, one after another, and moved to the CPU of the rank that keeps them. Collective."""
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    whole = {}
    for name, value in tensors.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            whole[name] = full.detach().to("cpu", copy=True) if isinstance(full, Tensor) else full
    return whole


def _like(full: Tensor, sharded: Tensor) -> Any:
    """A whole tensor, which every rank has, split as another one is. Collective."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(sharded, DTensor):
        return full
    return distribute_tensor(full.to(sharded.device), sharded.device_mesh, sharded.placements)


def _has_parts(value: Any) -> bool:
    """Whether an optimiser keeps a number for each of a parameter's, as its momentum, and not one for all."""
    return getattr(value, "ndim", 0) > 0


def _unsupported_compile(how: str, _options: Options) -> str:
    return "" if how == "default" else "FSDP2 takes and gives up memory in every step, and a CUDA graph keeps its own"


def _unsupported_training(train: Mapping[str, Any], options: Options) -> str:
    if train["channels_last"]:
        return "FSDP2 does not shard channels_last parameters"
    if options["mixed_precision"] == "cast" and train["precision"] != "bf16":
        return f'mixed_precision = "cast" is for precision = "bf16", not {train["precision"]}'
    if options["wrap"] == "model" and options["min_unit_parameters"] != SMALLEST_UNIT:
        return 'min_unit_parameters means nothing beside wrap = "model": leave one of the two out'
    return ""


def _unsupported_batch_norm(options: Options) -> str:
    if options["mixed_precision"] != "cast":
        return ""
    return (
        'mixed_precision = "cast" makes weights bf16, which batch norm cannot use beside its fp32 statistics: '
        'set mixed_precision = "autocast"'
    )


DECLARATION = StrategyDeclaration(
    name="fsdp",
    summary="FSDP2: one process per device; parameters, gradients and optimiser state sharded, gathered when needed.",
    framework="torch",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    unsupported_training=_unsupported_training,
    unsupported_compile=_unsupported_compile,
    unsupported_batch_norm=_unsupported_batch_norm,
    splits_batch=True,
    packages=("torch",),
    options=(
        Option(
            name="wrap",
            type=str,
            default="blocks",
            choices=("blocks", "model"),
            summary="What is gathered at a time: a block of the model, or all of it",
        ),
        Option(
            name="min_unit_parameters",
            type=int,
            default=SMALLEST_UNIT,
            minimum=0,
            summary="Layers with fewer parameters are gathered with the rest",
        ),
        Option(
            name="reshard",
            type=bool,
            default=True,
            summary="Give gathered parameters up after the forward pass and gather them again for the backward pass",
        ),
        Option(
            name="mixed_precision",
            type=str,
            default="autocast",
            choices=("autocast", "cast"),
            summary='With precision "bf16": autocast as other strategies do, or gather and use parameters in bf16',
        ),
    ),
    batch_norm_treatment="per_rank",
    contract_options=({}, {"reshard": False}, {"wrap": "model"}),
    divides_state=lambda _options: True,
    create=lambda: Fsdp,
)
