"""Median time of a step."""

from __future__ import annotations

from workloads.metrics import Measurements, Metric


def measure(found: Measurements) -> float | None:
    return found.maximum(found.tally.median_step_s) if found.tally.times_s else None


DECLARATION = Metric(
    name="step_time_s", type=float, meaning="median of the steady-state steps", measure=measure, after="evaluate_s"
)
