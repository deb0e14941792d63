"""The ways of training that contract tests compare: each strategy of the registry, on so many CPU devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workloads import registry
from workloads.contract import Hardware, Topology


@dataclass(frozen=True)
class Way:
    """A strategy with some options on so many CPU devices."""

    strategy: str
    devices: int
    options: tuple[tuple[str, registry.OptionValue], ...] = ()

    @property
    def declaration(self) -> registry.StrategyDeclaration:
        return registry.strategies()[self.strategy]

    @property
    def all_options(self) -> dict[str, registry.OptionValue]:
        return {option.name: option.default for option in self.declaration.options} | dict(self.options)

    @property
    def ranks(self) -> int:
        one_process = self.declaration.topology(self.all_options) is Topology.ONE_PROCESS
        return 1 if one_process else self.devices

    @property
    def exists(self) -> bool:
        return self.declaration.framework == "torch" and not self.declaration.refuses(
            Hardware("cpu", self.devices), self.all_options
        )

    @property
    def train(self) -> dict[str, Any]:
        """The keys of a run that goes this way."""
        return {
            "strategy": self.strategy,
            "strategy_options": dict(self.options),
            "hardware": f"cpu:{self.devices}",
        }

    def __str__(self) -> str:
        return "-".join([self.strategy, str(self.devices), *(f"{k}={v}" for k, v in self.options)])


def ways(*devices: int) -> list[Way]:
    """All ways that declarations want compared, those that CPUs can go, fewer devices first."""
    found = [
        Way(name, count, tuple(options.items()))
        for count in devices
        for name, declaration in registry.strategies().items()
        for options in declaration.contract_options
    ]
    return [way for way in found if way.exists]
