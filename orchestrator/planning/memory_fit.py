"""Whether a model's training state fits on a device. An estimate from declarations, so it excludes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from orchestrator.planning.plan import Check, PlannedRun
from workloads import registry
from workloads.contract import TrainConfig

if TYPE_CHECKING:
    from orchestrator.backends.local.machine import Machine

_MOMENTS = {"adam": 2, "adamw": 2}


def memory_checks(runs: Iterable[PlannedRun], machine: Machine | None) -> Iterator[Check]:
    """A note for each run whose weights, gradients and optimizer state need more memory than a device has.

    Args:
        runs: of the plan.
        machine: this machine, where the runs are for it; None for a cluster, whose profile has its GPUs' memory.
    """
    for run in runs:
        needed, have = state_gb(run.cell.train), _device_gb(run, machine)
        if needed is not None and have and needed > have:
            what = (
                f"{run.cell.label} is unlikely to fit: weights, gradients and optimizer state take about {needed:.0f} "
                f"GB on each device, and one has {have:.0f}"
            )
            yield Check(False, what, f"strategies that shard them over devices: {', '.join(_sharding_strategies())}")


def state_gb(train: TrainConfig) -> float | None:
    """Memory of a device before any activation, in GB (10^9 bytes); None where the model declares no size or the
    strategy trains nothing."""
    model = registry.find(registry.models(), train.model)
    if model is None or model.num_parameters is None:
        return None
    strategy = registry.find(registry.strategies(), train.strategy)
    assert strategy is not None, "the experiment file was checked"
    if strategy.framework == registry.NO_FRAMEWORK:
        return None
    moments = _MOMENTS.get(train.optimizer, 1 if train.momentum else 0)
    width = 8 if train.precision == "fp64" else 4
    options = strategy.options_with_defaults(train.strategy_options)
    devices = train.hardware.devices if strategy.divides_state(options) else 1
    return model.num_parameters(train.model) * width * (2 + moments) / devices / 1e9


def _sharding_strategies() -> list[str]:
    """Strategies that shard the training state with some of the options that their declarations list."""
    return [
        name
        for name, strategy in registry.strategies().items()
        if any(strategy.divides_state(strategy.options_with_defaults(dict(c))) for c in strategy.contract_options)
    ]


def _device_gb(run: PlannedRun, machine: Machine | None) -> float:
    """Memory of the smallest GPU that the run may get; 0 where it is unknown."""
    if not run.shape.gpus:
        return 0.0
    if machine is None:
        return run.shape.gpu_memory_gb
    return min((gpu.memory_bytes for gpu in machine.gpus), default=0) / 1e9
