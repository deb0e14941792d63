"""Metrics measured once, when training has ended: one file each, found by its name. Standard library only.

A file ``workloads/metrics/NAME.py`` binds ``DECLARATION``. From it follow the key in ``result.json``, the column in the
table ``results`` and the view ``summary`` (existing databases get it when they are next opened for writing), the
columns of ``orchestrate results``, and what ``[[published]]`` may state. Units are in names, as everywhere: ``_s``,
``_bytes``, ``_per_s``.

What the training loop itself fills as it goes (losses, epoch times, memory) are fields of
:class:`workloads.contract.RunResult`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workloads.contract import RunResult, TrainConfig
    from workloads.engines.backend import Backend
    from workloads.measurement.timing import Tally

Value = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What one rank has when training has ended."""

    config: TrainConfig
    result: RunResult
    """With the fields that the training loop fills."""
    tally: Tally
    """Warm-up and steady steps of this attempt."""
    epoch_times_s: Sequence[float]
    """Of all attempts."""
    backend: Backend
    """Its methods are collective: every rank must call them, in the same order."""
    beat: Callable[[], None]
    """Tells the watchdog that the run makes progress."""

    def maximum(self, value: float) -> float:
        """Maximum over ranks; collective."""
        (most,) = self.backend.maximum([value])
        return most


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One measured number or word of a run."""

    name: str
    type: type[Value]
    meaning: str
    """Its row in ``docs/experiment.md``."""
    measure: Callable[[Measurements], Value | None]
    """Called on every rank; rank 0's answer counts. None: not measured."""
    after: str = "cpus_seen"
    """The key of ``result.json``, and column, that it follows."""
    changes_model: bool = False
    """Whether measuring trains on. Such metrics are measured last: parameters mean nothing afterwards."""


@cache
def all_metrics() -> dict[str, Metric]:
    """Return every metric by name, in alphabetical order. Raises ValueError where a file declares another name."""
    found = {}
    for file in sorted((f for folder in __path__ for f in Path(folder).glob("[a-z]*.py")), key=lambda f: f.name):
        metric: Metric = importlib.import_module(f"{__name__}.{file.stem}").DECLARATION
        if metric.name != file.stem:
            raise ValueError(f"workloads/metrics/{file.name} declares {metric.name!r}: rename one of them")
        found[metric.name] = metric
    return found
