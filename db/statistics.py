"""Statistics of groups of runs that differ only in seed or repetition."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from workloads.contract import State, TrainConfig


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of a few values.

    The range rather than quartiles or a standard deviation: groups have two to ten runs, where quartiles interpolate
    between two values and a deviation assumes a distribution. The range grows with ``n``, so ``n`` is shown with it.
    """

    median: float
    low: float
    high: float
    n: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return median and range of the values that were measured; None when there are none."""
    found = [value for value in values if value is not None]
    return Spread(statistics.median(found), min(found), max(found), len(found)) if found else None


def group_rows(rows: Iterable[Mapping[str, Any]], by: Sequence[str], metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per group, in the order of first appearance.

    Each metric becomes ``METRIC`` (median), ``METRIC_min`` and ``METRIC_max``. ``n`` counts the runs they come from:
    those that succeeded and did not diverge. ``failed`` and ``diverged`` count the others that ended.
    """
    summaries = []
    for key, members in _groups(rows, by).items():
        sound = list(filter(_counts, members))
        summary: dict[str, Any] = dict(zip(by, key, strict=True))
        summary["n"] = len(sound)
        summary["failed"] = sum(map(is_failed, members))
        summary["diverged"] = sum(bool(row["diverged"]) for row in members)
        for name in metrics:
            found = spread(row[name] for row in sound)
            summary[name] = found.median if found else None
            summary[f"{name}_min"] = found.low if found else None
            summary[f"{name}_max"] = found.high if found else None
        summaries.append(summary)
    return summaries


_ORIGINS = {"device_name": "hardware", "dataset_digest": "dataset", "code_digest": "", "packages_digest": ""}
"""Columns that say where a result comes from, each with the setting that determines it."""


def differing_columns(rows: Iterable[Mapping[str, Any]], by: Sequence[str]) -> list[str]:
    """Return the columns in which runs of one group differ, besides seed and repetition.

    Settings, and origins where they are known: the device, the data, the code and the packages.
    """
    groups = _groups(filter(_counts, rows), by).values()
    names = [f.name for f in fields(TrainConfig) if f.name not in {"seed", "repeat", *by}]
    settings = [name for name in names if any(len({row.get(name) for row in group}) > 1 for group in groups)]
    origins = [
        name
        for name, setting in _ORIGINS.items()
        if name not in by
        and setting not in settings
        and any(len({row.get(name) for row in group} - {None, ""}) > 1 for group in groups)
    ]
    return [*settings, *origins]


def _groups(rows: Iterable[Mapping[str, Any]], by: Sequence[str]) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return groups


def _counts(row: Mapping[str, Any]) -> bool:
    """Whether a run counts in statistics: it succeeded and did not diverge."""
    return row["measured_attempt"] is not None and not row["diverged"]


def is_failed(row: Mapping[str, Any]) -> bool:
    """Whether a run's newest attempt ended without a result."""
    return State(row["state"]).ended_badly
