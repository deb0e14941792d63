"""The strategies, models and data sets that an experiment may name, as one value that tests can replace."""

from __future__ import annotations

import difflib
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
        """The declarations of this installation, entry points of other packages included."""
        return cls(registry.strategies(), registry.models(), registry.datasets())

    def of(self, kind: str) -> Mapping[str, object]:
        """The declarations that the key ``strategy``, ``model`` or ``dataset`` may name."""
        return {"strategy": self.strategies, "model": self.models, "dataset": self.datasets}[kind]

    def names(self, kind: str) -> list[str]:
        """All names of a kind; a family as ``timm/*``."""
        return sorted(self.of(kind))


def nearest(word: str, words: Iterable[str]) -> str:
    """``did you mean "lr"?`` for a misspelt word; empty when no word is similar."""
    close = difflib.get_close_matches(word.lower(), list(words), n=1, cutoff=0.6)
    return f'did you mean "{close[0]}"?' if close else ""
