"""Published figures beside measured results. Reads rows of results and the checked experiment file only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from orchestrator.cluster import resources
from orchestrator.config.experiment import ExperimentSpec, Published, matches
from orchestrator.config.keys import StrategyChoice
from orchestrator.config.tables import FIGURES
from orchestrator.planning import matrix
from workloads.contract import Hardware, TrainConfig

PREFIX = "published_"

_COMPARED = frozenset(f.name for f in fields(TrainConfig)) - {"hardware", "cpus", "seed", "repeat"}
"""Settings that a published figure and a run share: not where and how often each was measured."""


def figures(spec: ExperimentSpec) -> list[str]:
    """Published figures that the file has for any cell, in the order of results."""
    given = {name for rule in spec.published for name in rule.published.figures}
    return [name for name in FIGURES if name in given]


def with_published(rows: Sequence[Mapping[str, Any]], spec: ExperimentSpec) -> Iterator[dict[str, Any]]:
    """Yield each row of results with ``published_FIGURE`` and ``published_on``, once for each publication."""
    names = figures(spec)
    for row in rows:
        options = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in _options(row).items())
        choice = StrategyChoice(row["strategy"], options)
        settings = {**row, "strategy": choice, "hardware": Hardware.parse(row["hardware"])}
        found: list[Published | None] = [r.published for r in spec.published if matches(settings, r.match)]
        for published in found or [None]:
            values = published.figures if published else {}
            columns = {PREFIX + name: values.get(name) for name in names}
            yield {**row, **columns, f"{PREFIX}on": published.on if published else None}


def differing_settings(rows: Sequence[Mapping[str, Any]], spec: ExperimentSpec) -> list[str]:
    """Settings in which runs with published figures differ from every cell of the file, read without ``--set``."""
    expanded = matrix.expand(spec, default_cpus=resources.default_cpus(None))
    cells = {_settings(cell.train.to_json()) for cell in expanded.cells}
    runs = {_settings(row) for row in rows if row.get(f"{PREFIX}on") is not None}
    differing: set[str] = set()
    for run in runs - cells:
        named = {(name, value) for name, value in run if name in ("model", "strategy")}
        candidates = ({name for name, _ in run - cell} for cell in cells if named <= cell)
        differing |= min(candidates, key=len, default={"model", "strategy"})
    return sorted(differing)


def _settings(row: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """The compared settings of a cell or of a row of results; values as JSON texts."""
    known = {**row, "strategy_options": _options(row)}
    return frozenset((name, json.dumps(known.get(name))) for name in _COMPARED)


def _options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Strategy options of a cell, or of a row of results, which holds them as JSON text."""
    options = row["strategy_options"]
    return dict(json.loads(options) if isinstance(options, str) else options)
