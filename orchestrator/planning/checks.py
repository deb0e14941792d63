"""Plan checks: what a person should know, or must fix, before anything is submitted."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.planning.matrix import Matrix
from orchestrator.planning.plan import CellState, Check, PlannedRun
from orchestrator.units import counted
from workloads import registry
from workloads.contract import TrainConfig

if TYPE_CHECKING:
    from db.queries import RunRecord
    from orchestrator.backends.local.machine import Machine
    from orchestrator.cluster.cluster_file import ClusterProfile
    from orchestrator.environment.interpreter import Packages

_MOMENTS = {"adam": 2, "adamw": 2}
"""Numbers that the optimizer keeps for each parameter."""


def matrix_checks(expanded: Matrix, runs: Sequence[PlannedRun]) -> Iterator[Check]:
    """Notes of the matrix, duplicate cells, and a plan without any run."""
    for note in expanded.notes:
        yield Check(False, note)
    for label, duplicates in expanded.merged_labels.items():
        yield Check(False, f"{label} is requested {duplicates + 1} times and runs once")
    if not runs:
        yield Check(False, "every cell is excluded, nothing can run", "see the rules of the excluded cells")


def other_target_checks(runs: Sequence[PlannedRun], records: Mapping[str, RunRecord], target: str) -> Iterator[Check]:
    """Runs that are done on other machines: ``gpu:1`` is the same run on any GPU."""
    targets = (records[run.cell.run_id].target for run in runs if run.state is CellState.DONE)
    done = Counter(other for other in targets if other and other != target)  # damaged files may not name theirs
    if done:
        yield Check(
            False,
            f"{counted(done.total(), 'run')} done on {', '.join(sorted(done))} and not measured again on {target}",
            'to compare machines, name the kind in hardware ("a100:2"), or use a folder for each (--runs and --db)',
        )


def target_checks(profile: ClusterProfile | None, packages: Packages) -> Iterator[Check]:
    """What is missing for the target: the account of a cluster, the packages of the jobs' interpreter."""
    if profile is not None and profile.needs_account and not profile.account:
        fix = f"orchestrate init --cluster --profile {profile.name} writes cluster.toml; set account there"
        yield Check(True, f"cluster {profile.name} rejects jobs without an account", fix)
    if packages.versions is None:
        yield Check(False, f"packages of {packages.python} are unknown: it could not run here ({packages.problem})")


def unseen_reason(root: Path | None, *, local: bool) -> str:
    """Why this machine cannot check a data root, as when only a cluster's nodes mount its disk; empty when it can."""
    return "" if local or root is None or root.exists() else f"{root} is not visible here, so it was not checked"


def dataset_checks(
    names: Iterable[str], root: Path | None, digest: Callable[[str], str], *, local: bool
) -> Iterator[Check]:
    """Whether data sets are where jobs look for them, and prepared: ``digest`` is empty where the data must be read."""
    for name in sorted(names):
        declaration = registry.find(registry.datasets(), name)
        assert declaration is not None, "the experiment file was checked"
        if declaration.needs_root and (unseen := unseen_reason(root, local=local)):
            yield Check(False, f"data set {name}: {unseen}")
            continue
        problems = declaration.check(root, name)
        for problem in problems:
            yield Check(True, f"data set {name}: {problem.where}: {problem.what}", problem.fix)
        if declaration.needs_root and not problems and not digest(name):
            what = f"data set {name} is not prepared, so the first run prepares it while its devices wait"
            yield Check(False, what, f"orchestrate data prepare {shlex.quote(name)}")


def weights_checks(runs: Sequence[PlannedRun], root: Path | None, *, local: bool) -> Iterator[Check]:
    """Whether pretrained weights are where jobs look for them."""
    for name in sorted({run.cell.train.model for run in runs if run.cell.train.pretrained}):
        weights = registry.models()[name].weights
        assert weights is not None, "a rule excludes models without weights"
        if unseen := unseen_reason(root, local=local):
            yield Check(False, f"weights of {name}: {unseen}")
            continue
        for problem in weights.check(root, name):
            yield Check(True, f"weights of {name}: {problem.where}: {problem.what}", problem.fix)


def memory_checks(runs: Iterable[PlannedRun], machine: Machine | None) -> Iterator[Check]:
    """A note for each run whose weights, gradients and optimizer state need more memory than a device has."""
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
    """Memory of the smallest GPU that the run may get; 0 where it is unknown. ``machine`` is None on a cluster."""
    if not run.shape.gpus or machine is None:
        return run.shape.gpu_memory_gb if run.shape.gpus else 0.0
    return min((gpu.memory_bytes for gpu in machine.gpus), default=0) / 1e9
