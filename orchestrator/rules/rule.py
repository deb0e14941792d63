"""A rule excludes cells: its name, the keys that it reads, and the reason that it gives.

Rules are pure. Cells with the same values of all keys that were read therefore share one answer (:class:`Memo`), and
40,000 cells need a few hundred evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from orchestrator.config.keys import StrategyChoice
from orchestrator.plugins import Plugins
from workloads import registry
from workloads.contract import Hardware
from workloads.registry import DatasetDeclaration, DatasetShape, ModelDeclaration, Options, StrategyDeclaration

Subject = TypeVar("Subject")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Rule(Generic[Subject]):
    """One reason for which cells cannot run."""

    name: str
    """What ``plan`` shows, with keys in braces: ``model {model}``."""
    reads: tuple[str, ...]
    """Keys of ``experiment.toml`` that the reason depends on. What a plug-in's declaration reads beyond them is
    recorded by :class:`RecordedValues`."""
    reason: Callable[[Subject], str]
    """Why the cell cannot run; empty where it can."""
    needs_framework: bool = True
    """Whether the rule is silent for strategies that load neither model nor data."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """The first rule that excludes a cell."""

    rule: str
    """``strategy eager``, ``model vit_tiny``, ``batch_norm``."""
    why: str


def first_exclusion(rules: Iterable[Rule[Subject]], subject: Subject, values: Mapping[str, Any]) -> Exclusion | None:
    """The first rule that excludes a cell; None where it can run. ``values`` fill in the names of rules."""
    for rule in rules:
        if why := rule.reason(subject):
            return Exclusion(rule.name.format_map(values), why)
    return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One cell that may run, with the declarations that it names."""

    values: Mapping[str, Any]
    """Keys of ``experiment.toml`` to values."""
    strategy: StrategyDeclaration
    options: Options
    """All of the strategy's, defaults included."""
    model: ModelDeclaration
    dataset: DatasetDeclaration
    shape: DatasetShape | None
    """None where it is not known without reading much."""
    hardware: Hardware

    @classmethod
    def of(cls, values: Mapping[str, Any], plugins: Plugins, data_root: Path | None) -> Candidate:
        """Look up what the values of a cell of a checked experiment name."""
        choice: StrategyChoice = values["strategy"]
        strategy = registry.require(plugins.strategies, choice.name)
        dataset = registry.require(plugins.datasets, values["dataset"])
        return cls(
            values=values,
            strategy=strategy,
            options=strategy.options_with_defaults(dict(choice.options)),
            model=registry.require(plugins.models, values["model"]),
            dataset=dataset,
            shape=dataset.shape(data_root, values["dataset"]),
            hardware=values["hardware"],
        )

    @property
    def num_train(self) -> int | None:
        """Samples of an epoch, as ``workloads.loaders.order.subset`` counts them; None where the shape is unknown."""
        return max(1, round(self.values["train_fraction"] * self.shape.num_train)) if self.shape else None


class RecordedValues(Mapping[str, Any]):
    """The values of a cell; the keys that are read are noted in ``read``."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        self.read |= set(self._values)
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Memo(Generic[Answer]):
    """A pure function of a cell's values, evaluated once for each combination of the keys that it reads.

    Args:
        function: gets the values as :class:`RecordedValues`.
        reads: keys that it is known to read. Where it reads another one, as the functions of plug-ins may, that key
            joins them and the answers so far are worked out again.
    """

    def __init__(self, function: Callable[[Mapping[str, Any]], Answer], reads: Iterable[str]) -> None:
        self._function = function
        self._reads = set(reads)
        self._key = itemgetter(*sorted(self._reads))
        self._answers: dict[Any, Answer] = {}

    def __call__(self, values: Mapping[str, Any]) -> Answer:
        """The answer for a cell; its values must be hashable."""
        known = self._answers.get(self._key(values))
        if known is not None:
            return known
        recorded = RecordedValues(values)
        answer = self._function(recorded)
        if not recorded.read <= self._reads:
            self._reads |= recorded.read
            self._key = itemgetter(*sorted(self._reads))
            self._answers.clear()
        self._answers[self._key(values)] = answer
        return answer
