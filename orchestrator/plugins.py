"""The strategies, models and data sets that an experiment may name, in one value that tests can replace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from workloads import registry
from workloads.registry import DatasetDeclaration, ModelDeclaration, StrategyDeclaration


@dataclass(frozen=True, slots=True, eq=False)
class Plugins:
    """Declarations by name, as ``workloads.registry`` finds them."""

    strategies: Mapping[str, StrategyDeclaration]
    models: Mapping[str, ModelDeclaration]
    datasets: Mapping[str, DatasetDeclaration]

    @classmethod
    @cache
    def installed(cls) -> Plugins:
        """What this installation has, entry points of other packages included."""
        return cls(registry.strategies(), registry.models(), registry.datasets())

    def names(self, kind: str) -> list[str]:
        """What may stand under the key ``strategy``, ``model`` or ``dataset``; a family as ``timm/*``."""
        declarations: dict[str, Iterable[str]] = {
            "strategy": self.strategies,
            "model": self.models,
            "dataset": self.datasets,
        }
        return sorted(declarations[kind])

    def knows(self, kind: str, name: str) -> bool:
        """Whether a model or a data set answers to the name; a strategy is looked up with its options."""
        if kind == "model":
            return registry.find(self.models, name) is not None
        return registry.find(self.datasets, name) is not None


def nearest(word: str, words: Iterable[str]) -> str:
    """``did you mean "lr"?`` for a misspelt word, or the empty text when nothing is near."""
    import difflib  # only people who misspell wait for it

    close = difflib.get_close_matches(word.lower(), list(words), n=1, cutoff=0.6)
    return f'did you mean "{close[0]}"?' if close else ""
