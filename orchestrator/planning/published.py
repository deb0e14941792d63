"""Figures that others published, beside what was measured. Reads rows and the checked experiment file only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from orchestrator.cluster import resources
from orchestrator.config.experiment import ExperimentSpec, matches
from orchestrator.config.keys import StrategyChoice
from orchestrator.config.tables import FIGURES
from orchestrator.planning import matrix
from workloads.contract import Hardware, TrainConfig

PREFIX = "published_"


def figures(spec: ExperimentSpec) -> list[str]:
    """The figures that the file has for any cell, in the order of results."""
    given = {name for rule in spec.published for name in rule.published.figures}
    return [name for name in FIGURES if name in given]


def beside(rows: Sequence[Mapping[str, Any]], spec: ExperimentSpec) -> Iterator[dict[str, Any]]:
    """Each row with ``published_FIGURE`` and ``published_on``; as often as figures of others belong to it."""
    names = figures(spec)
    for row in rows:
        settings = {**row, "strategy": _choice(row), "hardware": Hardware.parse(row["hardware"])}
        found = [rule.published for rule in spec.published if matches(settings, rule.match)]
        for published in found:
            theirs = {PREFIX + name: published.figures.get(name) for name in names}
            yield {**row, **theirs, f"{PREFIX}on": published.on}
        if not found:
            yield {**row, **{PREFIX + name: None for name in names}, f"{PREFIX}on": None}


_WORK = frozenset(f.name for f in fields(TrainConfig)) - {"hardware", "cpus", "seed", "repeat"}
"""All but where and how often something was measured: the figures of others say where theirs were."""


def differences(rows: Sequence[Mapping[str, Any]], spec: ExperimentSpec) -> list[str]:
    """Settings in which runs that have figures of others beside them differ from every cell of the file.

    Args:
        rows: measured runs, with the figures of others or without.
        spec: the file as it is, without ``--set``.
    """
    cells = {
        _work(cell.train.to_json()) for cell in matrix.expand(spec, default_cpus=resources.default_cpus(None)).cells
    }
    runs = {_work(row) for row in rows if row.get(f"{PREFIX}on") is not None}
    found: set[str] = set()
    for run in runs - cells:
        named = {(name, value) for name, value in run if name in ("model", "strategy")}
        apart = ({name for name, _ in run - cell} for cell in cells if named <= cell)
        found |= min(apart, key=len, default={"model", "strategy"})
    return sorted(found)


def _choice(row: Mapping[str, Any]) -> StrategyChoice:
    options = json.loads(row["strategy_options"])
    return StrategyChoice(
        row["strategy"], tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items())
    )


def _work(settings: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """The settings of a cell, or of a row of results, that say what was trained; values as JSON."""
    options = settings["strategy_options"]
    known = {**settings, "strategy_options": json.loads(options) if isinstance(options, str) else options}
    return frozenset((name, json.dumps(known.get(name))) for name in _WORK)
