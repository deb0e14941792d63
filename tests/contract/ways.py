"""The ways of training that contract tests compare: each strategy of the registry, on so many CPU devices."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any

from workloads import registry
from workloads.contract import Hardware, Topology


@dataclass(frozen=True)
class Way:
    """A strategy with some options on so many devices of one node."""

    strategy: str
    devices: int
    options: tuple[tuple[str, registry.OptionValue], ...] = ()
    kind: str = "cpu"

    @property
    def declaration(self) -> registry.StrategyDeclaration:
        return registry.strategies()[self.strategy]

    @property
    def all_options(self) -> dict[str, registry.OptionValue]:
        return self.declaration.options_with_defaults(self.options)

    @property
    def ranks(self) -> int:
        one_process = self.declaration.topology(self.all_options) is Topology.ONE_PROCESS
        return 1 if one_process else self.devices

    @property
    def exists(self) -> bool:
        refused = self.declaration.unsupported_hardware(Hardware(self.kind, self.devices), self.all_options)
        return self.declaration.framework == "torch" and not refused and not missing_packages(self.declaration)

    @property
    def has_double_precision(self) -> bool:
        """Whether it can be asked to be exactly what another way is."""
        train = {"precision": "fp64", "channels_last": False, "optimizer": "sgd", "loader": "resident"}
        return not self.declaration.unsupported_training(train, self.all_options)

    @property
    def train(self) -> dict[str, Any]:
        """The keys of a run that goes this way."""
        return {
            "strategy": self.strategy,
            "strategy_options": dict(self.options),
            "hardware": f"{self.kind}:{self.devices}",
        }

    def __str__(self) -> str:
        return "-".join([self.strategy, str(self.devices), *(f"{k}={v}" for k, v in self.options)])


def missing_packages(declaration: registry.StrategyDeclaration) -> list[str]:
    """Distributions that a strategy needs and this environment has not."""
    ways = [name.split("|") for name in declaration.packages]
    return [way[0] for way in ways if not any(any(importlib.metadata.distributions(name=name)) for name in way)]


def ways(*devices: int, kind: str = "cpu") -> list[Way]:
    """All ways that declarations want compared, those that such devices can go, fewer devices first."""
    found = [
        Way(name, count, tuple(options.items()), kind)
        for count in devices
        for name, declaration in registry.strategies().items()
        for options in declaration.contract_options
    ]
    return [way for way in found if way.exists]
