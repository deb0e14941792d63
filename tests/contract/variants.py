"""What contract tests train: every strategy of the registry, with the options that its declaration names.

A new strategy is tested by being there. ``contract_options`` of its declaration are the sets of options that must equal
eager exactly; every other value of an option with choices is compared loosely. A strategy that cannot compute in double
precision is compared in single precision, one that CPUs cannot run is compared on GPUs (``tests/gpu``).
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace
from typing import Any

from workloads import registry
from workloads.contract import Hardware, Topology

PLAIN: dict[str, Any] = {
    "precision": "fp32",
    "channels_last": False,
    "optimizer": "sgd",
    "loader": "resident",
    "epochs": 1,
}
"""The keys that ``unsupported_training`` of a declaration may read."""


@dataclass(frozen=True)
class Variant:
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
        return self.declaration.options_with_defaults(dict(self.options))

    @property
    def ranks(self) -> int:
        one_process = self.declaration.topology(self.all_options) is Topology.ONE_PROCESS
        return 1 if one_process else self.devices

    @property
    def is_first(self) -> bool:
        """Whether these are the first of the options that the declaration names."""
        return dict(self.options) == self.declaration.contract_options[0]

    @property
    def can_run(self) -> bool:
        """Whether the strategy supports the hardware, and its packages are installed."""
        unsupported = self.declaration.unsupported_hardware(Hardware(self.kind, self.devices), self.all_options)
        return not unsupported and not missing_packages(self.declaration)

    def supports(self, **train: Any) -> bool:
        """Whether the strategy can train with these keys."""
        return not self.declaration.unsupported_training(PLAIN | train, self.all_options)

    def supports_compile(self, how: str) -> bool:
        return not self.declaration.unsupported_compile(how, self.all_options)

    @property
    def has_double_precision(self) -> bool:
        """Whether it can equal eager exactly."""
        return self.supports(precision="fp64")

    @property
    def train(self) -> dict[str, Any]:
        """The keys of a run of this variant."""
        return {
            "strategy": self.strategy,
            "strategy_options": dict(self.options),
            "hardware": f"{self.kind}:{self.devices}",
        }

    def __str__(self) -> str:
        return "-".join([self.strategy, str(self.devices), *(f"{k}={v}" for k, v in self.options)])


def missing_packages(declaration: registry.StrategyDeclaration) -> list[str]:
    """Return the distributions that a strategy needs and this environment lacks."""
    alternatives = [name.split("|") for name in declaration.packages]
    return [names[0] for names in alternatives if not any(map(_is_installed, names))]


def _is_installed(name: str) -> bool:
    return any(importlib.metadata.distributions(name=name))


def strategies_of(framework: str) -> dict[str, registry.StrategyDeclaration]:
    """Return the registry's strategies of a framework."""
    return {name: d for name, d in registry.strategies().items() if d.framework == framework}


def variants(*devices: int, kind: str = "cpu", framework: str = "torch") -> list[Variant]:
    """Return what declarations name in ``contract_options`` and can run on such devices, fewer devices first."""
    found = [
        Variant(name, count, tuple(options.items()), kind)
        for count in devices
        for name, declaration in strategies_of(framework).items()
        for options in declaration.contract_options
    ]
    return [variant for variant in found if variant.can_run]


def widest(*devices: int, framework: str = "torch") -> list[Variant]:
    """Return the same, each on the most of these numbers of devices that it can run on."""
    most = {(v.strategy, v.options): v for v in variants(*sorted(devices), framework=framework)}
    return list(most.values())


def option_variants(devices: int) -> list[Variant]:
    """Return the first options of each strategy with one value changed: to each other choice of the option."""
    found = []
    for first in (v for v in variants(devices) if v.is_first):
        for option in first.declaration.options:
            choices = (True, False) if option.type is bool else option.choices
            changed = [dict(first.options) | {option.name: value} for value in choices]
            found += [
                replace(first, options=tuple(options.items()))
                for options in changed
                if options[option.name] != first.all_options[option.name]
            ]
    return [variant for variant in found if variant.can_run]
