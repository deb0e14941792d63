"""What one target cannot run: packages that its interpreter lacks, hardware that it does not have."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from orchestrator.cluster import resources
from orchestrator.cluster.profile import ClusterProfile
from orchestrator.environment.interpreter import Packages
from orchestrator.plugins import Plugins
from orchestrator.rules.rule import Exclusion, Rule, first_exclusion
from workloads import registry
from workloads.contract import EXECUTION_KEYS, Execution, TrainConfig
from workloads.contract.resource_shape import ResourceShape
from workloads.registry import StrategyDeclaration


@dataclass(frozen=True, slots=True)
class _Run:
    train: TrainConfig
    execution: Execution


class TargetRules:
    """The rules of a target, and the resource shapes of the runs that pass them."""

    def __init__(
        self, profile: ClusterProfile | None, machine: resources.Devices | None, packages: Packages, plugins: Plugins
    ) -> None:
        self._profile, self._machine, self._packages, self._plugins = profile, machine, packages, plugins
        self.rules: tuple[Rule[_Run], ...] = (
            Rule("packages", ("strategy", "model", "dataset"), self._packages_reason),
            Rule("hardware", ("strategy", "hardware", "cpus", *EXECUTION_KEYS), self._hardware_reason),
        )
        read = {key for rule in self.rules for key in rule.reads}
        self._train_key = attrgetter(*sorted(read - set(EXECUTION_KEYS)))
        self._known: dict[Any, ResourceShape | Exclusion] = {}

    def place(self, train: TrainConfig, execution: Execution) -> ResourceShape | Exclusion:
        """What a run occupies on the target, or the rule that excludes it there."""
        key = (self._train_key(train), tuple(train.strategy_options.items()), execution)
        known = self._known.get(key)
        if known is None:
            run = _Run(train, execution)
            placed = first_exclusion(self.rules, run, {}) or self._shape(run)
            assert not isinstance(placed, str), "the rule hardware has reported it"
            known = self._known[key] = placed
        return known

    def _packages_reason(self, run: _Run) -> str:
        strategy = self._strategy(run)
        needed = [*strategy.packages]
        if strategy.framework != registry.NO_FRAMEWORK:
            needed += registry.require(self._plugins.datasets, run.train.dataset).packages
        if strategy.framework == "torch":
            needed += registry.require(self._plugins.models, run.train.model).packages
        missing = self._packages.missing(needed)
        if not missing:
            return ""
        what = f"not available: {self._packages.python} has no {', '.join(missing)}"
        return f"{what}; fix: {self._packages.install_command(missing)}"

    def _hardware_reason(self, run: _Run) -> str:
        shape = self._shape(run)
        return shape if isinstance(shape, str) else ""

    def _shape(self, run: _Run) -> ResourceShape | str:
        return resources.place(run.train, run.execution, self._strategy(run), self._profile, self._machine)

    def _strategy(self, run: _Run) -> StrategyDeclaration:
        return registry.require(self._plugins.strategies, run.train.strategy)
