"""``fsdp``: torch's FSDP2, ``fully_shard``: parameters, gradients and optimizer state are sharded over ranks.

A unit, such as a residual or transformer block, is gathered while it computes. The model's list of layers decides which
modules are units: those of at least ``min_unit_parameters`` that the model itself calls. All other parameters form one
more unit, which stays gathered between forward and backward pass; with ``wrap = "model"`` it holds everything, and
``reshard`` says whether it stays gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from workloads.contract import Topology
from workloads.errors import InputError
from workloads.lazy import lazy_imports
from workloads.registry import Option, Options, StrategyDeclaration
from workloads.strategies.shared import limits
from workloads.strategies.shared.compiled_steps import Model, compile_for_one_shape
from workloads.strategies.shared.protocol import Task
from workloads.strategies.shared.torch_strategy import ReplicaStrategy

with lazy_imports(__name__):
    import torch
    from torch import Tensor, nn
    from torch.distributed import device_mesh, fsdp, tensor

SMALLEST_UNIT = 100_000


class Fsdp(ReplicaStrategy):
    """This rank's shard of the model."""

    inference_mode = False
    """Parameters gathered in inference mode stay inference tensors, which a later training step cannot use."""

    def __init__(self, task: Task) -> None:
        policy = fsdp.MixedPrecisionPolicy()
        if task.options["mixed_precision"] == "cast":
            policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        reshard = bool(task.options["reshard"])
        mesh = device_mesh.init_device_mesh(task.device.type, (task.world.size,))
        # Unit by unit from the CPU, so that no device ever holds the whole model.
        self._units = list(_units(task))
        for unit in self._units:
            fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        # The backward pass needs what blocks leave over first, or it is small.
        rest = reshard and task.options["wrap"] == "model"
        fsdp.fully_shard(task.module, mesh=mesh, reshard_after_forward=rest, mp_policy=policy)
        self._sharded: list[Any] = list(task.module.parameters())
        # torch has no fused optimizer for DTensors, so the optimizer updates plain tensors in the same memory.
        shards = [torch.nn.Parameter(p.detach().to_local()) for p in self._sharded]
        super().__init__(task, task.module, parameters=shards, compile_model=self._compile_units)

    def clear_gradients(self) -> None:
        self.module.zero_grad(set_to_none=True)  # gradients belong to the module's parameters, not to the shards

    def update(self) -> None:
        # fully_shard reduces gradients into DTensors, which the optimizer of plain tensors does not see.
        for shard, parameter in zip(self.parameters, self._sharded, strict=True):
            shard.grad = None if parameter.grad is None else parameter.grad.to_local()
        super().update()

    def state_dict(self) -> dict[str, Any]:
        self.average_statistics()
        keep = self.task.world.rank == 0
        model = _gathered(self.module.state_dict(), keep)
        optimizer = self.optimizer.state_dict()
        states = {
            i: _gathered({k: self._as_sharded(v, i) for k, v in state.items()}, keep)
            for i, state in optimizer["state"].items()
        }
        return {"model": model, "optimizer": {**optimizer, "state": states}} if keep else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self.module.state_dict()
        model = {name: _sharded_like(value, own[name]) for name, value in state["model"].items()}
        states = {
            i: {k: self._local_shard(v, i) for k, v in values.items()}
            for i, values in state["optimizer"]["state"].items()
        }
        super().load_state_dict({"model": model, "optimizer": {**state["optimizer"], "state": states}})

    def _compile_units(self, model: Model) -> Model:
        """Return the model with compiled units; gathering and resharding happen between units, outside of the code."""
        units: list[Any] = self._units or [self.module]
        as_written = [unit.forward for unit in units]
        compiled = [compile_for_one_shape(forward) for forward in as_written]

        def compute(x: Tensor) -> Tensor:
            for unit, forward in zip(units, compiled, strict=True):
                unit.forward = forward
            try:
                return model(x)
            finally:
                for unit, forward in zip(units, as_written, strict=True):
                    unit.forward = forward

        return compute

    def _local_shard(self, value: Any, index: int) -> Any:
        """Return this rank's shard of the optimizer's state of a whole parameter."""
        return _sharded_like(value, self._sharded[index]).to_local() if _is_per_element(value) else value

    def _as_sharded(self, value: Any, index: int) -> Any:
        """Return the optimizer's state of a shard as a shard of its state of the whole parameter."""
        if not _is_per_element(value):
            return value
        like = self._sharded[index]
        return tensor.DTensor.from_local(
            value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def _units(task: Task) -> Iterator[nn.Module]:
    if task.options["wrap"] == "model":
        return
    smallest = task.options["min_unit_parameters"]
    assert isinstance(smallest, int)
    modules = [module for module in task.module.modules() if module is not task.module]
    found: dict[nn.Module, None] = {}
    try:
        layers = task.layers()
    except InputError as error:
        raise InputError(
            error.what,
            where="experiment.toml: strategy",
            why=error.why or 'wrap = "blocks" gathers layers',
            hint='set wrap = "model", which gathers the model as a whole',
        ) from error
    for layer in layers:
        own = set(layer.parameters())
        # A layer may be a part of a module that is called as a whole, such as half a block.
        holders = [layer] if layer in modules else [m for m in modules if own and own <= set(m.parameters())]
        sizes = {module: sum(p.numel() for p in module.parameters()) for module in holders}
        unit = min(sizes, key=sizes.__getitem__, default=None)
        if unit is not None and sizes[unit] >= smallest:
            found[unit] = None
    yield from found


def _gathered(tensors: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Gather sharded tensors one after another, to the CPU of the rank that keeps them. Collective."""
    whole = {}
    for name, value in tensors.items():
        full = value.full_tensor() if isinstance(value, tensor.DTensor) else value
        if keep:
            whole[name] = full.detach().to("cpu", copy=True) if isinstance(full, torch.Tensor) else full
    return whole


def _sharded_like(full: Tensor, sharded: Tensor) -> Any:
    """Shard a whole tensor, which every rank has, as another one is sharded. Collective."""
    if not isinstance(sharded, tensor.DTensor):
        return full
    return tensor.distribute_tensor(full.to(sharded.device), sharded.device_mesh, sharded.placements)


def _is_per_element(value: Any) -> bool:
    """Whether optimizer state has a number for each element of a parameter, as momenta do, and step counters do not."""
    return getattr(value, "ndim", 0) > 0


def _unsupported_training(train: Mapping[str, Any], options: Options) -> str:
    if train["channels_last"]:
        return "FSDP2 does not shard channels_last parameters"
    if options["mixed_precision"] == "cast" and train["precision"] != "bf16":
        return f'mixed_precision = "cast" is for precision = "bf16", not {train["precision"]}'
    if options["wrap"] == "model" and options["min_unit_parameters"] != SMALLEST_UNIT:
        return 'min_unit_parameters has no effect with wrap = "model": remove one of them'
    return ""


def _unsupported_batch_norm(options: Options) -> str:
    if options["mixed_precision"] != "cast":
        return ""
    return (
        'mixed_precision = "cast" casts weights to bf16, which batch norm cannot use with its fp32 statistics: '
        'set mixed_precision = "autocast"'
    )


DECLARATION = StrategyDeclaration(
    name="fsdp",
    summary="FSDP2: one process per device; parameters, gradients and optimizer state sharded, gathered when needed.",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    unsupported_training=_unsupported_training,
    unsupported_compile=limits.not_captured(
        "FSDP2 allocates and frees parameters in every step, which a CUDA graph cannot capture"
    ),
    unsupported_batch_norm=_unsupported_batch_norm,
    splits_batch=True,
    options=(
        Option(
            "wrap",
            "blocks",
            "What is gathered at a time: a block of the model, or all of it",
            choices=("blocks", "model"),
        ),
        Option(
            "min_unit_parameters", SMALLEST_UNIT, "Layers with fewer parameters are gathered with the rest", minimum=0
        ),
        Option(
            "reshard",
            True,
            "Give gathered parameters up after the forward pass and gather them again for the backward pass",
        ),
        Option(
            "mixed_precision",
            "autocast",
            'With precision "bf16": autocast as other strategies do, or gather and use parameters in bf16',
            choices=("autocast", "cast"),
        ),
    ),
    batch_norm_treatment="per_rank",
    contract_options=({}, {"reshard": False}, {"wrap": "model"}),
    divides_state=lambda _options: True,
    create=lambda: Fsdp,
)
