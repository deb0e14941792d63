"""Whether a model's training state fits on a device: an estimate from declarations, so a note and never a refusal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from orchestrator.planning.plan import Check, PlannedRun
from workloads import registry
from workloads.contract import TrainConfig

if TYPE_CHECKING:
    from orchestrator.backends.local.machine import Machine

_MOMENTS = {"adam": 2, "adamw": 2}


def memory_checks(runs: Iterable[PlannedRun], machine: Machine | None) -> list[Check]:
    """A note for each run whose weights, gradients and optimiser state are more than its devices have.

    Args:
        runs: of the plan.
        machine: this machine, where runs go; None for a cluster, whose profile says what its GPUs have.
    """
    found = []
    for run in runs:
        needed, have = state_gb(run.cell.train), _device_gb(run, machine)
        if needed is not None and have and needed > have:
            what = (
                f"{run.cell.label} will hardly fit: weights, gradients and optimiser state take about {needed:.0f} GB "
                f"on each device, and one has {have:.0f}"
            )
            found.append(Check(False, what, f"strategies that divide them between devices: {', '.join(_dividing())}"))
    return found


def state_gb(train: TrainConfig) -> float | None:
    """What a device holds before any activation, in GB (10^9 bytes); None for models that do not tell their size, and
    where nothing is trained: any name of a model will do there."""
    model = registry.find(registry.models(), train.model)
    if model is None or model.num_parameters is None:
        return None
    strategy = registry.find(registry.strategies(), train.strategy)
    assert strategy is not None, "matrix.expand lets no unknown name pass"
    if strategy.framework == registry.NO_FRAMEWORK:
        return None
    moments = _MOMENTS.get(train.optimizer, 1 if train.momentum else 0)
    width = 8 if train.precision == "fp64" else 4
    options = strategy.options_with_defaults(train.strategy_options)
    devices = train.hardware.devices if strategy.divides_state(options) else 1
    return model.num_parameters(train.model) * width * (2 + moments) / devices / 1e9


def _dividing() -> list[str]:
    """Strategies that can, with some of the options that their declarations name."""
    return [
        name
        for name, one in registry.strategies().items()
        if any(one.divides_state(one.options_with_defaults(c)) for c in one.contract_options)
    ]


def _device_gb(run: PlannedRun, machine: Machine | None) -> float:
    """Memory of the smallest GPU that the run may get; 0 where nobody knows."""
    if not run.shape.gpus:
        return 0.0
    if machine is None:
        return run.shape.gpu_memory_gb
    return min((gpu.memory_bytes for gpu in machine.gpus), default=0) / 1e9
