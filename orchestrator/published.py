"""Figures that others published, beside what was measured. Reads rows and the checked experiment file only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.experiment import ExperimentSpec
from orchestrator.grammar import FIGURES

PREFIX = "published_"


def figures(spec: ExperimentSpec) -> list[str]:
    """The figures that the file has for any cell, in the order of results."""
    given = {name for rule in spec.published for name in rule.published.figures}
    return [name for name in FIGURES if name in given]


def beside(rows: Sequence[Mapping[str, Any]], spec: ExperimentSpec) -> Iterator[dict[str, Any]]:
    """Each row with ``published_FIGURE`` and ``published_on``; as often as figures of others belong to it."""
    names = figures(spec)
    for row in rows:
        found = [
            rule.published
            for rule in spec.published
            if all(row.get(key) in wanted for key, wanted in rule.match.items())
        ]
        for published in found:
            theirs = {PREFIX + name: published.figures.get(name) for name in names}
            yield {**row, **theirs, f"{PREFIX}on": published.on}
        if not found:
            yield {**row, **{PREFIX + name: None for name in names}, f"{PREFIX}on": None}
